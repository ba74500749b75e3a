"""Operators that lay out elements anew: views, copies, concatenations, slices, pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.limits import limit
from onnxgrad.operators.axes import (
    Place,
    axes_named_by,
    axis_unless_named,
    broadcast_axis,
    first_operand,
    named_axes,
    reshaped_axis,
    row_axis,
)
from onnxgrad.operators.elements import Elements, of_known
from onnxgrad.operators.records import Naming, declare_operators
from onnxgrad.operators.shapes import Dim, Dims, broadcast, coefficient, constant, dims, static

Attributes = Mapping[str, Any]

# -- views ----------------------------------------------------------------------------------------


def reshaped(shape: Dims | None, target: Sequence[Dim], attributes: Attributes) -> Dims:
    """Return the shape after a Reshape; a length -1 is inferred, perhaps as a symbol."""
    result = list(target)
    if shape is None:
        return tuple(None if d in (0, -1) else d for d in result)
    if not attributes.get("allowzero"):
        result = [shape[i] if d == 0 else d for i, d in enumerate(result)]
    if -1 not in result:
        return tuple(result)
    before, after = list(shape), [d for d in result if d != -1]
    for d in list(after):
        if d is not None and d in before:
            before.remove(d)
            after.remove(d)
    sizes = [d for d in before if isinstance(d, int)]
    symbols = [d for d in before if not isinstance(d, int)]
    inferred: Dim = None
    if all(isinstance(d, int) and d > 0 for d in after):
        times, symbol = coefficient(symbols[0]) if symbols and symbols[0] else (1, None)
        factor, remainder = divmod(prod(sizes) * times, prod(after))  # type: ignore[arg-type]
        if remainder == 0 and not symbols:
            inferred = factor
        elif remainder == 0 and len(symbols) == 1 and symbol is not None:
            inferred = symbol if factor == 1 else f"{factor}*{symbol}"
    return tuple(inferred if d == -1 else d for d in result)


def _shape_of_reshape(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape = dims(inputs[0])
    if shape is None:
        return None
    target, length = constant(inputs[1]), static(dims(inputs[1]))
    if target is None:
        return None if length is None or length[0] > limit("rank") else (None,) * length[0]
    return reshaped(shape, target.tolist(), attributes)


def _reshape_to_lengths(node: ir.Node, operands: Sequence[Elements | None]) -> Dims | None:
    if operands[1] is None:
        return None
    attributes = {a.name: a.value for a in node.attributes.values()}
    return reshaped(dims(node.inputs[0]), tuple(operands[1].flat), attributes)


def _viewed_elements(node: ir.Node, x: Elements, *_: Elements | None) -> Elements | None:
    shape = static(dims(node.outputs[0]))
    return None if shape is None else x.reshape(shape)


def _shape_of_squeeze(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape, named = dims(inputs[0]), axes_named_by("Squeeze", inputs, attributes)
    if shape is None or named is None:
        return None
    return tuple(d for i, d in enumerate(shape) if i not in named)


def _squeezed_axis(node: Any, _operand: int, axis: int) -> Place:
    named = named_axes(node)
    if named is None:
        return reshaped_axis(node, 0, axis)
    return None if axis in named else axis - sum(a < axis for a in {*named})


def _shape_of_unsqueeze(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape, named = dims(inputs[0]), axes_named_by("Unsqueeze", inputs, attributes)
    if shape is None or named is None:
        return None
    old = iter(shape)
    return tuple(1 if i in named else next(old) for i in range(len(shape) + len(named)))


def _unsqueezed_axis(node: Any, _operand: int, axis: int) -> Place:
    new = named_axes(node)
    if new is None:
        return reshaped_axis(node, 0, axis)
    return [i for i in range(len(node.inputs[0].shape) + len(new)) if i not in new][axis]


_view = of_known(_viewed_elements)
declare_operators("Flatten Reshape", "view cheap reorders", axes=first_operand(reshaped_axis))
declare_operators("Reshape", shape=_shape_of_reshape, elements=_view, lengths=_reshape_to_lengths)
declare_operators(
    "Squeeze Unsqueeze", "view cheap reorders", naming=Naming("axes", 1), elements=_view
)
declare_operators("Squeeze", shape=_shape_of_squeeze, axes=first_operand(_squeezed_axis))
declare_operators("Unsqueeze", shape=_shape_of_unsqueeze, axes=first_operand(_unsqueezed_axis))

# -- other orders of all elements, some of them repeated ------------------------------------------


def _shape_of_transpose(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape = dims(inputs[0])
    if shape is None:
        return None
    return tuple(shape[i] for i in attributes.get("perm", range(len(shape))[::-1]))


def _transposed_axis(node: Any, _operand: int, axis: int) -> Place:
    return (named_axes(node) or []).index(axis)


def _shape_of_expand(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    shape, target = dims(inputs[0]), constant(inputs[1])
    return None if shape is None or target is None else broadcast(shape, tuple(target.tolist()))


def _expand_to_lengths(node: ir.Node, operands: Sequence[Elements | None]) -> Dims | None:
    wanted = None if operands[1] is None else nonnegative_lengths(operands[1])
    return None if wanted is None else broadcast(dims(node.inputs[0]), wanted)


def nonnegative_lengths(elements: Elements) -> Dims | None:
    """Return elements as a shape; None if one is negative, as in a node that never runs."""
    negative = any(isinstance(d, int) and d < 0 for d in elements.flat)
    return None if negative else tuple(elements.flat)


def _tiled_axis(node: Any, _operand: int, axis: int) -> Place:
    repeats = constant(node.inputs[1])
    return axis if repeats is not None and repeats[axis] == 1 else None


def _shape_of_concat(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of a Concat; along all other axes, the operands have the same length."""
    shapes, axis = [dims(v) for v in inputs], attributes.get("axis", 0)
    if not shapes or shapes[0] is None:
        return None
    ranked = [shape for shape in shapes if shape is not None]
    result = [
        next((d for d in column if d is not None), None) for column in zip(*ranked, strict=True)
    ]
    lengths = static(tuple(shape[axis] for shape in ranked))
    result[axis] = sum(lengths) if lengths is not None and len(ranked) == len(shapes) else None
    return tuple(result)


