"""Pooling over windows and over whole channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import OutputAxes, only_first_operand
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.outputs import range_of_first
from onnxgrad.operators.records import declare_operators, lowering, rule
from onnxgrad.operators.rule_nodes import (
    attributes_of,
    distinct_positions,
    is_last_write,
    node_output,
)
from onnxgrad.operators.shapes import Dims, dims, static
from onnxgrad.operators.windows import (
    Windows,
    padded_windows,
    scatter_windows,
    spatial_lengths,
    weigh_windows,
    window_extents,
    with_padding,
)


def _axis_after_pool(node: Any, _operand: int, axis: int) -> OutputAxes:
    # the indices of a MaxPool are positions in the whole batch
    return (axis if axis < 2 else None, None)[: len(node.outputs)]


def _ceil_mode_windows(
    lengths: Sequence[int], attributes: Mapping[str, Any]
) -> CeilModeWindows | None:
    """Return the windows of a pool in `ceil_mode`; None without it, or with `auto_pad`.

    A window that would start in the end padding is not computed, though onnx before opset 22 counts
    it.
    """
    n = len(lengths)
    automatic = attributes.get("auto_pad", "NOTSET") != "NOTSET"
    if not attributes.get("ceil_mode", 0) or automatic:
        return None
    kernel, strides, dilations = (
        np.array(attributes.get(name, (1,) * n))
        for name in ("kernel_shape", "strides", "dilations")
    )
    begin, end = np.array(attributes.get("pads", (0,) * 2 * n)).reshape(2, n)
    beyond = np.array(lengths) + begin + end - (kernel - 1) * dilations - 1
    dropped = -(-beyond // strides) * strides >= np.array(lengths) + begin
    return CeilModeWindows(
        -(-beyond // strides) + 1 - dropped, dropped, beyond % strides, begin, end
    )


class CeilModeWindows(NamedTuple):
    """Counts of the windows of a pool in `ceil_mode`: one number for each spatial axis.

    Attributes:
        number: how many there are.
        dropped: whether one more would start in the end padding.
        left: how many elements are behind the last full window.
        begin, end: the padding.
    """

    number: np.ndarray
    dropped: np.ndarray
    left: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def _shape_of_pool(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the result of a pool in `ceil_mode`; None without it, as onnx infers that
    right.
    """
    shape = dims(inputs[0])
    spatial = None if shape is None else static(shape[2:])
    windows = None if spatial is None else _ceil_mode_windows(spatial, attributes)
    return None if windows is None or shape is None else (*shape[:2], *windows.number.tolist())


_POOLED = only_first_operand(_axis_after_pool)

declare_operators("AveragePool LpPool MaxPool", "aligned", shape=_shape_of_pool, axes=_POOLED)
declare_operators("MaxPool", straight_through=(0,), value_range=range_of_first)
declare_operators("GlobalAveragePool GlobalLpPool GlobalMaxPool", "aligned", axes=_POOLED)
declare_operators("GlobalAveragePool", "moments", value_range=range_of_first)
declare_operators("GlobalMaxPool", value_range=range_of_first)


@lowering("AveragePool", "LpPool", "MaxPool")
def lower_ceil_mode(op, node):
    """Set the pads of a pool in `ceil_mode`, or slice its input, so that exactly its windows are
    read.

    Older runtimes count a window that would start in the end padding in the shape of the result.
    """
    spatial = spatial_lengths(node.inputs[0])
    windows = None if spatial is None else _ceil_mode_windows(spatial, attributes_of(node))
    if windows is None or not windows.dropped.any():
        return None
    dropped, needed = windows.dropped, windows.end - windows.left  # the end padding that is read
    if any(y.uses() or y.is_graph_output() for y in node.outputs[1:]) and (needed < 0).any():
        return None  # indices are positions in the whole input, which a Slice changes
    if (dropped | (windows.left == 0)).all():
        node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        return node.outputs
    ends = np.where(dropped, np.maximum(needed, 0), windows.end)
    pads = [*windows.begin.tolist(), *ends.tolist()]
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    unread = np.where(dropped, np.minimum(needed, 0), 0)  # -1 for one element at the end
    if unread.any():
        axes = np.flatnonzero(unread)
        x = op.Slice(node.inputs[0], [0] * len(axes), unread[axes], axes + 2)
        node.replace_input_with(0, x)
    return node.outputs


@rule("MaxPool")
def max_pool(op, node, g, g_indices=None):
    """y = max of a window of x:  dx = zeros with g added at the first maximum of each window."""
    (x,), y = node.inputs, node.outputs[0]
    if int_attribute(node, "storage_order"):
        attributes = attributes_of(node) | {"storage_order": 0}
        _, indices = op.emit_many("MaxPool", [x], attributes, outputs=2)
    else:
        indices = node_output(op, node, 1, ir.DataType.INT64)
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
        wins = is_last_write(op, op.Reshape(indices, [-1]), size)
        dx = op.Where(op.Reshape(wins, op.Shape(indices), allowzero=1), dx, 0.0)
    return op.set_type_like(dx, x), None, None


