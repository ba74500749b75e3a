"""Layers that slide windows, sample or resize images, and recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.operators.axes import (
    Answer,
    Place,
    axes_named_by,
    first_operand,
    named_axes,
    row_axis,
)
from onnxgrad.operators.records import Naming, declare_operators
from onnxgrad.operators.shapes import Dims, constant, dims


def _pooled_axis(node: Any, _operand: int, axis: int) -> Answer:
    # the indices of a MaxPool are positions in the whole batch
    return (axis if axis < 2 else None, None)[: len(node.outputs)]


def _sampled_axis(_node: Any, operand: int, axis: int) -> Place:
    return axis if axis < 2 - operand else None


def _axis_of_regions(_node: Any, operand: int, axis: int) -> Place:
    # channels of the images, rows of the regions and of their batch indices
    return axis if axis == (operand == 0) else None


def _shape_of_resize(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape after a Resize: axes of constant scale 1 keep their length."""
    shape, scales = dims(inputs[0]), constant(inputs[2]) if len(inputs) > 2 else None
    if shape is None:
        return None
    axes = axes_named_by("Resize", inputs, attributes) or ()
    result = [None if i in axes else d for i, d in enumerate(shape)]
    if scales is not None and len(scales) == len(axes):
        for axis, scale in zip(axes, scales, strict=True):
            result[axis] = shape[axis] if scale == 1 else None
    return tuple(result)


def _resized_axis(node: Any, _operand: int, axis: int) -> Place:
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


def _recurrent_axis(node: Any, operand: int, axis: int) -> Answer:
    rows = 0 if node.attributes.get_int("layout", 0) else 1
    if {0: rows, 4: 0, 5: rows, 6: rows}.get(operand) != axis:  # the input, lengths and states
        return None
    return (2 * rows, rows, rows)[: len(node.outputs)]


declare_operators("Conv ConvTranspose", roles="xfb", axes=first_operand(row_axis))
declare_operators(
    "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool",
    axes=first_operand(_pooled_axis),
)
declare_operators("GridSample", roles="xc", axes=_sampled_axis)
declare_operators("RoiAlign", roles="xc", axes=_axis_of_regions)
declare_operators(
    "Resize",
    shape=_shape_of_resize,
    naming=Naming("axes", default=lambda n, *_: range(n)),
    axes=first_operand(_resized_axis),
)
declare_operators("GRU LSTM RNN", axes=_recurrent_axis)
declare_operators("GRU RNN", roles="xffbch")
declare_operators("LSTM", roles="xffbchhf")
declare_operators("DeformConv", roles="xfxbx")
declare_operators("Resize Upsample STFT DFT", roles="xc")
declare_operators("Attention", roles="fffmhhc")
declare_operators("LinearAttention", roles="fffhx")
declare_operators("CausalConvWithState", roles="xfbh")
declare_operators("RotaryEmbedding", roles="xkkc")
declare_operators("QuantizeLinear DequantizeLinear", roles="xq")
declare_operators("DynamicQuantizeLinear", roles="x")
