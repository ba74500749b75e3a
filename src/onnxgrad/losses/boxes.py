"""Formulas for losses of object detection: of boxes, and of what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.losses.classification import binary_cross_entropy


def box_iou(op: Any, a: ir.Value, b: ir.Value, kind: str = "iou", eps: float = 1e-7) -> ir.Value:
    """|a ∩ b| / |a ∪ b|, less what GIoU or CIoU subtract for the distance of the boxes.

    GIoU: Rezatofighi et al. 2019, arXiv:1902.09630. CIoU: Zheng et al. 2020, arXiv:1911.08287,
    whose factor alpha is a constant in the gradient.

    Args:
        op: writes the nodes; see `Emit`.
        a, b: boxes (..., 4), x1, y1, x2, y2, that broadcast to each other.
        kind: "iou", "giou" or "ciou".
        eps: is added where sizes divide.

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
    """t BCE(p, t) where t > 0, and alpha p^gamma BCE(p, 0) elsewhere.  Zhang et al. 2021, eq. 2.

    "VarifocalNet", arXiv:2008.13367; p is the sigmoid of a logit.

    Args:
        op: writes the nodes; see `Emit`.
        logits: of classes, of any shape.
        target: t, from 0 to 1, such as the IoU of a box and its prediction, of the same shape.
        alpha, gamma: of elements without a target.

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
    """-(j + 1 - t) log p_j - (t - j) log p_{j+1}, j the whole part of t.  Li et al. 2020, eq. 6.

    "Generalized Focal Loss", arXiv:2006.04388: p is the softmax of the logits. Targets beyond
    R - 1.01 are cut to it.

    Args:
        op: writes the nodes; see `Emit`.
        logits: of distances 0, 1, ... R - 1, (..., R).
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
