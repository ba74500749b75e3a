"""Products of matrices: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from string import ascii_letters
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.axes import OutputAxis, axis_before_matrices
from onnxgrad.operators.member_forms import join_rows, shift_named_axes
from onnxgrad.operators.records import Unsupported, declare_operators, lowering, member_form, rule
from onnxgrad.operators.shapes import (
    Dim,
    Dims,
    UnknownShapeError,
    broadcast,
    broadcast_dim,
    count_bias_additions,
    dims,
    einsum_terms,
    equal,
    rank,
)


def shape_of_matmul(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of a product of matrices, whose axes in front broadcast."""
    a, b = dims(inputs[0]), dims(inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    batch = broadcast(a[:-2], b[:-2])
    return None if batch is None else (*batch, a[-2], b[-1])


def _axis_after_matmul(node: Any, operand: int, axis: int) -> OutputAxis:
    width, ranks = rank(node.outputs[0]), [rank(x) or 0 for x in node.inputs]
    from_end = axis - ranks[operand]
    contracted = from_end == (-1, -2)[operand]
    return None if width is None or min(ranks) < 2 or contracted else width + from_end


def shape_of_gemm(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of a product of two matrices, each of which may be transposed."""
    a, b = dims(inputs[0]), dims(inputs[1])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    return a[1 if attributes.get("transA") else 0], b[0 if attributes.get("transB") else 1]


def _axis_after_gemm(node: Any, operand: int, axis: int) -> OutputAxis:
    if operand == 2:
        return axis + 2 - len(node.inputs[2].shape)
    turned = int_attribute(node, ("transA", "transB")[operand])
    return operand if axis == (operand != turned) else None


def einsum_shape(shapes: Sequence[Dims | None], equation: str) -> Dims | None:
    """Return the shape of an Einsum; axes with the same index, or in an ellipsis, broadcast."""
    terms, output = einsum_terms(equation)
    lengths: dict[str, list[Dim]] = {}
    ellipses: list[Dims | None] = []
    for shape, term in zip(shapes, terms, strict=False):
        head, dots, tail = term.partition("...")
        ends: Dims = (None,) * len(head + tail)
        if shape is not None:
            end = len(shape) - len(tail)
            ends = shape[: len(head)] + shape[end:]
        if dots:
            ellipses.append(None if shape is None else shape[len(head) : end])
        for index, d in zip(head + tail, ends, strict=False):
            lengths.setdefault(index, []).append(d)
    head, dots, tail = output.partition("...")
    middle = broadcast(*ellipses) if dots else ()
    if middle is None:
        return None
    before, after = ([broadcast_dim(lengths.get(i, [None])) for i in part] for part in (head, tail))
    return (*before, *middle, *after)


def _shape_of_einsum(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    return einsum_shape([*map(dims, inputs)], attributes.get("equation", ""))


def _axis_after_einsum(node: Any, operand: int, axis: int) -> OutputAxis:
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if "." in "".join((*terms, output)):
        return None
    letter = terms[operand][axis]
    diagonal = any(term.count(letter) > 1 for term in terms)
    return None if diagonal or letter not in output else output.index(letter)


# -- multiply-adds ---------------------------------------------------------------------------------


def _matmul_macs(node: ir.Node, lengths_of: Callable) -> int:
    return prod(lengths_of(node.outputs[0])) * lengths_of(node.inputs[0])[-1]


def _gemm_macs(node: ir.Node, lengths_of: Callable) -> int:
    inner = lengths_of(node.inputs[0])[0 if node.attributes.get_int("transA", 0) else 1]
    return prod(lengths_of(node.outputs[0])) * inner + count_bias_additions(node, 2, lengths_of)


def _einsum_macs(node: ir.Node, lengths_of: Callable) -> int:
    terms, result = einsum_terms(node.attributes["equation"].as_string())
    if len(terms) < 2:
        return 0
    if "." in "".join([*terms, result]):
        raise UnknownShapeError
    lengths = {
        letter: length
        for term, x in zip(terms, node.inputs, strict=True)
        for letter, length in zip(term, lengths_of(x), strict=True)
    }
    return prod(lengths.values()) * (len(terms) - 1)


declare_operators("Gemm MatMul", "product quantizable", features=(1, -1))
declare_operators(
    "MatMul", roles="f", shape=shape_of_matmul, axes=_axis_after_matmul, work=_matmul_macs
)
declare_operators("Gemm", roles="ffb", shape=shape_of_gemm, axes=_axis_after_gemm, work=_gemm_macs)
declare_operators("MatMulInteger", "product", features=(1, -1), work=_matmul_macs)
declare_operators("QLinearMatMul", "product", features=(3, -1), work=_matmul_macs)
declare_operators(
    "Einsum", roles="f", shape=_shape_of_einsum, axes=_axis_after_einsum, work=_einsum_macs
)
declare_operators("Det", axes=axis_before_matrices, members=shift_named_axes)
declare_operators("SwiGLU", roles="f")


# -- gradients -------------------------------------------------------------------------------------

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
    left, right, g = _as_stacks_of_matrices(op, a, b, g)
    da = op.sum_to(op.MatMul(g, op.mT(right)), left)
    db = op.sum_to(op.MatMul(op.mT(left), g), right)
    return op.reshape_like(da, a), op.reshape_like(db, b)


def _as_stacks_of_matrices(op, a, b, g):
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

    def scaled_gemm(left, right, **transposed):
        return op.Gemm(left, right, alpha=alpha, **transposed)

    da = scaled_gemm(b, g, transA=tb, transB=1) if ta else scaled_gemm(g, b, transB=1 - tb)
    db = scaled_gemm(g, a, transA=1, transB=ta) if tb else scaled_gemm(a, g, transA=1 - ta)
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
    terms, output = _replace_ellipsis(node.inputs, terms, output)
    return [_einsum_gradient(op, node.inputs, terms, k, g, output) for k in range(len(terms))]


def _replace_ellipsis(xs, terms, output):
    """Return the terms of an Einsum with letters in place of the ellipsis, if the ranks are static.

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


def _einsum_gradient(op, xs, terms, k, g, output):
    """Return the gradient of an Einsum w.r.t. its operand `k`."""
    x, term, letters = xs[k], terms[k], terms[k].replace(DOTS, "")
    if 0 in (dims(x) or ()):  # onnxruntime's Einsum and Expand are wrong for empty tensors
        return op.zeros_like(x)
    # with the ellipsis at the front, all other axes can be counted from the end
    if DOTS in term[1:]:
        x, back = _move_ellipsis_first(op, x, term)
        xs, terms = [*xs[:k], x, *xs[k + 1 :]], [*terms[:k], DOTS + letters, *terms[k + 1 :]]
        return op.Einsum(_einsum_gradient(op, xs, terms, k, g, output), equation=back)
    others, sources = [*xs[:k], *xs[k + 1 :]], [output, *terms[:k], *terms[k + 1 :]]
    kept = [c for c in dict.fromkeys(letters) if c in "".join(sources)]
    target = (DOTS if DOTS in output else "") + "".join(kept)
    dx = g
    if sources != [target]:
        dx = op.Einsum(g, *others, equation=f"{','.join(sources)}->{target}")
    new = [i for i, c in enumerate(letters) if c not in kept or letters.index(c) < i]
    if new:
        dx = op.Unsqueeze(dx, [i - len(letters) for i in new])
        dx = _zero_off_diagonals(op, dx, x, letters)
    full = broadcast(dims(dx), dims(x))
    if not equal(dims(dx), full):
        dx = op.Expand(dx, op.shape_of(x))
        dx.shape = None if full is None else ir.Shape(full)
    return op.sum_to(dx, x)


def _move_ellipsis_first(op, x, term):
    """Return x with the axes of its ellipsis first, and the equation that moves them back."""
    head, _, tail = term.partition(DOTS)
    names = ascii_letters[: len(head + tail)]
    original, front = names[: len(head)] + DOTS + names[len(head) :], DOTS + names
    return op.Einsum(x, equation=f"{original}->{front}"), f"{front}->{original}"


def _zero_off_diagonals(op, dx, x, letters):
    """Return dx where all axes of x with the same letter have the same index, else zero."""

    def axis_positions(axis):
        line = op.arange(op.dim(x, axis))
        return op.Unsqueeze(line, list(range(1, -axis))) if axis < -1 else line

    for i, c in enumerate(letters):
        first = letters.index(c)
        if first < i:
            same = op.Equal(*(axis_positions(axis - len(letters)) for axis in (first, i)))
            dx = op.Where(same, dx, 0.0)
    return dx


@lowering("MatMul")
def lower_vector_product(op: Any, node: ir.Node) -> list[ir.Value] | None:
    """Return the product of a matrix and a vector, or of two vectors, by a MatMul of matrices."""
    a, b = node.inputs
    if 1 not in (rank(a), rank(b)) or None in (rank(a), rank(b)):
        return None
    return [matrix_product(op, a, b)]


def matrix_product(op: Any, a: Any, b: Any) -> ir.Value:
    """Return the product of two matrices or vectors."""
    axes = [-2] * (rank(a) == 1) + [-1] * (rank(b) == 1)
    y = op.MatMul(
        op.Unsqueeze(a, [0]) if rank(a) == 1 else a, op.Unsqueeze(b, [1]) if rank(b) == 1 else b
    )
    return op.Squeeze(y, axes) if axes else y


# -- members ---------------------------------------------------------------------------------------


@member_form("MatMul")
def write_matmul_for_members(m, node):
    """Write one MatMul for all members of a `TrainerStack`; with matrices on the right, all rows of
    a member are one matrix.
    """
    op, (a, b) = m.op, node.inputs
    n, width, x, y = rank(a) or 0, rank(b) or 0, m.value_for(a), m.value_for(b)
    if b not in m and n and width in (1, 2):
        result = op.MatMul(x, y)
    elif min(n, width) < 2:
        return None
    elif width == 2 and n > 2:
        inner, lead = op.dim(y, 2), [m.count] if a in m else []
        rows = [op.dim(x, i + len(lead)) for i in range(n - 1)]
        flat = op.Reshape(x, op.vector(*lead, -1, op.dim(y, 1)))
        front = [m.length] if a in m else []
        flat.type, flat.shape = a.type, ir.Shape([*front, None, (dims(a) or ())[-1]])
        result = op.Reshape(op.MatMul(flat, y), op.vector(m.count, *rows, inner))
    else:
        result = op.MatMul(*(m.aligned_value(v, max(n, width)) for v in (a, b)))
    return [m.set_member_type(result, node.outputs[0])]


@member_form("Gemm")
def write_gemm_for_members(m, node):
    """Write one MatMul for all members of a `TrainerStack` in place of a Gemm, with its factors and
    its added matrix.
    """
    op, (a, b, c) = m.op, (*node.inputs, None)[:3]
    if m.shares_operands([b, c]) and not int_attribute(node, "transA") and (rank(c) or 0) < 2:
        return join_rows(m, node)
    alpha, beta = (float_attribute(node, name) for name in ("alpha", "beta"))
    factors = [
        op.mT(m.value_for(v)) if int_attribute(node, name) else m.value_for(v)
        for v, name in ((a, "transA"), (b, "transB"))
    ]
    result = m.set_member_type(op.MatMul(*factors), node.outputs[0])
    if alpha != 1:
        result = m.set_member_type(result * alpha, node.outputs[0])
    if c is not None and beta != 0:
        added = m.aligned_value(c, 2)
        result = m.set_member_type(result + (added if beta == 1 else added * beta), node.outputs[0])
    return [result]


@member_form("Einsum")
def write_einsum_for_members(m, node):
    """Write one Einsum for all members of a `TrainerStack`, with a new letter for the axis of
    members.
    """
    terms, output = einsum_terms(string_attribute(node, "equation"))
    used = "".join((*terms, output))
    letter = next((c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in used), None)
    if "." in used or letter is None:
        return None
    pairs = zip(terms, node.inputs, strict=True)
    new = [f"{letter}{t}" if x in m else t for t, x in pairs]
    equation = f"{','.join(new)}->{letter}{output}"
    return m.write_node(node, m.values_for(node.inputs), equation=equation)