@rule("AveragePool")
def average_pool(op, node, g):
    """y = mean of a window of x:  dx = g / n added over each window, n the divisor of y."""
    windows = padded_windows(op, node)
    shares = g / _window_divisor(op, node, windows)
    return (_adjoint_of_window_sum(op, shares, windows, node.inputs[0]),)


@rule("LpPool")
def lp_pool(op, node, g):
    """y = (sum over a window of |x|^p)^(1/p):  dx = sign(x) |x|^(p-1) sum of g y^(1-p) over the
    windows of x, 0 where y = 0, the smallest subgradient.
    """
    (x,), windows = node.inputs, padded_windows(op, node)
    shares, inner = _lp_norm_slopes(op, node, g)
    return (inner * _adjoint_of_window_sum(op, shares, windows, x),)


@rule("GlobalLpPool")
def global_lp_pool(op, node, g):
    """y = (sum over a channel of |x|^p)^(1/p):  dx = g y^(1-p) sign(x) |x|^(p-1), 0 where y = 0,
    the smallest subgradient.
    """
    shares, inner = _lp_norm_slopes(op, node, g)
    return (shares * inner,)


def _lp_norm_slopes(op, node, g):
    """Return g dy/ds and ds/dx, y = s^(1/p), s the sum of |x|^p, without the factors 1/p and p."""
    x, y, p = node.inputs[0], node.outputs[0], int_attribute(node, "p")
    if p == 1:
        return g, op.Sign(x)
    nonzero = op.Greater(y, 0.0)
    outer = op.Where(nonzero, op.Pow(op.Where(nonzero, y, 1.0), float(1 - p)), 0.0)
    inner = x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), float(p - 1))
    return g * outer, inner


def _adjoint_of_window_sum(op, g, windows: Windows, x):
    """Return the adjoint of the sum over windows of each channel of x."""
    shape = dims(x)
    channels = None if shape is None else shape[1]
    if isinstance(channels, int):
        ones = op.const(np.ones((channels, 1, *windows.kernel), x.dtype.numpy()))
        return op.set_type_like(scatter_windows(op, g, ones, windows, x, group=channels), x)
    ones = op.const(np.ones((1, 1, *windows.kernel), x.dtype.numpy()))
    rows = op.ReduceProd(op.Shape(g, start=0, end=2), [0], keepdims=1)
    flat = op.Reshape(g, op.Concat(rows, [1], op.Shape(g, start=2), axis=0), allowzero=1)
    if (counts := dims(g)) is not None:
        flat.shape = ir.Shape([None, 1, *counts[2:]])
    return op.reshape_like(scatter_windows(op, flat, ones, windows, x), x)


def _window_divisor(op, node, windows: Windows):
    """Return the divisor of each window: its size, or the number of its elements in the input."""
    (x,), y = node.inputs, node.outputs[0]
    unpadded = windows.pads is not None and not any(windows.pads)
    count_padding = bool(int_attribute(node, "count_include_pad"))
    ceil_mode = bool(int_attribute(node, "ceil_mode")) and max(windows.strides) > 1
    if not ceil_mode and (count_padding or unpadded):
        return float(prod(windows.kernel))
    x_lengths, y_lengths = spatial_lengths(x), spatial_lengths(y)
    if x_lengths is not None and y_lengths is not None:
        divisor = np.ones((), x.dtype.numpy())
        for i, (m, o) in enumerate(zip(x_lengths, y_lengths, strict=True)):
            starts = np.arange(o) * windows.strides[i] - windows.begin[i]
            positions = starts[:, None] + np.arange(windows.kernel[i]) * windows.dilations[i]
            low, high = (-windows.begin[i], m + windows.end[i]) if count_padding else (0, m)
            inside = ((positions >= low) & (positions < high)).sum(axis=1)
            divisor = divisor[..., None] * inside.astype(divisor.dtype)
        return op.const(divisor)
    # sum over windows: ones at elements that count, zeros from there to the end of the last window
    one = x.dtype.numpy().type(1)
    counted = op.Expand(op.const(one), op.Concat([1, 1], op.Shape(x, start=2), axis=0))
    counted = with_padding(op, counted, windows, one if count_padding else None)
    end = op.Sub(op.Shape(y, start=2), 1) * np.array(windows.strides) + window_extents(op, windows)
    none = np.zeros(len(windows.axes), np.int64)
    last = replace(windows, begin=none, end=end - op.Shape(counted, start=2))
    return weigh_windows(op, counted, op.const(np.ones((1, 1, *windows.kernel), one.dtype)), last)
