"""Follow the axis of a layer's units through the operators behind it, up to the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.finetune.layers import add_initializer
from onnxgrad.finetune.unit_axes import INDEX, UnitAxes, UnitSpan
from onnxgrad.graph.traversal import captured
from onnxgrad.operators import REORDERS, SELECTS, axes as places, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import SUMMED, named_axes
from onnxgrad.operators.shapes import constant, dims, is_stated, rank, static

_AS_FEATURES = "it works for the old number of units only, or reads the units as features"
_SELECTED = "it selects some of the units"
_UNNAMED = "its axes are not constant"
# the opset from which Slice and Split read their integers from inputs
_NUMBERS_AS_INPUTS = {"Slice": 10, "Split": 13}


def follow_units_to_outputs(units: UnitAxes) -> None:
    """Track the axis of the replaced layer's units through all nodes behind the layer, and adapt
    the nodes to the new number of units.

    Raises:
        ValueError: a node needs the old number of units.
    """
    for node in list(units.op.graph):
        axes = {units.axes[x] for x in node.inputs if x in units.axes}
        if any(x in units.axes for x in captured(node)):
            units.refuse(node, "its subgraph reads the units")
        if not axes or "shape" in operator_of(node).traits:
            continue
        if INDEX in axes:
            _follow_class_indices(units, node)
            continue
        axis = axes.pop()
        if axes:
            units.refuse(node, "its operands have the units along several axes")
        # joins or selects along an axis
        parts = not node.domain and node.op_type in SELECTS | {"Concat"}
        if parts and axis + units.rank(node) in (named_axes(node) or []):
            _follow_units_past_join(units, node, axis)
            continue
        spans = {units.span(x) for x in node.inputs if x is not None and x in units.axes}
        if len(spans) > 1:
            units.refuse(node, "its operands have the units at different places of the axis")
        [span] = spans
        _follow_units(units, node, axis, span)
        for y in node.outputs:
            if units.axes.get(y, INDEX) != INDEX:
                units.set_span(y, span)


def _follow_units(units: UnitAxes, node: ir.Node, axis: int, span: UnitSpan) -> None:
    """Record which axis of the results of `node` holds the units, and adapt the operands of `node`
    to the new number of units.
    """
    operator = operator_of(node)
    if "elementwise" in operator.traits:
        _follow_units_past_elementwise(units, node, axis)
    elif "unary" in operator.traits and "normalizes" not in operator.traits:
        _check_operands_without_units(units, node, span)
        units.record_axis(node, axis)
    elif node.domain:
        units.refuse(node, _AS_FEATURES)
    elif "reduces" in operator.traits:
        _follow_units_past_reduction(units, node, axis)
    elif "searches" in operator.traits:
        _follow_units_past_argmax(units, node, axis)
    elif operator.lengths is not None:
        _follow_units_past_reshape(units, node, axis, span)
    elif node.op_type == "Squeeze":
        _follow_units_past_squeeze(units, node, axis)
    elif node.op_type in ("Resize", "Upsample"):
        _follow_units_past_resize(units, node, axis)
    elif node.op_type == "Pad":
        _follow_units_past_pad(units, node, axis)
    elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        if node.op_type == "QuantizeLinear" and node.outputs[0].is_graph_output():
            units.refuse(node, "its scale belongs to the old weights")
        units.bypass(node)  # removed, as the scale belongs to the old weights
    elif node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        _follow_units_past_loss(units, node, axis)
    elif operator.axes is None:
        units.refuse(node, _AS_FEATURES)
    else:
        _follow_units_by_axis_mapping(units, node, axis)


def _follow_units_by_axis_mapping(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Record which axis of the results of `node` holds the units of the new layer.

    The record of the operator in `operators.records` says to which axis of a result an axis of an
    operand leads.

    Raises:
        ValueError: the operator works across the axis, or another operand may have it, too.
    """
    ranks = {x: rank(x) for x in node.inputs if x is not None and x in units.axes}
    if None in ranks.values():
        units.refuse(node, "the rank of its operand is unknown")
    counted = {x: axis + (n or 0) for x, n in ranks.items()}
    for y, place in zip(node.outputs, places.shared_output_axes(node, counted), strict=True):
        n = rank(y)
        if place is not None and place != SUMMED and n is not None:
            units.axes[y] = place - n
            units.changed.add(y)
        elif place != SUMMED and (y.uses() or y.is_graph_output()):
            units.refuse(node, _reason_for_lost_axis(node))
    _check_operands_without_units(units, node, units.span(next(iter(counted))))


