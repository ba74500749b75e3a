"""The formulas of the losses, and their registration.

A formula is a function `(op, prediction, label, **options)` that writes the loss of every element
or every row. The arguments of its decorator `register` are fields of its `LossSpec`, by which other
modules know the loss. Sample weights, reductions and penalties are the same for all losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.losses.classification import (
    binary_cross_entropy as binary_cross_entropy,
    cross_entropy as cross_entropy,
)
from onnxgrad.losses.spec import (
    COLUMN_OF_TWO_CLASSES,
    LIKE_PREDICTION,
    LOSSES,
    Formula,
    LabelBounds,
    LabelKind,
    LossSpec,
    Options,
    Terms,
    known_dims,
    labels_like_prediction,
    move_classes_to_axis_1,
    register,
    softplus,
    take_at_index,
    where_const,
)
from onnxgrad.operators import shapes


def loss_spec(loss: str | Formula | LossSpec, reduction: str | None, options: Options) -> LossSpec:
    """Return the loss for a name, a formula or a `LossSpec`, with these options and reduction.

    Raises:
        ValueError: an unknown name, option or reduction, or an option out of its range.
    """
    if isinstance(loss, LossSpec):
        spec, options = loss, {**loss.options, **options}
    elif callable(loss):
        spec = LossSpec(loss, getattr(loss, "__name__", str(loss)))
    elif loss in LOSSES:
        spec = LOSSES[loss]
        for name, value in options.items():
            _check_option_range(loss, name, value)
    else:
        raise unknown("loss", loss, LOSSES)
    return spec.with_options(options, reduction)


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

_NOT_NEGATIVE = ("gamma", "smooth", "l1_weight", "l2_weight", "pos_weight", "margin")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("delta", "eps", "scale"), (lambda v: v > 0, "above 0")),
    **dict.fromkeys(_NOT_NEGATIVE, (lambda v: v >= 0, "of 0 or more")),
    "label_smoothing": (lambda v: 0 <= v < 1, "of at least 0 and less than 1"),
}


def _check_option_range(loss: str, name: str, value: Any) -> None:
    """Raise `ValueError` for a loss option out of range, such as a negative factor."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and name in _RANGES and (loss, name) != ("cosine_embedding", "margin"):
        fits, needs = _RANGES[name]
        if not fits(value):
            raise ValueError(
                f"{name}={value!r}: this option of the loss {loss!r} needs a number {needs}"
            )


@register("squared_error", "l2")
def squared_error(op, prediction, label):
    """(f - y)^2."""
    d = prediction - label
    return d * d


@register("absolute_error", "l1")
def absolute_error(op, prediction, label):
    """|f - y|."""
    return op.Abs(prediction - label)


@register("elastic")
def elastic(op, prediction, label, l1_weight=0.5, l2_weight=0.5):
    """a |f - y| + b (f - y)^2."""
    size = op.Abs(prediction - label)
    return size * (l1_weight + l2_weight * size)


def _log_loss_terms(op, prediction, label, eps=1e-6):
    """Write the log loss of each row, -log of the probability of its label, (N, 1)."""
    return Terms(op.ReduceSum(log(op, prediction, label, eps), [1], keepdims=1))


@register(
    "log",
    reduction="mean",
    labels=lambda options: COLUMN_OF_TWO_CLASSES,
    write_terms=_log_loss_terms,
)
def log(op, prediction, label, eps=1e-6):
    """-log p[y] for (N, 2) probabilities clipped to [eps, 1 - eps], labels (N, 1)."""
    if (shapes.dims(prediction) or (None,))[-1] is None:
        # fails for predictions of one column, which would be broadcast
        prediction = op.Reshape(prediction, [0, 2])
    hit = op.Equal(label, op.const(np.arange(2)))
    return where_const(op, hit, -1.0, 0.0, prediction) * op.Log(op.Clip(prediction, eps, 1.0 - eps))


