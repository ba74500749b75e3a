"""The units of a layer, followed from operator to operator up to the outputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.finetune.shared_axis import concatenate, gather, slice_, split
from onnxgrad.finetune.tail import INDEX, Span, Tail
from onnxgrad.graph.traversal import captured
from onnxgrad.operators import ELEMENTWISE, OF_SHAPES, UNARY, axes as places
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import SUMMED, named_axes
from onnxgrad.operators.shapes import constant, dims, rank, static

_MICROSOFT = frozenset("Gelu QuickGelu FastGelu".split())
_MIXES = "it mixes them with other axes of {}"
_SELECTS = "it selects some of them"
_SHARED = "its axis holds others beside them"
_POOLS = "it pools over them"
_REASONS = {  # operators that pass units on as `graph.axes` says, and why they are refused if not
    "AveragePool": _POOLS,
    "Flatten": _MIXES,
    "GlobalAveragePool": _POOLS,
    "GlobalLpPool": _POOLS,
    "GlobalMaxPool": _POOLS,
    "LpPool": _POOLS,
    "MaxPool": _POOLS,
    "Tile": "it repeats them",
    "Transpose": _MIXES,
    "Unsqueeze": "its axes are not constant",
}
_MOVES = frozenset("Cast Identity Reshape Squeeze Unsqueeze Flatten Transpose Expand".split())

Handler = Callable[["Tail", ir.Node, int], None]
HANDLERS: dict[str, Handler] = {}


def handler(*op_types: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a function `(tail, node, axis)` for operators."""

    def add(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(op_types, function))
        return function

    return add


def follow(tail: Tail) -> None:
    """Follow the units to the outputs, and correct the nodes on the way, in place.

    Raises:
        ValueError: a node needs the old number of units.
    """
    for node in list(tail.op.graph):
        axes = {tail.axes[x] for x in node.inputs if x in tail.axes}
        if any(x in tail.axes for x in captured(node)):
            tail.refuse(node, "its subgraph reads them")
        if not axes or (node.op_type in OF_SHAPES and not node.domain):
            continue
        if INDEX in axes:
            _follow_indices(tail, node)
            continue
        axis = axes.pop()
        if axes:
            tail.refuse(node, "its operands have them along several axes")
        span = None if node.op_type in _ALONG else _span_of(tail, node)
        if node.domain == "com.microsoft" and node.op_type in _MICROSOFT and not node.inputs[1:]:
            tail.keep(node, axis)
        elif node.op_type in HANDLERS and not node.domain:
            HANDLERS[node.op_type](tail, node, axis)
        elif node.op_type in ELEMENTWISE and not node.domain:
            _elementwise(tail, node, axis)
        elif node.op_type in _REASONS and not node.domain:
            _pass_on(tail, node, axis, _REASONS[node.op_type])
        else:
            tail.refuse(node, "it works for the old number only, or reads them as features")
        if span is not None:
            for y in node.outputs:
                if tail.axes.get(y, INDEX) != INDEX:
                    tail.set_span(y, span)


def _span_of(tail: Tail, node: ir.Node) -> Span:
    """Return where the units are on their axis in the operands of `node`, or refuse."""
    spans = {tail.span(x) for x in node.inputs if x is not None and x in tail.axes}
    if len(spans) > 1:
        tail.refuse(node, "its operands have them at several places of the axis")
    return spans.pop()


def _pass_on(tail: Tail, node: ir.Node, axis: int, why: str) -> None:
    """Follow the units to where `graph.axes` says that they stand; refuse for `why` elsewhere."""
    ranks = {x: rank(x) for x in node.inputs if x is not None and x in tail.axes}
    if None in ranks.values():
        tail.refuse(node, "the rank of its operand is unknown")
    own = {x: axis + (n or 0) for x, n in ranks.items()}
    for y, place in zip(node.outputs, places.follow(node, own), strict=True):
        n = rank(y)
        if place is not None and place != SUMMED and n is not None:
            tail.axes[y] = place - n
            tail.changed.add(y)
        elif place != SUMMED and (y.uses() or y.is_graph_output()):
            tail.refuse(node, why.format(list(dims(node.inputs[0]) or ())))


def _follow_indices(tail: Tail, node: ir.Node) -> None:
    """Pass indices of units on, or refuse."""
    if not node.domain and node.op_type in _MOVES:
        tail.axes[node.outputs[0]] = INDEX
    elif not node.domain and node.op_type == "OneHot":
        tail.depth(node)
        axis, n = int_attribute(node, "axis"), rank(node.outputs[0])
        if n is None and axis >= 0:
            tail.refuse(node, "the rank of its result is unknown")
        tail.keep(node, axis if axis < 0 else axis - (n or 0))
    elif node.domain or node.op_type not in ELEMENTWISE:
        tail.refuse(node, "it looks up what belongs to the old units")


@handler("PRelu")
def _elementwise(tail: Tail, node: ir.Node, axis: int) -> None:
    if node.op_type not in UNARY or node.op_type == "PRelu":
        for i, x in enumerate(node.inputs):
            if x is not None and x not in tail.axes:
                tail.operand(node, i, axis)
    tail.keep(node, axis)


@handler(*"Softmax LogSoftmax Hardmax LpNormalization LRN Dropout Trilu".split())
def _same(tail: Tail, node: ir.Node, axis: int) -> None:
    tail.keep(node, axis)