def _reason_for_lost_axis(node: ir.Node) -> str:
    """Return the reason why the results of `node` have no axis of units, for the error message."""
    operator = operator_of(node)
    if operator.naming is not None and named_axes(node) is None:
        return _UNNAMED
    if operator.traits & {"selects", "searches"}:
        return _SELECTED
    if "reorders" in operator.traits:
        return f"it mixes or repeats the units, with axes of {list(dims(node.inputs[0]) or ())}"
    return _AS_FEATURES


def _check_operands_without_units(units: UnitAxes, node: ir.Node, span: UnitSpan) -> None:
    """Raise `ValueError` if an operand of `node` without units may have an axis as long as the old
    number of units.
    """
    operator = operator_of(node)
    settings = {*operator.settings, operator.lookup_operand}
    settings.add(None if operator.naming is None else operator.naming.operand)
    others = [
        x
        for i, x in enumerate(node.inputs)
        if x is not None and x not in units.axes and i not in settings
    ]
    if others and node.op_type == "Concat":
        names = ", ".join(repr(x.name) for x in others)
        units.refuse(node, f"it joins the units with {names}: name the layers of these, too")
    for x in others:
        shape = dims(x)
        if shape is None or any(d == span.length or not is_stated(d) for d in shape):
            units.refuse(node, f"{_AS_FEATURES}: {x.name!r} may have a number for each unit")


def _follow_class_indices(units: UnitAxes, node: ir.Node) -> None:
    """Follow class indices, results of ArgMax or TopK, through `node`; raise `ValueError` if `node`
    depends on the old classes.
    """
    operator = operator_of(node)
    moves = node.op_type in REORDERS | SELECTS and node.op_type != "Concat"
    if not node.domain and moves and units.axes.keys().isdisjoint(node.inputs[1:]):
        units.axes.update(dict.fromkeys(node.outputs, INDEX))
    elif not node.domain and node.op_type == "OneHot":
        units.correct_depth(node)
        axis, n = int_attribute(node, "axis"), rank(node.outputs[0])
        if n is None and axis >= 0:
            units.refuse(node, "the rank of its result is unknown")
        units.record_axis(node, axis if axis < 0 else axis - (n or 0))
    elif "elementwise" not in operator.traits:
        units.refuse(node, "it looks up values that belong to the old units")


