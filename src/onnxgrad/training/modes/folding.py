"""Frozen BatchNormalization as part of the convolution before it."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators import operator_of
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.shapes import dims, static
from onnxgrad.training.modes.replacement import replace

_ROWS = 16  # of a batch, as which the size of images is compared with that of weights


def fold_normalizations(
    op: Emit, trained: Collection[ir.Value], kept: Collection[ir.Value]
) -> None:
    """Write each Conv and the BatchNormalization behind it, in inference form, as one Conv.

    With f = s / sqrt(v + e), f (x * w + c - m) + b is x * (f w) + (b + f (c - m)): the step does
    once with the weight, in both directions, what it would do with every pixel.

    Args:
        op: writes into a prepared graph.
        trained: the weights that are trained: those of the convolution must be among them.
        kept: values that must stay what they are.
    """
    for node in list(op.graph):
        if node.domain or node.op_type != "BatchNormalization" or operator_of(node).of_user:
            continue
        x = node.inputs[0]
        conv = None if x is None else x.producer()
        if conv is None or conv.op_type != "Conv" or conv.domain or conv.graph is not node.graph:
            continue
        if _folds(node, conv, trained) and not {x, *node.outputs} & {*kept, *op.graph.outputs}:
            with op.at(node):
                replace(op, node, [_convolution_of_both(op, node, conv)])


def _folds(node: ir.Node, conv: ir.Node, trained: Collection[ir.Value]) -> bool:
    """Return whether only the normalization reads the convolution, and its weight is small."""
    w = conv.inputs[1]
    if w not in trained or len(conv.outputs[0].uses()) > 1 or len(node.outputs) > 1:
        return False
    dtypes = {v.dtype for v in (*conv.inputs, *node.inputs) if v is not None}
    shape, pixels = static(dims(w)), static((dims(conv.outputs[0]) or (None,) * 3)[2:])
    training = int_attribute(node, "training_mode")
    if training or len(dtypes) > 1 or shape is None or pixels is None:
        return False
    return _ROWS * prod(pixels) >= prod(shape[1:])


def _convolution_of_both(op: Emit, node: ir.Node, conv: ir.Node) -> ir.Value:
    """Return the result of both nodes."""
    _, scale, shift, mean, variance = node.inputs
    x, w, bias = (*conv.inputs, None)[:3]
    assert w is not None
    epsilon = float_attribute(node, "epsilon")
    factor = op.Div(scale, op.Sqrt(op.Add(variance, epsilon)))
    per_row = op.Reshape(factor, [-1, *[1] * (len(dims(w) or ()) - 1)])
    center = mean if bias is None else op.Sub(mean, bias)
    attributes = {a.name: a.value for a in conv.attributes.values()}
    weight = op.set_type_like(op.Mul(w, per_row), w)
    y = op.Conv(x, weight, op.Sub(shift, op.Mul(center, factor)), **attributes)
    return op.set_type_like(y, node.outputs[0])
