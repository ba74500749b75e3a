"""What is between convolutions, in blocks of channels, so that nothing is reordered there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import Dims, constant, dims, equal, static
from onnxgrad.native.blocked_layout import Layout, sizes
from onnxgrad.native.phases import BLOCKS

_FLOAT = ir.DataType.FLOAT


@rewrites(*ELEMENTWISE, group=BLOCKS)
def elementwise(op, node):
    """An elementwise operator, also with one number for each channel."""
    layout, y = Layout(op), node.outputs[0]
    operands = [v for v in node.inputs if v is not None and not _is_number(v)]
    images = [v for v in operands if not _is_per_channel(v, dims(y))]
    if not images or not all(layout.has(v) and equal(dims(v), dims(y)) for v in images):
        return None
    return (_on_blocks if images == operands else _per_channel)(layout, node)


@rewrites("Concat", group=BLOCKS)
def concat(op, node):
    """A Concat of channels."""
    layout, channels = Layout(op), node.attributes.get_int("axis", 0) in (1, -3)
    return _on_blocks(layout, node) if channels and all(map(layout.has, node.inputs)) else None


@rewrites("ReduceSum", group=BLOCKS)
def sum_per_channel(op, node):
    """A sum over batch and pixels is a sum over the batch of the means of images."""
    layout, x, y = Layout(op), node.inputs[0], node.outputs[0]
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    pixels = static(sizes(x)[2:])
    if axes is None or not pixels or x.dtype != _FLOAT or y.shape is None:
        return None
    if not layout.has(x) or sorted(int(a) % 4 for a in axes.ravel()) != [0, 2, 3]:
        return None
    channels = sizes(x)[1]
    means = layout.mean_of_pixels(layout.blocked(x))
    total = op.Mul(op.ReduceSum(means, [0], keepdims=0), float(pixels[0] * pixels[1]))
    shape = [1, channels, 1, 1] if node.attributes.get_int("keepdims", 1) else [channels]
    return [layout.view(total, shape)]


def _is_number(x: ir.Value | None) -> bool:
    """Return whether `x` has one element."""
    shape = dims(x)
    return shape is not None and all(d == 1 for d in shape)


def _is_per_channel(x: ir.Value | None, shape: Dims | None) -> bool:
    """Return whether `x` is of shape [C, 1, 1] or [1, C, 1, 1], where `shape` is (N, C, H, W)."""
    own = dims(x)
    if own is None or shape is None or len(shape) != 4 or shape[1] in (1, None):
        return False
    return own in ((shape[1], 1, 1), (1, shape[1], 1, 1))


def _on_blocks(layout: Layout, node: ir.Node) -> list[ir.Value] | None:
    """Apply the operator of `node` to its operands in blocks."""
    y = node.outputs[0]
    joined = _joined(layout, node) if node.op_type in ("Add", "Relu") else None
    if joined is not None:
        return [layout.plain(joined, y)]
    inputs = [layout.blocked(v) if v is not None and layout.has(v) else v for v in node.inputs]
    attributes = {a.name: a.value for a in node.attributes.values()}
    result = layout.op.set_type_like(layout.op.emit(node.op_type, inputs, attributes), y)
    if y.dtype == _FLOAT:
        return [layout.plain(result, y)]
    # a mask cannot be reordered; the plain one is removed if nothing reads it
    return [y] if layout.note(y, result) else None


def _joined(layout: Layout, node: Any) -> ir.Value | None:
    """Return an Add or Relu as part of a convolution that only it reads, or None."""
    for v, other in zip(node.inputs[::-1], node.inputs, strict=True):
        if len(v.uses()) > 1 or not layout.has(v) or not layout.has(other):
            continue
        x, plus = layout.blocked(v), None if v is other else layout.blocked(other)
        only = all(user.op_type == "ReorderOutput" for user, _ in x.uses())
        joined = layout.joined(x, node.op_type, plus) if only else None
        if joined is not None:
            return joined
    return None


def _per_channel(layout: Layout, node: Any) -> list[ir.Value] | None:
    """Write a sum, difference or product with a number per channel as a convolution of 1 x 1."""
    op, (a, b), y = layout.op, node.inputs, node.outputs[0]
    if node.op_type not in ("Add", "Mul", "Sub") or y.dtype != _FLOAT:
        return None
    left = _is_per_channel(a, dims(y))
    x, other = (b, a) if left else (a, b)
    numbers = layout.view(other, [sizes(y)[1]])
    factor, bias = (numbers, None) if node.op_type == "Mul" else (None, numbers)
    if node.op_type == "Sub" and left:
        factor = op.const(np.full(sizes(x)[1], -1, np.float32))
    elif node.op_type == "Sub":
        bias = op.Neg(bias)
    return [layout.plain(layout.affine(layout.blocked(x), factor, bias), x)]
