"""Losses of imbalanced classes, of masks, of distributions, of quantiles and of variances.

They are formulas as those of `formulas`, and registered with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log, pi
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument
from onnxgrad.graph.shapes import Dims, dims
from onnxgrad.losses.classification import softplus
from onnxgrad.losses.registry import register
from onnxgrad.losses.spec import (
    LIKE_PREDICTION,
    LabelBounds,
    LabelKind,
    Options,
    Terms,
    class_indices,
)

_LOWEST = -1e30  # a logit of probability zero, finite so that differences are not NaN
_LOWEST_FLOAT16 = -1e4

_TWO_CLASSES: dict[str, Any] = {
    "activation": "Sigmoid",
    "bounds": LabelBounds("0 and 1", (0, 1)),
    "threshold": lambda options: 0.0 if options["from_logits"] else 0.5,
}


def _indices(rank: int, needs: str) -> Callable[[Options], LabelKind]:
    """Return the class indices for a prediction of at least `rank` axes, by the option `axis`."""

    def kind(options: Options) -> LabelKind:
        plain = class_indices(1 if options["axis"] is None else options["axis"])
        return replace(
            plain, accepts=lambda f: plain.accepts(f) and len(f or ()) >= rank, needs=needs
        )

    return kind


def _needs_rank(rank: int, needs: str) -> LabelKind:
    """Return labels like the prediction, which has at least `rank` axes."""
    return LabelKind(accepts=lambda f: f is not None and len(f) >= rank, needs=needs)


_MEAN_AND_VARIANCE = LabelKind(
    shape=lambda f: None if f is None else (f[0], *f[2:]),
    accepts=lambda f: f is not None and len(f) >= 2 and f[1] in (2, None),
    needs="means and logarithms of variances, (N, 2, ...)",
)
_ONE_COLUMN = LabelKind(
    shape=lambda f: None if f is None else (f[0], 1, *f[2:]),
    accepts=lambda f: f is not None and len(f) >= 2,
    needs="a prediction (N, quantiles, ...)",
)


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
    labels=_indices(2, "a prediction (N, C, ...)"),
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
    prediction = _classes_second(op, prediction, axis)
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


@register("dice", **_TWO_CLASSES, labels=lambda options: _needs_rank(
    3 if options["per_channel"] else 2,
    "a prediction (N, C, d1, ...)" if options["per_channel"] else "a prediction (N, ...)",
))  # fmt: skip
def dice(op, prediction, label, smooth=1.0, from_logits=True, per_channel=False):
    """1 - (2 sum(p y) + s) / (sum p + sum y + s).  Milletari et al. 2016, arXiv:1606.04797.

    The sums are over all axes but the first: one loss for every row; or but the first two with
    per_channel: one for every row and channel.
    """
    p = op.Sigmoid(prediction) if from_logits else prediction
    return _dice(op, p, label, smooth, 2 if per_channel else 1)


@register(
    "softmax_dice",
    labels=_indices(3, "a prediction (N, C, d1, ...)"),
    has_ignore_index=True,
    activation="Softmax",
)
def softmax_dice(op, prediction, label, smooth=1.0, from_logits=True, ignore_index=-100, axis=None):
    """Mean over classes of 1 - (2 sum(p t) + s) / (sum p + sum t + s), t one-hot.  1606.04797.

    The sums are over the axes d1, ... of a prediction (N, C, d1, ...), without ignored labels. One
    loss for every row; the mean is over rows with a label that is not ignored. axis: that of the
    classes; None is decided by the graph, or 1.
    """
    prediction = _classes_second(op, prediction, axis)
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


@register(
    "kl_divergence",
    bounds=LabelBounds("between 0 and 1", least=0, most=1),
    activation="Softmax",
    labels=lambda options: _needs_rank(2, "a prediction (N, C, ...)"),
)
def kl_divergence(op, prediction, label, from_logits=True, eps=1e-7, axis=None):
    """sum t (log t - log p) over classes, t the probabilities that are the label, and 0 log 0 = 0.

    One loss for every row, or every position of a prediction (N, C, d1, ...). From probabilities, p
    is at least eps. axis: that of the classes; None is decided by the graph, or 1.
    """
    prediction, label = (_classes_second(op, x, axis) for x in (prediction, label))
    p = op.LogSoftmax(prediction, axis=1) if from_logits else op.Clip(prediction, eps)
    log_p = p if from_logits else op.Log(p)
    log_t = op.Log(op.Where(op.Greater(label, 0.0), label, 1.0))
    return _sum(op, label * (log_t - log_p))


@register(
    "quantile",
    labels=lambda options: LIKE_PREDICTION if np.ndim(options["q"]) == 0 else _ONE_COLUMN,
)
def quantile(op, prediction, label, q=0.5):
    """max(q d, (q - 1) d), d = y - f: minimal at the quantile q of y.  Koenker & Bassett 1978.

    One loss for every element. q: a number; or a list, for a prediction (N, len(q), ...) of several
    quantiles and labels (N, 1, ...): one loss for every label, the mean over the quantiles.
    """
    numbers: Any = np.asarray(q, dtype=float)
    if not ((numbers > 0) & (numbers < 1)).all() or numbers.ndim > 1:
        raise ValueError(f"q={q!r}: give numbers between 0 and 1")
    if numbers.ndim:
        width = dims_of(prediction)[1]
        if isinstance(width, int) and width != len(numbers):
            raise ValueError(f"the prediction has {width} columns for {len(numbers)} quantiles")
        numbers = numbers.reshape([-1] + [1] * (len(dims_of(prediction)) - 2))
    above, below = (op.const(a.astype(prediction.dtype.numpy())) for a in (numbers, numbers - 1.0))
    d = label - prediction
    losses = op.Where(op.Greater(d, 0.0), above, below) * d
    return op.ReduceMean(losses, [1], keepdims=1) if numbers.ndim else losses


@register("log_cosh")
def log_cosh(op, prediction, label):
    """log cosh(f - y), as d + log(1 + e^(-2 d)) - log 2.  One loss for every element."""
    d = prediction - label
    return d + softplus(op, -2.0 * d) - log(2.0)


@register("gaussian_nll", labels=lambda options: _MEAN_AND_VARIANCE)
def gaussian_nll(op, prediction, label, full=False):
    """(s + (y - m)^2 e^-s) / 2, -log of a normal density.  Nix & Weigend 1994.

    The prediction (N, 2, ...) holds the mean m and s, the logarithm of the variance; labels are
    (N, ...). One loss for every label. full adds the constant log(2 pi) / 2.
    """
    mean, log_variance = (op.Gather(prediction, np.int64(i), axis=1) for i in (0, 1))
    shape = dims_of(prediction)
    for v in (mean, log_variance):
        v.shape = ir.Shape([shape[0], *shape[2:]])
    d = label - mean
    loss = 0.5 * (log_variance + d * d * op.Exp(-log_variance))
    return loss + 0.5 * log(2.0 * pi) if full else loss


def lowest(op: Any, like: ir.Value) -> ir.Value:
    """Write a logit of probability zero."""
    low = _LOWEST_FLOAT16 if like.dtype == ir.DataType.FLOAT16 else _LOWEST
    return op.const(low, like.dtype)


def dims_of(x: ir.Value) -> Dims:
    """Return the dimensions of a value of known rank, such as a label kind requires."""
    shape = dims(x)
    assert shape is not None
    return shape


def widened(op: Any, x: ir.Value) -> ir.Value:
    """Write `x` in float32 if it has a narrower dtype, in which sums lose their digits."""
    return x if x.dtype == ir.DataType.DOUBLE else op.Cast(x, to=ir.DataType.FLOAT)


def positions(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """Write 0, 1, ... along an axis of `x`, int64 of one axis."""
    n = op.dim(x, axis)
    if isinstance(n, int):
        return op.const(np.arange(n))
    y = op.Range(np.int64(0), op.Squeeze(n, [0]), np.int64(1))
    y.shape = ir.Shape([dims_of(x)[axis]])
    return y


def _classes_second(op: Any, x: ir.Value, axis: int | None) -> ir.Value:
    """Write `x` with the axis of the classes as axis 1."""
    n = len(dims_of(x))
    axis = 1 if axis is None else axis % n
    if axis == 1:
        return x
    rest = [i for i in range(n) if i != axis]
    return op.Transpose(x, perm=[rest[0], axis, *rest[1:]])


def _classes(op, prediction):
    """Write the numbers of the classes, (C, 1, ...), to be compared with labels (N, 1, ...)."""
    return op.Reshape(positions(op, prediction, 1), [-1] + [1] * (len(dims_of(prediction)) - 2))


def _sum(op, x):
    """Write the sum over the classes."""
    return op.ReduceSum(x, [1], keepdims=0)
