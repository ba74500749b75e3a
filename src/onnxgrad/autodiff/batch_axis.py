"""Whether the rows of a batch mix: the axis of the batch, followed from the inputs to the outputs.

What is followed is the derivative: a value that no gradient goes through, such as a mask of
comparisons, may depend on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.rules import NON_DIFFERENTIABLE
from onnxgrad.errors import printable
from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.shapes import Dim, constant, dims, einsum_terms, rank, static
from onnxgrad.graph.traversal import reads

Axes = dict[ir.Value, int]  # of the values that depend on the inputs, the axis of the batch

_IMAGES = frozenset(  # by rows, of their first operand
    "AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GridSample InstanceNormalization LRN LpPool MaxPool SpaceToDepth".split()
)
_ALONG = {  # attribute `axis`, and its default: the others are kept apart
    "Concat": 0, "CumProd": 0, "CumSum": 0, "GatherElements": 0, "LogSoftmax": -1,
    "LpNormalization": -1, "Softmax": -1, "Split": 0, "TopK": -1,
}  # fmt: skip


def require_rows(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], proof: bool
) -> None:
    """Raise unless row i of every output is known to depend on row i of the inputs only.

    Without `proof`, only that they all have as many rows.

    Raises:
        ValueError: rows that mix, or of which that cannot be told.
    """
    for v in (*inputs, *outputs):
        if not rank(v):
            what = "its rank is not known" if rank(v) is None else "it is a scalar"
            raise ValueError(
                f"{v.name!r} has no rows ({what}): choose inputs and outputs that have"
            )
    length = _first(inputs[0])
    if proof and length != 1:  # with one row there is none to mix with
        _follow(graph, dict.fromkeys(inputs, 0), length, outputs)
    for v in (*inputs, *outputs):
        if (isinstance(length, int) or isinstance(_first(v), int)) and _first(v) != length:
            raise ValueError(
                f"{v.name!r} of shape {dims(v)} has not as many rows as {inputs[0].name!r} of "
                f"shape {dims(inputs[0])}: batched derivatives go from row to row"
            )


def _first(v: ir.Value) -> Dim:
    return (dims(v) or (None,))[0]


def _follow(graph: ir.Graph, axes: Axes, length: Dim, outputs: Sequence[ir.Value]) -> None:
    """Follow the axis of the batch; raise where it ends on the way to an output."""
    needed = _leading_to(graph, outputs)
    for node in graph:
        if node not in needed or axes.keys().isdisjoint(reads(node)):
            continue
        axis = _axis(node, axes)
        for y in node.outputs:
            if y.dtype is not None and not y.dtype.is_floating_point():
                continue
            shape = dims(y)
            if axis is None or shape is None or not 0 <= axis < len(shape):
                raise _error(node, "mixes the rows of the batch, or may do so")
            if shape[axis] != length:
                raise _error(node, f"has an output of shape {shape}, not known to have its rows")
            axes[y] = axis
    for y in outputs:
        if axes.get(y, 0) != 0:
            raise ValueError(f"the rows of output {y.name!r} lie along axis {axes[y]}, not 0")


def _leading_to(graph: ir.Graph, outputs: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes that a gradient of the outputs goes through."""
    needed, found = set(outputs), set()
    for node in reversed(graph):
        if (node.domain, node.op_type) in NON_DIFFERENTIABLE or needed.isdisjoint(node.outputs):
            continue
        found.add(node)
        floats = (x for x in reads(node) if x.dtype is None or x.dtype.is_floating_point())
        needed.update(floats)
    return found


def _error(node: ir.Node, what: str) -> ValueError:
    return ValueError(
        f"{printable(node.op_type)} (node {node.name!r}, output {node.outputs[0].name!r}) {what}: "
        'use batched=False, or batched="unchecked" if you know that row i of the output depends on '
        "row i of the input only"
    )


def _axis(node: ir.Node, axes: Axes) -> int | None:
    """Return the axis of the batch in the outputs, or None where rows mix or it cannot be told."""
    if node.domain:
        return None
    places = [i for i, x in enumerate(node.inputs) if x in axes]
    name = node.op_type
    if name in ELEMENTWISE or name in ("Dropout", "Expand"):
        return _aligned(node, axes)
    if name in _ALONG:
        return _kept_apart(node, axes, places)
    if name.startswith("Reduce"):
        return _reduced(node, axes)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(node, axes)
    if places == [0] and axes[node.inputs[0]] == 0 and name in _IMAGES:  # type: ignore[index]
        return 0
    return None


def _aligned(node: Any, axes: Axes) -> int | None:
    """Return the axis that the operands have in common after broadcasting."""
    shape = dims(node.outputs[0])
    if shape is None:
        return None
    found = {axes[x] + len(shape) - (rank(x) or 0) for x in node.inputs if x in axes}
    return found.pop() if len(found) == 1 else None


def _kept_apart(node: Any, axes: Axes, places: list[int]) -> int | None:
    """Return the axis of operands that are worked on along another one."""
    x, name = node.inputs[places[0]], node.op_type
    n = rank(x)
    if n is None or (name in ("GatherElements", "TopK") and places != [0]):
        return None
    along: int | None = node.attributes.get_int("axis", _ALONG[name])
    if name in ("CumProd", "CumSum"):
        known = constant(node.inputs[1])
        along = None if known is None else int(known)
    same = {axes[node.inputs[i]] for i in places} == {axes[x]}
    return None if along is None or along % n == axes[x] or not same else axes[x]