@handler("Resize", "Upsample")
def _resize(tail: Tail, node: ir.Node, axis: int) -> None:
    n = tail.rank(node)
    axes = [a % n for a in node.attributes.get_ints("axes", range(n))]
    if axis + n in axes:
        position = axes.index(axis + n)
        index = 2 if node.op_type == "Resize" and len(node.inputs) > 2 else 1
        scales = constant(node.inputs[index]) if len(node.inputs) > index else None
        if scales is not None and scales.size and scales[position] != 1:
            tail.refuse(node, "it resizes their axis")
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            tail.vector(node, 3, position)
    tail.keep(node, axis)


@handler("Pad")
def _pad(tail: Tail, node: ir.Node, axis: int) -> None:
    named, at = named_axes(node) or [], axis + tail.rank(node)
    pads = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = node.attributes.get_ints("pads", ()) if pads is None else pads.tolist()
    if not stated or (at in named and any(stated[named.index(at) :: len(named)])):
        tail.refuse(node, "it pads their axis")
    tail.keep(node, axis)


@handler("Reshape")
def _reshape(tail: Tail, node: ir.Node, axis: int) -> None:
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None:
        tail.refuse(node, "the rank of its operand or result is unknown")
    [place] = places.places(node, 0, axis + len(before))
    if isinstance(place, int):
        tail.vector(node, 1, place)
        tail.keep(node, place - len(after))
    elif _span_of(tail, node).length == 1 and len(after) < len(before):
        _drop(tail, node)
    else:
        tail.refuse(node, f"it reshapes {list(before)} to {list(after)}")


def _drop(tail: Tail, node: ir.Node) -> None:
    """Handle a node that removes the axis of one unit: remove it if there are more units now."""
    if tail.new != 1:
        tail.bypass(node)


@handler("Squeeze")
def _squeeze(tail: Tail, node: ir.Node, axis: int) -> None:
    n, shape = tail.rank(node), dims(node.inputs[0]) or ()
    axes = named_axes(node)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(d, int) for d in shape[1:]) or tail.new == 1:
            tail.refuse(node, "it does not name its axes")
        axes = [i for i, d in enumerate(shape) if d == 1]
        if axes != [axis + n] and axis + n in axes:
            tail.refuse(node, "it does not name its axes")
    if axis + n in axes:
        if len(axes) > 1:
            tail.refuse(node, "it removes their axis")
        _drop(tail, node)
    else:
        tail.keep(node, axis + sum(a > axis + n for a in axes))


@handler(*"ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2".split())
@handler("ReduceLogSumExp", "ReduceSumSquare", "ReduceLogSum")
def _reduce(tail: Tail, node: ir.Node, axis: int) -> None:
    named, unnamed = named_axes(node), "its axes are not constant"
    if named is None:
        tail.refuse(node, unnamed)
    if axis + tail.rank(node) not in named:
        _pass_on(tail, node, axis, unnamed)


@handler("ArgMax", "ArgMin", "TopK")
def _search(tail: Tail, node: ir.Node, axis: int) -> None:
    if named_axes(node) != [axis + tail.rank(node)]:
        _pass_on(tail, node, axis, _SELECTS)
        return
    if not tail.is_whole(node.inputs[0]):
        tail.refuse(node, _SHARED)
    count = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type == "TopK" and (count is None or count.item() > tail.new):
        tail.refuse(node, f"it takes {'k' if count is None else count.item()} of them")
    tail.axes[node.outputs[-1]] = INDEX


_ALONG = {"Concat": concatenate, "Gather": gather, "Slice": slice_, "Split": split}


@handler(*_ALONG)
def _take_parts(tail: Tail, node: ir.Node, axis: int) -> None:
    """Handle what joins or selects parts along an axis: that of the units, or another."""
    if axis + tail.rank(node) in (named_axes(node) or []):
        _ALONG[node.op_type](tail, node, axis)
        return
    if node.op_type == "Concat" and (others := [v for v in node.inputs if v not in tail.axes]):
        names = ", ".join(repr(v.name) for v in others if v is not None)
        tail.refuse(node, f"it joins them with {names}: name the layers of these, too")
    span = _span_of(tail, node)
    _pass_on(tail, node, axis, _SELECTS)
    for y in node.outputs:
        if y in tail.axes:
            tail.set_span(y, span)


@handler("GatherElements")
def _gather_elements(tail: Tail, node: ir.Node, axis: int) -> None:
    along = axis + tail.rank(node) in (named_axes(node) or [])
    if along and (node.inputs[1] in tail.axes or not tail.is_whole(node.inputs[0])):
        tail.refuse(node, _SELECTS)
    if not along:  # else one element, of the label
        tail.keep(node, axis)


@handler("Expand")
def _expand(tail: Tail, node: ir.Node, axis: int) -> None:
    length = (static(dims(node.inputs[1])) or (None,))[0]
    if length is None:
        tail.refuse(node, "its shape is not constant")
    if length >= -axis:
        tail.vector(node, 1, length + axis)
    tail.keep(node, axis)


@handler("QuantizeLinear", "DequantizeLinear")
def _drop_rounding(tail: Tail, node: ir.Node, axis: int) -> None:
    """Remove the rounding of the result: its scale belongs to the old weights."""
    if node.op_type == "QuantizeLinear" and node.outputs[0].is_graph_output():
        tail.refuse(node, "its scale belongs to the old weights")
    tail.bypass(node)


@handler("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(tail: Tail, node: ir.Node, axis: int) -> None:
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        tail.refuse(node, "it has a weight for each class")
    for y in node.outputs[1:]:
        tail.axes[y] = axis
        tail.changed.add(y)