def _follow_units_past_elementwise(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Follow the axis of units through an elementwise node, whose other operands are resized."""
    if "unary" not in operator_of(node).traits or node.op_type == "PRelu":
        for i, x in enumerate(node.inputs):
            if x is not None and x not in units.axes:
                units.resize_operand(node, i, axis)
    units.record_axis(node, axis)


def _follow_units_past_resize(units: UnitAxes, node: ir.Node, axis: int) -> None:
    n = units.rank(node)
    axes = [a % n for a in node.attributes.get_ints("axes", range(n))]
    if axis + n in axes:
        position = axes.index(axis + n)
        index = 2 if node.op_type == "Resize" and len(node.inputs) > 2 else 1
        scales = constant(node.inputs[index]) if len(node.inputs) > index else None
        if scales is not None and scales.size and scales[position] != 1:
            units.refuse(node, "it resizes the axis of units")
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            units.correct_length(node, 3, position)
    units.record_axis(node, axis)


def _follow_units_past_pad(units: UnitAxes, node: ir.Node, axis: int) -> None:
    named, at = named_axes(node) or [], axis + units.rank(node)
    pads = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = node.attributes.get_ints("pads", ()) if pads is None else pads.tolist()
    if not stated or (at in named and any(stated[named.index(at) :: len(named)])):
        units.refuse(node, "it pads the axis of units")
    units.record_axis(node, axis)


def _follow_units_past_reshape(units: UnitAxes, node: ir.Node, axis: int, span: UnitSpan) -> None:
    """Follow the axis of units through a Reshape or Expand, and set the new number of units in the
    target shape.
    """
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None:
        units.refuse(node, "the rank of its operand or result is unknown")
    [place] = places.output_axes(node, 0, axis + len(before))
    [operand] = operator_of(node).settings
    if isinstance(place, int):
        [count] = static(dims(node.inputs[operand])) or (len(after),)
        # else the shape does not state the length
        if (position := place - len(after) + count) >= 0:
            units.correct_length(node, operand, position)
        units.record_axis(node, place - len(after))
    elif span.length == 1 and len(after) < len(before):
        _bypass_axis_removal(units, node)
    else:
        units.refuse(node, f"it reshapes {list(before)} to {list(after)}")


def _bypass_axis_removal(units: UnitAxes, node: ir.Node) -> None:
    """Remove `node`, which removes the axis of a single unit, if the new layer has several
    units.
    """
    if units.new != 1:
        units.bypass(node)


def _follow_units_past_squeeze(units: UnitAxes, node: ir.Node, axis: int) -> None:
    n, shape = units.rank(node), dims(node.inputs[0]) or ()
    axes = named_axes(node)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(d, int) for d in shape[1:]) or units.new == 1:
            units.refuse(node, "it does not name its axes")
        axes = [i for i, d in enumerate(shape) if d == 1]
        if axes != [axis + n] and axis + n in axes:
            units.refuse(node, "it does not name its axes")
    if axis + n in axes:
        if len(axes) > 1:
            units.refuse(node, "it removes the axis of units")
        _bypass_axis_removal(units, node)
    else:
        units.record_axis(node, axis + sum(a > axis + n for a in axes))


def _follow_units_past_reduction(units: UnitAxes, node: ir.Node, axis: int) -> None:
    named = named_axes(node)
    if named is None:
        units.refuse(node, _UNNAMED)
    if axis + units.rank(node) not in named:  # else the results have no axis of units
        _follow_units_by_axis_mapping(units, node, axis)


def _follow_units_past_argmax(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Follow the axis of units through an ArgMax, ArgMin or TopK, and record its class indices."""
    if named_axes(node) != [axis + units.rank(node)]:
        _follow_units_by_axis_mapping(units, node, axis)
        return
    if not units.holds_only_units(node.inputs[0]):
        units.refuse(node, "its axis holds other values beside the units")
    count = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type == "TopK" and (count is None or count.item() > units.new):
        units.refuse(node, f"it takes {'k' if count is None else count.item()} of the units")
    units.axes[node.outputs[-1]] = INDEX


def _follow_units_past_join(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Follow the units through a Concat, Split, Slice or Gather along the axis of units."""
    if operator_of(node).lookup_operand is not None:
        _follow_units_past_gather(units, node, axis)
    elif node.op_type == "Concat":
        _follow_units_past_concat(units, node, axis)
    elif node.op_type == "Slice":
        _follow_units_past_slice(units, node, axis)
    elif node.op_type == "Split":
        _follow_units_past_split(units, node, axis)
    elif (
        node.op_type != "GatherElements"  # a loss takes the element of the label by GatherElements
        or node.inputs[1] in units.axes
        or not units.holds_only_units(node.inputs[0])
    ):
        units.refuse(node, _SELECTED)


def _follow_units_past_loss(units: UnitAxes, node: ir.Node, axis: int) -> None:
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        units.refuse(node, "it has a weight for each old class")
    for y in node.outputs[1:]:
        units.axes[y] = axis
        units.changed.add(y)


# -- operators that join units with other values along their axis, or take parts of the axis ------
#
# Detectors end in such operators: a Concat of the coordinates of boxes and the scores of classes,
# perhaps of several scales, and Split, Slice or Gather that take them apart again.


def _follow_units_past_concat(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Record where the units are on the axis of the result of a Concat along the axis of units."""
    start, total, own = 0, 0, list[UnitSpan]()
    for x in node.inputs:
        if x is not None and x in units.axes:
            own.append(units.span(x))
            start, length = total + own[-1].start, own[-1].length
        else:
            shape = dims(x)
            stated = None if shape is None else shape[axis]
            if not isinstance(stated, int):
                units.refuse(
                    node,
                    f"it joins the units with {getattr(x, 'name', '')!r}, whose length "
                    "on the axis of units is unknown",
                )
            length = stated
        total += length
    if len(own) > 1:
        units.refuse(node, "it joins the units of several layers along one axis")
    units.record_axis(node, axis)
    units.set_span(node.outputs[0], UnitSpan(start, total))


def _follow_units_past_split(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Correct the sizes of a Split along the axis of units, and record the units in the output that
    contains them.
    """
    span = units.span(_first_operand(node))
    sizes = _integers_of_operand_or_attribute(node, "split", 1)
    if sizes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            units.refuse(node, "its sizes are not constant")
        count = len(node.outputs)
        size = -(-span.length // count)
        sizes = [size] * (count - 1) + [span.length - size * (count - 1)]
    start = 0
    for i, (y, size) in enumerate(zip(node.outputs, sizes, strict=True)):
        if start <= span.start and span.start + units.old <= start + size:
            units.axes[y] = axis
            units.changed.add(y)
            units.set_span(y, UnitSpan(span.start - start, size))
            new = [*sizes[:i], size + units.new - units.old, *sizes[i + 1 :]]
            _replace_integers(units, node, "split", 1, new)
            node.attributes.pop("num_outputs", None)
            return
        start += size
    units.refuse(node, _SELECTED)


def _follow_units_past_slice(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Correct the starts and ends of a Slice along the axis of units; raise `ValueError` if it
    takes some of the units and not all.
    """
    x = _first_operand(node)
    span, named = units.span(x), named_axes(node) or []
    starts, ends = (
        _integers_of_operand_or_attribute(node, "starts", 1),
        _integers_of_operand_or_attribute(node, "ends", 2),
    )
    steps = _integers_of_operand_or_attribute(node, "steps", 4) or [1] * len(named)
    if starts is None or ends is None:
        units.refuse(node, "its bounds are not constant")
    i = named.index(axis + units.rank(node))
    if steps[i] != 1:
        units.refuse(node, _SELECTED)
    bounds = []
    for numbers, operand, name in ((starts, 1, "starts"), (ends, 2, "ends")):
        position = int(np.clip(numbers[i] + span.length * (numbers[i] < 0), 0, span.length))
        bounds.append(position)
        moved = units.new_boundary(span, position)
        if moved is None:
            units.refuse(node, _SELECTED)
        number, length = numbers[i], units.new_length(x)
        if abs(number) <= span.length:
            numbers[i] = moved - length * (number < 0)
        else:  # a bound beyond the axis stands for its start or end
            numbers[i] = max(number, length) if number > 0 else min(number, -length)
        if numbers[i] != number:
            _replace_integers(units, node, name, operand, numbers)
    start, end = bounds
    if start <= span.start and span.start + units.old <= end:
        units.record_axis(node, axis)
        units.set_span(node.outputs[0], UnitSpan(span.start - start, end - start))


def _follow_units_past_gather(units: UnitAxes, node: ir.Node, axis: int) -> None:
    """Correct the indices of a Gather along the axis of units; raise `ValueError` if the indices
    take units.
    """
    x, indices = _first_operand(node), constant(node.inputs[1])
    span = units.span(x)
    if indices is None:
        units.refuse(node, _SELECTED)
    places = np.where(indices < 0, indices + span.length, indices)
    if np.any((places >= span.start) & (places < span.start + units.old)):
        units.refuse(node, _SELECTED)
    moved = np.where(places > span.start, places + units.new - units.old, places)
    new = np.where(indices < 0, moved - units.new_length(x), moved).astype(indices.dtype)
    if not np.array_equal(new, indices):
        units.replace_constant(node, 1, new)


def _first_operand(node: ir.Node) -> ir.Value:
    assert node.inputs[0] is not None
    return node.inputs[0]


def _integers_of_operand_or_attribute(
    node: ir.Node, attribute: str, operand: int
) -> list[int] | None:
    """Return the constant integers that `node` has as an operand or an attribute, such as the
    starts of a Slice; None if there are none.
    """
    if len(node.inputs) > operand and node.inputs[operand] is not None:
        array = constant(node.inputs[operand])
        return None if array is None else array.tolist()
    stated = node.attributes.get_ints(attribute, ())
    return list(stated) or None


def _replace_integers(
    units: UnitAxes, node: ir.Node, attribute: str, operand: int, numbers: Sequence[int]
) -> None:
    """Replace the integers that `node` has as an operand or an attribute, such as the starts of a
    Slice, by `numbers`.
    """
    if units.op.opset < _NUMBERS_AS_INPUTS[node.op_type]:
        node.attributes[attribute] = ir.AttrInt64s(attribute, list(numbers))
    elif len(node.inputs) > operand and node.inputs[operand] is not None:
        array = constant(node.inputs[operand])
        assert array is not None
        units.replace_constant(node, operand, np.array(numbers, array.dtype))
    else:
        node.resize_inputs(max(len(node.inputs), operand + 1))
        value = add_initializer(
            units.op, np.array(numbers), ir.DataType.INT64, f"{attribute}_sizes"
        )
        node.replace_input_with(operand, value)
