"""Activations.

At a kink the slope is that of PyTorch: Relu, LeakyRelu, Elu, ... take the slope of x < 0 at x = 0.
"""

from __future__ import annotations

from math import log, pi, sqrt

import onnx_ir as ir

from onnxgrad.autodiff.registry import elementwise, rule
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute

elementwise(
    # Two casts, as onnxruntime's Sign takes several times as long on large tensors.
    Relu=lambda op, x, y: op.Cast(op.Cast(y, to=ir.DataType.BOOL), to=y.dtype),
    Sigmoid=lambda op, x, y: y * (1.0 - y),
    Softplus=lambda op, x, y: op.Sigmoid(x),
    Softsign=lambda op, x, y: 1.0 / ((1.0 + op.Abs(x)) * (1.0 + op.Abs(x))),
    Mish=lambda op, x, y: _mish_slope(op, x),
    HardSwish=lambda op, x, y: _hard_swish_slope(op, x),
)


def _mish_slope(op, x):
    """Return the slope of x tanh(softplus(x))."""
    t = op.Tanh(op.Softplus(x))
    return t + x * op.Sigmoid(x) * (1.0 - t * t)


def _hard_swish_slope(op, x):
    """Return the slope of x clip(x / 6 + 1 / 2, 0, 1)."""
    inside = op.And(op.Greater(x, -3.0), op.Less(x, 3.0))
    return op.Where(inside, x / 3.0 + 0.5, op.Where(op.Less(x, 3.0), 0.0, op.const(1.0, x.dtype)))


@rule("LeakyRelu")
def leaky_relu(op, node, g):
    """y = x where x > 0 else a x:  dx = g where x > 0 else a g."""
    alpha = float_attribute(node, "alpha")
    positive = op.Greater(node.inputs[0], 0.0)
    if not 0 <= alpha <= 1:
        return (op.Where(positive, g, alpha * g),)
    # onnxruntime's Where takes several times as long as these three
    return (g * op.Max(op.Cast(positive, to=g.dtype), op.const(alpha, g.dtype)),)


@rule("ThresholdedRelu")
def thresholded_relu(op, node, g):
    """y = x where x > a else 0:  dx = g where x > a."""
    alpha = float_attribute(node, "alpha")
    return (op.Where(op.Greater(node.inputs[0], alpha), g, 0.0),)


@rule("PRelu")
def prelu(op, node, g):
    """y = x where x > 0 else s x:  dx = g where x > 0 else s g,  ds = x g where x <= 0."""
    x, slope = node.inputs
    above = op.Greater(x, 0.0)
    return op.Where(above, g, slope * g), op.sum_to(op.Where(above, 0.0, x * g), slope)


@rule("Elu")
def elu(op, node, g):
    """y = x where x > 0 else a (e^x - 1):  dx = g where x > 0 else g (y + a)."""
    alpha = float_attribute(node, "alpha")
    return (op.Where(op.Greater(node.inputs[0], 0.0), g, g * (node.outputs[0] + alpha)),)


@rule("Selu")
def selu(op, node, g):
    """y = c x where x > 0 else c a (e^x - 1):  dx = c g where x > 0 else g (y + c a)."""
    alpha = float_attribute(node, "alpha")
    gamma = float_attribute(node, "gamma")
    positive = op.Greater(node.inputs[0], 0.0)
    return (op.Where(positive, gamma * g, g * (node.outputs[0] + gamma * alpha)),)


@rule("Celu")
def celu(op, node, g):
    """y = x where x > 0 else a (e^(x/a) - 1):  dx = g where x > 0 else g (y / a + 1)."""
    alpha = float_attribute(node, "alpha")
    return (op.Where(op.Greater(node.inputs[0], 0.0), g, g * (node.outputs[0] / alpha + 1.0)),)


@rule("HardSigmoid")
def hard_sigmoid(op, node, g):
    """y = clip(a x + b, 0, 1):  dx = a g where 0 < y < 1."""
    alpha = float_attribute(node, "alpha")
    (y,) = node.outputs
    return (op.Where(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), alpha * g, 0.0),)


@rule("Shrink")
def shrink(op, node, g):
    """y = x + b where x < -l, x - b where x > l, else 0:  dx = g where |x| > l."""
    limit = float_attribute(node, "lambd")
    return (op.Where(op.Greater(op.Abs(node.inputs[0]), limit), g, 0.0),)


@rule("Gelu")
def gelu(op, node, g):
    """y = x F(x):  dx = g (F(x) + x F'(x)), F the standard normal distribution function.

    With `approximate="tanh"`, F is its tanh approximation.
    Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    (x,) = node.inputs
    if string_attribute(node, "approximate") == "tanh":
        c = sqrt(2 / pi)
        x = op.Clip(x, -10.0, 10.0)  # beyond, the slope is 0 or 1, and x^3 may overflow
        t = op.Tanh(c * (x + 0.044715 * (x * x * x)))
        inner = c * (1.0 + 3 * 0.044715 * (x * x))
        return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner),)
    normal = 0.5 * (1.0 + op.Erf(x / sqrt(2)))
    return (g * (normal + x * op.Exp(-0.5 * log(2 * pi) - 0.5 * (x * x))),)


@rule("Softmax")
def softmax(op, node, g):
    """y = softmax(x):  dx = y (g - sum(g y)), the sum over the softmax axis.

    y is NaN in rows where all of x is -inf. If the model replaces such rows by means of a Where, as
    exported attention does for rows that are masked out completely, dx is 0 there.
    """
    (y,), axis = node.outputs, int_attribute(node, "axis")
    return (y * (g - op.ReduceSum(g * y, [axis], keepdims=1)),)


@rule("LogSoftmax")
def log_softmax(op, node, g):
    """y = log softmax(x):  dx = g - e^y sum(g), the sum over the softmax axis."""
    (y,), axis = node.outputs, int_attribute(node, "axis")
    return (g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1),)
