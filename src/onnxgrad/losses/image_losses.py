"""Losses of imbalanced classes and of masks, and formulas for losses of object detection."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument, unknown
from onnxgrad.losses.classification import binary_cross_entropy
from onnxgrad.losses.spec import (
    LabelBounds,
    Terms,
    class_index_kind,
    known_dims,
    labels_like_prediction,
    lowest_logit,
    move_classes_to_axis_1,
    register,
    softplus,
    where_const,
    write_class_indices,
)

_TWO_CLASSES: dict[str, Any] = {
    "activation": "Sigmoid",
    "bounds": LabelBounds("0 and 1", (0, 1)),
    "threshold": lambda options: 0.0 if options["from_logits"] else 0.5,
}


@register("focal", **_TWO_CLASSES)
def focal(op, prediction, label, alpha=0.25, gamma=2.0, from_logits=True, eps=1e-7):
    """-a_t (1 - p_t)^g log p_t, p_t the probability of the label.  Lin et al. 2017, 1708.02002.

    One loss for every element. a_t is alpha for label 1, and 1 - alpha for label 0; with
    alpha=None it is 1. From probabilities, p_t and 1 - p_t are at least eps.
    """
    positive = op.Greater(label, 0.5)
    if from_logits:
        log_p = -softplus(op, op.Where(positive, -prediction, prediction))
        log_q = -softplus(op, op.Where(positive, prediction, -prediction))
    else:
        p = op.Where(positive, prediction, 1.0 - prediction)
        log_p, log_q = op.Log(op.Clip(p, eps)), op.Log(op.Clip(1.0 - p, eps))
    loss = op.Exp(gamma * log_q) * -log_p
    return loss if alpha is None else where_const(op, positive, alpha, 1.0 - alpha, loss) * loss


@register(
    "softmax_focal",
    labels=lambda options: class_index_kind(options["axis"], 2, "a prediction (N, C, ...)"),
    has_ignore_index=True,
    activation="Softmax",
)
def softmax_focal(
    op, prediction, label, alpha=None, gamma=2.0, from_logits=True, ignore_index=-100, eps=1e-7,
    axis=None,
):  # fmt: skip
    """-a_y (1 - p_y)^g log p_y, y the label.  Lin et al. 2017, arXiv:1708.02002.

    One loss for every label; the mean is over labels that are not ignored. alpha: a number, or one
    for every class; None is 1. From probabilities, p_y and 1 - p_y are at least eps. axis: axis of
    the classes; None: the graph decides, or 1.
    """
    prediction = move_classes_to_axis_1(op, prediction, axis)
    index = op.Unsqueeze(label, [1])
    hit = op.Equal(index, write_class_indices(op, prediction))
    if from_logits:  # 1 - p is a sum over the other classes: p near 1 loses no digits
        log_all = op.LogSoftmax(prediction, axis=1)
        log_p = op.ReduceSum(op.Where(hit, log_all, 0.0), [1], keepdims=0)
        log_q = op.ReduceLogSumExp(
            op.Where(hit, lowest_logit(op, prediction), log_all), [1], keepdims=0
        )
    else:
        p = op.ReduceSum(op.Where(hit, prediction, 0.0), [1], keepdims=0)
        log_p, log_q = op.Log(op.Clip(p, eps)), op.Log(op.Clip(1.0 - p, eps))
    loss = op.Exp(gamma * log_q) * -log_p * _label_alphas(op, prediction, hit, alpha)
    kept = op.Not(op.Equal(label, ignore_index))
    return Terms(op.Where(kept, loss, 0.0), op.Cast(kept, to=loss.dtype))


def _label_alphas(op, like, hit, alpha):
    """Write the factor alpha of each label's class, 0 for a label that is no class index."""
    numbers: Any = np.asarray(1.0 if alpha is None else alpha)
    classes = known_dims(like)[1]
    if numbers.ndim > 1 or (numbers.ndim and isinstance(classes, int) and len(numbers) != classes):
        given = argument("loss_options.alpha", alpha)
        raise ValueError(f"{given} must be one number, or {classes} numbers, one for each class")
    if numbers.ndim:
        numbers = numbers.reshape([-1] + [1] * (len(known_dims(like)) - 2))
    weights = op.const(numbers.astype(like.dtype.numpy()))
    return op.ReduceSum(op.Where(hit, weights, op.const(0.0, like.dtype)), [1], keepdims=0)


