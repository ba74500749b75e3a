"""Matrix products, and Einsum: the gradient w.r.t. an operand is an Einsum of the others.

numpy and onnxruntime broadcast named indices of length one, as they do the axes of an ellipsis, and
so do the gradients. If an input has an ellipsis, the output must have it too.
"""

from __future__ import annotations

from string import ascii_letters

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.shapes import broadcast, dims, einsum_terms, equal, rank

DOTS = "..."


@rule("MatMul")
def matmul(op, node, g):
    """y = a b:  da = g bT,  db = aT g."""
    a, b = node.inputs
    if rank(b) == 2:
        if rank(a) == 2:
            return op.Gemm(g, b, transB=1), op.Gemm(a, g, transA=1)
        rows = [op.Reshape(v, op.vector(-1, op.dim(b, axis))) for axis, v in enumerate((a, g))]
        return op.MatMul(g, op.mT(b)), op.Gemm(*rows, transA=1)
    if min(rank(a) or 0, rank(b) or 0) > 1:
        return op.sum_to(op.MatMul(g, op.mT(b)), a), op.sum_to(op.MatMul(op.mT(a), g), b)
    left, right, g = _matrices(op, a, b, g)
    da = op.sum_to(op.MatMul(g, op.mT(right)), left)
    db = op.sum_to(op.MatMul(op.mT(left), g), right)
    return op.reshape_like(da, a), op.reshape_like(db, b)


def _matrices(op, a, b, g):
    """Return a, b and g as stacks of matrices: a vector a becomes a row, a vector b a column."""
    missing = [op.Max(2 - op.Shape(op.Shape(v)), [0]) for v in (a, b)]
    one = ir.tensor(np.ones(1, np.int64))
    row, column = (op.ConstantOfShape(count, value=one) for count in missing)
    left, right = op.Concat(row, op.Shape(a), axis=0), op.Concat(op.Shape(b), column, axis=0)
    wide = op.Concat(op.Shape(g), column, axis=0)
    shape = op.Concat(op.Slice(wide, [0], [-1]), row, op.Slice(wide, [-1], [2**62]), axis=0)
    return [op.Reshape(v, s, allowzero=1) for v, s in ((a, left), (b, right), (g, shape))]


@rule("Gemm")
def gemm(op, node, g):
    """y = s A B + t c:  dA = s g BT,  dB = s AT g,  dc = t g, A = a or aT, B = b or bT."""
    a, b, c = (*node.inputs, None)[:3]
    ta, tb = int_attribute(node, "transA"), int_attribute(node, "transB")
    alpha, beta = float_attribute(node, "alpha"), float_attribute(node, "beta")

    def product(left, right, **transposed):
        return op.Gemm(left, right, alpha=alpha, **transposed)

    da = product(b, g, transA=tb, transB=1) if ta else product(g, b, transB=1 - tb)
    db = product(g, a, transA=1, transB=ta) if tb else product(a, g, transA=1 - ta)
    if c is None:
        return da, db
    return da, db, op.sum_to(g if beta == 1 else beta * g, c)


@rule("Det")
def det(op, node, g):
    """y = det x:  dx = g C, C_ij the determinant of x with the unit vector j as its row i.

    C are the cofactors, which exist for singular x too. The n^2 determinants take n^4 numbers of
    memory and n^5 operations, as ONNX has no inverse.
    """
    (x,) = node.inputs
    index = op.Range(np.int64(0), op.Gather(op.Shape(x), np.int64(-1)), np.int64(1))
    same = op.Equal(op.Unsqueeze(index, [1]), index)
    units = op.Cast(same, to=x.dtype)
    rows = op.Where(
        op.Unsqueeze(same, [1, 3]), op.Unsqueeze(units, [0, 2]), op.Unsqueeze(x, [-4, -3])
    )
    return (op.Unsqueeze(g, [-2, -1]) * op.set_type_like(op.Det(rows), x),)


