"""Gradients that are zeros with numbers added at indices: of tables, labels and maxima."""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.forms.arithmetic import GRADIENT, has_one_reader
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by, marks
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import dims, equal, rank, static
from onnxgrad.operators.windows import padded_windows, spatial_lengths, windows_partition


def _match_scatter_into_zeros(op: Any, v: ir.Value) -> ir.Node | None:
    """Return the ScatterElements node that computes `v` by adding numbers to zeros, or None."""
    node = made_by(v, "ScatterElements")
    if node is None or string_attribute(node, "reduction") != "add":
        return None
    zeros = made_by(node.inputs[0], "Expand")
    return node if zeros is not None and op.is_all(zeros.inputs[0], 0) else None


@rewrites("Add", group=GRADIENT)
def scatter_into_sum(op, node):
    """x + scatter(0, i, u) = scatter(x, i, u), where scatter adds u at the indices i.

    So is the gradient of a table that is read by rows, and as a matrix. Zeros would be as large.
    """
    for x, y in (node.inputs, node.inputs[::-1]):
        added = _match_scatter_into_zeros(op, y)
        if added is None or not (op.is_own(node) and op.is_own(added) and has_one_reader(y)):
            continue
        exact = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and static(dims(x)) is not None
        if exact and dims(x) == dims(y) == dims(node.outputs[0]):
            return [op.ScatterElements(x, *added.inputs[1:], **attributes_of(added))]
    return None


@rewrites("Sub", group=GRADIENT)
def scatter_into_softmax(op, node):
    """g - e^y sum(g) = scatter(-e^y sum(u), i, u), where g is zero but for u, added at indices i.

    This is the gradient of a LogSoftmax, i the index of the label of each row.
    """
    g, product = node.inputs[0], made_by(node.inputs[1], "Mul")
    label = _match_one_index_per_row(op, g) if product else None
    if product is None or label is None:
        return None
    (i, u, axis), factors = label, product.inputs
    for shares, total in (factors, factors[::-1]):
        # not broadcast: rules write operands of one shape; a stack of members adds an axis to some
        one_shape = equal(dims(shares), dims(g)) or (op.is_own(node) and rank(shares) == rank(g))
        if one_shape and _is_sum_along_axis(op, total, g, axis):
            others = op.Mul(shares, op.Neg(op.ReduceSum(u, [axis], keepdims=1)))
            return [op.ScatterElements(others, i, u, axis=axis, reduction="add")]
    return None


def _match_one_index_per_row(op, g):
    """Return (i, u, axis) if `g` is zero but for u, added along `axis` at one index of i in each
    row; else None.
    """
    node, n = _match_scatter_into_zeros(op, g), rank(g)
    if node is None or n is None:
        return None
    (_, i, u), axis = node.inputs, int_attribute(node, "axis") % n
    rows, labels = list(dims(g) or ()), list(dims(i) or (None,) * n)
    rows[axis] = labels[axis] = 1  # i must have an index for every row of g
    return (i, u, axis) if equal(tuple(rows), tuple(labels)) else None


def _is_sum_along_axis(op, total, g, axis):
    """Return whether `total` is the sum of `g` along `axis`, with keepdims=1."""
    node = made_by(total, "ReduceSum")
    if node is None or node.inputs[0] is not g:
        return False
    axes = op.known_value(node.inputs[1]) if len(node.inputs) > 1 else None
    kept = bool(int_attribute(node, "keepdims"))
    return kept and axes is not None and [int(a) % len(dims(g) or ()) for a in axes] == [axis]


@rewrites("Reshape", group=GRADIENT)
def unpool_maxima(op, node):
    """Zeros with g added at the maxima of pooling windows = MaxUnpool(g), where the windows tile x.

    Zeros for other windows have the rows of g, so that no runtime stores them, or asks for a size.
    """
    scatter, dx = _match_scatter_into_zeros(op, node.inputs[0]), node.outputs[0]
    flat = [] if scatter is None else scatter.inputs[1:]
    reshapes = [r for v in flat if (r := made_by(v, "Reshape")) is not None and rank(v) == 1]
    if len(reshapes) < max(len(flat), 1):
        return None
    i, g = (reshape.inputs[0] for reshape in reshapes)
    maxima = where.inputs[1] if (where := made_by(i, "Where")) else i
    pool = made_by(maxima, "MaxPool")
    if pool is None or int_attribute(pool, "storage_order") != 0:
        return None
    x = pool.inputs[0]
    rows = [(dims(v) or ())[1:] for v in (dx, x, g, i)]  # g and i have the same lengths
    if spatial_lengths(x) is None or not equal(*rows[:2]) or not equal(*rows[2:]):
        return None
    windows: Any = padded_windows(op, pool)
    (row, count), new = map(static, rows[1:3]), None
    if windows_partition(x, windows) and i is maxima and dx.dtype == ir.DataType.FLOAT:
        new = op.MaxUnpool(g, i, kernel_shape=windows.kernel, strides=windows.strides)
    elif row and count:
        empty = op.Slice(op.Reshape(g, [-1, prod(count)]), [0], [0], [1])
        zeros = op.Pad(empty, [0, 0, 0, prod(row)])
        sums = op.ScatterElements(op.Reshape(zeros, [-1]), *flat, axis=0, reduction="add")
        new = op.Reshape(sums, [-1, *row])
    pool.outputs[0].meta[marks.POOL_GRADIENT] = new or dx, g
    return None if new is None else [new]