@register("dice", **_TWO_CLASSES, labels=lambda options: (
    labels_like_prediction(3, "a prediction (N, C, d1, ...)") if options["per_channel"]
    else labels_like_prediction(2, "a prediction (N, ...)")
))  # fmt: skip
def dice(
    op, prediction, label, smooth=1.0, from_logits=True, per_channel=False, ignore_nan=False
):  # fmt: skip
    """1 - (2 sum(p y) + s) / (sum p + sum y + s).  Milletari et al. 2016, arXiv:1606.04797.

    The sums are over all axes but the first, which gives one loss for every row; with per_channel,
    over all but the first two, which gives one for every row and channel. With ignore_nan, labels
    that are NaN are left out, and rows (or channels) in which all labels are NaN.
    """
    first = 2 if per_channel else 1
    p = op.Sigmoid(prediction) if from_logits else prediction
    if not ignore_nan:
        return _dice_losses(op, p, label, smooth, first)
    nan = op.IsNaN(label)
    known = op.set_type_like(op.Where(nan, 0.0, label), label)
    losses = _dice_losses(op, op.Where(nan, 0.0, p), known, smooth, first)
    axes = list(range(first, len(known_dims(prediction))))
    kept = op.Cast(op.Not(nan), to=p.dtype)
    return Terms(losses, op.ReduceMax(kept, axes, keepdims=0))


@register(
    "softmax_dice",
    labels=lambda options: class_index_kind(options["axis"], 3, "a prediction (N, C, d1, ...)"),
    has_ignore_index=True,
    activation="Softmax",
)
def softmax_dice(op, prediction, label, smooth=1.0, from_logits=True, ignore_index=-100, axis=None):
    """Mean over classes of 1 - (2 sum(p t) + s) / (sum p + sum t + s), t the one-hot label.
    1606.04797.

    The sums are over the axes d1, ... of a prediction (N, C, d1, ...), without ignored labels. One
    loss for every row; the mean is over rows with a label that is not ignored. axis: axis of the
    classes; None: the graph decides, or 1.
    """
    prediction = move_classes_to_axis_1(op, prediction, axis)
    p = op.Softmax(prediction, axis=1) if from_logits else prediction
    index = op.Unsqueeze(label, [1])
    kept = op.Not(op.Equal(index, ignore_index))
    hit = op.And(op.Equal(index, write_class_indices(op, prediction)), kept)
    t = op.Cast(hit, to=p.dtype)
    per_class = _dice_losses(op, op.Where(kept, p, 0.0), t, smooth, 2)
    axes = list(range(1, len(known_dims(prediction))))
    any_kept = op.ReduceMax(op.Cast(kept, to=p.dtype), axes, keepdims=0)
    return Terms(op.ReduceMean(per_class, [1], keepdims=0), any_kept)


def _dice_losses(op, p, t, smooth, first):
    """Write 1 - (2 sum(p t) + s) / (sum p + sum t + s), with sums over axes `first` and later."""
    axes = list(range(first, len(known_dims(p))))
    both = op.ReduceSum(p * t, axes, keepdims=0)
    total = op.ReduceSum(p, axes, keepdims=0) + op.ReduceSum(t, axes, keepdims=0)
    return 1.0 - (2.0 * both + smooth) / (total + smooth)


