"""Runtime checks in gradient models: axes that share a symbolic dimension have the same length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims

_Axis = tuple[ir.Value, int]


def require_equal_lengths(
    graph: ir.Graph, inputs: Iterable[ir.Value], gradients: Mapping[ir.Value, ir.Value]
) -> None:
    """Make `graph` fail when `inputs` that share a symbolic dimension differ in its length.

    onnxruntime does not compare the lengths, and broadcasts where it can. The gradient relies on
    symbolic dimensions: it would have a wrong shape, or sum over too few elements. `gradients` maps
    inputs to outputs of `graph`. The node that fails is a Reshape whose name tells the two axes.
    """
    first: dict[str, _Axis] = {}
    shared: dict[ir.Value, dict[int, _Axis]] = {}
    for x in inputs:
        if not isinstance(x.type, ir.TensorType):
            continue
        for axis, d in enumerate(dims(x) or ()):
            if isinstance(d, str) and first.setdefault(d, (x, axis)) != (x, axis):
                shared.setdefault(x, {})[axis] = first[d]
                shared.setdefault(first[d][0], {})
    op, head = Emit(graph), next(iter(graph), None)
    for x, axes in shared.items():
        if all(node.op_type == "Shape" for node, _ in x.uses()):
            if x in gradients:
                _shape_gradient(op, x, gradients[x])
        elif axes:
            with op.at(head):
                _guard(op, x, axes)


def _guard(op: Emit, x: ir.Value, axes: Mapping[int, _Axis]) -> None:
    """Replace `x` in its consumers by `Reshape(x)`, one Reshape for each axis to be checked."""
    uses, checked = list(x.uses()), x
    for axis, (other, i) in axes.items():  # one by one: together, swapped lengths would pass
        own = [d if isinstance(d, int) else op.dim(x, j) for j, d in enumerate(dims(x) or ())]
        own[axis] = op.dim(other, i)
        name = f"axis {axis} of {x.name!r} is as long as axis {i} of {other.name!r}"
        checked = _reshaped(op, checked, op.vector(*own), name)
    for consumer, i in uses:
        consumer.replace_input_with(i, checked)


def _shape_gradient(op: Emit, x: ir.Value, gradient: ir.Value) -> None:
    """Reshape the gradient of an unused input to the shape that the input has at run time."""
    name = f"the gradient has the lengths of {x.name!r}"
    shaped = _reshaped(op, gradient, op.Shape(x), name)
    shaped.name, gradient.name = gradient.name, op.name(str(gradient.name))
    op.graph.outputs[:] = [shaped if y is gradient else y for y in op.graph.outputs]


def _reshaped(op: Emit, x: ir.Value, shape: list[int] | ir.Value, name: str) -> ir.Value:
    """Return the output of a new Reshape called `name`, which fails if `shape` is another one."""
    y = op.emit("Reshape", [x, shape], {"allowzero": 1}, fresh=True)
    node = op.set_type_like(y, x).producer()
    assert node is not None
    node.name = name
    return y