def _reduced(node: Any, axes: Axes) -> int | None:
    x, keep = node.inputs[0], node.attributes.get_int("keepdims", 1)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    known, n = constant(given), rank(x)
    if n is None or known is None or not known.size:
        noop = node.attributes.get_int("noop_with_empty_axes", 0)
        return axes[x] if noop and (given is None or known is not None) else None
    gone = {int(a) % n for a in known}
    return None if axes[x] in gone else axes[x] - (0 if keep else sum(a < axes[x] for a in gone))


def _same_front(node: Any, axes: Axes) -> int | None:
    """Return the axis of the batch where the shape changes behind it only."""
    a, b = dims(node.inputs[0]), dims(node.outputs[0])
    axis = axes[node.inputs[0]]
    if a is None or b is None or None in a[: axis + 1] or a[: axis + 1] != b[: axis + 1]:
        return None
    return axis


def _transposed(node: Any, axes: Axes) -> int | None:
    n = rank(node.inputs[0])
    if n is None:
        return None
    return list(node.attributes.get_ints("perm", None) or range(n)[::-1]).index(
        axes[node.inputs[0]]
    )


def _unsqueezed(node: Any, axes: Axes) -> int | None:
    known, n = constant(node.inputs[1]), rank(node.outputs[0])
    if known is None or n is None:
        return None
    new = {int(a) % n for a in known}
    return [i for i in range(n) if i not in new][axes[node.inputs[0]]]


def _squeezed(node: Any, axes: Axes) -> int | None:
    known, n = constant(node.inputs[1] if len(node.inputs) > 1 else None), rank(node.inputs[0])
    axis = axes[node.inputs[0]]
    if known is None or n is None:
        return None
    gone = {int(a) % n for a in known}
    return None if axis in gone else axis - sum(a < axis for a in gone)


def _sliced(node: Any, axes: Axes) -> int | None:
    """Return the axis of what is cut along others."""
    x, n, count = node.inputs[0], rank(node.inputs[0]), static(dims(node.inputs[1]))
    named = _named_axes(node, range(*count)) if count is not None else None
    if node.inputs[0] not in axes or n is None or named is None:
        return None
    return None if axes[x] in {a % n for a in named} else axes[x]


def _padded(node: Any, axes: Axes) -> int | None:
    """Return the axis of what is padded along others."""
    x, n, pads = node.inputs[0], rank(node.inputs[0]), constant(node.inputs[1])
    named = _named_axes(node, range(n or 0))
    if x not in axes or any(v in axes for v in node.inputs[1:]) or n is None or named is None:
        return None
    if pads is None:
        return None if axes[x] in {a % n for a in named} else axes[x]
    pairs = zip(named, pads.reshape(2, -1).T, strict=True)
    return None if axes[x] in {a % n for a, pair in pairs if pair.any()} else axes[x]


def _named_axes(node: Any, otherwise: range) -> list[int] | None:
    given = node.inputs[3] if len(node.inputs) > 3 else None
    known = constant(given)
    if given is None:
        return list(otherwise)
    return None if known is None else known.tolist()


def _gathered(node: Any, axes: Axes) -> int | None:
    x, i = node.inputs
    n, m = rank(x), rank(i)
    if x not in axes or n is None or m is None:
        return None
    along = node.attributes.get_int("axis", 0) % n
    return None if along == axes[x] else axes[x] + (m - 1 if along < axes[x] else 0)


def _normalized(node: Any, axes: Axes) -> int | None:
    """Return the axis of what is normalized over the last axes: those of the batch are before."""
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
    found = set()
    for x, contracted in ((a, -1), (b, -2)):
        if x in axes:
            from_end = axes[x] - rank(x)  # type: ignore[operator]
            if from_end == contracted or (a in axes and b in axes and from_end > -3):
                return None
            found.add(width + from_end)
    return found.pop() if len(found) == 1 else None


def _gemm(node: Any, axes: Axes) -> int | None:
    a, b, c = (*node.inputs, None)[:3]
    found = set()
    if a in axes:
        found.add(0 if axes[a] == node.attributes.get_int("transA", 0) else None)
    if b in axes:
        found.add(1 if axes[b] == 1 - node.attributes.get_int("transB", 0) else None)
    if c in axes:
        found.add(axes[c] + 2 - (rank(c) or 0))
    return found.pop() if len(found) == 1 else None


def _einsum(node: Any, axes: Axes) -> int | None:
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if "..." in "".join((*terms, output)):
        return None
    found = {terms[i][axes[x]] for i, x in enumerate(node.inputs) if x in axes}
    letter = found.pop()
    active = [t for x, t in zip(node.inputs, terms, strict=True) if x in axes]
    if found or any(t.count(letter) > 1 for t in active) or letter not in output:
        return None
    return output.index(letter)


def _tiled(node: Any, axes: Axes) -> int | None:
    known, axis = constant(node.inputs[1]), axes[node.inputs[0]]
    return axis if known is not None and known[axis] == 1 else None


def _loss(node: Any, axes: Axes) -> int | None:
    x = node.inputs[0]
    whole = node.attributes.get_string("reduction", "mean") != "none"
    return None if whole or [v for v in node.inputs if v in axes] != [x] or axes[x] else 0


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
    "Slice": _sliced,
    "SoftmaxCrossEntropyLoss": _loss,
    "Squeeze": _squeezed,
    "Tile": _tiled,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