@rule("Inverse", domain="com.microsoft")
def inverse(op, node, g):
    """Y = X^-1:  dX = -Y^T G Y^T."""
    turned = op.mT(node.outputs[0])
    return (-op.MatMul(op.MatMul(turned, g), turned),)


@rule("Einsum")
def einsum(op, node, g):
    """y = sum a b ...:  da = sum g b ... over the indices that a lacks.

    Laue, Mitterreiter & Giesen 2020, A simple and efficient tensor calculus, arXiv:2010.03313.
    """
    terms, output = einsum_terms(string_attribute(node, "equation"))
    if DOTS not in output and any(DOTS in term for term in terms):
        return Unsupported("its ellipsis is not in its output; name the axes that are summed")
    terms, output = _named_dots(node.inputs, terms, output)
    return [_by_operand(op, node.inputs, terms, k, g, output) for k in range(len(terms))]


def _named_dots(xs, terms, output):
    """Return the terms with letters in place of the ellipsis, if the ranks are static.

    An Einsum sums over named indices only. The axes of an ellipsis are summed after it, so that its
    result is larger.
    """
    pairs = [(rank(x), term) for x, term in zip(xs, terms, strict=True) if DOTS in term]
    counts = {None if n is None else n - len(term.replace(DOTS, "")) for n, term in pairs}
    if len(counts) != 1 or None in counts:
        return terms, output
    free = [c for c in ascii_letters if c not in "".join(terms)]
    names = "".join(free[: counts.pop()])
    return [term.replace(DOTS, names) for term in terms], output.replace(DOTS, names)


def _by_operand(op, xs, terms, k, g, output):
    """Return the gradient with respect to operand k."""
    x, term, letters = xs[k], terms[k], terms[k].replace(DOTS, "")
    if 0 in (dims(x) or ()):  # onnxruntime's Einsum and Expand are wrong for empty tensors
        return op.zeros_like(x)
    if DOTS in term[1:]:  # move it to the front: axes are then counted from the end
        x, back = _dots_first(op, x, term)
        xs, terms = [*xs[:k], x, *xs[k + 1 :]], [*terms[:k], DOTS + letters, *terms[k + 1 :]]
        return op.Einsum(_by_operand(op, xs, terms, k, g, output), equation=back)
    others, sources = [*xs[:k], *xs[k + 1 :]], [output, *terms[:k], *terms[k + 1 :]]
    kept = [c for c in dict.fromkeys(letters) if c in "".join(sources)]
    target = (DOTS if DOTS in output else "") + "".join(kept)
    dx = g
    if sources != [target]:
        dx = op.Einsum(g, *others, equation=f"{','.join(sources)}->{target}")
    new = [i for i, c in enumerate(letters) if c not in kept or letters.index(c) < i]
    if new:
        dx = op.Unsqueeze(dx, [i - len(letters) for i in new])
        dx = _on_diagonals(op, dx, x, letters)
    full = broadcast(dims(dx), dims(x))
    if not equal(dims(dx), full):
        dx = op.Expand(dx, op.shape_of(x))
        dx.shape = None if full is None else ir.Shape(full)
    return op.sum_to(dx, x)


def _dots_first(op, x, term):
    """Return x with the axes of its ellipsis first, and the equation that moves them back."""
    head, _, tail = term.partition(DOTS)
    names = ascii_letters[: len(head + tail)]
    original, front = names[: len(head)] + DOTS + names[len(head) :], DOTS + names
    return op.Einsum(x, equation=f"{original}->{front}"), f"{front}->{original}"


def _on_diagonals(op, dx, x, letters):
    """Return dx where all axes of x with the same letter have the same index, else zero."""

    def positions(axis):
        line = op.arange(op.dim(x, axis))
        return op.Unsqueeze(line, list(range(1, -axis))) if axis < -1 else line

    for i, c in enumerate(letters):
        first = letters.index(c)
        if first < i:
            same = op.Equal(*(positions(axis - len(letters)) for axis in (first, i)))
            dx = op.Where(same, dx, 0.0)
    return dx
