"""Rewrites of convolutions and of their gradients into onnxruntime's blocked layout, NCHWc."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.tidy import latest_replacement
from onnxgrad.graph.traversal import depends_on
from onnxgrad.native.blocked_gradients import correlate_images, transposed_conv
from onnxgrad.native.blocked_layout import BLOCKS, BlockedLayout, known_dims
from onnxgrad.native.single_nodes import LEAST_PIXELS, NODES
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import constant, dims, static
from onnxgrad.operators.windows import Windows, auto_pad, explicit_windows

# attributes of a convolution, and their values for the new axis of length 1
_OF_HEIGHT_1 = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 0, "output_padding": 0}


@rewrites("Conv", "ConvTranspose", group=BLOCKS)
def convolution_in_blocks(op, node):
    """Rewrite a convolution of trained weights, or its input gradient, into the NCHWc layout."""
    layout, (y,) = BlockedLayout(op), node.outputs
    x, w, bias = (*node.inputs, None)[:3]
    if not _is_float_image(x) or not _is_float_image(w) or marks.WEIGHT_GRADIENT in y.meta:
        return None
    if static(known_dims(w)) is None or dims(y) is None:
        return None
    if not layout.is_whole_blocks(known_dims(w)[0]) or not _is_faster_in_blocks(layout, x, w):
        return None
    write_blocked = (
        _blocked_convolution if node.op_type == "Conv" else _blocked_transposed_convolution
    )
    blocked = write_blocked(layout, node, x, w, bias)
    return None if blocked is None else [layout.to_nchw(blocked, y)]


@rewrites("Conv", "ConvTranspose", group=NODES)
def depthwise_1d_as_2d(op, node):
    """Rewrite a depthwise 1-d convolution as a 2-d convolution of images of height 1.

    onnxruntime has blocks for images only: for 32 rows of 64 x 50 and windows of 9, an image of
    height 1 takes 0.12 ms instead of 0.6, with the reordering. For a convolution that mixes
    channels, the reordering costs as much as the blocks save.
    """
    (x, w, *bias), (y,), attributes = node.inputs, node.outputs, node.attributes
    shapes = [dims(v) or () for v in (x, w, y)]
    if any(len(shape) != 3 for shape in shapes) or x.dtype != ir.DataType.FLOAT:
        return None
    (_, channels, length), (rows, per_group, _), (batch, maps, count) = shapes
    if not (attributes.get_int("group", 1) == channels == rows == maps and per_group == 1):
        return None
    if marks.WEIGHT_GRADIENT in y.meta or shapes[1][2] in (1, None):
        return None
    if not BlockedLayout(op).is_whole_blocks(channels):
        return None
    if "output_shape" in attributes or auto_pad(node) != "NOTSET":
        return None
    if isinstance(length, int) and length < LEAST_PIXELS:
        return None
    wider = {name: a.value for name, a in attributes.items()}
    for name, first in _OF_HEIGHT_1.items():
        if name in wider:
            wider[name] = [n for given in wider[name] for n in (first, given)]
    images = op.emit(node.op_type, [op.Unsqueeze(x, [2]), op.Unsqueeze(w, [2]), *bias], wider)
    images.type, images.shape = y.type, ir.Shape([batch, channels, 1, count])
    return [op.Squeeze(images, [2])]


def _is_float_image(x: ir.Value | None) -> bool:
    """Return whether `x` is a float32 tensor of rank 4, (N, C, H, W)."""
    shape = dims(x)
    return x is not None and x.dtype == ir.DataType.FLOAT and shape is not None and len(shape) == 4


def _is_faster_in_blocks(layout: BlockedLayout, x: ir.Value, weight: ir.Value) -> bool:
    """Return whether NCHWc is faster: not for few pixels, nor for 1 x 1 kernels on NCHW input."""
    *_, height, width = known_dims(x)
    kernel = known_dims(weight)[2:]
    few = isinstance(height, int) and isinstance(width, int) and height * width < LEAST_PIXELS
    return not few and (prod(kernel) > 1 or layout.has_blocked(x))


def _blocked_convolution(
    layout: BlockedLayout, node: ir.Node, x: ir.Value, w: ir.Value, bias: ir.Value | None
) -> ir.Value | None:
    """Return a Conv in NCHWc layout; None if the channel counts are no multiples of the block."""
    rows, per_group, *_ = known_dims(w)
    channels, group = known_dims(x)[1], node.attributes.get_int("group", 1)
    by_channel = group == rows == channels and per_group == 1
    plain = group == 1 and isinstance(channels, int) and channels < layout.block
    in_blocks = layout.is_whole_blocks(channels) and (by_channel or group == 1)
    # a constant weight is left to onnxruntime's optimizer, which reorders it once
    if not (plain or in_blocks) or constant(w) is not None:
        return None
    attributes = {a.name: a.value for a in node.attributes.values()}
    operand = x if plain else layout.to_nchwc(x)
    pixels = (dims(node.outputs[0]) or (None,) * 4)[2:]
    return layout.convolve(operand, layout.conv_weight(w), pixels, attributes, bias)


def _blocked_transposed_convolution(
    layout: BlockedLayout, node: ir.Node, x: ir.Value, w: ir.Value, bias: ir.Value | None
) -> ir.Value | None:
    """Return a ConvTranspose in NCHWc layout; None if an attribute or shape prevents it."""
    rows, per_group, *_ = known_dims(w)
    windows, group = explicit_windows(node, w), node.attributes.get_int("group", 1)
    pixels, counts = static(known_dims(node.outputs[0])[2:]), static(known_dims(x)[2:])
    if "output_shape" in node.attributes or not pixels or not counts or windows is None:
        return None
    if auto_pad(node) != "NOTSET":
        return None
    by_channel = group == rows and per_group == 1
    if not by_channel and not (group == 1 and layout.is_whole_blocks(per_group)):
        return None
    return transposed_conv(layout, x, w, windows, pixels, group, bias)


@rewrites(group=BLOCKS)
def weight_gradient_in_blocks(op, node):
    """Rewrite the gradient of a 2-d convolution's weight into the NCHWc layout."""
    dw = node.outputs[0]
    if marks.WEIGHT_GRADIENT not in dw.meta or len(node.outputs) > 1:
        return None
    x, g, windows, group = dw.meta[marks.WEIGHT_GRADIENT]
    layout, x, g = BlockedLayout(op), latest_replacement(x), latest_replacement(g)
    shapes = [static(known_dims(v)[1:]) for v in (x, g)]
    if not (_is_float_image(x) and _is_float_image(g) and _is_float_image(dw) and all(shapes)):
        return None
    rows, per_group, *kernel = known_dims(dw)
    channels, counts = known_dims(x)[1], known_dims(g)[2:]
    by_channel = group == rows == channels and per_group == 1
    if not layout.is_whole_blocks(rows) or not (by_channel or group == 1):
        return None
    if windows.pads is None or not windows.kernel or not depends_on(dw, {x, g}):
        return None
    if not (layout.has_blocked(x) and layout.has_blocked(g)) and (
        prod(kernel) == 1 or prod(counts) < LEAST_PIXELS
    ):
        return None
    return [correlate_images(layout, x, g, dw, windows, group)]


