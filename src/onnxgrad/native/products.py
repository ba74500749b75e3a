"""Rewrites of matrix products whose operands are transposed."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.native.single_nodes import NODES
from onnxgrad.operators import made_by
from onnxgrad.operators.attributes import default_attribute
from onnxgrad.operators.shapes import coefficient, dims, static

ORDERED = "native.ordered"  # the group of rewrites of steps whose nodes keep their order

# Rows and columns of aT b from which a transposed copy of a pays: the kernel transposes a anew for
# every 128 columns. Measured with 1 thread: 0.73-0.88 of the time of these products, 0.93-0.96 of a
# step of an MLP; no difference for encoders, whose products have fewer rows or columns.
LEAST_PRODUCT_LENGTH = 512
MOST_COPIED_BYTES = 1 << 25  # bytes of the transposed copy

_FLOAT = ir.DataType.FLOAT
_MICROSOFT = "com.microsoft"
_GEMM_ATTRIBUTES = ("alpha", "beta", "transA", "transB")
DEFAULTS = {name: default_attribute("", "Gemm", name).value for name in _GEMM_ATTRIBUTES}


@rewrites("Gemm", group=NODES)
def transposed_operand(op, node):
    """Let a Gemm aT b, as in the gradient of a weight, read a transposed copy of a.

    The copy has three axes, as onnxruntime fuses a Transpose of two axes into the Gemm again.
    """
    if (
        not _is_large_weight_gradient(node)
        or _first_operand_nbytes(node, op.target.rows) > MOST_COPIED_BYTES
    ):
        return None
    a, b = node.inputs
    rows = op.dim(a, 1)
    copy = op.Transpose(op.Reshape(a, [1, -1, rows]), perm=[0, 2, 1])
    return [op.Gemm(op.Reshape(copy, [rows, -1]), b)]


@rewrites("MatMul", group=ORDERED)
def product_by_transposed_weight(op, node):
    """Rewrite x Transpose(w), of a weight w, as one FusedMatMul, and x Transpose(Transpose(w)) as
    x w. In a product that is computed again, a Reshape in between waits for a cotangent; w is in
    memory all the time.

    Other sessions leave this to onnxruntime's MatmulTransposeFusion, which would also change the
    order of a step. Without it, memory would hold transposed copies of frozen weights.
    """
    x, factor = node.inputs
    w, transposed = _weight_behind(factor)
    if w is None or w is factor or x.dtype != _FLOAT:
        return None
    if not transposed:
        return [op.MatMul(x, w)]
    op.root.graph.opset_imports[_MICROSOFT] = 1
    return [op.emit("FusedMatMul", [x, w], {"transB": 1}, domain=_MICROSOFT)]


def _weight_behind(x: ir.Value) -> tuple[ir.Value | None, bool]:
    """Return the matrix without a producer from which Transposes, and Reshapes to the shape of
    their operand, compute `x`, and whether `x` is its transpose; None if there is no such matrix.
    """
    transposed = False
    while node := made_by(x, "Transpose", "Reshape"):
        before, shape = node.inputs[0], static(dims(x))
        assert before is not None
        if node.op_type == "Transpose":
            transposed ^= [*node.attributes.get_ints("perm", (1, 0))] == [1, 0]
        elif shape is None or static(dims(before)) != shape:
            break
        x = before
    return (x if x.producer() is None and len(dims(x) or ()) == 2 else None), transposed


def _is_large_weight_gradient(node: ir.Node) -> bool:
    """Return whether `node` is a Gemm aT b of float32, whose result has many rows and columns."""
    if len(node.inputs) != 2 or node.outputs[0].dtype != _FLOAT:
        return False
    columns = [(dims(v) or (0, 0))[1] for v in node.inputs]
    many = all(isinstance(length, int) and length >= LEAST_PRODUCT_LENGTH for length in columns)
    return many and gemm_attributes(node) == DEFAULTS | {"transA": 1}


def _first_operand_nbytes(product: ir.Node, rows: int) -> int:
    """Return the bytes of a Gemm's first operand for a batch of `rows` rows."""
    first, columns = dims(product.inputs[0]) or (1, 1)
    if not isinstance(first, int):
        first = rows * (1 if first is None else coefficient(first)[0])
    return 4 * first * (columns if isinstance(columns, int) else 1)


def gemm_attributes(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a Gemm node by name, absent ones as their defaults."""
    return DEFAULTS | {name: a.value for name, a in node.attributes.items()}
