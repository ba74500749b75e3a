"""The units of a layer, followed from operator to operator up to the outputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.finetune.layers import known_value
from onnxgrad.finetune.tail import INDEX, Tail
from onnxgrad.graph.axes import keeps_axis
from onnxgrad.graph.operators import ELEMENTWISE, OF_SHAPES, UNARY
from onnxgrad.graph.shapes import dims, rank, static
from onnxgrad.graph.traversal import captured

_MICROSOFT = frozenset("Gelu QuickGelu FastGelu".split())
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
        if node.domain == "com.microsoft" and node.op_type in _MICROSOFT and not node.inputs[1:]:
            tail.keep(node, axis)
        elif node.op_type in HANDLERS and not node.domain:
            HANDLERS[node.op_type](tail, node, axis)
        elif node.op_type in ELEMENTWISE and not node.domain:
            _elementwise(tail, node, axis)
        else:
            tail.refuse(node, "it works for the old number only, or reads them as features")


def _follow_indices(tail: Tail, node: ir.Node) -> None:
    """Pass indices of units on, or refuse."""
    if not node.domain and node.op_type in _MOVES:
        tail.axes[node.outputs[0]] = INDEX
    elif not node.domain and node.op_type == "OneHot":
        tail.depth(node)
        axis, n = node.attributes.get_int("axis", -1), rank(node.outputs[0])
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


@handler(*"AveragePool GlobalAveragePool GlobalMaxPool MaxPool LpPool GlobalLpPool".split())
def _pooled(tail: Tail, node: ir.Node, axis: int) -> None:
    if axis + tail.rank(node) != 1:
        tail.refuse(node, "it pools over them")
    tail.keep(node, axis)


@handler("Resize", "Upsample")
def _resized(tail: Tail, node: ir.Node, axis: int) -> None:
    n = tail.rank(node)
    axes = [a % n for a in node.attributes.get_ints("axes", range(n))]
    if axis + n in axes:
        position = axes.index(axis + n)
        index = 2 if node.op_type == "Resize" and len(node.inputs) > 2 else 1
        scales = known_value(node.inputs[index]) if len(node.inputs) > index else None
        if scales is not None and scales.size and scales[position] != 1:
            tail.refuse(node, "it resizes their axis")
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            tail.vector(node, 3, position)
    tail.keep(node, axis)


@handler("Pad")
def _padded(tail: Tail, node: ir.Node, axis: int) -> None:
    n = tail.rank(node)
    pads = known_value(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = node.attributes.get_ints("pads", ()) if pads is None else pads.tolist()
    axes = known_value(node.inputs[3]) if len(node.inputs) > 3 else None
    along = list(range(n)) if axes is None else [int(a) % n for a in axes]
    if not stated or any(
        stated[i :: len(along)] != [0, 0] for i, a in enumerate(along) if a == axis + n
    ):
        tail.refuse(node, "it pads their axis")
    tail.keep(node, axis)


@handler("Transpose")
def _transposed(tail: Tail, node: ir.Node, axis: int) -> None:
    perm = list(node.attributes.get_ints("perm", ())) or list(range(tail.rank(node)))[::-1]
    tail.keep(node, perm.index(axis + len(perm)) - len(perm))


@handler("Flatten")
def _flattened(tail: Tail, node: ir.Node, axis: int) -> None:
    shape = dims(node.inputs[0]) or ()
    n = tail.rank(node)
    first = node.attributes.get_int("axis", 1)
    first = first + n if first < 0 else first
    behind = axis + n >= first
    others = [d for i, d in enumerate(shape) if (i >= first) == behind and i != axis + n]
    if any(d != 1 for d in others):
        tail.refuse(node, f"it mixes them with other axes of {list(shape)}")
    tail.keep(node, -1 if behind else -2)


@handler("Reshape")
def _reshaped(tail: Tail, node: ir.Node, axis: int) -> None:
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None:
        tail.refuse(node, "the rank of its operand or result is unknown")
    at = axis + len(before)
    same = [i for i in range(len(after)) if keeps_axis(before, at, after, i)]
    if not same and tail.old == 1 and len(after) < len(before):
        _drop(tail, node)
        return
    if len(same) != 1:
        tail.refuse(node, f"it reshapes {list(before)} to {list(after)}")
    tail.vector(node, 1, same[0])
    tail.keep(node, same[0] - len(after))


def _drop(tail: Tail, node: ir.Node) -> None:
    """Handle a node that removes the axis of one unit: remove it if there are more units now."""
    if tail.new != 1:
        tail.bypass(node)


def _axes(node: ir.Node, n: int) -> list[int] | None:
    """Return the axes that `node` names, counted from the first; None: it names none."""
    stated = node.attributes.get_ints("axes", ())
    if not stated and len(node.inputs) > 1:
        array = known_value(node.inputs[1])
        stated = () if array is None else array.ravel().tolist()
    return [int(a) % n for a in stated] if stated else None


@handler("Squeeze")
def _squeezed(tail: Tail, node: ir.Node, axis: int) -> None:
    n, shape = tail.rank(node), dims(node.inputs[0]) or ()
    axes = _axes(node, n)
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


@handler("Unsqueeze")
def _unsqueezed(tail: Tail, node: ir.Node, axis: int) -> None:
    n = tail.rank(node)
    count = len(_axes(node, 1) or ())
    axes = _axes(node, n + count)
    if axes is None:
        tail.refuse(node, "its axes are not constant")
    kept = [i for i in range(n + count) if i not in axes]
    tail.keep(node, kept[axis + n] - n - count)


@handler(*"ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2".split())
@handler("ReduceLogSumExp", "ReduceSumSquare", "ReduceLogSum")
def _reduced(tail: Tail, node: ir.Node, axis: int) -> None:
    if _axes(node, 1) is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        tail.refuse(node, "its axes are not constant")
    if not _axes(node, 1):
        if node.attributes.get_int("noop_with_empty_axes", 0):
            tail.keep(node, axis)
        return
    n = tail.rank(node)
    axes = _axes(node, n) or []
    if axis + n not in axes:
        keeps = node.attributes.get_int("keepdims", 1)
        tail.keep(node, axis if keeps else axis + sum(a > axis + n for a in axes))


@handler("ArgMax", "ArgMin", "TopK")
def _searched(tail: Tail, node: ir.Node, axis: int) -> None:
    top = node.op_type == "TopK"
    along = node.attributes.get_int("axis", -1 if top else 0)
    along = along if along < 0 else along - tail.rank(node)
    keeps = bool(top or node.attributes.get_int("keepdims", 1))
    if along != axis:
        tail.keep(node, axis if keeps or along < axis else axis + 1)
        return
    count = known_value(node.inputs[1]) if len(node.inputs) > 1 else None
    if top and (count is None or count.item() > tail.new):
        tail.refuse(node, f"it takes {'k' if count is None else count.item()} of them")
    tail.axes[node.outputs[-1]] = INDEX


@handler("Slice", "Split", "Concat", "GatherElements", "Gather", "Tile", "Expand")
def _chosen(tail: Tail, node: ir.Node, axis: int) -> None:
    n, op_type = tail.rank(node), node.op_type
    if op_type in ("Tile", "Expand"):
        _repeated(tail, node, axis)
        return
    if op_type == "Slice":
        axes = known_value(node.inputs[3]) if len(node.inputs) > 3 else None
        stated = node.attributes.get_ints("axes", ()) if axes is None else axes.tolist()
        along = [a % n for a in stated] or list(range(n))
    else:
        along = [node.attributes.get_int("axis", 0) % n]
    if op_type == "Gather" and (node.inputs[0] not in tail.axes or axis + n in along):
        tail.refuse(node, "it selects some of them")
    if op_type == "GatherElements" and axis + n in along:
        if node.inputs[1] in tail.axes:
            tail.refuse(node, "it selects some of them")
        return  # one element, of the label
    if axis + n in along or any(x not in tail.axes for x in node.inputs if op_type == "Concat"):
        joins = "it joins them with others" if op_type == "Concat" else "it selects some of them"
        tail.refuse(node, joins)
    behind = along[0] > axis + n and op_type == "Gather"
    tail.keep(node, axis - ((rank(node.inputs[1]) or 0) - 1 if behind else 0))


def _repeated(tail: Tail, node: ir.Node, axis: int) -> None:
    if node.op_type == "Tile":
        repeats = known_value(node.inputs[1])
        if repeats is None or repeats[axis] != 1:
            tail.refuse(node, "it repeats them")
    else:
        length = (static(dims(node.inputs[1])) or (None,))[0]
        if length is None:
            tail.refuse(node, "its shape is not constant")
        if length >= -axis:
            tail.vector(node, 1, length + axis)
    tail.keep(node, axis)


@handler("QuantizeLinear", "DequantizeLinear")
def _quantized(tail: Tail, node: ir.Node, axis: int) -> None:
    """Remove the rounding of the result: its scale belongs to the old weights."""
    if node.op_type == "QuantizeLinear" and node.outputs[0].is_graph_output():
        tail.refuse(node, "its scale belongs to the old weights")
    tail.bypass(node)


@handler("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _lost(tail: Tail, node: ir.Node, axis: int) -> None:
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        tail.refuse(node, "it has a weight for each class")
    for y in node.outputs[1:]:
        tail.axes[y] = axis
        tail.changed.add(y)
