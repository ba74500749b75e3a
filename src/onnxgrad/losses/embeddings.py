"""Losses of embeddings: triplet, contrastive, cosine, ArcFace and CosFace losses.

`triplet`, `contrastive` and `multiple_negatives` compare the rows of a batch by their class labels;
`cosine_embedding` compares two embeddings in one row, `cosine_similarity` two consecutive rows;
`arcface` and `cosface` take the cosines of the angles to the centers of classes, which
`add_head(..., cosine=True)` computes. The functions without a label compare the embeddings of one
row: see `output_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.losses.classification import cross_entropy_terms
from onnxgrad.losses.spec import (
    Dims,
    LabelBounds,
    LabelKind,
    Terms,
    axis_positions,
    class_index_kind,
    known_dims,
    lowest_logit,
    register,
    take_at_index,
    widen_to_float32,
)


def _label_kind_for_rows(
    needs: str, accepts: Callable[[Dims], bool], dtype: ir.DataType | None = ir.DataType.INT64
) -> LabelKind:
    """Return the `LabelKind` of losses that take one label for each row, (N,)."""
    return LabelKind(
        dtype, lambda f: (f[0] if f else None,), lambda f: f is not None and accepts(f), needs
    )


_CLASS_OF_ROW = _label_kind_for_rows("embeddings (N, D)", lambda f: len(f) == 2)
_CLASS_OF_VIEWS = _label_kind_for_rows(
    "embeddings (N, D), or (N, views, D)", lambda f: len(f) in (2, 3)
)
_NUMBER_OF_ROW = _label_kind_for_rows("embeddings (N, D)", lambda f: len(f) == 2, None)
_COSINES = class_index_kind(1, 2, "cosines (N, C)")
_SAME_OR_NOT = _label_kind_for_rows(
    "pairs of embeddings (N, 2, D)", lambda f: len(f) == 3 and f[1] in (2, None), None
)


@register(
    "cosine_embedding",
    labels=lambda options: _SAME_OR_NOT,
    bounds=LabelBounds("-1 and 1", (-1, 1)),
)
def cosine_embedding(op, prediction, label, margin=0.0):
    """1 - cos(a, b) for label 1, max(0, cos(a, b) - margin) for -1; a, b in (N, 2, D).

    One loss for every row. As in PyTorch, 1e-12 is added to the squared lengths.
    """
    cosine = cosine_of_rows(op, *(take_at_index(op, prediction, i) for i in (0, 1)))
    return op.Where(op.Greater(label, 0.0), 1.0 - cosine, op.Relu(cosine - margin))


def cosine_of_rows(op: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    """Write the cosine of the elements of each row of `a` and `b`, (N,)."""
    axes = list(range(1, len(known_dims(a))))
    product, aa, bb = (op.ReduceSum(x, axes, keepdims=0) for x in (a * b, a * a, b * b))
    return product / op.Sqrt((aa + 1e-12) * (bb + 1e-12))


@register("cosine_similarity", labels=lambda options: _NUMBER_OF_ROW, mixes=False)
def cosine_similarity(op, prediction, label):
    """(cos(a, b) - y)^2 for consecutive rows a, b of (N, D), N even, both with the label y.

    One loss for every row, equal for both of a pair. Reimers and Gurevych 2019, arXiv:1908.10084.
    """
    z = _normalize_rows(op, widen_to_float32(op, prediction))
    pairs = op.Reshape(z, op.vector(-1, 2, op.dim(prediction, 1)))
    other = op.Reshape(op.Gather(pairs, np.array([1, 0], np.int64), axis=1), op.Shape(z))
    cosine = op.ReduceSum(z * op.set_type_like(other, z), [1], keepdims=0)
    difference = cosine - op.Cast(label, to=z.dtype)
    return op.Cast(difference * difference, to=prediction.dtype)


@register("arcface", labels=lambda options: _COSINES)
def arcface(op, prediction, label, margin=0.5, scale=64.0, eps=1e-7):
    """-log softmax_y(s c), c the cosines, with cos(t + m) in place of c_y = cos t, y the label.
    Deng et al. 2019, 1801.07698.

    One loss for every row of cosines c, (N, C); the margin m is an angle in radians. Where
    t_y + m > pi, it is c_y - m sin m instead, so that the loss rises on. The cosine of the label is
    clipped to [-1 + eps, 1 - eps].
    """
    cosine = op.Clip(widen_to_float32(op, prediction), eps - 1.0, 1.0 - eps)
    moved = cosine * math.cos(margin) - op.Sqrt(1.0 - cosine * cosine) * math.sin(margin)
    within = op.GreaterOrEqual(cosine, -math.cos(margin))
    moved = op.Where(within, moved, cosine - margin * math.sin(margin))
    return _margin_loss(op, prediction, moved, label, scale)


@register("cosface", labels=lambda options: _COSINES)
def cosface(op, prediction, label, margin=0.35, scale=64.0):
    """-log softmax_y(s c), c the cosines, with c_y - m in place of c_y, y the label.  Wang et al.
    2018, arXiv:1801.09414, eq. 4.

    One loss for every row of cosines c, (N, C).
    """
    return _margin_loss(op, prediction, widen_to_float32(op, prediction) - margin, label, scale)


def _margin_loss(op, cosines, moved, label, scale):
    """Write the cross-entropy of cosines times `scale`, with `moved` in place of the cosine of each
    row's label.
    """
    hit = op.Equal(op.Unsqueeze(label, [1]), axis_positions(op, cosines, 1))
    logits = op.set_type_like(op.Where(hit, moved, widen_to_float32(op, cosines)) * scale, moved)
    return op.Cast(cross_entropy_terms(op, logits, label, axis=1).losses, to=cosines.dtype)


@register("triplet", labels=lambda options: _CLASS_OF_ROW, mixes=False)
def triplet(op, prediction, label, margin=1.0, p=2, mining="all", eps=1e-6):
    """max(0, |a - b + eps|_p - |a - c + eps|_p + margin), b of the class of a, c of another.

    Triplets are rows of the batch: with mining="all", every one, and the mean is over triplets
    (Schroff et al. 2015, arXiv:1503.03832); with "semi-hard", for every a and b the nearest c that
    is farther than b, or the farthest c where none is, and the mean is over these a and b; with
    "hard", the farthest b and the nearest c of every row a that has both, and the mean is over
    these rows (Hermans et al. 2017, arXiv:1703.07737). Memory: N^2 D, and N^3 but for "hard". p is
    1 or 2.
    """
    if mining not in ("all", "semi-hard", "hard"):
        raise unknown("mining", mining, ["all", "semi-hard", "hard"])
    difference = op.Unsqueeze(prediction, [1]) - op.Unsqueeze(prediction, [0])
    far = _p_norms(op, difference, p, eps)
    same, itself = _same_label_mask(op, label), _identity_mask(op, label)
    positive, negative = op.And(same, op.Not(itself)), op.Not(same)
    low = lowest_logit(op, prediction)
    count = _count_pairs(op, positive, far) * _count_pairs(op, negative, far)
    if mining == "hard":
        b = op.ReduceMax(op.Where(positive, far, low), [1], keepdims=0)
        c = op.ReduceMin(op.Where(negative, far, -low), [1], keepdims=0)
        has_both = op.Greater(count, 0.0)
        loss = op.Relu(op.Where(has_both, b - c, 0.0) + margin)
        weight = op.Cast(has_both, to=far.dtype)
        return Terms(loss * weight, weight)
    if mining == "semi-hard":
        valid = op.And(positive, op.Greater(op.Unsqueeze(count, [1]), 0.0))
        c = _semi_hard_negative_distances(op, far, negative)
        losses = op.Where(valid, op.Relu(op.Where(valid, far - c, 0.0) + margin), 0.0)
        count = _count_pairs(op, valid, far)
        return Terms(op.ReduceSum(losses, [1], keepdims=0) / op.Max(count, 1.0), count)
    terms = op.Relu(op.Unsqueeze(far, [2]) - op.Unsqueeze(far, [1]) + margin)
    valid = op.And(op.Unsqueeze(positive, [2]), op.Unsqueeze(negative, [1]))
    summed = op.ReduceSum(op.Where(valid, terms, 0.0), [1, 2], keepdims=0)
    return Terms(summed / op.Max(count, 1.0), count)


def _semi_hard_negative_distances(op, far, negative):
    """Write (N, N): for each pair of rows a, b the distance from a to the nearest row of another
    class that is farther than b.
    """
    low, negatives = lowest_logit(op, far), op.Unsqueeze(negative, [1])  # (a, 1, c)
    to_c = op.Unsqueeze(far, [1])
    farther = op.And(negatives, op.Greater(to_c, op.Unsqueeze(far, [2])))
    nearest = op.ReduceMin(op.Where(farther, to_c, -low), [2], keepdims=0)
    farthest = op.ReduceMax(op.Where(negative, far, low), [1], keepdims=1)
    return op.Where(op.Less(nearest, -low), nearest, farthest)


def triplet_margin(op, anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False):
    """max(0, |a - b + eps|_p - |a - c + eps|_p + margin), each (N, D).  Balntas et al. 2016.

    One loss for every row. With swap, |b - c + eps|_p replaces |a - c + eps|_p if it is smaller.
    """
    near = _p_norms(op, anchor - positive, p, eps)
    far = _p_norms(op, anchor - negative, p, eps)
    if swap:
        far = op.Min(far, _p_norms(op, positive - negative, p, eps))
    return op.Relu(near - far + margin)


@register("contrastive", labels=lambda options: _CLASS_OF_VIEWS, mixes=False)
def contrastive(op, prediction, label, temperature=0.1, normalize=True):
    """-mean of log softmax_a(z . z_a / T) over the other rows a of the class of row z.  Khosla et
    al. 2020.

    The softmax is over all other rows a of the batch (arXiv:2004.11362, eq. 2). Embeddings are
    (N, D), or (N, views, D) where the views of a row have its label: with labels that are all
    different, the loss is NT-Xent (Chen et al. 2020, arXiv:2002.05709). normalize divides
    embeddings by their lengths. One loss for every row; the mean is over rows that are not alone in
    their class.
    """
    shape = known_dims(prediction)
    if len(shape) == 2:
        return Terms(*_contrastive_losses(op, prediction, label, temperature, normalize))
    views = op.dim(prediction, 1)
    flat = op.Reshape(prediction, op.vector(-1, op.dim(prediction, 2)))
    repeated = op.Expand(op.Unsqueeze(label, [1]), op.vector(1, views))
    repeated.shape = ir.Shape(shape[:2])
    label = op.Reshape(repeated, [-1])
    losses, weights = _contrastive_losses(op, flat, label, temperature, normalize)
    back = op.vector(-1, views)  # the weights of the views of a row are equal
    means = [op.ReduceMean(op.Reshape(v, back), [1], keepdims=0) for v in (losses, weights)]
    for v in means:
        v.shape = ir.Shape(shape[:1])
    return Terms(*means)


@register("multiple_negatives", labels=lambda options: _CLASS_OF_ROW, mixes=False)
def multiple_negatives(op, prediction, label, scale=20.0, symmetric=False):
    """-mean of log softmax_j(s cos(a, z_j)) over the rows j of the class of a.  1705.00652, eq. 9.

    Henderson et al. 2017, as in sentence-transformers. The first row of each class in the batch
    that has another one is an anchor a. The softmax is over all rows j that are no anchors: the
    positives of a, which are the other rows of its class; the positives of other anchors; and rows
    that are alone in their class, as hard negatives. One loss for every row; the mean is over
    anchors. symmetric: the mean of this loss and -log softmax_a(s cos(a, z_j)), over all anchors a
    for each positive j.
    """
    dtype, z = prediction.dtype, _normalize_rows(op, widen_to_float32(op, prediction))
    same, place = _same_label_mask(op, label), axis_positions(op, label, 0)
    others = op.And(same, op.Not(_identity_mask(op, label)))
    before = op.And(same, op.Less(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1])))
    first = op.Equal(_count_pairs(op, before, z), 0.0)
    anchor = op.And(first, op.Greater(_count_pairs(op, others, z), 0.0))
    row = op.Unsqueeze(anchor, [1])
    positive = op.And(others, row)
    scores, low = op.MatMul(z, op.Transpose(z, perm=[1, 0])) * scale, lowest_logit(op, z)
    log_p = op.LogSoftmax(op.Where(op.Unsqueeze(anchor, [0]), low, scores), axis=1)
    if symmetric:
        log_p = 0.5 * (log_p + op.LogSoftmax(op.Where(row, scores, low), axis=0))
    summed = op.ReduceSum(op.Where(positive, log_p, 0.0), [1], keepdims=0)
    loss = -summed / op.Max(_count_pairs(op, positive, z), 1.0)
    return Terms(op.Cast(loss, to=dtype), op.Cast(anchor, to=dtype))


def info_nce(op, first, second, temperature=0.1, normalize=True, symmetric=True):
    """-log softmax_j(a_i . b_j / T) at j = i, each (N, D).  van den Oord et al. 2018, 1807.03748.

    One loss for every row. symmetric: the mean with -log softmax_i(a_i . b_j / T) at i = j
    (Radford et al. 2021, arXiv:2103.00020).
    """
    dtype, a, b = first.dtype, widen_to_float32(op, first), widen_to_float32(op, second)
    a, b = (_normalize_rows(op, x) if normalize else x for x in (a, b))
    scores = op.MatMul(a, op.Transpose(b, perm=[1, 0])) / temperature
    itself = _identity_mask(op, first)
    losses = [
        -op.ReduceSum(op.Where(itself, op.LogSoftmax(scores, axis=axis), 0.0), [axis], keepdims=0)
        for axis in ((1, 0) if symmetric else (1,))
    ]
    return op.Cast(0.5 * (losses[0] + losses[1]) if symmetric else losses[0], to=dtype)


def nt_xent(op, first, second, temperature=0.1, normalize=True):
    """-log softmax_j(z_i . z_j / T) at the second embedding j of the row of z_i, with the softmax
    over the 2N - 1 embeddings other than z_i.

    Both are (N, D). One loss for every row, the mean over its two embeddings. Chen et al. 2020,
    arXiv:2002.05709.
    """
    pairs = op.Concat(op.Unsqueeze(first, [1]), op.Unsqueeze(second, [1]), axis=1)
    return contrastive(op, pairs, axis_positions(op, first, 0), temperature, normalize).losses


def _contrastive_losses(op, z, label, temperature, normalize):
    """Write the loss of `contrastive` and a weight, 0 or 1, for each of N embeddings (N, D)."""
    dtype, z = z.dtype, widen_to_float32(op, z)
    z = _normalize_rows(op, z) if normalize else z
    itself = _identity_mask(op, label)
    scores = op.MatMul(z, op.Transpose(z, perm=[1, 0])) / temperature
    log_p = op.LogSoftmax(op.Where(itself, lowest_logit(op, z), scores), axis=1)
    positive = op.And(_same_label_mask(op, label), op.Not(itself))
    count = _count_pairs(op, positive, z)
    summed = op.ReduceSum(op.Where(positive, log_p, 0.0), [1], keepdims=0)
    loss = -summed / op.Max(count, 1.0)
    return op.Cast(loss, to=dtype), op.Cast(op.Greater(count, 0.0), to=dtype)


def _normalize_rows(op, x):
    """Write each row of `x` divided by its Euclidean norm, or by 1e-12 if the norm is smaller."""
    return x / op.Max(op.ReduceL2(x, [1], keepdims=1), 1e-12)


def _p_norms(op, x, p, eps):
    """Write the p-norms of x + eps over the last axis; raise `ValueError` unless p is 1 or 2."""
    norms = {1: op.ReduceL1, 2: op.ReduceL2}
    if p not in norms:
        raise ValueError(f"p={p!r} is no norm of distances: pass p=1 or p=2")
    return norms[p](x + eps, [-1], keepdims=0)


def _identity_mask(op: Any, x: ir.Value) -> ir.Value:
    """Write the (N, N) identity matrix as booleans: true where both rows have the same index."""
    return _same_label_mask(op, axis_positions(op, x, 0))


def _same_label_mask(op: Any, label: ir.Value) -> ir.Value:
    """Write for each pair of rows whether their labels are equal, (N, N)."""
    return op.Equal(op.Unsqueeze(label, [1]), op.Unsqueeze(label, [0]))


def _count_pairs(op: Any, pairs: ir.Value, like: ir.Value) -> ir.Value:
    """Write for each row of the booleans `pairs` (N, N) the number of true elements, (N,), in the
    dtype of `like`.
    """
    return op.ReduceSum(op.Cast(pairs, to=like.dtype), [1], keepdims=0)
