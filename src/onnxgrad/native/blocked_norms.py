"""BatchNormalization in blocks of channels, and its gradient in training mode.

Statistics are means of the pixels of each image, then of the images; what else there is for each
pixel are convolutions of 1 x 1, one channel a group.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnxgrad.graph.operators import GRADIENT_OF
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import static
from onnxgrad.graph.tidy import current
from onnxgrad.graph.traversal import depends_on
from onnxgrad.native.blocked_layout import Layout, sizes
from onnxgrad.native.phases import BLOCKS

_FLOAT = ir.DataType.FLOAT
_OPERANDS = "onnxgrad.operands"  # in `meta` of a result: what its normalization in blocks reads


@rewrites("BatchNormalization", group=BLOCKS)
def normalization(op, node):
    """y = s c / r + b, c = x - m, r the standard deviation; and the running statistics."""
    layout, (x, scale, bias, *running) = Layout(op), node.inputs
    if not layout.has(x) or any(v.dtype != _FLOAT for v in node.inputs):
        return None
    y, epsilon = node.outputs[0], node.attributes.get_float("epsilon", 1e-5)
    if not node.attributes.get_int("training_mode", 0):
        factor = op.Div(scale, op.Sqrt(op.Add(running[1], epsilon)))
        shift = op.Sub(bias, op.Mul(running[0], factor))
        return [layout.plain(layout.affine(layout.blocked(x), factor, shift), x)]
    if static(sizes(x)[1:]) is None:
        return None
    y.meta[_OPERANDS] = x, scale, epsilon
    centered, mean, variance, inverse = _statistics(layout, x, epsilon)
    momentum = node.attributes.get_float("momentum", 0.9)
    states = []
    for old, batch in zip(running, (mean, variance), strict=True):
        kept = op.Mul(old, momentum) if momentum else None
        states.append(batch if kept is None else op.Add(kept, op.Mul(batch, 1.0 - momentum)))
    new = layout.plain(layout.affine(centered, op.Mul(scale, inverse), bias), y)
    return [new, *states][: len(node.outputs)]


@rewrites(group=BLOCKS)
def normalization_gradient(op, node):
    """dx = s (g - mean g - c mean(g c) / r^2) / r,  ds = sum(g c) / r,  db = sum g."""
    old = node.outputs[0]
    if GRADIENT_OF not in old.meta or len(node.outputs) > 1:
        return None
    primal, wanted, (g, *others) = old.meta[GRADIENT_OF]
    x, scale, epsilon = primal.outputs[0].meta.get(_OPERANDS, (None,) * 3)
    if x is None or any(others):
        return None
    layout, g = Layout(op), current(g)
    if not layout.has(x) or not any(depends_on(old, {v}) for v in layout.forms(g)):
        return None
    c, _, _, inverse = _statistics(layout, x, epsilon)
    g = layout.blocked(g)
    images = layout.mean_of_pixels(g)
    products = layout.mean_of_pixels(op.set_type_like(op.Mul(g, c), c))
    if wanted > 0:
        total = op.ReduceSum(products if wanted == 1 else images, [0], keepdims=0)
        total = op.Mul(total, float(prod(sizes(c)[2:])))
        return [op.reshape_like(op.Mul(total, inverse) if wanted == 1 else total, old)]
    mean, covariance = (op.ReduceMean(v, [0], keepdims=0) for v in (images, products))
    slope = op.Mul(scale, inverse)
    of_centered = op.Neg(op.Mul(op.Mul(slope, covariance), op.Mul(inverse, inverse)))
    dx = layout.affine(c, of_centered, op.Neg(op.Mul(slope, mean)))
    return [layout.plain(layout.affine(g, slope, plus=dx), old)]


def _statistics(
    layout: Layout, x: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return x less its mean, in blocks; the mean, variance and inverse standard deviation."""
    op, x = layout.op, layout.blocked(x)
    mean = op.ReduceMean(layout.mean_of_pixels(x), [0], keepdims=0)
    centered = layout.affine(x, None, op.Neg(mean))
    squares = op.set_type_like(op.Mul(centered, centered), centered)
    variance = op.ReduceMean(layout.mean_of_pixels(squares), [0], keepdims=0)
    return centered, mean, variance, op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
