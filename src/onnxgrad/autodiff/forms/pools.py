"""Gradients of MaxPool."""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.forms.group import GRADIENT, is_zero
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by, marks
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.shapes import dims, equal, rank, static
from onnxgrad.operators.windows import lengths, tile, windows_of


@rewrites("Reshape", group=GRADIENT)
def unpool(op, node):
    """Zeros with g added at the maxima of windows = MaxUnpool(g), where windows tile x.

    Zeros for other windows have the rows of g, so that no runtime stores them, or asks for a size.
    """
    scatter, dx = made_by(node.inputs[0], "ScatterElements"), node.outputs[0]
    if scatter is None:
        return None
    zeros, *flat = scatter.inputs
    adds = is_zero(op, zeros) and string_attribute(scatter, "reduction") == "add"
    reshapes = [r for v in flat if (r := made_by(v, "Reshape")) is not None and rank(v) == 1]
    if not adds or len(reshapes) < len(flat):
        return None
    i, g = (reshape.inputs[0] for reshape in reshapes)
    maxima = where.inputs[1] if (where := made_by(i, "Where")) else i
    pool = made_by(maxima, "MaxPool")
    if pool is None or int_attribute(pool, "storage_order") != 0:
        return None
    x = pool.inputs[0]
    rows = [(dims(v) or ())[1:] for v in (dx, x, g, i)]  # those of g and i are as many
    if lengths(x) is None or not equal(*rows[:2]) or not equal(*rows[2:]):
        return None
    windows: Any = windows_of(op, pool)
    (row, count), new = map(static, rows[1:3]), None
    if tile(x, windows) and i is maxima and dx.dtype == ir.DataType.FLOAT:
        new = op.MaxUnpool(g, i, kernel_shape=windows.kernel, strides=windows.strides)
    elif row and count:
        empty = op.Slice(op.Reshape(g, [-1, prod(count)]), [0], [0], [1])
        zeros = op.Pad(empty, [0, 0, 0, prod(row)])
        sums = op.ScatterElements(op.Reshape(zeros, [-1]), *flat, axis=0, reduction="add")
        new = op.Reshape(sums, [-1, *row])
    pool.outputs[0].meta[marks.POOL_GRADIENT] = new or dx, g
    return None if new is None else [new]
