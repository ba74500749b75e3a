"""Normalizations, and Dropout."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.graph.shapes import rank


@rule("LayerNormalization")
def layer_normalization(op, node, g):
    """y = s n + b, n = (x - m) / r:  dx = (h - mean h - n mean(h n)) / r, h = s g.

    m the mean, r the root of the variance plus epsilon, over the axes from `axis` on.
    Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """
    x, scale, bias = (*node.inputs, None)[:3]
    axis = node.attributes.get_int("axis", -1)
    if axis >= 0 and rank(x) is None:
        return Refused("the rank of its input is not known")
    axes = list(range(axis if axis < 0 else axis - rank(x), 0))
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(variance + node.attributes.get_float("epsilon", 1e-5)))
    n, h = centred * inverse, g * scale
    slope = op.ReduceMean(h * n, axes, keepdims=1)
    dx = (h - op.ReduceMean(h, axes, keepdims=1) - n * slope) * inverse
    dbias = None if bias is None else op.sum_to(g, bias)
    return dx, op.sum_to(g * n, scale), dbias


@rule("BatchNormalization")
def batch_normalization(op, node, g):
    """y = s (x - m) / r + b, r = sqrt(v + e):  dx = g s / r, ds = sum g (x - m) / r, db = sum g,
    dm = -sum dx, dv = -sum dx (x - m) / (2 r^2), sums over all axes but the channel's.

    Ioffe & Szegedy 2015, arXiv:1502.03167.
    """
    if node.attributes.get_int("training_mode", 0):
        return Refused("training_mode=1 is not covered; export the model in inference mode")
    x, scale, _, mean, variance = node.inputs
    if rank(x) is None:
        return Refused("the rank of its input is not known")
    others = [i for i in range(rank(x)) if i != 1]

    def channel(v):
        return op.Reshape(v, [1 if i != 1 else -1 for i in range(rank(x))])

    def total(v):
        return op.ReduceSum(v, others, keepdims=0)

    inverse = op.Reciprocal(op.Sqrt(variance + node.attributes.get_float("epsilon", 1e-5)))
    centred, dx = x - channel(mean), g * channel(scale * inverse)
    dvariance = -0.5 * total(dx * centred) * inverse * inverse
    return dx, total(g * centred) * inverse, total(g), -total(dx), dvariance


@rule("Dropout")
def dropout(op, node, g, g_mask=None):
    """y = x mask / (1 - p) in training, else x:  dx = g mask / (1 - p) in training, else g.

    The mask is the forward's own.
    """
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is None or (op.constant(training) is not None and not op.constant(training)):
        return (g,)
    ratio = node.inputs[1] if node.inputs[1] is not None else op.value(0.5, g.dtype)
    if len(node.outputs) < 2:
        node.resize_outputs(2)
        node.outputs[1].name, node.outputs[1].dtype = op.name("mask"), ir.DataType.BOOL
    scale = op.Where(training, 1.0 / (1.0 - op.Cast(ratio, to=g.dtype)), op.value(1.0, g.dtype))
    return (op.Where(node.outputs[1], g * scale, 0.0),)
