"""Losses of imbalanced classes, and of masks.

They are formulas as those of `formulas`, and registered with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.errors import argument
from onnxgrad.losses.classification import softplus
from onnxgrad.losses.formula_nodes import classes_second, dims_of, lowest, positions
from onnxgrad.losses.spec import LabelBounds, Terms, class_indices, like_prediction, register

_TWO_CLASSES: dict[str, Any] = {
    "activation": "Sigmoid",
    "bounds": LabelBounds("0 and 1", (0, 1)),
    "threshold": lambda options: 0.0 if options["from_logits"] else 0.5,
}


@register("focal", **_TWO_CLASSES)
def focal(op, prediction, label, alpha=0.25, gamma=2.0, from_logits=True, eps=1e-7):
    """-a_t (1 - p_t)^g log p_t, p_t the probability of the label.  Lin et al. 2017, 1708.02002.

    One loss for every element. a_t is alpha for label 1, and 1 - alpha for label 0; alpha=None is
    no balance. From probabilities, p_t and 1 - p_t are at least eps.
    """
    positive = op.Greater(label, 0.5)
    if from_logits:
        log_p = -softplus(op, op.Where(positive, -prediction, prediction))
        log_q = -softplus(op, op.Where(positive, prediction, -prediction))
    else:
        p = op.Where(positive, prediction, 1.0 - prediction)
        log_p, log_q = op.Log(op.Clip(p, eps)), op.Log(op.Clip(1.0 - p, eps))
    loss = op.Exp(gamma * log_q) * -log_p
    if alpha is None:
        return loss
    one, other = (op.const(a, prediction.dtype) for a in (alpha, 1.0 - alpha))
    return op.Where(positive, one, other) * loss


@register(
    "softmax_focal",
    labels=lambda options: class_indices(options["axis"], 2, "a prediction (N, C, ...)"),
    has_ignore_index=True,
    activation="Softmax",
)
def softmax_focal(
    op, prediction, label, alpha=None, gamma=2.0, from_logits=True, ignore_index=-100, eps=1e-7,
    axis=None,
):  # fmt: skip
    """-a_y (1 - p_y)^g log p_y, y the label.  Lin et al. 2017, arXiv:1708.02002.

    One loss for every label; the mean is over labels that are not ignored. alpha: None for ones, a
    number, or one for every class. From probabilities, p_y and 1 - p_y are at least eps. axis: that
    of the classes; None is decided by the graph, or 1.
    """
    prediction = classes_second(op, prediction, axis)
    index = op.Unsqueeze(label, [1])
    classes = _classes(op, prediction)
    hit = op.Equal(index, classes)
    if from_logits:  # 1 - p is the sum of the others: no digits are lost where p is near 1
        log_all = op.LogSoftmax(prediction, axis=1)
        log_p = _sum(op, op.Where(hit, log_all, 0.0))
        log_q = op.ReduceLogSumExp(op.Where(hit, lowest(op, prediction), log_all), [1], keepdims=0)
    else:
        p = _sum(op, op.Where(hit, prediction, 0.0))
        log_p, log_q = op.Log(op.Clip(p, eps)), op.Log(op.Clip(1.0 - p, eps))
    loss = op.Exp(gamma * log_q) * -log_p * _balance(op, prediction, hit, alpha)
    kept = op.Not(op.Equal(label, ignore_index))
    return Terms(op.Where(kept, loss, 0.0), op.Cast(kept, to=loss.dtype))


def _balance(op, like, hit, alpha):
    """Write alpha of the class of every label, 0 where it is no class."""
    numbers: Any = np.asarray(1.0 if alpha is None else alpha)
    classes = dims_of(like)[1]
    if numbers.ndim > 1 or (numbers.ndim and isinstance(classes, int) and len(numbers) != classes):
        given = argument("loss_options.alpha", alpha)
        raise ValueError(f"{given}: give one number, or {classes}, one for every class")
    if numbers.ndim:
        numbers = numbers.reshape([-1] + [1] * (len(dims_of(like)) - 2))
    weights = op.const(numbers.astype(like.dtype.numpy()))
    return _sum(op, op.Where(hit, weights, op.const(0.0, like.dtype)))


@register("dice", **_TWO_CLASSES, labels=lambda options: (
    like_prediction(3, "a prediction (N, C, d1, ...)") if options["per_channel"]
    else like_prediction(2, "a prediction (N, ...)")
))  # fmt: skip
def dice(
    op, prediction, label, smooth=1.0, from_logits=True, per_channel=False, ignore_nan=False
):  # fmt: skip
    """1 - (2 sum(p y) + s) / (sum p + sum y + s).  Milletari et al. 2016, arXiv:1606.04797.

    The sums are over all axes but the first: one loss for every row; or but the first two with
    per_channel: one for every row and channel. With ignore_nan, they are without the labels that
    are NaN, and the mean is over rows (and channels) with a label that is not.
    """
    first = 2 if per_channel else 1
    p = op.Sigmoid(prediction) if from_logits else prediction
    if not ignore_nan:
        return _dice(op, p, label, smooth, first)
    nan = op.IsNaN(label)
    known = op.set_type_like(op.Where(nan, 0.0, label), label)
    losses = _dice(op, op.Where(nan, 0.0, p), known, smooth, first)
    axes = list(range(first, len(dims_of(prediction))))
    kept = op.Cast(op.Not(nan), to=p.dtype)
    return Terms(losses, op.ReduceMax(kept, axes, keepdims=0))


@register(
    "softmax_dice",
    labels=lambda options: class_indices(options["axis"], 3, "a prediction (N, C, d1, ...)"),
    has_ignore_index=True,
    activation="Softmax",
)
def softmax_dice(op, prediction, label, smooth=1.0, from_logits=True, ignore_index=-100, axis=None):
    """Mean over classes of 1 - (2 sum(p t) + s) / (sum p + sum t + s), t one-hot.  1606.04797.

    The sums are over the axes d1, ... of a prediction (N, C, d1, ...), without ignored labels. One
    loss for every row; the mean is over rows with a label that is not ignored. axis: that of the
    classes; None is decided by the graph, or 1.
    """
    prediction = classes_second(op, prediction, axis)
    p = op.Softmax(prediction, axis=1) if from_logits else prediction
    index = op.Unsqueeze(label, [1])
    kept = op.Not(op.Equal(index, ignore_index))
    hit = op.And(op.Equal(index, _classes(op, prediction)), kept)
    t = op.Cast(hit, to=p.dtype)
    per_class = _dice(op, op.Where(kept, p, 0.0), t, smooth, 2)
    axes = list(range(1, len(dims_of(prediction))))
    any_kept = op.ReduceMax(op.Cast(kept, to=p.dtype), axes, keepdims=0)
    return Terms(op.ReduceMean(per_class, [1], keepdims=0), any_kept)


def _dice(op, p, t, smooth, first):
    """Write the losses with sums over the axes from `first` on."""
    axes = list(range(first, len(dims_of(p))))
    both = op.ReduceSum(p * t, axes, keepdims=0)
    total = op.ReduceSum(p, axes, keepdims=0) + op.ReduceSum(t, axes, keepdims=0)
    return 1.0 - (2.0 * both + smooth) / (total + smooth)


def _classes(op, prediction):
    """Write the numbers of the classes, (C, 1, ...), to be compared with labels (N, 1, ...)."""
    return op.Reshape(positions(op, prediction, 1), [-1] + [1] * (len(dims_of(prediction)) - 2))


def _sum(op, x):
    """Write the sum over the classes."""
    return op.ReduceSum(x, [1], keepdims=0)