def box_iou(op: Any, a: ir.Value, b: ir.Value, kind: str = "iou", eps: float = 1e-7) -> ir.Value:
    """|a ∩ b| / |a ∪ b|, minus the terms of GIoU or CIoU for the distance of the boxes.

    GIoU: Rezatofighi et al. 2019, arXiv:1902.09630. CIoU: Zheng et al. 2020, arXiv:1911.08287,
    whose factor alpha is a constant in the gradient.

    Args:
        op: writes the nodes; see `Emit`.
        a, b: boxes (..., 4), x1, y1, x2, y2, that broadcast to each other.
        kind: "iou", "giou" or "ciou".
        eps: is added to heights and areas that divide.

    Returns:
        A number for each pair, (...).

    Raises:
        ValueError: an unknown kind.

    Examples:
        >>> import onnx_ir as ir, onnxgrad as og
        >>> def loss(op, prediction, label):
        ...     return 1.0 - og.losses.box_iou(op, prediction, label, "giou")
        >>> kind = og.losses.LabelKind(ir.DataType.FLOAT, lambda f: f, lambda f: True, "boxes")
        >>> og.losses.LossSpec(loss, "giou", "mean", lambda options: kind).name
        'giou'
    """
    if kind not in ("iou", "giou", "ciou"):
        raise unknown("kind", kind, ["iou", "giou", "ciou"])
    ax, ay, aX, aY = op.split(a, [1] * 4, -1)
    bx, by, bX, bY = op.split(b, [1] * 4, -1)
    w, h, w2, h2 = aX - ax, aY - ay + eps, bX - bx, bY - by + eps
    shared = op.Max(op.Min(aX, bX) - op.Max(ax, bx), 0.0)
    shared = shared * op.Max(op.Min(aY, bY) - op.Max(ay, by), 0.0)
    union = w * h + w2 * h2 - shared + eps
    iou = shared / union
    if kind != "iou":
        wide, high = op.Max(aX, bX) - op.Min(ax, bx), op.Max(aY, bY) - op.Min(ay, by)
    if kind == "giou":
        hull = wide * high + eps
        iou = iou - (hull - union) / hull
    if kind == "ciou":
        x, y = bx + bX - ax - aX, by + bY - ay - aY
        distance = (x * x + y * y) / 4.0 / (wide * wide + high * high + eps)
        angle = op.Atan(w2 / h2) - op.Atan(w / h)
        v = angle * angle * (4 / np.pi**2)
        iou = iou - distance - v * op.detached(v / (v - iou + (1.0 + eps)))
    return op.Squeeze(iou, [-1])


def varifocal(
    op: Any, logits: ir.Value, target: ir.Value, alpha: float = 0.75, gamma: float = 2.0
) -> ir.Value:
    """t BCE(p, t) where the target t > 0, and alpha p^gamma BCE(p, 0) elsewhere, BCE the binary
    cross-entropy.  Zhang et al. 2021, eq. 2.

    "VarifocalNet", arXiv:2008.13367; p is the sigmoid of a logit.

    Args:
        op: writes the nodes; see `Emit`.
        logits: scores of classes, of any shape.
        target: t, from 0 to 1, such as the IoU of a box and its prediction, of the same shape.
        alpha, gamma: factor and power for elements whose target is 0.

    Returns:
        One loss for each element.

    Examples:
        >>> import onnx_ir as ir, onnxgrad as og
        >>> kind = og.losses.LabelKind(ir.DataType.FLOAT, lambda f: f, lambda f: True, "shares")
        >>> og.losses.LossSpec(og.losses.varifocal, "varifocal", "mean", lambda options: kind).name
        'varifocal'
    """
    weight = op.Where(op.Greater(target, 0.0), target, alpha * op.Pow(op.Sigmoid(logits), gamma))
    return weight * binary_cross_entropy(op, logits, target, from_logits=True)


def distribution_focal(op: Any, logits: ir.Value, target: ir.Value) -> ir.Value:
    """-(j + 1 - t) log p_j - (t - j) log p_{j+1}, j the whole part of the target t.  Li et al.
    2020, eq. 6.

    "Generalized Focal Loss", arXiv:2006.04388: p is the softmax of the logits. Targets beyond
    R - 1.01 are cut to it.

    Args:
        op: writes the nodes; see `Emit`.
        logits: scores of the distances 0, 1, ... R - 1, (..., R).
        target: t, (...), from 0 to R - 1.

    Returns:
        One loss for each target, (...).

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad.losses import LabelKind, LossSpec, distribution_focal
        >>> kind = LabelKind(ir.DataType.FLOAT, lambda f: f[:-1], lambda f: True, "distances")
        >>> spec = LossSpec(distribution_focal, "distances", "mean", lambda options: kind)
        >>> spec.label_kind.shape(("N", 4, 16))
        ('N', 4)
    """
    bins: Any = (logits.shape or [0])[-1]
    target = op.Clip(target, 0.0, bins - 1.01)
    away = op.Abs(op.Unsqueeze(target, [-1]) - np.arange(bins, dtype=np.float32))
    share = op.Max(1.0 - away, 0.0)
    return -op.ReduceSum(share * op.LogSoftmax(logits, axis=-1), [-1], keepdims=0)