FIRST = Naming("axis", default=lambda *_: [0])
_BY_PERMUTATION = Naming("perm", default=lambda n, *_: range(n)[::-1])

declare_operators("Concat Expand Tile Transpose", "cheap reorders")
declare_operators("DepthToSpace SpaceToDepth", "cheap reorders", axes=first_operand(row_axis))
declare_operators(
    "Transpose",
    shape=_shape_of_transpose,
    naming=_BY_PERMUTATION,
    axes=first_operand(_transposed_axis),
)
declare_operators(
    "Expand", shape=_shape_of_expand, lengths=_expand_to_lengths, axes=first_operand(broadcast_axis)
)
declare_operators("Tile", axes=first_operand(_tiled_axis))
declare_operators(
    "Concat",
    shape=_shape_of_concat,
    naming=FIRST,
    axes=axis_unless_named,
    elements=of_known(lambda node, *parts: np.concatenate(parts)),
)

# -- parts and surroundings -----------------------------------------------------------------------


def _started_axes(_rank: int, inputs: Sequence, _attributes: Attributes) -> Sequence[int] | None:
    """Return the axes of a Slice that names none: as many as it has starts."""
    count = static(dims(inputs[1]))
    return None if count is None else range(*count)


def _sliced_axis(node: Any, operand: int, axis: int) -> Place:
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


def _sliced_elements(node: ir.Node, x: Elements, *bounds: Elements | None) -> Elements | None:
    if x.ndim != 1 or any(b is not None and not isinstance(b[0], int) for b in bounds):
        return None
    start, end, _, step = (*(None if b is None else int(b[0]) for b in bounds), None, None)[:4]
    return x[slice(start, end, step)]


def _padded_axis(node: Any, _operand: int, axis: int) -> Place:
    named, pads = named_axes(node), constant(node.inputs[1])
    if named is None or axis not in named:
        return None if named is None else axis
    return None if pads is None or pads[named.index(axis) :: len(named)].any() else axis


def _axis_before_matrices(node: Any, _operand: int, axis: int) -> Place:
    return axis if axis < len(node.inputs[0].shape) - 2 else None


declare_operators(
    "Slice",
    "cheap selects",
    naming=Naming("axes", 3, _started_axes),
    axes=first_operand(_sliced_axis),
    elements=of_known(_sliced_elements),
)
declare_operators("Split", "cheap selects", naming=FIRST, axes=first_operand(axis_unless_named))
declare_operators(
    "Pad",
    "cheap",
    naming=Naming("axes", 3, lambda n, *_: range(n)),
    axes=first_operand(_padded_axis),
    roles="xc",
)
declare_operators("Trilu", "cheap", axes=first_operand(_axis_before_matrices))
declare_operators("Det", axes=first_operand(_axis_before_matrices))
