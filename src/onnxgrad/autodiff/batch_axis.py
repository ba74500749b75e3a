"""A proof that a model does not mix rows: the batch axis, followed from the inputs to the outputs.

Only derivatives count: a value without a gradient, such as a mask, may depend on all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.axes import follow
from onnxgrad.graph.operators import operator_of
from onnxgrad.graph.shapes import Dim, dims, rank
from onnxgrad.graph.traversal import reads

Axes = dict[ir.Value, int]  # the batch axis of each value that depends on the inputs


def require_rows(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], proof: bool
) -> None:
    """Raise unless row i of every output is proven to depend on row i of the inputs only.

    Without `proof`, check only that they all have the same number of rows.
    """
    for v in (*inputs, *outputs):
        if not rank(v):
            reason = "its rank is unknown" if rank(v) is None else "it is a scalar"
            raise ValueError(
                f"{v.name!r} has no rows ({reason}): choose inputs and outputs that have rows"
            )
    length = _first(inputs[0])
    if proof and length != 1:  # a single row cannot mix
        _follow(graph, dict.fromkeys(inputs, 0), length, outputs)
    for v in (*inputs, *outputs):
        if (isinstance(length, int) or isinstance(_first(v), int)) and _first(v) != length:
            raise ValueError(
                f"{v.name!r} of shape {dims(v)} and {inputs[0].name!r} of shape "
                f"{dims(inputs[0])} have different numbers of rows: use batched=False"
            )


def _first(v: ir.Value) -> Dim:
    return (dims(v) or (None,))[0]


def _follow(graph: ir.Graph, axes: Axes, length: Dim, outputs: Sequence[ir.Value]) -> None:
    """Extend `axes` to all values on paths to the outputs; raise if a node mixes rows."""
    needed = _leading_to(graph, outputs)
    for node in graph:
        if node not in needed or axes.keys().isdisjoint(reads(node)):
            continue
        for y, axis in zip(node.outputs, follow(node, axes), strict=True):
            if y.dtype is not None and not y.dtype.is_floating_point():
                continue
            shape = dims(y)
            if not isinstance(axis, int) or shape is None or axis >= len(shape):
                raise _error(node, "mixes the rows of the batch, or may do so")
            if shape[axis] != length:
                raise _error(node, f"has an output of shape {shape}, in which rows may be missing")
            axes[y] = axis
    for y in outputs:
        if axes.get(y, 0) != 0:
            raise ValueError(
                f"the rows of output {y.name!r} are along axis {axes[y]}: transpose it, as batched "
                "derivatives need them along axis 0"
            )


def _leading_to(graph: ir.Graph, outputs: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes through which a gradient of the outputs flows."""
    needed, nodes = set(outputs), set()
    for node in reversed(graph):
        if operator_of(node).no_gradient or needed.isdisjoint(node.outputs):
            continue
        nodes.add(node)
        floats = (x for x in reads(node) if x.dtype is None or x.dtype.is_floating_point())
        needed.update(floats)
    return nodes


def _error(node: ir.Node, what: str) -> ValueError:
    return ValueError(
        f"{printable(node.op_type)} (node {node.name!r}, output {node.outputs[0].name!r}) {what}: "
        'use batched=False, or batched="unchecked" if you know that row i of the output depends on '
        "row i of the input only"
    )
