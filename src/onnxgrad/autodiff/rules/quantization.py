"""Quantization: rounded values have no gradient, their scales have one."""

from __future__ import annotations

from math import prod

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.autodiff.rules.common import attributes_of, widened
from onnxgrad.graph.shapes import dims, static


@rule("DequantizeLinear")
def dequantize_linear(op, node, g):
    """y = s (x - z):  ds = g (x - z), summed over the elements that share a scale."""
    x, scale, *zero_point = node.inputs
    if scale.dtype is None or scale.dtype.bitwidth < 16:
        return Unsupported("its scale's dtype is too coarse for a gradient; use float16 or wider")
    ones = op.Expand(op.const(1.0, scale.dtype), op.shape_of(scale))
    steps = op.DequantizeLinear(x, ones, *zero_point, **attributes_of(node))
    g, steps = widened(op, g, op.set_type_like(steps, node.outputs[0]))
    dscale = op.Cast(_per_scale(op, node, g * steps), to=scale.dtype)
    return _quantized_gradient(x), op.reshape_like(dscale, scale), None


def _quantized_gradient(x):
    """Return None if x is an integer, else that its dtype allows no gradient."""
    if not x.dtype.is_floating_point():
        return None
    return Unsupported(f"{x.dtype.name} is too coarse for a gradient; use float16 or wider")


def _per_scale(op, node, v):
    """Return the sums of v over the elements that share a scale.

    These are all elements, those with the same index on `axis`, or those of one block along it.
    """
    x, scale = node.inputs[:2]
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    before = op.numel(x, 0, axis)
    if not block:
        shape = static(dims(scale))
        length = op.Reshape(op.Size(scale), [1]) if shape is None else prod(shape)
        rows, shared = op.Reshape(v, op.vector(before, length, -1)), [0, 2]
    else:
        blocks = op.dim(scale, axis)
        padded = op.Pad(v, op.vector(0, blocks * block - op.dim(x, axis)), None, [axis])
        rows, shared = op.Reshape(padded, op.vector(before, blocks, block, -1)), [2]
    return op.ReduceSum(rows, shared, keepdims=0)


@rule("DynamicQuantizeLinear")
def dynamic_quantize_linear(op, node, g, g_scale=None):
    """scale = (max(x, 0) - min(x, 0)) / 255:  g / 255 in equal shares to the largest elements,
    -g / 255 to the smallest; half of it where they are 0.
    """
    (x,) = node.inputs
    terms = []
    for reduce, side in ((op.ReduceMax, 1.0), (op.ReduceMin, -1.0)):
        extreme = reduce(x, keepdims=0)
        hits = op.Cast(op.Equal(x, extreme), to=x.dtype)
        beyond = side + op.Sign(extreme)  # 2 side, side if the extreme is 0, or 0
        terms.append(hits * (g_scale * beyond / (2.0 * 255.0) / op.ReduceSum(hits, keepdims=0)))
    return (op.total(terms),)
