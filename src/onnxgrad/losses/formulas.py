"""The formulas of the losses, and their registration.

A formula is a function `(op, prediction, label, **options)` that writes the loss of every element
or every row. The arguments of its decorator `_loss` are the other fields of its `LossSpec`, which
are all that other modules have to know of a loss. Sample weights, reductions and penalties are the
same for all losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.graph import shapes
from onnxgrad.losses.spec import (
    CLASS_INDICES,
    COLUMN_OF_TWO_CLASSES,
    LIKE_PREDICTION,
    Formula,
    LabelBounds,
    LossSpec,
    Options,
)

LOSSES: dict[str, LossSpec] = {}


def _loss(*names: str, **fields: Any) -> Callable[[Formula], Formula]:
    """Register a formula by `names`; `fields` are those of `LossSpec`."""

    def register(formula: Formula) -> Formula:
        LOSSES.update({name: LossSpec(formula, name, **fields) for name in names})
        return formula

    return register


def loss_spec(loss: str | Formula, reduction: str | None, options: Options) -> LossSpec:
    """Return the loss for a name or a formula, with these options and reduction.

    Raises:
        ValueError: an unknown name, option or reduction.
    """
    if callable(loss):
        spec = LossSpec(loss, getattr(loss, "__name__", str(loss)))
    elif loss in LOSSES:
        spec = LOSSES[loss]
    else:
        raise unknown("loss", loss, LOSSES)
    return spec.with_options(options, reduction)


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


@_loss("log", reduction="mean", labels=lambda options: COLUMN_OF_TWO_CLASSES)
def log(op, prediction, label, eps=1e-6):
    """-log p[y] for (N, 2) probabilities clipped to [eps, 1 - eps], labels (N, 1)."""
    if (shapes.dims(prediction) or (None,))[-1] is None:
        prediction = op.Reshape(prediction, [0, 2])  # or a single column would be broadcast
    hit = op.Equal(label, op.const(np.arange(2)))
    return _where(op, prediction, hit, -1.0, 0.0) * op.Log(op.Clip(prediction, eps, 1.0 - eps))


@_loss(
    "binary_cross_entropy",
    bounds=LabelBounds("between 0 and 1", lambda y: (y >= 0) & (y <= 1)),
    threshold=lambda options: 0.0 if options["from_logits"] else 0.5,
)
def binary_cross_entropy(op, prediction, label, from_logits=False, eps=1e-7):
    """-y log p - (1 - y) log(1 - p), p and 1 - p at least eps, or log(1 + e^f) - y f."""
    if from_logits:
        return softplus(op, prediction) + (-label) * prediction
    p, q = op.Clip(prediction, eps), op.Clip(1.0 - prediction, eps)  # 1 - eps may round to 1
    return (-label) * op.Log(p) + (label - 1.0) * op.Log(q)


@_loss(
    "cross_entropy",
    labels=lambda options: LIKE_PREDICTION if options["soft_labels"] else CLASS_INDICES,
    has_ignore_index=True,
)
def cross_entropy(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7,
):  # fmt: skip
    """-t_c log p_c for every class c of axis 1, t the one-hot or soft label, smoothed.

    Logits must be finite: mask a class with a large negative number, not with -inf.
    Smoothing: t <- (1 - s) t + s / C (Szegedy et al. 2016, arXiv:1512.00567).
    """
    classes = shapes.dims(prediction)[1]
    if not isinstance(classes, int):
        raise ValueError(
            "cross_entropy needs a prediction with a known number of classes: give axis 1 a length"
        )
    if from_logits:
        log_p = op.LogSoftmax(prediction, axis=1)
    else:
        log_p = op.Log(op.Clip(prediction, eps, 1.0))
    share = label_smoothing / classes
    if soft_labels:
        minus_t = (label_smoothing - 1.0) * label - share if label_smoothing else -label
    else:
        index = op.Unsqueeze(label, [1])
        indices = np.arange(classes).reshape([-1] + [1] * (shapes.rank(prediction) - 2))
        hit = op.Equal(index, op.const(indices))
        minus_t = _where(op, prediction, hit, label_smoothing - 1.0 - share, -share)
        if label_smoothing or 0 <= ignore_index < classes:  # else t is zero already
            minus_t = op.Where(op.Equal(index, ignore_index), 0.0, minus_t)
    return minus_t * log_p


@_loss("huber")
def huber(op, prediction, label, delta=1.0):
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = f - y.  Huber 1964."""
    size = op.Abs(prediction - label)
    inner = op.Clip(size, None, delta)
    return inner * (size - 0.5 * inner)


@_loss("poisson", bounds=LabelBounds("of 0 or more", lambda y: y >= 0))
def poisson(op, prediction, label, log_input=True, eps=1e-8):
    """e^f - y f, or f - y log(f + eps) if f is the rate: -log of Poisson, up to a constant."""
    if log_input:
        return op.Exp(prediction) + (-label) * prediction
    if prediction.dtype == ir.DataType.FLOAT16:
        eps = max(eps, 1e-4)  # 1 / eps must be finite
    return prediction + (-label) * op.Log(prediction + eps)


@_loss(
    "hinge",
    bounds=LabelBounds("-1 and 1, or 0 and 1", lambda y: np.isin(y, (-1, 0, 1))),
    threshold=lambda options: 0.0,
)
def hinge(op, prediction, label):
    """max(0, 1 - y f) for labels -1 and 1, or 0 and 1."""
    return op.Relu(1.0 + _where(op, label, op.Greater(label, 0.0), -1.0, 1.0) * prediction)


def softplus(op, x):
    """log(1 + e^x), smooth at 0, without overflow.

    onnxruntime has a kernel of Softplus for float32 only. For other dtypes it expands the function
    body of the opset, which overflows or fails. For float64: max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    positive = op.Greater(x, 0.0)
    return op.Where(positive, x, 0.0) - op.Log(op.Sigmoid(op.Where(positive, x, -x)))


def row_sums(op: Any, loss: ir.Value) -> ir.Value:
    """Return the sums over all axes but the first, (N, 1)."""
    shape = shapes.dims(loss)
    if shape is None:
        return op.ReduceSum(op.Reshape(loss, [0, -1]), [1], keepdims=1)
    if not shape:
        raise ValueError("a loss must have one number per element or row, not one for all rows")
    if len(shape) > 1 and shape[1:] != (1,):
        loss = op.ReduceSum(loss, list(range(1, len(shape))), keepdims=1)
    return loss if len(shape) == 2 else op.Reshape(loss, [-1, 1])


def _where(op, like, condition, yes, no):
    """Write `yes` where `condition` is true, else `no`, in the dtype of `like`."""
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))
