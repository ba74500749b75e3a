"""Losses of embeddings: triplets, contrast, and the cosine of pairs.

`triplet` and `contrastive` compare the rows of a batch by their class labels; `cosine_embedding`
compares two embeddings in one row. All are formulas as those of `formulas`. The functions without
a label are for rows that hold what is compared: see `output_losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.losses.formula_nodes import at_index, dims_of, lowest, positions, wide
from onnxgrad.losses.spec import Dims, LabelBounds, LabelKind, Terms, register


def _label_of_row(
    needs: str, accepts: Callable[[Dims], bool], dtype: ir.DataType | None = ir.DataType.INT64
) -> LabelKind:
    """Return one label for every row of a prediction of known rank."""
    return LabelKind(
        dtype, lambda f: (f[0] if f else None,), lambda f: f is not None and accepts(f), needs
    )


_CLASS_OF_ROW = _label_of_row("embeddings (N, D)", lambda f: len(f) == 2)
_CLASS_OF_VIEWS = _label_of_row("embeddings (N, D), or (N, views, D)", lambda f: len(f) in (2, 3))
_SAME_OR_NOT = _label_of_row(
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
    a, b = (at_index(op, prediction, i) for i in (0, 1))
    product, aa, bb = (op.ReduceSum(x, [1], keepdims=0) for x in (a * b, a * a, b * b))
    cosine = product / op.Sqrt((aa + 1e-12) * (bb + 1e-12))
    return op.Where(op.Greater(label, 0.0), 1.0 - cosine, op.Relu(cosine - margin))


@register("triplet", labels=lambda options: _CLASS_OF_ROW, mixes=False)
def triplet(op, prediction, label, margin=1.0, p=2, mining="all", eps=1e-6):
    """max(0, |a - b + eps|_p - |a - c + eps|_p + margin), b of the class of a, c of another.

    Triplets are rows of the batch: with mining="all", every one, and the mean is over triplets
    (Schroff et al. 2015, arXiv:1503.03832); with "hard", the farthest b and the nearest c of every
    row a that has both, and the mean is over these rows (Hermans et al. 2017, arXiv:1703.07737).
    Memory: N^2 D, and N^3 for "all". p is 1 or 2.
    """
    if mining not in ("all", "hard"):
        raise unknown("mining", mining, ["all", "hard"])
    difference = op.Unsqueeze(prediction, [1]) - op.Unsqueeze(prediction, [0])
    far = _norm(op, difference, p, eps)
    same, itself = _same(op, label), _diagonal(op, label)
    positive, negative = op.And(same, op.Not(itself)), op.Not(same)
    low = lowest(op, prediction)
    if mining == "hard":
        b = op.ReduceMax(op.Where(positive, far, low), [1], keepdims=0)
        c = op.ReduceMin(op.Where(negative, far, -low), [1], keepdims=0)
        has_both = op.Greater(_count(op, positive, far) * _count(op, negative, far), 0.0)
        loss = op.Relu(op.Where(has_both, b - c, 0.0) + margin)
        weight = op.Cast(has_both, to=far.dtype)
        return Terms(loss * weight, weight)
    terms = op.Relu(op.Unsqueeze(far, [2]) - op.Unsqueeze(far, [1]) + margin)
    valid = op.And(op.Unsqueeze(positive, [2]), op.Unsqueeze(negative, [1]))
    summed = op.ReduceSum(op.Where(valid, terms, 0.0), [1, 2], keepdims=0)
    count = _count(op, positive, far) * _count(op, negative, far)
    return Terms(summed / op.Max(count, 1.0), count)


def triplet_margin(op, anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False):
    """max(0, |a - b + eps|_p - |a - c + eps|_p + margin), each (N, D).  Balntas et al. 2016.

    One loss for every row. With swap, the distance of b and c is taken if it is below that of a, c.
    """
    near = _norm(op, anchor - positive, p, eps)
    far = _norm(op, anchor - negative, p, eps)
    if swap:
        far = op.Min(far, _norm(op, positive - negative, p, eps))
    return op.Relu(near - far + margin)


@register("contrastive", labels=lambda options: _CLASS_OF_VIEWS, mixes=False)
def contrastive(op, prediction, label, temperature=0.1, normalize=True):
    """-mean of log softmax_a(z . z_a / T) over the a of the class of z.  Khosla et al. 2020.

    a are all other rows of the batch (arXiv:2004.11362, eq. 2). Embeddings (N, D), or (N, views, D)
    where the views of a row have its label: with labels that are all different, the loss is NT-Xent
    (Chen et al. 2020, arXiv:2002.05709). normalize divides embeddings by their lengths. One loss
    for every row; the mean is over rows that have another one of their class.
    """
    shape = dims_of(prediction)
    if len(shape) == 2:
        return Terms(*_contrast(op, prediction, label, temperature, normalize))
    views = op.dim(prediction, 1)
    flat = op.Reshape(prediction, op.vector(-1, op.dim(prediction, 2)))
    repeated = op.Expand(op.Unsqueeze(label, [1]), op.vector(1, views))
    repeated.shape = ir.Shape(shape[:2])
    label = op.Reshape(repeated, [-1])
    losses, weights = _contrast(op, flat, label, temperature, normalize)
    back = op.vector(-1, views)  # the weights of the views of a row are equal
    means = [op.ReduceMean(op.Reshape(v, back), [1], keepdims=0) for v in (losses, weights)]
    for v in means:
        v.shape = ir.Shape(shape[:1])
    return Terms(*means)


def info_nce(op, first, second, temperature=0.1, normalize=True, symmetric=True):
    """-log softmax_j(a_i . b_j / T) at j = i, each (N, D).  van den Oord et al. 2018, 1807.03748.

    One loss for every row. symmetric: the mean with that of b_j over a_i (Radford et al. 2021,
    arXiv:2103.00020).
    """
    dtype, a, b = first.dtype, wide(op, first), wide(op, second)
    a, b = (_unit(op, x) if normalize else x for x in (a, b))
    scores = op.MatMul(a, op.Transpose(b, perm=[1, 0])) / temperature
    itself = _diagonal(op, first)
    losses = [
        -op.ReduceSum(op.Where(itself, op.LogSoftmax(scores, axis=axis), 0.0), [axis], keepdims=0)
        for axis in ((1, 0) if symmetric else (1,))
    ]
    return op.Cast(0.5 * (losses[0] + losses[1]) if symmetric else losses[0], to=dtype)


def nt_xent(op, first, second, temperature=0.1, normalize=True):
    """-log softmax_j(z_i . z_j / T) at the other z of its row, j over all 2N - 1 others.

    Each (N, D); one loss for every row, the mean of both. Chen et al. 2020, arXiv:2002.05709.
    """
    pairs = op.Concat(op.Unsqueeze(first, [1]), op.Unsqueeze(second, [1]), axis=1)
    return contrastive(op, pairs, positions(op, first, 0), temperature, normalize).losses


def _contrast(op, z, label, temperature, normalize):
    """Write the losses and the weights of `contrastive` for embeddings (N, D)."""
    dtype, z = z.dtype, wide(op, z)
    z = _unit(op, z) if normalize else z
    itself = _diagonal(op, label)
    scores = op.MatMul(z, op.Transpose(z, perm=[1, 0])) / temperature
    log_p = op.LogSoftmax(op.Where(itself, lowest(op, z), scores), axis=1)
    positive = op.And(_same(op, label), op.Not(itself))
    count = _count(op, positive, z)
    summed = op.ReduceSum(op.Where(positive, log_p, 0.0), [1], keepdims=0)
    loss = -summed / op.Max(count, 1.0)
    return op.Cast(loss, to=dtype), op.Cast(op.Greater(count, 0.0), to=dtype)


def _unit(op, x):
    """Write the rows of `x` divided by their lengths, but by at least 1e-12 as in PyTorch."""
    return x / op.Max(op.ReduceL2(x, [1], keepdims=1), 1e-12)


def _norm(op, x, p, eps):
    """Write the p-norms of x + eps over the last axis."""
    norms = {1: op.ReduceL1, 2: op.ReduceL2}
    if p not in norms:
        raise ValueError(f"p={p!r}: give 1 or 2")
    return norms[p](x + eps, [-1], keepdims=0)


def _diagonal(op: Any, x: ir.Value) -> ir.Value:
    """Write whether two rows are the same one, (N, N)."""
    return _same(op, positions(op, x, 0))


def _same(op: Any, label: ir.Value) -> ir.Value:
    """Write whether two rows have the same label, (N, N)."""
    return op.Equal(op.Unsqueeze(label, [1]), op.Unsqueeze(label, [0]))


def _count(op: Any, pairs: ir.Value, like: ir.Value) -> ir.Value:
    """Write the number of pairs of every row, (N,), in the dtype of `like`."""
    return op.ReduceSum(op.Cast(pairs, to=like.dtype), [1], keepdims=0)
