"""The units of a layer, followed from operator to operator up to the outputs."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.finetune.shared_axis import concatenate, gather, slice_, split
from onnxgrad.finetune.tail import INDEX, Span, Tail
from onnxgrad.graph.traversal import captured
from onnxgrad.operators import REORDERS, SELECTS, axes as places, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import SUMMED, named_axes
from onnxgrad.operators.shapes import constant, dims, is_stated, rank, static

_AS_FEATURES = "it works for the old number only, or reads them as features"
_SELECTED = "it selects some of them"
_UNNAMED = "its axes are not constant"


def follow(tail: Tail) -> None:
    """Follow the units to the outputs, and correct the nodes on the way, in place.

    Raises:
        ValueError: a node needs the old number of units.
    """
    for node in list(tail.op.graph):
        axes = {tail.axes[x] for x in node.inputs if x in tail.axes}
        if any(x in tail.axes for x in captured(node)):
            tail.refuse(node, "its subgraph reads them")
        if not axes or "shape" in operator_of(node).traits:
            continue
        if INDEX in axes:
            _follow_indices(tail, node)
            continue
        axis = axes.pop()
        if axes:
            tail.refuse(node, "its operands have them along several axes")
        parts = not node.domain and node.op_type in SELECTS | {"Concat"}  # joined, or selected
        if parts and axis + tail.rank(node) in (named_axes(node) or []):
            _follow_into_part(tail, node, axis)
            continue
        spans = {tail.span(x) for x in node.inputs if x is not None and x in tail.axes}
        if len(spans) > 1:
            tail.refuse(node, "its operands have them at several places of the axis")
        [span] = spans
        _follow_units(tail, node, axis, span)
        for y in node.outputs:
            if tail.axes.get(y, INDEX) != INDEX:
                tail.set_span(y, span)


def _follow_units(tail: Tail, node: ir.Node, axis: int, span: Span) -> None:
    """Find the axis of the units in the results of `node`, and correct its operands, or refuse."""
    operator = operator_of(node)
    if "elementwise" in operator.traits:
        _follow_elementwise(tail, node, axis)
    elif "unary" in operator.traits and "normalizes" not in operator.traits:
        _check_other_operands(tail, node, span)
        tail.keep(node, axis)
    elif node.domain:
        tail.refuse(node, _AS_FEATURES)
    elif "reduces" in operator.traits:
        _follow_reduction(tail, node, axis)
    elif "searches" in operator.traits:
        _follow_search(tail, node, axis)
    elif operator.lengths is not None:
        _follow_to_lengths(tail, node, axis, span)
    elif node.op_type == "Squeeze":
        _follow_squeeze(tail, node, axis)
    elif node.op_type in ("Resize", "Upsample"):
        _follow_resize(tail, node, axis)
    elif node.op_type == "Pad":
        _follow_pad(tail, node, axis)
    elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        _drop_rounding(tail, node)
    elif node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        _follow_loss(tail, node, axis)
    elif operator.axes is None:
        tail.refuse(node, _AS_FEATURES)
    else:
        _follow_record(tail, node, axis)


def _follow_record(tail: Tail, node: ir.Node, axis: int) -> None:
    """Follow the units to where the record of the operator says that their axis stands, or refuse.

    Raises:
        ValueError: the operator works across the axis, or another operand may have it, too.
    """
    ranks = {x: rank(x) for x in node.inputs if x is not None and x in tail.axes}
    if None in ranks.values():
        tail.refuse(node, "the rank of its operand is unknown")
    counted = {x: axis + (n or 0) for x, n in ranks.items()}
    for y, place in zip(node.outputs, places.follow(node, counted), strict=True):
        n = rank(y)
        if place is not None and place != SUMMED and n is not None:
            tail.axes[y] = place - n
            tail.changed.add(y)
        elif place != SUMMED and (y.uses() or y.is_graph_output()):
            tail.refuse(node, _reason_to_refuse(node))
    _check_other_operands(tail, node, tail.span(next(iter(counted))))


def _reason_to_refuse(node: ir.Node) -> str:
    """Return why the units have no axis in the result of an operator whose record has `axes`."""
    operator = operator_of(node)
    if operator.naming is not None and named_axes(node) is None:
        return _UNNAMED
    if operator.traits & {"selects", "searches"}:
        return _SELECTED
    if "reorders" in operator.traits:
        return f"it mixes or repeats them, with axes of {list(dims(node.inputs[0]) or ())}"
    return _AS_FEATURES


def _check_other_operands(tail: Tail, node: ir.Node, span: Span) -> None:
    """Refuse a node if an operand without units may have an axis of their old number."""
    operator = operator_of(node)
    settings = {*operator.settings, operator.lookup_operand}
    settings.add(None if operator.naming is None else operator.naming.operand)
    others = [
        x
        for i, x in enumerate(node.inputs)
        if x is not None and x not in tail.axes and i not in settings
    ]
    if others and node.op_type == "Concat":
        names = ", ".join(repr(x.name) for x in others)
        tail.refuse(node, f"it joins them with {names}: name the layers of these, too")
    for x in others:
        shape = dims(x)
        if shape is None or any(d == span.length or not is_stated(d) for d in shape):
            tail.refuse(node, f"{_AS_FEATURES}: {x.name!r} may have a number for each")


def _follow_indices(tail: Tail, node: ir.Node) -> None:
    """Follow indices of units, or refuse."""
    operator = operator_of(node)
    moves = node.op_type in REORDERS | SELECTS and node.op_type != "Concat"
    if not node.domain and moves and tail.axes.keys().isdisjoint(node.inputs[1:]):
        tail.axes.update(dict.fromkeys(node.outputs, INDEX))
    elif not node.domain and node.op_type == "OneHot":
        tail.depth(node)
        axis, n = int_attribute(node, "axis"), rank(node.outputs[0])
        if n is None and axis >= 0:
            tail.refuse(node, "the rank of its result is unknown")
        tail.keep(node, axis if axis < 0 else axis - (n or 0))
    elif "elementwise" not in operator.traits:
        tail.refuse(node, "it looks up what belongs to the old units")


def _follow_elementwise(tail: Tail, node: ir.Node, axis: int) -> None:
    if "unary" not in operator_of(node).traits or node.op_type == "PRelu":
        for i, x in enumerate(node.inputs):
            if x is not None and x not in tail.axes:
                tail.operand(node, i, axis)
    tail.keep(node, axis)


def _follow_resize(tail: Tail, node: ir.Node, axis: int) -> None:
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


def _follow_pad(tail: Tail, node: ir.Node, axis: int) -> None:
    named, at = named_axes(node) or [], axis + tail.rank(node)
    pads = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = node.attributes.get_ints("pads", ()) if pads is None else pads.tolist()
    if not stated or (at in named and any(stated[named.index(at) :: len(named)])):
        tail.refuse(node, "it pads their axis")
    tail.keep(node, axis)


def _follow_to_lengths(tail: Tail, node: ir.Node, axis: int, span: Span) -> None:
    """Follow the units through a Reshape or Expand, and correct the length that it states."""
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None:
        tail.refuse(node, "the rank of its operand or result is unknown")
    [place] = places.places(node, 0, axis + len(before))
    [operand] = operator_of(node).settings
    if isinstance(place, int):
        [count] = static(dims(node.inputs[operand])) or (len(after),)
        if (position := place - len(after) + count) >= 0:  # else the length is not stated
            tail.vector(node, operand, position)
        tail.keep(node, place - len(after))
    elif span.length == 1 and len(after) < len(before):
        _drop_axis(tail, node)
    else:
        tail.refuse(node, f"it reshapes {list(before)} to {list(after)}")


def _drop_axis(tail: Tail, node: ir.Node) -> None:
    """Handle a node that removes the axis of one unit: remove it if there are more units now."""
    if tail.new != 1:
        tail.bypass(node)


def _follow_squeeze(tail: Tail, node: ir.Node, axis: int) -> None:
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
        _drop_axis(tail, node)
    else:
        tail.keep(node, axis + sum(a > axis + n for a in axes))


def _follow_reduction(tail: Tail, node: ir.Node, axis: int) -> None:
    named = named_axes(node)
    if named is None:
        tail.refuse(node, _UNNAMED)
    if axis + tail.rank(node) not in named:  # else the results are for any number of units
        _follow_record(tail, node, axis)


def _follow_search(tail: Tail, node: ir.Node, axis: int) -> None:
    """Follow the units through an ArgMax, ArgMin or TopK; indices of units result along them."""
    if named_axes(node) != [axis + tail.rank(node)]:
        _follow_record(tail, node, axis)
        return
    if not tail.is_whole(node.inputs[0]):
        tail.refuse(node, "its axis holds others beside them")
    count = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type == "TopK" and (count is None or count.item() > tail.new):
        tail.refuse(node, f"it takes {'k' if count is None else count.item()} of them")
    tail.axes[node.outputs[-1]] = INDEX


def _follow_into_part(tail: Tail, node: ir.Node, axis: int) -> None:
    """Follow the units through a node that joins or selects parts along their axis, or refuse."""
    if operator_of(node).lookup_operand is not None:
        gather(tail, node, axis)
    elif node.op_type == "Concat":
        concatenate(tail, node, axis)
    elif node.op_type == "Slice":
        slice_(tail, node, axis)
    elif node.op_type == "Split":
        split(tail, node, axis)
    elif (
        node.op_type != "GatherElements"  # which takes one element, of the label
        or node.inputs[1] in tail.axes
        or not tail.is_whole(node.inputs[0])
    ):
        tail.refuse(node, _SELECTED)


def _drop_rounding(tail: Tail, node: ir.Node) -> None:
    """Remove the rounding of the result: its scale belongs to the old weights."""
    if node.op_type == "QuantizeLinear" and node.outputs[0].is_graph_output():
        tail.refuse(node, "its scale belongs to the old weights")
    tail.bypass(node)


def _follow_loss(tail: Tail, node: ir.Node, axis: int) -> None:
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        tail.refuse(node, "it has a weight for each class")
    for y in node.outputs[1:]:
        tail.axes[y] = axis
        tail.changed.add(y)
