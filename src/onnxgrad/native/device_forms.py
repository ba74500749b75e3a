"""Forms of operators for execution providers other than CPU and CUDA, which often lack kernels.

onnxruntime gives a node without a kernel to the CPU, which copies its operands and results. These
operators are written with others, which all providers have.
"""

from __future__ import annotations

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import rank

DEVICES = "native.devices"  # the group of rewrites


@rewrites("LogSoftmax", group=DEVICES)
def log_softmax_by_sums(op, node):
    """log softmax(x) = s - log(sum exp s), with s = x - max x."""
    axis = [int_attribute(node, "axis")]
    s = op.Sub(node.inputs[0], op.ReduceMax(node.inputs[0], axis, keepdims=1))
    return [op.Sub(s, op.Log(op.ReduceSum(op.Exp(s), axis, keepdims=1)))]


@rewrites("BatchNormalization", group=DEVICES)
def batch_norm_by_means(op, node):
    """y = (x - m) / sqrt(v + epsilon) * scale + bias, with the mean m and variance v of a batch."""
    x, scale, bias, *running = node.inputs
    n = rank(x)
    if not int_attribute(node, "training_mode") or n is None or n < 2:
        return None
    axes = [0, *range(2, n)]
    column = [-1, *[1] * (n - 2)]  # the shape of values by channel beside x
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    deviation = op.Sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    y = op.Add(
        op.Mul(op.Div(centered, deviation), op.Reshape(scale, column)), op.Reshape(bias, column)
    )
    momentum = node.attributes.get_float("momentum", 0.9)
    new = [
        op.Add(op.Mul(before, momentum), op.Mul(op.Reshape(now, [-1]), 1 - momentum))
        for before, now in zip(running, (mean, variance), strict=True)
    ]
    return [y, *new][: len(node.outputs)]


@rewrites("LayerNormalization", group=DEVICES)
def layer_norm_with_statistics(op, node):
    """m = mean x, i = 1 / sqrt(mean (x - m)^2 + epsilon) and y = (x - m) i scale + bias."""
    if len(node.outputs) < 2 or (n := rank(node.inputs[0])) is None:
        return None
    (x, scale), bias = node.inputs[:2], [b for b in node.inputs[2:] if b is not None]
    axes = list(range(int_attribute(node, "axis") % n, n))
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(variance + node.attributes.get_float("epsilon", 1e-5)))
    y = op.Mul(op.Mul(centered, inverse), scale)
    return [op.Add(y, bias[0]) if bias else y, mean, inverse][: len(node.outputs)]


@rewrites("Sum", group=DEVICES)
def copy_by_identity(op, node):
    """Sum(x) = Identity(x): OpenVINO returns memory that it has not written for the first."""
    return [op.Identity(node.inputs[0])] if len(node.inputs) == 1 else None
