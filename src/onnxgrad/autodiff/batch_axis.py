"""A proof that a model does not mix rows: the batch axis, followed from the inputs to the outputs.

Only derivatives count: a value without a gradient, such as a mask, may depend on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.operators import ELEMENTWISE, operator_of
from onnxgrad.graph.shapes import Dim, constant, dims, einsum_terms, rank, static
from onnxgrad.graph.traversal import reads

Axes = dict[ir.Value, int]  # the batch axis of each value that depends on the inputs

_IMAGES = frozenset(  # each row of the output depends on that row of the first operand only
    "AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GridSample InstanceNormalization LRN LpPool MaxPool SpaceToDepth".split()
)
_RECURRENT = frozenset(("GRU", "LSTM", "RNN"))
_ALONG = {  # the default of the attribute `axis`, the only axis along which they mix elements
    "Concat": 0, "CumProd": 0, "CumSum": 0, "GatherElements": 0, "LogSoftmax": -1,
    "LpNormalization": -1, "Softmax": -1, "Split": 0, "TopK": -1,
}  # fmt: skip


def require_rows(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], proof: bool
) -> None:
    """Raise unless row i of every output is proven to depend on row i of the inputs only.

    Without `proof`, check only that they all have the same number of rows.

    Raises:
        ValueError: the model mixes rows, is not proven not to, or a value has no rows.
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
        for y, axis in zip(node.outputs, axes_of_outputs(node, axes), strict=True):
            if y.dtype is not None and not y.dtype.is_floating_point():
                continue
            shape = dims(y)
            if axis is None or shape is None or not 0 <= axis < len(shape):
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


def axes_of_outputs(node: ir.Node, axes: Axes) -> list[int | None]:
    """Return the batch axis of each output of `node`, None if it mixes rows or may do so."""
    if node.op_type in _RECURRENT and not node.domain:
        return _recurrent(node, axes)
    return [_axis(node, axes)] * len(node.outputs)


def _axis(node: ir.Node, axes: Axes) -> int | None:
    """Return the batch axis of the outputs of `node`, or None if it mixes rows or may do so."""
    if node.domain:
        return None
    operands = [i for i, x in enumerate(node.inputs) if x in axes]  # those with a batch axis
    name = node.op_type
    if name in ELEMENTWISE or name in ("Dropout", "Expand"):
        return _aligned(node, axes)
    if name in _ALONG:
        return _mixed_along_axis(node, axes, operands)
    if name.startswith("Reduce"):
        return _reduced(node, axes)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(node, axes)
    if operands == [0] and axes[node.inputs[0]] == 0 and name in _IMAGES:  # type: ignore[index]
        return 0
    return None


def _aligned(node: Any, axes: Axes) -> int | None:
    """Return the batch axis after broadcasting, if it is the same for all operands."""
    shape = dims(node.outputs[0])
    if shape is None:
        return None
    aligned = {axes[x] + len(shape) - (rank(x) or 0) for x in node.inputs if x in axes}
    return aligned.pop() if len(aligned) == 1 else None


def _mixed_along_axis(node: Any, axes: Axes, operands: list[int]) -> int | None:
    """Return the batch axis of the operands, unless the operator mixes elements along it."""
    x, name = node.inputs[operands[0]], node.op_type
    n = rank(x)
    if n is None or (operands[0] != 0 and name in ("GatherElements", "TopK")):
        return None
    along: int | None = node.attributes.get_int("axis", _ALONG[name])
    if name in ("CumProd", "CumSum"):
        axis = constant(node.inputs[1])
        along = None if axis is None else int(axis)
    same = {axes[node.inputs[i]] for i in operands} == {axes[x]}
    return None if along is None or along % n == axes[x] or not same else axes[x]


def _reduced(node: Any, axes: Axes) -> int | None:
    x, keep = node.inputs[0], node.attributes.get_int("keepdims", 1)
    reduced = reduced_axes(node)
    if reduced is None or axes[x] in reduced:
        return None
    return axes[x] - (0 if keep else sum(a < axes[x] for a in reduced))


