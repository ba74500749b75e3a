"""Where operators take an axis of an operand: one table, read by all that follow an axis.

The place of an axis in an output is one of these:

- an int, the axis of the output whose index i depends on index i of the operand only, if both have
  the same length: an axis of length 1 may be broadcast, and a Gather may leave out elements;
- `SUMMED`: the output is a sum over the axis, of the same function of each index;
- None: the operator mixes the axis, counts positions along it, or may do so.

Where axes of several operands have the same place, index i of one meets index i of the others.

Examples:
    >>> import onnx_ir as ir
    >>> from onnxgrad import Emit
    >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3, 4]))
    >>> op = Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20}))
    >>> turned = op.Transpose(x, perm=[2, 0, 1]).producer()
    >>> total = op.ReduceSum(x, [-3], keepdims=0).producer()
    >>> places(turned, 0, 0), places(total, 0, 0), places(total, 0, 2)
    ([1], ['summed'], [1])
    >>> named_axes(turned), named_axes(total)
    ([2, 0, 1], [0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.operators import ELEMENTWISE, OPERATORS, Naming, Operator, add, operator_of
from onnxgrad.graph.shapes import Dims, constant, dims, einsum_terms, rank, static, volume

SUMMED: Literal["summed"] = "summed"
Place = int | Literal["summed"] | None
Answer = Place | tuple[Place, ...]  # of all outputs, or of each

# -- how operators name axes ----------------------------------------------------------------------


def _starts(_rank: int, inputs: Sequence, _attributes: Mapping) -> Sequence[int] | None:
    """Return the axes of a Slice that names none: as many as it has starts."""
    count = static(dims(inputs[1]))
    return None if count is None else range(*count)


def _reduced(n: int, _inputs: Sequence, attributes: Mapping) -> Sequence[int]:
    return [] if attributes.get("noop_with_empty_axes") else range(n)


_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare"
)
_LAST, _FIRST = (Naming("axis", default=lambda *_, a=a: [a]) for a in (-1, 0))
for _names, _naming in {
    "Hardmax LogSoftmax LpNormalization Softmax TopK LayerNormalization RMSNormalization": _LAST,
    "ArgMax ArgMin Concat Gather GatherElements ScatterElements Split": _FIRST,
    "Compress": Naming("axis"),
    "CumProd CumSum": Naming("axis", 1),
    "MeanVarianceNormalization": Naming("axes", default=lambda *_: [0, 2, 3]),
    "Pad": Naming("axes", 3, lambda n, *_: range(n)),
    "Resize": Naming("axes", default=lambda n, *_: range(n)),
    "ReverseSequence": Naming("time_axis", default=lambda *_: [0]),
    "Slice": Naming("axes", 3, _starts),
    "Squeeze Unsqueeze": Naming("axes", 1),
    "Transpose": Naming("perm", default=lambda n, *_: range(n)[::-1]),
    _REDUCTIONS: Naming("axes", 1, _reduced),
}.items():
    for _name in _names.split():
        add("", _name, naming=_naming)


def named_axes(node: ir.Node) -> list[int] | None:
    """Return the axes that `node` names, counted from the first; None if they are not known.

    They are in the order in which it names them.
    """
    given = {a.name: a.value for a in node.attributes.values()}
    return axes_named_by(node.op_type, node.inputs, given)


def axes_named_by(op_type: str, inputs: Sequence, attributes: Mapping) -> list[int] | None:
    """Return what `named_axes` does of a node with these inputs and attributes."""
    naming, n = OPERATORS.get(("", op_type), Operator()).naming, rank(inputs[0])
    if naming is None or n is None:
        return None
    stated, at = attributes.get(naming.attribute), naming.operand
    if stated is None and at is not None and at < len(inputs) and inputs[at] is not None:
        stated = constant(inputs[at])
        if stated is None:
            return None
    named = [] if stated is None else np.ravel(stated).tolist()
    named = named or naming.default(n, inputs, attributes)
    if named is None:
        return None
    n += len(named) if op_type == "Unsqueeze" else 0
    return [a % n for a in named]


# -- where an axis goes ---------------------------------------------------------------------------


def follow(node: ir.Node, axes: Mapping[ir.Value, int]) -> list[Place]:
    """Return where an axis stands in each output of `node`, if all operands in `axes` have it.

    The other operands do not depend on what is along the axis.
    """
    found = [places(node, i, axes[x]) for i, x in enumerate(node.inputs) if x and x in axes]
    return [_common(column) for column in zip(*found, strict=True)] or [None] * len(node.outputs)


def _common(column: Sequence[Place]) -> Place:
    """Return the place that all operands lead to; sums over several may be products of sums."""
    one = len(set(column)) == 1 and (len(column) == 1 or column[0] != SUMMED)
    return column[0] if one else None


def places(node: ir.Node, operand: int, axis: int) -> list[Place]:
    """Return the place of an axis of an operand, counted from the first, in each output."""
    function = operator_of(node).axes
    known = function is not None and rank(node.inputs[operand]) is not None
    answer = function(node, operand, axis) if function is not None and known else None
    return list(answer) if isinstance(answer, tuple) else [answer] * len(node.outputs)


def keeps_axis(before: Dims, axis: int, after: Dims, other: int) -> bool:
    """Return whether a Reshape is proven to keep `axis` as `other`.

    It is if two of these have the same number of elements: the axes in front, the axis, those
    behind. For all three together have.
    """
    pairs = (
        (before[:axis], after[:other]),
        ((before[axis],), (after[other],)),
        (before[axis + 1 :], after[other + 1 :]),
    )
    return sum(volume(a) is not None and volume(a) == volume(b) for a, b in pairs) >= 2


# -- the places of each operator ------------------------------------------------------------------


def axes_of(*op_types: str, domain: str = "", first: bool = False) -> Callable[[Any], Any]:
    """Register the decorated function of operators: (node, operand, axis) -> its place.

    The rank of the operand is known, and the axis counted from the first. The result is the place
    in all outputs, or a tuple of one for each. With `first`, the function is asked of the first
    operand only, as the axes of the others do not stay.

    Examples:
        >>> @axes_of("ScaleColumns", domain="doc.example")
        ... def scale_columns(node, operand, axis):
        ...     # y[i, j] = x[i, j] s[j]
        ...     return 1 if operand else axis
        >>> x, s = ir.Value(shape=ir.Shape(["N", 3])), ir.Value(shape=ir.Shape([3]))
        >>> follow(ir.Node("doc.example", "ScaleColumns", [x, s]), {s: 0})
        [1]
    """

    def register(function: Callable[[Any, int, int], Answer]) -> Any:
        def of_first(node: Any, operand: int, axis: int) -> Answer:
            return None if operand else function(node, operand, axis)

        for op_type in op_types:
            add(domain, op_type, axes=of_first if first else function)
        return function

    return register


@axes_of(*ELEMENTWISE, "Dropout")
@axes_of("Expand", first=True)
def _broadcast(node: Any, operand: int, axis: int) -> Place:
    width, n = rank(node.outputs[0]), len(node.inputs[operand].shape)
    return None if width is None or width < n else axis + width - n


@axes_of("Concat")
@axes_of("Compress", "CumProd", "CumSum", "Hardmax", "LogSoftmax", "LpNormalization", first=True)
@axes_of("MeanVarianceNormalization", "Softmax", "Split", "TopK", first=True)
def _unless_named(node: Any, _operand: int, axis: int) -> Place:
    named = named_axes(node)
    return None if named is None or axis in named else axis


@axes_of("Slice", first=True)
def _sliced(node: Any, operand: int, axis: int) -> Place:
    named = named_axes(node)
    if named is None or axis not in named:
        return None if named is None else axis
    starts, steps = constant(node.inputs[1]), constant((*node.inputs, None, None)[4])
    k = named.index(axis)
    from_first = starts is not None and starts[k] == 0
    one_by_one = (
        len(node.inputs) < 5 or node.inputs[4] is None or (steps is not None and steps[k] == 1)
    )
    return axis if from_first and one_by_one else None


@axes_of("LayerNormalization", "RMSNormalization", first=True)
def _in_front_of_named(node: Any, _operand: int, axis: int) -> Place:
    named = named_axes(node)
    return None if named is None or axis >= named[0] else axis


@axes_of("BatchNormalization", "LRN", first=True)
def _but_channels(node: Any, _operand: int, axis: int) -> Place:
    return None if axis == 1 or node.attributes.get_int("training_mode", 0) else axis


@axes_of("Conv", "ConvTranspose", "DepthToSpace", "GroupNormalization", first=True)
@axes_of("InstanceNormalization", "SpaceToDepth", first=True)
def _rows(_node: Any, _operand: int, axis: int) -> Place:
    return 0 if axis == 0 else None


@axes_of("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", first=True)
@axes_of("MaxPool", first=True)
def _pooled(node: Any, _operand: int, axis: int) -> Answer:
    # the indices of a MaxPool are positions in the whole batch
    return (axis if axis < 2 else None, None)[: len(node.outputs)]


@axes_of("GridSample")
def _sampled(_node: Any, operand: int, axis: int) -> Place:
    return axis if axis < 2 - operand else None


@axes_of("RoiAlign")
def _regions(_node: Any, operand: int, axis: int) -> Place:
    return axis if axis == (operand == 0) else None  # channels of the images, rows of the others


@axes_of("Det", "Trilu", first=True)
def _but_matrices(node: Any, _operand: int, axis: int) -> Place:
    return axis if axis < len(node.inputs[0].shape) - 2 else None


@axes_of(*_REDUCTIONS.split(), "ArgMax", "ArgMin", "Squeeze", first=True)
def _without_named(node: Any, _operand: int, axis: int) -> Place:
    named, squeezes = named_axes(node), node.op_type == "Squeeze"
    if named is None:
        return _reshaped(node, 0, axis) if squeezes else None
    if axis in named:
        return SUMMED if node.op_type in ("ReduceL1", "ReduceSum", "ReduceSumSquare") else None
    keeps = not squeezes and node.attributes.get_int("keepdims", 1)
    return axis if keeps else axis - sum(a < axis for a in {*named})


@axes_of("Unsqueeze", first=True)
def _unsqueezed(node: Any, _operand: int, axis: int) -> Place:
    new = named_axes(node)
    if new is None:
        return _reshaped(node, 0, axis)
    return [i for i in range(len(node.inputs[0].shape) + len(new)) if i not in new][axis]


@axes_of("Flatten", "Reshape", first=True)
def _reshaped(node: Any, _operand: int, axis: int) -> Place:
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    same = [i for i in range(len(after)) if keeps_axis(before, axis, after, i)]
    return same[0] if len(same) == 1 else None


@axes_of("Transpose", first=True)
def _transposed(node: Any, _operand: int, axis: int) -> Place:
    return (named_axes(node) or []).index(axis)


@axes_of("Pad", first=True)
def _padded(node: Any, _operand: int, axis: int) -> Place:
    named, pads = named_axes(node), constant(node.inputs[1])
    if named is None or axis not in named:
        return None if named is None else axis
    return None if pads is None or pads[named.index(axis) :: len(named)].any() else axis


@axes_of("Tile", first=True)
def _tiled(node: Any, _operand: int, axis: int) -> Place:
    repeats = constant(node.inputs[1])
    return axis if repeats is not None and repeats[axis] == 1 else None


@axes_of("Resize", first=True)
def _resized(node: Any, _operand: int, axis: int) -> Place:
    # each axis is resized by itself; equal lengths may hide a scale other than 1
    x, _, scales, sizes = (*node.inputs, None, None, None)[:4]
    named, option = named_axes(node) or [], node.attributes.get_string
    if axis not in named:
        return axis
    if option("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if sizes is None:
        factors = constant(scales)
        return axis if factors is not None and factors[named.index(axis)] == 1 else None
    before, after = ((dims(v) or {axis: None})[axis] for v in (x, node.outputs[0]))
    stretches = option("keep_aspect_ratio_policy", "stretch") == "stretch"
    return axis if stretches and before == after is not None else None


@axes_of("OneHot", first=True)
def _one_hot(node: Any, _operand: int, axis: int) -> Place:
    new = node.attributes.get_int("axis", -1) % (len(node.inputs[0].shape) + 1)
    return axis + (axis >= new)


@axes_of("Gather")
def _gathered(node: Any, operand: int, axis: int) -> Place:
    named, n = named_axes(node), rank(node.inputs[1])
    if named is None or n is None or (operand == 0 and axis in named):
        return None
    if operand:
        return named[0] + axis
    return axis + n - 1 if named[0] < axis else axis


@axes_of("GatherElements")
def _gathered_elements(node: Any, operand: int, axis: int) -> Place:
    return axis if operand else _unless_named(node, operand, axis)


@axes_of("GatherND")
def _gathered_nd(node: Any, operand: int, axis: int) -> Place:
    kept = len(node.inputs[1].shape) - 1 if operand else node.attributes.get_int("batch_dims", 0)
    return axis if axis < kept else None


@axes_of("ReverseSequence")
def _sequences_reversed(node: Any, operand: int, axis: int) -> Place:
    return (
        node.attributes.get_int("batch_axis", 1) if operand else _unless_named(node, operand, axis)
    )


@axes_of("MatMul")
def _matrix_product(node: Any, operand: int, axis: int) -> Place:
    width, ranks = rank(node.outputs[0]), [rank(x) or 0 for x in node.inputs]
    from_end = axis - ranks[operand]
    contracted = from_end == (-1, -2)[operand]
    return None if width is None or min(ranks) < 2 or contracted else width + from_end


@axes_of("Gemm")
def _gemm(node: Any, operand: int, axis: int) -> Place:
    if operand == 2:
        return axis + 2 - len(node.inputs[2].shape)
    turned = node.attributes.get_int(("transA", "transB")[operand], 0)
    return operand if axis == (operand != turned) else None


@axes_of("Einsum")
def _einsum(node: Any, operand: int, axis: int) -> Place:
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if "." in "".join((*terms, output)):
        return None
    letter = terms[operand][axis]
    diagonal = any(term.count(letter) > 1 for term in terms)
    return None if diagonal or letter not in output else output.index(letter)


@axes_of("GRU", "LSTM", "RNN")
def _recurrent(node: Any, operand: int, axis: int) -> Answer:
    rows = 0 if node.attributes.get_int("layout", 0) else 1
    if {0: rows, 4: 0, 5: rows, 6: rows}.get(operand) != axis:  # the input, lengths and states
        return None
    return (2 * rows, rows, rows)[: len(node.outputs)]


@axes_of("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(node: Any, operand: int, axis: int) -> Answer:
    # classes are along axis 1 of the scores; labels have no such axis, and weights no other
    if operand > 1 or (operand, axis) == (0, 1):
        return None
    loss = axis - 1 if operand == 0 and axis > 1 else axis
    scores = axis + 1 if operand == 1 and axis > 0 else axis
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    return (None if reduced else loss, scores)[: len(node.outputs)]
