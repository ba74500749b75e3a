"""Pooling over windows and over whole channels."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import (
    Answer,
    first_operand,
)
from onnxgrad.operators.distinct import distinct_positions
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.records import declare_operators
from onnxgrad.operators.registry import rule
from onnxgrad.operators.resize import LARGEST_BLOCK
from onnxgrad.operators.rule_nodes import attributes_of, last_writes, output
from onnxgrad.operators.shapes import dims
from onnxgrad.operators.windows import (
    Windows,
    lengths,
    reach,
    scatter_windows,
    tile,
    weigh_windows,
    windows_of,
    with_padding,
)


def _pooled_axis(node: Any, _operand: int, axis: int) -> Answer:
    # the indices of a MaxPool are positions in the whole batch
    return (axis if axis < 2 else None, None)[: len(node.outputs)]


declare_operators(
    "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool",
    axes=first_operand(_pooled_axis),
)


@rule("MaxPool")
def max_pool(op, node, g, g_indices=None):
    """y = max of a window of x:  dx = zeros with g added at the first maximum of each window."""
    (x,), y = node.inputs, node.outputs[0]
    if int_attribute(node, "storage_order"):
        attributes = attributes_of(node) | {"storage_order": 0}
        _, indices = op.emit_many("MaxPool", [x], attributes, outputs=2)
    else:
        indices = output(op, node, 1, ir.DataType.INT64)
    indices.dtype, indices.shape = ir.DataType.INT64, y.shape
    if max(node.attributes.get_ints("dilations", (1,))) > 1:
        # of windows without an element of x, onnxruntime returns the lowest number as the maximum,
        # and an index in another row
        wide = y.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        nonempty = op.Greater(y, np.finfo(y.dtype.numpy()).min if wide else -np.inf)
        g, indices = op.Where(nonempty, g, 0.0), op.Where(nonempty, indices, np.int64(0))
    return (scatter_flat(op, x, indices, g),)


@rule("MaxUnpool")
def max_unpool(op, node, g):
    """y = zeros with x at indices i:  dx = g[i], 0 for all but the last x of the same index.

    Indices are positions in the flattened output, whose shape is `output_shape` if stated, as in
    onnxruntime and PyTorch. In the node case of onnx they refer to the output without it.
    """
    x, indices = node.inputs[:2]
    dx = op.Gather(op.Reshape(g, [-1]), indices, axis=0)
    if not distinct_positions(indices):
        size = op.Reshape(op.Size(g), [1])
        wins = last_writes(op, op.Reshape(indices, [-1]), size)
        dx = op.Where(op.Reshape(wins, op.Shape(indices), allowzero=1), dx, 0.0)
    return op.set_type_like(dx, x), None, None


@rule("AveragePool")
def average_pool(op, node, g):
    """y = mean of a window of x:  dx = g / n added over each window, n the divisor of y."""
    windows = windows_of(op, node)
    return (_sum_windows_adjoint(op, g / _divisor(op, node, windows), windows, node.inputs[0]),)


@rule("LpPool")
def lp_pool(op, node, g):
    """y = (sum over a window of |x|^p)^(1/p):  dx = sign(x) |x|^(p-1) sum of g y^(1-p) over the
    windows of x, 0 where y = 0, the smallest subgradient.
    """
    (x,), windows = node.inputs, windows_of(op, node)
    outer, inner = _slopes_of_norm(op, node)
    return (inner * _sum_windows_adjoint(op, g if outer is None else g * outer, windows, x),)


@rule("GlobalLpPool")
def global_lp_pool(op, node, g):
    """y = (sum over a channel of |x|^p)^(1/p):  dx = g y^(1-p) sign(x) |x|^(p-1), 0 where y = 0,
    the smallest subgradient.
    """
    outer, inner = _slopes_of_norm(op, node)
    return ((g if outer is None else g * outer) * inner,)


def _slopes_of_norm(op, node):
    """Return dy/ds and ds/dx, s the sum of powers, without the factors 1/p and p; None for 1."""
    x, y, p = node.inputs[0], node.outputs[0], int_attribute(node, "p")
    if p == 1:
        return None, op.Sign(x)
    nonzero = op.Greater(y, 0.0)
    outer = op.Where(nonzero, op.Pow(op.Where(nonzero, y, 1.0), float(1 - p)), 0.0)
    return outer, x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), float(p - 1))


def _sum_windows_adjoint(op, g, windows: Windows, x):
    """Return the adjoint of the sum over windows of each channel of x."""
    repeats = x.dtype == ir.DataType.FLOAT and 1 < max(windows.kernel) <= LARGEST_BLOCK
    if repeats and tile(x, windows):  # Resize takes a quarter to 0.8 times as long as below
        scales = op.const(np.array([1, 1, *windows.kernel], np.float32))
        floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return op.set_type_like(op.Resize(g, None, scales, mode="nearest", **floor), x)
    shape = dims(x)
    channels = None if shape is None else shape[1]
    if isinstance(channels, int):
        ones = op.const(np.ones((channels, 1, *windows.kernel), x.dtype.numpy()))
        return op.set_type_like(scatter_windows(op, g, ones, windows, x, group=channels), x)
    ones = op.const(np.ones((1, 1, *windows.kernel), x.dtype.numpy()))
    rows = op.ReduceProd(op.Shape(g, start=0, end=2), [0], keepdims=1)
    flat = op.Reshape(g, op.Concat(rows, [1], op.Shape(g, start=2), axis=0), allowzero=1)
    return op.reshape_like(scatter_windows(op, flat, ones, windows, x), x)


def _divisor(op, node, windows: Windows):
    """Return the divisor of each window: its size, or the number of its elements in the input."""
    (x,), y = node.inputs, node.outputs[0]
    unpadded = windows.pads is not None and not any(windows.pads)
    count_padding = bool(int_attribute(node, "count_include_pad"))
    ceil_mode = bool(int_attribute(node, "ceil_mode")) and max(windows.strides) > 1
    if not ceil_mode and (count_padding or unpadded):
        return float(prod(windows.kernel))
    x_lengths, y_lengths = lengths(x), lengths(y)
    if x_lengths is not None and y_lengths is not None:
        divisor = np.ones((), x.dtype.numpy())
        for i, (m, o) in enumerate(zip(x_lengths, y_lengths, strict=True)):
            starts = np.arange(o) * windows.strides[i] - windows.begin[i]
            positions = starts[:, None] + np.arange(windows.kernel[i]) * windows.dilations[i]
            low, high = (-windows.begin[i], m + windows.end[i]) if count_padding else (0, m)
            inside = ((positions >= low) & (positions < high)).sum(axis=1)
            divisor = divisor[..., None] * inside.astype(divisor.dtype)
        return op.const(divisor)
    # ones at elements that count, zeros up to the end of the last window, summed over windows
    one = x.dtype.numpy().type(1)
    counted = op.Expand(op.const(one), op.Concat([1, 1], op.Shape(x, start=2), axis=0))
    counted = with_padding(op, counted, windows, one if count_padding else None)
    end = op.Sub(op.Shape(y, start=2), 1) * np.array(windows.strides) + reach(op, windows)
    none = np.zeros(len(windows.axes), np.int64)
    last = replace(windows, begin=none, end=end - op.Shape(counted, start=2))
    return weigh_windows(op, counted, op.const(np.ones((1, 1, *windows.kernel), one.dtype)), last)
