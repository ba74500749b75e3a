"""The formulas of the losses, and their registration.

A formula is a function `(op, prediction, label, **options)` that writes the loss of every element
or every row. The arguments of its decorator `_loss` are the other fields of its `LossSpec`, which
are all that other modules have to know of a loss. Sample weights, reductions and penalties are the
same for all losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.graph import shapes
from onnxgrad.losses.classification import (
    binary_cross_entropy,
    binary_cross_entropy_terms,
    cross_entropy,
    cross_entropy_terms,
)
from onnxgrad.losses.registry import LOSSES, register as _loss
from onnxgrad.losses.spec import (
    CLASS_INDICES,
    COLUMN_OF_TWO_CLASSES,
    LIKE_PREDICTION,
    Formula,
    LabelBounds,
    LabelKind,
    LossSpec,
    Options,
    Terms,
    class_indices,
)


def loss_spec(loss: str | Formula, reduction: str | None, options: Options) -> LossSpec:
    """Return the loss for a name or a formula, with these options and reduction.

    Raises:
        ValueError: an unknown name, option or reduction, or an option out of its range.
    """
    if callable(loss):
        spec = LossSpec(loss, getattr(loss, "__name__", str(loss)))
    elif loss in LOSSES:
        spec = LOSSES[loss]
        for name, value in options.items():
            _require_range(loss, name, value)
    else:
        raise unknown("loss", loss, LOSSES)
    return spec.with_options(options, reduction)


_POSITIVE = ("delta", "eps")
_NOT_NEGATIVE = ("gamma", "smooth", "l1_weight", "l2_weight", "pos_weight", "margin")


def _require_range(loss: str, name: str, value: Any) -> None:
    """Raise `ValueError` for an option that would turn the loss around, or make it undefined."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    needs = ""
    if name in _POSITIVE and not value > 0:
        needs = "above 0"
    elif (
        name in _NOT_NEGATIVE and not value >= 0 and (loss, name) != ("cosine_embedding", "margin")
    ):
        needs = "of 0 or more"
    elif name == "label_smoothing" and not 0 <= value < 1:
        needs = "of at least 0 and less than 1"
    if needs:
        raise ValueError(f"{name}={value!r}: {loss!r} needs a number {needs}")


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


def _log_terms(op, prediction, label, eps=1e-6):
    """-log p[y] of every row, (N, 1)."""
    return Terms(op.ReduceSum(log(op, prediction, label, eps), [1], keepdims=1))


@_loss(
    "log",
    reduction="mean",
    labels=lambda options: COLUMN_OF_TWO_CLASSES,
    write_terms=_log_terms,
)
def log(op, prediction, label, eps=1e-6):
    """-log p[y] for (N, 2) probabilities clipped to [eps, 1 - eps], labels (N, 1)."""
    if (shapes.dims(prediction) or (None,))[-1] is None:
        prediction = op.Reshape(prediction, [0, 2])  # or a single column would be broadcast
    hit = op.Equal(label, op.const(np.arange(2)))
    return _where(op, prediction, hit, -1.0, 0.0) * op.Log(op.Clip(prediction, eps, 1.0 - eps))


_loss(
    "binary_cross_entropy",
    bounds=LabelBounds("between 0 and 1", least=0, most=1),
    threshold=lambda options: 0.0 if options["from_logits"] else 0.5,
    write_terms=binary_cross_entropy_terms,
    activation="Sigmoid",
)(binary_cross_entropy)


_loss(
    "cross_entropy",
    labels=lambda options: LIKE_PREDICTION if options["soft_labels"] else _indices(options["axis"]),
    has_ignore_index=True,
    write_terms=cross_entropy_terms,
    activation="Softmax",
)(cross_entropy)


@_loss("huber")
def huber(op, prediction, label, delta=1.0):
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = f - y.  Huber 1964."""
    size = op.Abs(prediction - label)
    inner = op.Clip(size, None, delta)
    return inner * (size - 0.5 * inner)


@_loss("poisson", bounds=LabelBounds("of 0 or more", least=0))
def poisson(op, prediction, label, log_input=True, eps=1e-8):
    """e^f - y f, or f - y log(f + eps) if f is the rate: -log of Poisson, up to a constant."""
    if log_input:
        return op.Exp(prediction) + (-label) * prediction
    if prediction.dtype == ir.DataType.FLOAT16:
        eps = max(eps, 1e-4)  # 1 / eps must be finite
    return prediction + (-label) * op.Log(prediction + eps)


@_loss(
    "hinge",
    bounds=LabelBounds("-1 and 1, or 0 and 1", (-1, 0, 1)),
    threshold=lambda options: 0.0,
)
def hinge(op, prediction, label):
    """max(0, 1 - y f) for labels -1 and 1, or 0 and 1."""
    return op.Relu(1.0 + _where(op, label, op.Greater(label, 0.0), -1.0, 1.0) * prediction)


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


def _indices(axis: int | None) -> LabelKind:
    return CLASS_INDICES if axis is None else class_indices(axis)


def _where(op, like, condition, yes, no):
    """Write `yes` where `condition` is true, else `no`, in the dtype of `like`."""
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))