@register("huber")
def huber(op, prediction, label, delta=1.0):
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = f - y.  Huber 1964."""
    size = op.Abs(prediction - label)
    inner = op.Clip(size, None, delta)
    return inner * (size - 0.5 * inner)


@register("poisson", bounds=LabelBounds("of 0 or more", least=0))
def poisson(op, prediction, label, log_input=True, eps=1e-8):
    """e^f - y f, or f - y log(f + eps) if f is the rate: -log of Poisson, up to a constant."""
    if log_input:
        return op.Exp(prediction) + (-label) * prediction
    if prediction.dtype == ir.DataType.FLOAT16:
        eps = max(eps, 1e-4)  # 1 / eps must be finite in float16
    return prediction + (-label) * op.Log(prediction + eps)


@register(
    "hinge",
    bounds=LabelBounds("-1 and 1, or 0 and 1", (-1, 0, 1)),
    threshold=lambda options: 0.0,
)
def hinge(op, prediction, label):
    """max(0, 1 - y f) for labels -1 and 1, or 0 and 1."""
    return op.Relu(1.0 + where_const(op, op.Greater(label, 0.0), -1.0, 1.0, label) * prediction)


@register(
    "kl_divergence",
    bounds=LabelBounds("between 0 and 1", least=0, most=1),
    activation="Softmax",
    labels=lambda options: labels_like_prediction(2, "a prediction (N, C, ...)"),
)
def kl_divergence(op, prediction, label, from_logits=True, eps=1e-7, axis=None):
    """sum t (log t - log p) over classes, t the probabilities that are the label, and 0 log 0 = 0.

    One loss for every row, or every position of a prediction (N, C, d1, ...). Probabilities p, with
    from_logits=False, are at least eps. axis: axis of the classes; None: the graph decides, or 1.
    """
    prediction, label = (move_classes_to_axis_1(op, x, axis) for x in (prediction, label))
    p = op.LogSoftmax(prediction, axis=1) if from_logits else op.Clip(prediction, eps)
    log_p = p if from_logits else op.Log(p)
    log_t = op.Log(op.Where(op.Greater(label, 0.0), label, 1.0))
    return op.ReduceSum(label * (log_t - log_p), [1], keepdims=0)


@register(
    "quantile",
    labels=lambda options: LIKE_PREDICTION if np.ndim(options["q"]) == 0 else _ONE_COLUMN,
)
def quantile(op, prediction, label, q=0.5):
    """max(q d, (q - 1) d), d = y - f: minimal at the quantile q of y.  Koenker & Bassett 1978.

    One loss for every element. q: a number; or a list, for a prediction (N, len(q), ...) of several
    quantiles and labels (N, 1, ...): one loss for every label, the mean over the quantiles.
    """
    numbers = np.asarray(q, dtype=float)
    if not ((numbers > 0) & (numbers < 1)).all() or numbers.ndim > 1:
        raise ValueError(f"q={q!r} must be a quantile between 0 and 1, or a list of such quantiles")
    if numbers.ndim:
        width = known_dims(prediction)[1]
        if isinstance(width, int) and width != len(numbers):
            raise ValueError(
                f"{prediction.name!r} has {width} columns, and q {len(numbers)} quantiles: give "
                "one quantile for each column"
            )
        numbers = numbers.reshape([-1] + [1] * (len(known_dims(prediction)) - 2))
    above, below = (op.const(a.astype(prediction.dtype.numpy())) for a in (numbers, numbers - 1.0))
    d = label - prediction
    losses = op.Where(op.Greater(d, 0.0), above, below) * d
    return op.ReduceMean(losses, [1], keepdims=1) if numbers.ndim else losses


@register("log_cosh")
def log_cosh(op, prediction, label):
    """log cosh(f - y), as d + log(1 + e^(-2 d)) - log 2.  One loss for every element."""
    d = prediction - label
    return d + softplus(op, -2.0 * d) - math.log(2.0)


@register("gaussian_nll", labels=lambda options: _MEAN_AND_VARIANCE)
def gaussian_nll(op, prediction, label, full=False):
    """(s + (y - m)^2 e^-s) / 2, -log of a normal density with mean m and log-variance s.  Nix &
    Weigend 1994.

    The prediction (N, 2, ...) holds the mean m and s, the logarithm of the variance; labels are
    (N, ...). One loss for every label. full adds the constant log(2 pi) / 2.
    """
    mean, log_variance = (take_at_index(op, prediction, i) for i in (0, 1))
    d = label - mean
    loss = 0.5 * (log_variance + d * d * op.Exp(-log_variance))
    return loss + 0.5 * math.log(2.0 * math.pi) if full else loss


def row_sums(op: Any, loss: ir.Value) -> ir.Value:
    """Write the sums of the losses over all axes but the first, (N, 1)."""
    shape = shapes.dims(loss)
    if shape is None:
        return op.ReduceSum(op.Reshape(loss, [0, -1]), [1], keepdims=1)
    if not shape:
        raise ValueError(
            "a loss must have one number for every element or row, not one for all rows: leave "
            "out the last mean or sum"
        )
    if len(shape) > 1 and shape[1:] != (1,):
        loss = op.ReduceSum(loss, list(range(1, len(shape))), keepdims=1)
    return loss if len(shape) == 2 else op.Reshape(loss, [-1, 1])
