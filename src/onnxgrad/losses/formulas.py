"""Losses: written into the graph of a model, behind the output that they judge.

A loss is a function `(op, prediction, label, **options)` that writes the loss of every element or
every row; what comes after it (row weights, sum or mean, penalties) is the same for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.graph import shapes

Loss = Callable[..., ir.Value]


@dataclass(frozen=True)
class LossSpec:
    """A loss, what its rows are reduced by, and what its labels are."""

    function: Loss
    reduction: str = "sum"
    classes: bool = False  # labels are class numbers


LOSSES: dict[str, LossSpec] = {}


def _loss(*names: str, reduction: str = "sum", classes: bool = False) -> Callable[[Loss], Loss]:
    def register(function: Loss) -> Loss:
        LOSSES.update(dict.fromkeys(names, LossSpec(function, reduction, classes)))
        return function

    return register


@_loss("squared_error", "l2")
def squared_error(op, prediction, label):
    """(f - y)^2."""
    d = prediction - label
    return d * d


@_loss("absolute_error", "l1")
def absolute_error(op, prediction, label):
    """|f - y|."""
    return op.Abs(prediction - label)


@_loss("elastic")
def elastic(op, prediction, label, l1_weight=0.5, l2_weight=0.5):
    """a |f - y| + b (f - y)^2."""
    size = op.Abs(prediction - label)
    return size * (l1_weight + l2_weight * size)


@_loss("log", reduction="mean", classes=True)
def log(op, prediction, label, eps=1e-6):
    """-log p[y] for (N, 2) probabilities clipped to [eps, 1 - eps], labels (N, 1)."""
    if (shapes.dims(prediction) or (None,))[-1] is None:
        prediction = op.Reshape(prediction, [0, 2])  # fails where one column would be broadcast
    hit = op.Equal(label, op.const(np.arange(2)))
    return _number(op, prediction, hit, -1.0, 0.0) * op.Log(op.Clip(prediction, eps, 1.0 - eps))


@_loss("binary_cross_entropy")
def binary_cross_entropy(op, prediction, label, from_logits=False, eps=1e-7):
    """-y log p - (1 - y) log(1 - p), p and 1 - p at least eps, or log(1 + e^f) - y f."""
    if from_logits:
        return softplus(op, prediction) + (-label) * prediction
    p, q = op.Clip(prediction, eps), op.Clip(1.0 - prediction, eps)  # 1 - eps may round to 1
    return (-label) * op.Log(p) + (label - 1.0) * op.Log(q)


@_loss("cross_entropy", classes=True)
def cross_entropy(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7,
):  # fmt: skip
    """-t_c log p_c for the classes c of axis 1, t the label's class or distribution, smoothed.

    Logits must be finite: mask a class with a large negative number, not with -inf.
    Smoothing moves a share of t to all classes alike (Szegedy et al. 2016, arXiv:1512.00567).
    """
    classes = shapes.dims(prediction)[1]
    if not isinstance(classes, int):
        raise ValueError("cross_entropy needs a prediction with a known number of classes")
    if from_logits:
        logs = op.LogSoftmax(prediction, axis=1)
    else:
        logs = op.Log(op.Clip(prediction, eps, 1.0))
    share = label_smoothing / classes
    if soft_labels:
        minus = (label_smoothing - 1.0) * label - share if label_smoothing else -label
    else:
        number = op.Unsqueeze(label, [1])
        numbers = np.arange(classes).reshape([-1] + [1] * (shapes.rank(prediction) - 2))
        hit = op.Equal(number, op.const(numbers))
        minus = _number(op, prediction, hit, label_smoothing - 1.0 - share, -share)
        if label_smoothing or 0 <= ignore_index < classes:  # else it hits no class anyway
            minus = op.Where(op.Equal(number, ignore_index), 0.0, minus)
    return minus * logs


@_loss("huber")
def huber(op, prediction, label, delta=1.0):
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = f - y.  Huber 1964."""
    size = op.Abs(prediction - label)
    inner = op.Clip(size, None, delta)
    return inner * (size - 0.5 * inner)


@_loss("poisson")
def poisson(op, prediction, label, log_input=True, eps=1e-8):
    """e^f - y f, or f - y log(f + eps) when f is the rate itself: Poisson, up to a constant."""
    if log_input:
        return op.Exp(prediction) + (-label) * prediction
    if prediction.dtype == ir.DataType.FLOAT16:
        eps = max(eps, 1e-4)  # 1 / eps must be finite
    return prediction + (-label) * op.Log(prediction + eps)


@_loss("hinge")
def hinge(op, prediction, label):
    """max(0, 1 - y f) for labels -1 and 1, or 0 and 1."""
    return op.Relu(1.0 + _number(op, label, op.Greater(label, 0.0), -1.0, 1.0) * prediction)


LABELS = {  # loss -> what its labels must be, beyond what fits their type
    "binary_cross_entropy": ("between 0 and 1", lambda y: (y >= 0) & (y <= 1)),
    "hinge": ("-1 and 1, or 0 and 1", lambda y: np.isin(y, (-1, 0, 1))),
    "poisson": ("of 0 or more", lambda y: y >= 0),
}


def softplus(op, x):
    """log(1 + e^x), smooth at 0, that does not overflow.

    onnxruntime has a kernel of Softplus for float32 alone. In other types it expands the function
    that the opset has, which overflows, or fails. For float64, max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    above = op.Greater(x, 0.0)
    return op.Where(above, x, 0.0) - op.Log(op.Sigmoid(op.Where(above, x, -x)))


def row_sums(op: Any, loss: ir.Value) -> ir.Value:
    """Return the sums over all axes but the first, (N, 1)."""
    shape = shapes.dims(loss)
    if shape is None:
        return op.ReduceSum(op.Reshape(loss, [0, -1]), [1], keepdims=1)
    if not shape:
        raise ValueError("a loss must have one number per element or row, not one for all")
    if len(shape) > 1 and shape[1:] != (1,):
        loss = op.ReduceSum(loss, list(range(1, len(shape))), keepdims=1)
    return loss if len(shape) == 2 else op.Reshape(loss, [-1, 1])


def _number(op, like, condition, yes, no):
    """Return `yes` or `no` of the dtype of `like`, by `condition`."""
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))


def loss_spec(score: str | Loss, reduction: str | None, options: Mapping[str, Any]) -> LossSpec:
    """Return the loss for a name or a function, after a check of its options."""
    if callable(score):
        kind = LossSpec(score)
    elif score in LOSSES:
        kind = LOSSES[score]
    else:
        raise unknown("loss", score, LOSSES)
    valid = list(inspect.signature(kind.function).parameters)[3:]
    for name in options:
        if name not in valid:
            shown = getattr(score, "__name__", score)
            raise unknown(f"option of loss {shown!r}", name, valid)
    if reduction not in (None, "sum", "mean"):
        raise unknown("reduction", reduction, ["sum", "mean"])
    return LossSpec(kind.function, reduction or kind.reduction, kind.classes)
