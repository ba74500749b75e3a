"""Operators that join units with others along their axis, and that take parts of it.

Detectors end in them: a Concat of the coordinates of boxes and the scores of classes, perhaps of
several scales, and Split, Slice or Gather that take them apart again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.finetune.layers import initializer
from onnxgrad.finetune.tail import Span, Tail
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.shapes import constant, dims

_SELECTS = "it selects some of them"
_INPUTS = {"Slice": 10, "Split": 13}  # opset from which their numbers are inputs


def concatenate(tail: Tail, node: ir.Node, axis: int) -> None:
    """Follow the units of one operand of a Concat along their axis."""
    start, total, own = 0, 0, list[Span]()
    for x in node.inputs:
        if x is not None and x in tail.axes:
            own.append(tail.span(x))
            start, length = total + own[-1].start, own[-1].length
        else:
            shape = dims(x)
            stated = None if shape is None else shape[axis]
            if not isinstance(stated, int):
                tail.refuse(
                    node,
                    f"it joins them with {getattr(x, 'name', '')!r}, whose length "
                    "on their axis is unknown",
                )
            length = stated
        total += length
    if len(own) > 1:
        tail.refuse(node, "it joins the units of several layers along one axis")
    tail.keep(node, axis)
    tail.set_span(node.outputs[0], Span(start, total))


def split(tail: Tail, node: ir.Node, axis: int) -> None:
    """Correct the sizes of a Split along the axis of the units, and follow them into one part."""
    span = tail.span(_first_operand(node))
    sizes = _constant_integers(node, "split", 1)
    if sizes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            tail.refuse(node, "its sizes are not constant")
        count = len(node.outputs)
        size = -(-span.length // count)
        sizes = [size] * (count - 1) + [span.length - size * (count - 1)]
    start = 0
    for i, (y, size) in enumerate(zip(node.outputs, sizes, strict=True)):
        if start <= span.start and span.start + tail.old <= start + size:
            tail.axes[y] = axis
            tail.changed.add(y)
            tail.set_span(y, Span(span.start - start, size))
            new = [*sizes[:i], size + tail.new - tail.old, *sizes[i + 1 :]]
            _set_numbers(tail, node, "split", 1, new)
            node.attributes.pop("num_outputs", None)
            return
        start += size
    tail.refuse(node, _SELECTS)


def slice_(tail: Tail, node: ir.Node, axis: int) -> None:
    """Correct the bounds of a Slice along the axis of the units: it takes all of them, or none."""
    x = _first_operand(node)
    span, named = tail.span(x), named_axes(node) or []
    starts, ends = _constant_integers(node, "starts", 1), _constant_integers(node, "ends", 2)
    steps = _constant_integers(node, "steps", 4) or [1] * len(named)
    if starts is None or ends is None:
        tail.refuse(node, "its bounds are not constant")
    i = named.index(axis + tail.rank(node))
    if steps[i] != 1:
        tail.refuse(node, _SELECTS)
    bounds = []
    for numbers, operand, name in ((starts, 1, "starts"), (ends, 2, "ends")):
        position = int(np.clip(numbers[i] + span.length * (numbers[i] < 0), 0, span.length))
        bounds.append(position)
        moved = tail.moved(span, position)
        if moved is None:
            tail.refuse(node, _SELECTS)
        number, length = numbers[i], tail.new_length(x)
        if abs(number) <= span.length:
            numbers[i] = moved - length * (number < 0)
        else:  # it stands for the first or the last place
            numbers[i] = max(number, length) if number > 0 else min(number, -length)
        if numbers[i] != number:
            _set_numbers(tail, node, name, operand, numbers)
    start, end = bounds
    if start <= span.start and span.start + tail.old <= end:
        tail.keep(node, axis)
        tail.set_span(node.outputs[0], Span(span.start - start, end - start))


def gather(tail: Tail, node: ir.Node, axis: int) -> None:
    """Correct the indices of a Gather along the axis of the units, which takes none of them."""
    x, indices = _first_operand(node), constant(node.inputs[1])
    span = tail.span(x)
    if indices is None:
        tail.refuse(node, _SELECTS)
    places = np.where(indices < 0, indices + span.length, indices)
    if np.any((places >= span.start) & (places < span.start + tail.old)):
        tail.refuse(node, _SELECTS)
    moved = np.where(places > span.start, places + tail.new - tail.old, places)
    new = np.where(indices < 0, moved - tail.new_length(x), moved).astype(indices.dtype)
    if not np.array_equal(new, indices):
        tail.replace_constant(node, 1, new)


def _first_operand(node: ir.Node) -> ir.Value:
    assert node.inputs[0] is not None
    return node.inputs[0]


def _constant_integers(node: ir.Node, attribute: str, operand: int) -> list[int] | None:
    """Return constant integers that `node` has as an operand, or as an attribute in old opsets."""
    if len(node.inputs) > operand and node.inputs[operand] is not None:
        array = constant(node.inputs[operand])
        return None if array is None else array.tolist()
    stated = node.attributes.get_ints(attribute, ())
    return list(stated) or None


def _set_numbers(
    tail: Tail, node: ir.Node, attribute: str, operand: int, numbers: Sequence[int]
) -> None:
    """Let `node` have other integers, as an operand or an attribute as its opset demands."""
    if tail.op.opset < _INPUTS[node.op_type]:
        node.attributes[attribute] = ir.AttrInt64s(attribute, list(numbers))
    elif len(node.inputs) > operand and node.inputs[operand] is not None:
        array = constant(node.inputs[operand])
        assert array is not None
        tail.replace_constant(node, operand, np.array(numbers, array.dtype))
    else:
        node.resize_inputs(max(len(node.inputs), operand + 1))
        value = initializer(tail.op, np.array(numbers), ir.DataType.INT64, f"{attribute}_sizes")
        node.replace_input_with(operand, value)
