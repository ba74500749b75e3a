"""Products of transposed matrices, as one Gemm."""

from __future__ import annotations

from onnxgrad.autodiff.forms.group import GRADIENT, is_own, read_once
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import is_real, rank

_FLAGS = ("transA", "transB")


@rewrites("MatMul", "Gemm", group=GRADIENT)
def multiply_transposed(op, node):
    """a bT, aT b or aT bT, as one Gemm."""
    operands = list(node.inputs)
    flags = [node.attributes.get_int(name, 0) for name in _FLAGS]
    if not op.is_own(node) or not is_real(operands[0]):
        return None
    for i, v in enumerate(operands[:2]):
        if rank(v) != 2:
            return None
        # one outside of the body of a loop is computed once
        if _is_transposed(op, v) and v.producer().graph is node.graph:
            operands[i], flags[i] = v.producer().inputs[0], 1 - flags[i]
    return None if operands == list(node.inputs) else [_gemm(op, operands, flags, node)]


@rewrites("Transpose", group=GRADIENT)
def transpose_product(op, node):
    """(a b)T = bT aT."""
    y = node.inputs[0]
    if not _is_transposed(op, node.outputs[0]) or not is_own(op, y, "Gemm") or not read_once(y):
        return None
    gemm = y.producer()
    flags = [1 - gemm.attributes.get_int(name, 0) for name in _FLAGS[::-1]]
    return [_gemm(op, gemm.inputs[::-1], flags, gemm)] if len(gemm.inputs) == 2 else None


def _is_transposed(op, v):
    return is_own(op, v, "Transpose") and tuple(v.producer().attributes.get_ints("perm", ())) == (
        1,
        0,
    )


def _gemm(op, operands, flags, like):
    factors = {a.name: a.value for a in like.attributes.values() if a.name in ("alpha", "beta")}
    return op.Gemm(*operands, **factors, **{n: 1 for n, f in zip(_FLAGS, flags, strict=True) if f})
