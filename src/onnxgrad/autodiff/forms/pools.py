"""Gradients of MaxPool."""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.forms.group import GRADIENT, is_result_of, is_zero
from onnxgrad.autodiff.rules.windows import lengths, tile, windows_of
from onnxgrad.graph.operators import POOL_GRADIENT
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import dims, equal, rank, static


@rewrites("Reshape", group=GRADIENT)
def unpool(op, node):
    """Zeros with g added at the maxima of windows = MaxUnpool(g), where windows tile x.

    Zeros for other windows have the rows of g, so that no runtime stores them, or asks for a size.
    """
    scatter, dx = node.inputs[0].producer(), node.outputs[0]
    if not is_result_of(node.inputs[0], "ScatterElements"):
        return None
    zeros, *flat = scatter.inputs
    adds = is_zero(op, zeros) and scatter.attributes.get_string("reduction", "none") == "add"
    if not adds or not all(is_result_of(v, "Reshape") and rank(v) == 1 for v in flat):
        return None
    i, g = (v.producer().inputs[0] for v in flat)
    maxima = i.producer().inputs[1] if is_result_of(i, "Where") else i
    pool = maxima.producer()
    if not is_result_of(maxima, "MaxPool") or pool.attributes.get_int("storage_order", 0):
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
    pool.outputs[0].meta[POOL_GRADIENT] = new or dx, g
    return None if new is None else [new]
