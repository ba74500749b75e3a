"""The loss operators of ONNX: negative log likelihood and softmax cross entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import string_attribute
from onnxgrad.operators.axes import Answer
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.records import declare_operators
from onnxgrad.operators.registry import rule
from onnxgrad.operators.rule_nodes import cast_to_inputs, cast_to_wide, node_output


def _axis_of_loss(node: Any, operand: int, axis: int) -> Answer:
    # classes are along axis 1 of the scores; labels have no such axis, and weights no other
    if operand > 1 or (operand, axis) == (0, 1):
        return None
    loss = axis - 1 if operand == 0 and axis > 1 else axis
    scores = axis + 1 if operand == 1 and axis > 0 else axis
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    return (None if reduced else loss, scores)[: len(node.outputs)]


declare_operators(
    "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", axes=_axis_of_loss, roles="c"
)


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood(op, node, g):
    """y = -w_t x_t, or their sum:  dx_t = -g w_t,  dw_t = -g x_t, 0 where t is ignored;
    y = -sum w_t x_t / sum w_t:  dx_t = -g w_t / sum w_t,  dw_t = -g (x_t + y) / sum w_t.

    t is the label. If all labels are ignored, the mean is NaN and its gradient 0, as in PyTorch.
    """
    x, g = cast_to_wide(op, node.inputs[0], g)
    t, share, dweights = _label_gradients(op, node, g, x)
    zeros = op.Expand(op.const(0.0, x.dtype), op.shape_of(x))
    dx = op.set_type_like(op.ScatterElements(zeros, t, -share, axis=1), x)
    return cast_to_inputs(op, [dx, None, dweights], node.inputs)


@rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(op, node, g, g_log=None):
    """y = NegativeLogLikelihoodLoss(f), f = log softmax x:  dx = e^f s, minus s at t, s = -df_t;
    from the output f:  dx += gf - e^f sum(gf), sums over the classes.
    """
    scores = node.inputs[0]
    log = op.set_type_like(node_output(op, node, 1, scores.dtype), scores)
    log, g, gf = cast_to_wide(op, log, g, g_log)
    terms, dweights = [], None
    if g is not None:
        t, share, dweights = _label_gradients(op, node, g, log)
        others = op.Exp(log) * share
        terms.append(op.ScatterElements(others, t, -share, axis=1, reduction="add"))
    if gf is not None:
        terms.append(gf - op.Exp(log) * op.ReduceSum(gf, [1], keepdims=1))
    return cast_to_inputs(op, [op.total(terms), None, dweights], node.inputs)


def _label_gradients(op, node, g, x):
    """Return the labels, the gradient of each label's loss, and the gradient of the class weights.

    The labels have an axis for the classes, and are 0 where ignored. The loss of a label is minus
    its log likelihood. The gradient of the weights is None without weights.
    """
    _, labels, weights = (*node.inputs, None)[:3]
    reduction = string_attribute(node, "reduction")
    ignored = node.attributes.get_int("ignore_index", None)
    t, kept = op.Unsqueeze(op.Cast(labels, to=ir.DataType.INT64), [1]), None
    if ignored is not None:
        kept = op.Not(op.Equal(t, np.int64(ignored)))
        t = op.Where(kept, t, np.int64(0))

    def masked(v):
        return v if kept is None else op.Where(kept, v, 0.0)

    of_class = None if weights is None else op.Gather(cast_to_wide(op, x, weights)[1], t)
    g = op.Unsqueeze(g, [1]) if reduction == "none" else op.Expand(g, op.shape_of(t))
    if reduction == "mean" and kept is None and of_class is None:
        g = g / op.Cast(op.Size(t), to=g.dtype)
    elif reduction == "mean":
        g = g / op.ReduceSum(masked(op.ones_like(g) if of_class is None else of_class), keepdims=0)
    if of_class is None:
        return t, masked(g), None
    loss = -op.GatherElements(x, t, axis=1)
    if reduction == "mean":
        loss = loss - op.Cast(node.outputs[0], to=x.dtype)
    return t, masked(g * of_class), scatter_flat(op, weights, t, masked(g * loss))
