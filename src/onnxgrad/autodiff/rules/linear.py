"""Matrix products."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.graph.shapes import rank


@rule("MatMul")
def matmul(op, node, g):
    """y = a b:  da = g bT,  db = aT g."""
    a, b = node.inputs
    if rank(b) == 2:
        if rank(a) == 2:
            return op.Gemm(g, b, transB=1), op.Gemm(a, g, transA=1)
        k, n = op.size(b, 0), op.size(b, 1)
        rows = [op.Reshape(v, _pair(op, width)) for v, width in ((a, k), (g, n))]
        return op.MatMul(g, op.swap(b)), op.Gemm(*rows, transA=1)
    if rank(a) is None or rank(b) is None:
        return Refused("the ranks of its operands are not known")
    return op.sum_to(op.MatMul(g, op.swap(b)), a), op.sum_to(op.MatMul(op.swap(a), g), b)


def _pair(op, width):
    """Return the shape [-1, width]."""
    return [-1, width] if isinstance(width, int) else op.Concat([-1], width, axis=0)


@rule("Gemm")
def gemm(op, node, g):
    """y = s A B + t c:  dA = s g BT,  dB = s AT g,  dc = t g, for A, B as a, b or transposed."""
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
