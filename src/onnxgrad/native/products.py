"""Rewrites of matrix products whose operands are transposed, or of few rows."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.native.single_nodes import NODES, PLAIN
from onnxgrad.operators import made_by
from onnxgrad.operators.attributes import default_attribute, int_attribute
from onnxgrad.operators.shapes import Dim, coefficient, constant, dims, equal, static

ORDERED = "native.ordered"  # the group of rewrites of steps whose nodes keep their order

# Rows and columns of aT b from which a transposed copy of a pays: the kernel transposes a anew for
# every 128 columns. Measured with 1 thread: 0.73-0.88 of the time of these products, 0.93-0.96 of a
# step of an MLP; no difference for encoders, whose products have fewer rows or columns.
LEAST_PRODUCT_LENGTH = 512
MOST_COPIED_BYTES = 1 << 25  # bytes of the transposed copy
# Rows of x between which x wT pays as (w xT)T, for a matrix w of LEAST_FACTOR elements or more. On
# an Intel Xeon with AVX-512, the product then takes 0.45-0.93 of the time with 1 thread and
# 0.62-0.93 with 2; with 1 or 4 rows, or with 128, it may take longer.
FEW_ROWS = range(8, 65)
LEAST_FACTOR = 1 << 18
# Rows that fill whole vectors of the kernel pay from fewer elements: 0.71-0.88, and 0.53-1.02.
VECTOR_ROWS = (16, 32)
LEAST_VECTOR_FACTOR = 1 << 16
# Elements of k b from which a Gemm multiplies by the number k itself: smaller products are left to
# the rewrites of the loop over batches.
LEAST_SCALED_ELEMENTS = 1 << 15

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


@rewrites("Gemm", group=PLAIN)
def number_as_alpha(op, node):
    """Let a Gemm a (k b), as in the gradient of a weight behind a GELU, multiply by the number k.

    onnxruntime does so for a MatMul; a Gemm would read k b, for which k b must be in memory.
    """
    for i, x in enumerate(node.inputs[:2]):
        view = made_by(x, "Reshape")
        y = x if view is None else view.inputs[0]
        b, k = _match_number_factor(y)
        if b is None or (view is not None and int_attribute(view, "allowzero")):
            continue
        size = prod(_length_in_batch(d, op.target.rows) for d in dims(b) or ())
        if size >= LEAST_SCALED_ELEMENTS and node.outputs[0].dtype == _FLOAT:
            operands, attributes = list(node.inputs), gemm_attributes(node)
            operands[i] = b if view is None else op.set_type_like(op.Reshape(b, view.inputs[1]), x)
            return [op.Gemm(*operands, **attributes | {"alpha": attributes["alpha"] * k})]
    return None


def _match_number_factor(y: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Return (x, k) if `y` = k x, of the shape of x, for a number k; else (None, 1)."""
    node = made_by(y, "Mul")
    for x, number in () if node is None else (node.inputs, node.inputs[::-1]):
        k = constant(number)
        if k is not None and k.size == 1 and x is not None and equal(dims(x), dims(y)):
            return x, float(k.item())
    return None, 1.0


@rewrites("MatMul", "Gemm", group=PLAIN)
def product_of_few_rows(op, node):
    """Rewrite x wT + c, of few rows x and a large matrix w, as (w xT)T + c.

    The kernel copies its second factor into blocks in each call, which takes as long as the product
    with a few rows; the first factor is read in place. A constant it copies once, in the session.
    """
    y, (x, _, c) = node.outputs[0], (*node.inputs, None)[:3]
    w = _transposed_factor(node)
    if w is None or w.is_initializer() or x.dtype != _FLOAT or len(dims(x) or ()) != 2:
        return None
    lengths, first = static(dims(w)), (dims(x) or (None,))[0]
    if lengths is None or len(lengths) != 2 or first is None:
        return None
    if not _is_product_of_few_rows(_length_in_batch(first, op.target.rows), prod(lengths)):
        return None
    op.root.graph.opset_imports[_MICROSOFT] = 1
    columns = op.emit("FusedMatMul", [w, x], {"transB": 1}, domain=_MICROSOFT)
    columns.type, columns.shape = y.type, ir.Shape([lengths[0], first])
    product = op.Transpose(columns, perm=[1, 0])
    return [product if c is None else op.Add(op.set_type_like(product, y), c)]


def _is_product_of_few_rows(rows: int, factor_elements: int) -> bool:
    """Return whether it pays to multiply the matrix by a few rows, and not the rows by it."""
    if rows in VECTOR_ROWS and factor_elements >= LEAST_VECTOR_FACTOR:
        return True
    return rows in FEW_ROWS and factor_elements >= LEAST_FACTOR


def _transposed_factor(product: ir.Node) -> ir.Value | None:
    """Return w if a MatMul or Gemm computes x wT, perhaps plus c; else None."""
    if product.op_type == "Gemm":
        attributes = gemm_attributes(product)
        if attributes == DEFAULTS | {"transB": 1}:
            return product.inputs[1]
        if attributes != DEFAULTS:
            return None
    node = made_by(product.inputs[1], "Transpose")
    if node is None or [*node.attributes.get_ints("perm", (1, 0))] != [1, 0]:
        return None
    return node.inputs[0]


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
    return 4 * _length_in_batch(first, rows) * (columns if isinstance(columns, int) else 1)


def _length_in_batch(length: Dim, rows: int) -> int:
    """Return a length as an int; a symbol or an unknown length counts as a batch of `rows` rows."""
    if isinstance(length, int):
        return length
    return rows * (1 if length is None else coefficient(length)[0])


@rewrites("ReduceSum", group=PLAIN)
def sum_over_rows_as_product(op, node):
    """Rewrite the sum of x over all axes but the last as a product 1T x, on several threads.

    On two threads, onnxruntime's ReduceSum of (4, 65, 192) takes 50 us, and the product 4 us; on
    one thread, they take 5 and 3 us. A matrix is left to the rewrites of the loop over batches.
    """
    x, shape, sizes = node.inputs[0], dims(node.inputs[0]), static(dims(node.outputs[0]))
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if op.target.threads == 1 or x.dtype != _FLOAT or shape is None or len(shape) < 3:
        return None
    if axes is None or sizes is None or not isinstance(shape[-1], int):
        return None
    if sorted(axis % len(shape) for axis in axes.tolist()) != list(range(len(shape) - 1)):
        return None
    ones = op.Expand(np.ones((1, 1), np.float32), op.vector(1, op.numel(x, 0, -1)))
    return [op.Reshape(op.MatMul(ones, op.Reshape(x, [-1, shape[-1]])), sizes)]


def gemm_attributes(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a Gemm node by name, absent ones as their defaults."""
    return DEFAULTS | {name: a.value for name, a in node.attributes.items()}
