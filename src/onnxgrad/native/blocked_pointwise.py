"""Elementwise operators and BatchNormalization in onnxruntime's blocked layout, NCHWc.

They stand between convolutions of images or sequences in blocks, whose results need no reordering
then. An elementwise operator runs on blocks, or becomes part of a convolution. The statistics of a
BatchNormalization are means over the pixels of each image, then over the images; the rest of it are
convolutions of 1 x 1, with one channel in each group.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.tidy import latest_replacement
from onnxgrad.graph.traversal import depends_on
from onnxgrad.native.blocked_layout import BLOCKS, BlockedLayout, known_dims
from onnxgrad.operators import ELEMENTWISE, marks
from onnxgrad.operators.shapes import Dims, constant, dims, equal, static

_FLOAT = ir.DataType.FLOAT


@rewrites(*ELEMENTWISE, group=BLOCKS)
def elementwise_in_blocks(op, node):
    """Rewrite an elementwise operator of NCHWc images or sequences, or of one of these and one
    number per channel.
    """
    layout, y = BlockedLayout(op), node.outputs[0]
    operands = [v for v in node.inputs if v is not None and not _is_single_number(v)]
    images = [v for v in operands if not _is_number_per_channel(v, dims(y))]
    if not images or not all(layout.has_blocked(v) and equal(dims(v), dims(y)) for v in images):
        return None
    return (_elementwise_on_blocks if images == operands else _affine_per_channel)(layout, node)


def _is_single_number(x: ir.Value | None) -> bool:
    """Return whether all axes of `x` have length 1, so that it holds one number."""
    shape = dims(x)
    return shape is not None and all(d == 1 for d in shape)


def _is_number_per_channel(x: ir.Value | None, shape: Dims | None) -> bool:
    """Return whether `x` has one number per channel of a `shape` (N, C, H, W) or (N, C, W)."""
    if shape is None or len(shape) not in (3, 4) or shape[1] in (1, None):
        return False
    column = (shape[1], *[1] * (len(shape) - 2))
    return dims(x) in (column, (1, *column))


def _elementwise_on_blocks(layout: BlockedLayout, node: ir.Node) -> list[ir.Value] | None:
    """Return the result of an elementwise node whose image operands are in the NCHWc layout."""
    y = node.outputs[0]
    joined = _fuse_into_convolution(layout, node) if node.op_type in ("Add", "Relu") else None
    if joined is not None:
        return [layout.to_nchw(joined, y)]
    inputs = [
        layout.to_nchwc(v) if v is not None and layout.has_blocked(v) else v for v in node.inputs
    ]
    attributes = {a.name: a.value for a in node.attributes.values()}
    result = layout.op.set_type_like(layout.op.emit(node.op_type, inputs, attributes), y)
    if y.dtype == _FLOAT:
        return [layout.to_nchw(result, y)]
    # a mask cannot be reordered; the plain mask is removed if no node reads it
    return [y] if layout.record_blocked(y, result) else None


def _fuse_into_convolution(layout: BlockedLayout, node: Any) -> ir.Value | None:
    """Return an Add or Relu fused into the Conv it reads; None if other nodes read the Conv."""
    for v, other in zip(node.inputs[::-1], node.inputs, strict=True):
        if len(v.uses()) > 1 or not layout.has_blocked(v) or not layout.has_blocked(other):
            continue
        x, plus = layout.to_nchwc(v), None if v is other else layout.to_nchwc(other)
        only = all(user.op_type == "ReorderOutput" for user, _ in x.uses())
        joined = layout.fuse_into(x, node.op_type, plus) if only else None
        if joined is not None:
            return joined
    return None


def _affine_per_channel(layout: BlockedLayout, node: Any) -> list[ir.Value] | None:
    """Return an Add, Sub or Mul of an image and one number per channel as a 1 x 1 convolution."""
    op, (a, b), y = layout.op, node.inputs, node.outputs[0]
    if node.op_type not in ("Add", "Mul", "Sub") or y.dtype != _FLOAT:
        return None
    left = _is_number_per_channel(a, dims(y))
    x, other = (b, a) if left else (a, b)
    numbers = layout.reshape(other, [known_dims(y)[1]])
    factor, bias = (numbers, None) if node.op_type == "Mul" else (None, numbers)
    if node.op_type == "Sub" and left:
        factor = op.const(np.full(known_dims(x)[1], -1, np.float32))
    elif node.op_type == "Sub":
        bias = op.Neg(bias)
    return [layout.to_nchw(layout.scale_and_shift(layout.to_nchwc(x), factor, bias), x)]


# -- means and sums of pixels ----------------------------------------------------------------------


@rewrites("GlobalAveragePool", group=BLOCKS)
def pixel_means_in_blocks(op, node):
    """Rewrite the means over the pixels of an NCHWc image or sequence."""
    layout, x, y = BlockedLayout(op), node.inputs[0], node.outputs[0]
    if not layout.has_blocked(x):
        return None
    means = layout.mean_of_pixels(layout.to_nchwc(x))
    return [op.Unsqueeze(means, list(range(2, len(known_dims(y)))))]


@rewrites("ReduceSum", group=BLOCKS)
def channel_sums_in_blocks(op, node):
    """Rewrite the sum of an NCHWc image or sequence over all axes but the channels, as in the
    gradient of a bias: the sum over the images of means over pixels, times their count.
    """
    layout, (x, axes) = BlockedLayout(op), (*node.inputs, None)[:2]
    pixels, along = static(known_dims(x)[2:]), constant(axes)
    if along is None or pixels is None or not layout.has_blocked(x):
        return None
    if sorted(along.tolist()) != [0, *range(2, len(known_dims(x)))]:
        return None
    total = op.ReduceSum(layout.mean_of_pixels(layout.to_nchwc(x)), [0], keepdims=0)
    return [op.reshape_like(op.Mul(total, float(prod(pixels))), node.outputs[0])]


# -- BatchNormalization ----------------------------------------------------------------------------


@rewrites("BatchNormalization", group=BLOCKS)
def normalization_in_blocks(op, node):
    """Rewrite a BatchNormalization of an NCHWc image, y = scale (x - mean) / std + bias.

    In training mode, the running statistics are rewritten, too.
    """
    layout, (x, scale, bias, *running) = BlockedLayout(op), node.inputs
    if not layout.has_blocked(x) or any(v.dtype != _FLOAT for v in node.inputs):
        return None
    y, epsilon = node.outputs[0], node.attributes.get_float("epsilon", 1e-5)
    if not node.attributes.get_int("training_mode", 0):
        factor = op.Div(scale, op.Sqrt(op.Add(running[1], epsilon)))
        shift = op.Sub(bias, op.Mul(running[0], factor))
        return [layout.to_nchw(layout.scale_and_shift(layout.to_nchwc(x), factor, shift), x)]
    if static(known_dims(x)[1:]) is None:
        return None
    y.meta[marks.NORMALIZED_IMAGE] = x, scale, epsilon
    centered, mean, variance, inverse = _batch_statistics(layout, x, epsilon)
    momentum = node.attributes.get_float("momentum", 0.9)
    states = []
    for old, batch in zip(running, (mean, variance), strict=True):
        kept = op.Mul(old, momentum) if momentum else None
        states.append(batch if kept is None else op.Add(kept, op.Mul(batch, 1.0 - momentum)))
    new = layout.to_nchw(layout.scale_and_shift(centered, op.Mul(scale, inverse), bias), y)
    return [new, *states][: len(node.outputs)]


@rewrites(group=BLOCKS)
def normalization_gradient_in_blocks(op, node):
    """Rewrite a gradient of BatchNormalization, w.r.t. x, scale or bias, of an NCHWc image.

    With g the cotangent, c = x - mean, s the scale and r the standard deviation:
    dx = s (g - mean g - c mean(g c) / r^2) / r,  ds = sum(g c) / r,  db = sum g.
    """
    old = node.outputs[0]
    if marks.GRADIENT_OF not in old.meta or len(node.outputs) > 1:
        return None
    primal, wanted, (g, *others) = old.meta[marks.GRADIENT_OF]
    x, scale, epsilon = primal.outputs[0].meta.get(marks.NORMALIZED_IMAGE, (None,) * 3)
    if x is None or any(others):
        return None
    layout, g = BlockedLayout(op), latest_replacement(g)
    if not layout.has_blocked(x) or not any(depends_on(old, {v}) for v in layout.known_layouts(g)):
        return None
    c, _, _, inverse = _batch_statistics(layout, x, epsilon)
    g = layout.to_nchwc(g)
    images = layout.mean_of_pixels(g)
    products = layout.mean_of_pixels(op.set_type_like(op.Mul(g, c), c))
    if wanted > 0:
        total = op.ReduceSum(products if wanted == 1 else images, [0], keepdims=0)
        total = op.Mul(total, float(prod(known_dims(c)[2:])))
        return [op.reshape_like(op.Mul(total, inverse) if wanted == 1 else total, old)]
    mean, covariance = (op.ReduceMean(v, [0], keepdims=0) for v in (images, products))
    slope = op.Mul(scale, inverse)
    of_centered = op.Neg(op.Mul(op.Mul(slope, covariance), op.Mul(inverse, inverse)))
    dx = layout.scale_and_shift(c, of_centered, op.Neg(op.Mul(slope, mean)))
    return [layout.to_nchw(layout.scale_and_shift(g, slope, plus=dx), old)]


def _batch_statistics(
    layout: BlockedLayout, x: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return x - mean in NCHWc layout, and per channel the mean, variance and 1 / std of x."""
    op, x = layout.op, layout.to_nchwc(x)
    mean = op.ReduceMean(layout.mean_of_pixels(x), [0], keepdims=0)
    centered = layout.scale_and_shift(x, None, op.Neg(mean))
    squares = op.set_type_like(op.Mul(centered, centered), centered)
    variance = op.ReduceMean(layout.mean_of_pixels(squares), [0], keepdims=0)
    return centered, mean, variance, op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
