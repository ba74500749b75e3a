"""What is between convolutions, in blocks of channels, so that nothing is reordered there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.shapes import Dims, constant, dims, equal, static
from onnxgrad.native.blocked_layout import Layout, sizes

_FLOAT = ir.DataType.FLOAT


def between_convolutions(layout: Layout, node: ir.Node) -> None:
    """Rewrite a node whose operands are in blocks already, if it has a form for blocks."""
    y, first = node.outputs[0], next(iter(node.inputs), None)
    if node.domain or first is None or not _all_in_blocks(layout, node):
        return
    real = all(v is None or v.dtype == _FLOAT for v in (*node.inputs, y))
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "ReduceSum":
        _sum_per_channel(layout, node, first)
    elif node.op_type == "BatchNormalization" and real:
        _normalization(layout, node, first)
    elif node.op_type == "Concat" and axis in (1, -3):
        if all(v is not None and layout.has(v) for v in node.inputs):
            _on_blocks(layout, node, y)
    elif any(_is_per_channel(v, dims(y)) for v in node.inputs):
        if real and node.op_type in ("Add", "Mul", "Sub"):
            _per_channel(layout, node)
    elif node.op_type in ELEMENTWISE and all(_keeps_order(v, dims(y)) for v in node.inputs):
        _on_blocks(layout, node, y)


def _all_in_blocks(layout: Layout, node: ir.Node) -> bool:
    """Return whether all operands of more than one number per channel are in blocks."""
    images = [v for v in node.inputs if len(sizes(v)) == 4 and not _is_number(v)]
    images = [v for v in images if not _is_per_channel(v, (None, sizes(v)[1], 2, 2))]
    return bool(images) and all(layout.has(v) for v in images if v is not None)


def _is_number(x: ir.Value | None) -> bool:
    """Return whether `x` has one element."""
    shape = dims(x)
    return shape is not None and all(d == 1 for d in shape)


def _keeps_order(x: ir.Value | None, shape: Dims | None) -> bool:
    """Return whether the elements of an operand are where those of the result are, or one."""
    return x is None or _is_number(x) or equal(dims(x), shape)


def _is_per_channel(x: ir.Value | None, shape: Dims | None) -> bool:
    """Return whether `x` is of shape [C, 1, 1] or [1, C, 1, 1], where `shape` is (N, C, H, W)."""
    own = dims(x)
    if own is None or shape is None or len(shape) != 4 or shape[1] in (1, None):
        return False
    return own in ((shape[1], 1, 1), (1, shape[1], 1, 1))


def _on_blocks(layout: Layout, node: ir.Node, y: ir.Value) -> None:
    """Apply the operator of `node` to its operands in blocks."""
    joined = _joined(layout, node) if node.op_type in ("Add", "Relu") else None
    if joined is not None:
        layout.replace(y, joined)
        return
    inputs = [layout.blocked(v) if v is not None and layout.has(v) else v for v in node.inputs]
    attributes = {a.name: a.value for a in node.attributes.values()}
    result = layout.op.emit(node.op_type, inputs, attributes)
    layout.op.set_type_like(result, y)
    if y.dtype == _FLOAT:
        layout.replace(y, result)
    else:  # a mask cannot be reordered; the plain one is removed if nothing reads it
        layout.note(y, result)


def _joined(layout: Layout, node: ir.Node) -> ir.Value | None:
    """Return an Add or Relu as part of a convolution that only it reads, or None."""
    for v in node.inputs[::-1]:
        if v is None or len(v.uses()) > 1 or not layout.has(v):
            continue
        x = layout.blocked(v)
        if {user.op_type for user, _ in x.uses()} - {"ReorderOutput"}:
            continue
        if node.op_type == "Relu":
            return layout.joined(x, activation="Relu")
        other = node.inputs[0] if v is node.inputs[1] else node.inputs[1]
        if other is not None and layout.has(other) and equal(dims(other), dims(v)):
            joined = layout.joined(x, plus=layout.blocked(other))
            if joined is not None:
                return joined
    return None


def _per_channel(layout: Layout, node: ir.Node) -> None:
    """Write a sum, difference or product with a number per channel as a convolution of 1 x 1."""
    op, y, (a, b) = layout.op, node.outputs[0], node.inputs
    left = _is_per_channel(a, dims(y))
    x, other = (b, a) if left else (a, b)
    if x is None or other is None or not layout.has(x) or not equal(dims(x), dims(y)):
        return
    numbers = layout.view(other, [sizes(y)[1]])
    if node.op_type == "Mul":
        _affine(layout, y, x, numbers, None)
    elif node.op_type == "Add":
        _affine(layout, y, x, None, numbers)
    elif left:
        _affine(layout, y, x, _filled(layout, x, -1), numbers)
    else:
        _affine(layout, y, x, None, op.Neg(numbers))


def _normalization(layout: Layout, node: ir.Node, x: ir.Value) -> None:
    """Write a BatchNormalization in inference form as a convolution of 1 x 1."""
    y, op = node.outputs[0], layout.op
    _, scale, bias, mean, var = node.inputs
    if len(node.outputs) > 1 or node.attributes.get_int("training_mode", 0) == 1:
        return
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    factor = op.Div(scale, op.Sqrt(op.Add(var, epsilon)))
    _affine(layout, y, x, factor, op.Sub(bias, op.Mul(mean, factor)))


def _affine(
    layout: Layout, y: ir.Value, x: ir.Value, factor: ir.Value | None, bias: ir.Value | None
) -> None:
    """Replace `y` by x * factor + bias, which are numbers per channel."""
    layout.replace(y, layout.affine(layout.blocked(x), factor, bias))


def _filled(layout: Layout, x: ir.Value, number: float) -> ir.Value:
    """Return `number` for each channel of `x`."""
    return layout.op.const(np.full(sizes(x)[1], number, np.float32))


def _sum_per_channel(layout: Layout, node: ir.Node, x: ir.Value) -> None:
    """Write a sum over batch and pixels as a sum over the batch of the means of images."""
    y, op = node.outputs[0], layout.op
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    pixels = static(sizes(x)[2:])
    if axes is None or pixels is None or x.dtype != _FLOAT or y.shape is None:
        return
    if sorted(int(a) % 4 for a in axes.ravel()) != [0, 2, 3]:
        return
    channels = sizes(x)[1]
    means = layout.mean_of_pixels(layout.blocked(x))
    total = op.Mul(op.ReduceSum(means, [0], keepdims=0), float(pixels[0] * pixels[1]))
    shape = [1, channels, 1, 1] if node.attributes.get_int("keepdims", 1) else [channels]
    layout.replace_plain(y, layout.view(total, shape))
