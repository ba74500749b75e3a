"""Matrix products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.registry import rule
from onnxgrad.graph.shapes import rank


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
    ta, tb = node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)

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