def reduced_axes(node: Any) -> set[int] | None:
    """Return the axes over which a reduction goes; None if that is unknown."""
    operand, n = node.inputs[1] if len(node.inputs) > 1 else None, rank(node.inputs[0])
    array = constant(operand)
    if n is None or (operand is not None and array is None):
        return None
    if array is None or not array.size:
        return set() if node.attributes.get_int("noop_with_empty_axes", 0) else set(range(n))
    return {int(a) % n for a in array}


def _same_front(node: Any, axes: Axes) -> int | None:
    """Return the batch axis of a Reshape that changes only later axes."""
    a, b = dims(node.inputs[0]), dims(node.outputs[0])
    axis = axes[node.inputs[0]]
    if a is None or b is None or None in a[: axis + 1] or a[: axis + 1] != b[: axis + 1]:
        return None
    return axis


def _recurrent(node: Any, axes: Axes) -> list[int | None]:
    """Return the batch axes of an RNN, GRU or LSTM; `layout` says where its operands have it."""
    first = node.attributes.get_int("layout", 0)
    x, *weights = node.inputs[:4]
    lengths, *states = (*node.inputs[4:7], None, None, None)[:3]
    state = 0 if first else 1
    wanted = {x: state, lengths: 0} | dict.fromkeys(states, state)
    outside = [w for w in (*weights, *node.inputs[7:]) if w in axes]
    if outside or x not in axes or any(axes.get(v, a) != a for v, a in wanted.items()):
        return [None] * len(node.outputs)
    return [0 if first else 2, *[state] * (len(node.outputs) - 1)]


def _transposed(node: Any, axes: Axes) -> int | None:
    n = rank(node.inputs[0])
    if n is None:
        return None
    return list(node.attributes.get_ints("perm", None) or range(n)[::-1]).index(
        axes[node.inputs[0]]
    )


def _unsqueezed(node: Any, axes: Axes) -> int | None:
    array, n = constant(node.inputs[1]), rank(node.outputs[0])
    if array is None or n is None:
        return None
    new = {int(a) % n for a in array}
    return [i for i in range(n) if i not in new][axes[node.inputs[0]]]


def _squeezed(node: Any, axes: Axes) -> int | None:
    array, n = constant(node.inputs[1] if len(node.inputs) > 1 else None), rank(node.inputs[0])
    axis = axes[node.inputs[0]]
    if array is None or n is None:
        return None
    removed = {int(a) % n for a in array}
    return None if axis in removed else axis - sum(a < axis for a in removed)


def _sliced(node: Any, axes: Axes) -> int | None:
    """Return the batch axis of a Slice along other axes."""
    x, n, count = node.inputs[0], rank(node.inputs[0]), static(dims(node.inputs[1]))
    named = _named_axes(node, range(*count)) if count is not None else None
    if node.inputs[0] not in axes or n is None or named is None:
        return None
    return None if axes[x] in {a % n for a in named} else axes[x]


def _padded(node: Any, axes: Axes) -> int | None:
    """Return the batch axis of a Pad along other axes."""
    x, n, pads = node.inputs[0], rank(node.inputs[0]), constant(node.inputs[1])
    named = _named_axes(node, range(n or 0))
    if x not in axes or any(v in axes for v in node.inputs[1:]) or n is None or named is None:
        return None
    if pads is None:
        return None if axes[x] in {a % n for a in named} else axes[x]
    pairs = zip(named, pads.reshape(2, -1).T, strict=True)
    return None if axes[x] in {a % n for a, pair in pairs if pair.any()} else axes[x]


def _named_axes(node: Any, default: range) -> list[int] | None:
    """Return the axes that a Slice or Pad names, or None if they are not constant."""
    operand = node.inputs[3] if len(node.inputs) > 3 else None
    if operand is None:
        return list(default)
    array = constant(operand)
    return None if array is None else array.tolist()


def _gathered(node: Any, axes: Axes) -> int | None:
    x, i = node.inputs
    n, m = rank(x), rank(i)
    if n is None or m is None or (x in axes and i in axes):
        return None
    along = node.attributes.get_int("axis", 0) % n
    if i in axes:
        return along + axes[i]
    return None if along == axes[x] else axes[x] + (m - 1 if along < axes[x] else 0)