@rewrites(group=BLOCKS)
def depthwise_1d_gradient_as_2d(op, node):
    """Rewrite the weight gradient of a depthwise 1-d convolution as one of images of height 1."""
    dw = node.outputs[0]
    if marks.WEIGHT_GRADIENT not in dw.meta or len(node.outputs) > 1 or len(known_dims(dw)) != 3:
        return None
    x, g, windows, group = dw.meta[marks.WEIGHT_GRADIENT]
    layout, x, g = BlockedLayout(op), latest_replacement(x), latest_replacement(g)
    rows, per_group, taps = known_dims(dw)
    (channels, length), (maps, count) = (static(known_dims(v)[1:]) or (0, 0) for v in (x, g))
    if not (group == rows == channels == maps and per_group == 1 and layout.is_whole_blocks(rows)):
        return None
    if min(length, count) < LEAST_PIXELS or windows.pads is None or not windows.kernel or taps == 1:
        return None
    if any(v.dtype != ir.DataType.FLOAT for v in (x, g, dw)) or not depends_on(dw, {x, g}):
        return None
    images = [op.Unsqueeze(v, [2]) for v in (x, g)]
    for image, v in zip(images, (x, g), strict=True):
        image.shape = ir.Shape([*known_dims(v)[:2], 1, known_dims(v)[2]])
    weight = ir.Value(name=op.name("weight"), type=dw.type, shape=ir.Shape([rows, 1, 1, taps]))
    wider = Windows(
        kernel=(1, taps),
        strides=(1, *windows.strides),
        dilations=(1, *windows.dilations),
        begin=np.array([0, *windows.begin]),
        end=np.array([0, *windows.end]),
    )
    return [op.Squeeze(correlate_images(layout, images[0], images[1], weight, wider, group), [2])]