def _normalized(node: Any, axes: Axes) -> int | None:
    """Return the batch axis of a normalization over the last axes, if it precedes them."""
    x, n = node.inputs[0], rank(node.inputs[0])
    if [v for v in node.inputs if v in axes] != [x] or n is None:
        return None
    return axes[x] if axes[x] < node.attributes.get_int("axis", -1) % n else None


def _batch_normalized(node: Any, axes: Axes) -> int | None:
    alone = [v for v in node.inputs if v in axes] == [node.inputs[0]]
    training = node.attributes.get_int("training_mode", 0)
    return None if training or not alone or axes[node.inputs[0]] == 1 else axes[node.inputs[0]]


def _flattened(node: Any, axes: Axes) -> int | None:
    return 0 if axes[node.inputs[0]] == 0 and node.attributes.get_int("axis", 1) == 1 else None


def _matrix_product(node: Any, axes: Axes) -> int | None:
    a, b = node.inputs
    width = rank(node.outputs[0])
    if width is None or (rank(a) or 0) < 2 or (rank(b) or 0) < 2:
        return None
    batch_axes = set()
    for x, contracted in ((a, -1), (b, -2)):
        if x in axes:
            from_end = axes[x] - rank(x)  # type: ignore[operator]
            if from_end == contracted or (a in axes and b in axes and from_end > -3):
                return None
            batch_axes.add(width + from_end)
    return batch_axes.pop() if len(batch_axes) == 1 else None


def _gemm(node: Any, axes: Axes) -> int | None:
    a, b, c = (*node.inputs, None)[:3]
    batch_axes = set()
    if a in axes:
        batch_axes.add(0 if axes[a] == node.attributes.get_int("transA", 0) else None)
    if b in axes:
        batch_axes.add(1 if axes[b] == 1 - node.attributes.get_int("transB", 0) else None)
    if c in axes:
        batch_axes.add(axes[c] + 2 - (rank(c) or 0))
    return batch_axes.pop() if len(batch_axes) == 1 else None


def _einsum(node: Any, axes: Axes) -> int | None:
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if "..." in "".join((*terms, output)):
        return None
    letters = {terms[i][axes[x]] for i, x in enumerate(node.inputs) if x in axes}
    letter = letters.pop()
    active = [t for x, t in zip(node.inputs, terms, strict=True) if x in axes]
    if letters or any(t.count(letter) > 1 for t in active) or letter not in output:
        return None
    return output.index(letter)


def _tiled(node: Any, axes: Axes) -> int | None:
    repeats, axis = constant(node.inputs[1]), axes[node.inputs[0]]
    return axis if repeats is not None and repeats[axis] == 1 else None


def _resized(node: Any, axes: Axes) -> int | None:
    """Return the batch axis of a Resize that keeps its length: each axis is resized by itself."""
    x = node.inputs[0]
    cropped = node.attributes.get_string("coordinate_transformation_mode", "") == (
        "tf_crop_and_resize"
    )
    before, after = dims(x), dims(node.outputs[0])
    if x not in axes or cropped or before is None or after is None:
        return None
    return axes[x] if before[axes[x]] == after[axes[x]] is not None else None


def _loss(node: Any, axes: Axes) -> int | None:
    x = node.inputs[0]
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    return None if reduced or [v for v in node.inputs if v in axes] != [x] or axes[x] else 0


_RULES: dict[str, Callable[[Any, Axes], int | None]] = {
    "BatchNormalization": _batch_normalized,
    "Einsum": _einsum,
    "Flatten": _flattened,
    "Gather": _gathered,
    "Gemm": _gemm,
    "LayerNormalization": _normalized,
    "MatMul": _matrix_product,
    "NegativeLogLikelihoodLoss": _loss,
    "Pad": _padded,
    "RMSNormalization": _normalized,
    "Reshape": _same_front,
    "Resize": _resized,
    "Slice": _sliced,
    "SoftmaxCrossEntropyLoss": _loss,
    "Squeeze": _squeezed,
    "Tile": _tiled,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
