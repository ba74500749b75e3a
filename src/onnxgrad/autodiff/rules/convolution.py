"""Convolutions."""

from __future__ import annotations

import numpy as np

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.autodiff.rules.correlation import correlate
from onnxgrad.autodiff.rules.windows import (
    Windows,
    at_least_zero,
    halves,
    padded,
    reach,
    run_time_lengths,
    scatter_windows,
    unified,
    weigh_windows,
    windows_of,
    windows_without_padding,
)
from onnxgrad.graph.operators import WEIGHT_GRADIENT


@rule("Conv")
def conv(op, node, g):
    """y = x * w + b:  dx = g *T w,  dw = x correlated with g,  db = sum g over all but axis 1.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    windows = windows_of(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    group = node.attributes.get_int("group", 1)
    dx = op.set_type_like(scatter_windows(op, g, w, windows, x, group), x)
    dw = _weight_gradient(op, x, g, windows, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, windows)


@rule("ConvTranspose")
def conv_transpose(op, node, g):
    """y = x *T w + b:  dx = g * w,  dw = g correlated with x,  db = sum g over all but
    axis 1.
    """
    x, w, b = (*node.inputs, None)[:3]
    windows = _transposed_windows(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    group = node.attributes.get_int("group", 1)
    dx = op.set_type_like(weigh_windows(op, g, w, windows, group), x)
    dw = _weight_gradient(op, g, x, windows, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, windows)


def _weight_gradient(op, x, g, windows: Windows, w, group: int):
    """Return the gradient of w, with a note of what it is for another form of the same."""
    dw = correlate(op, x, g, windows, w, group)
    dw.meta[WEIGHT_GRADIENT] = (x, g, windows, group)
    return dw


def _per_channel(op, g, windows: Windows):
    return op.ReduceSum(g, [0, *windows.axes], keepdims=0)


def _transposed_windows(op, node, weight) -> Windows | Unsupported:
    """Return the windows of the convolution whose adjoint a ConvTranspose is.

    They lie on the output of the node, one for each spatial position of its input.
    """
    windows = windows_without_padding(op, node, weight)
    if isinstance(windows, Unsupported):
        return windows
    n, get = len(windows.strides), node.attributes.get_ints
    strides = np.array(windows.strides)
    added = np.array(get("output_padding", (0,) * n), np.int64)
    beyond = np.where(added < strides, 0, added)  # from a stride on: room for one more window
    output_shape = np.array(get("output_shape", ())[-n:], np.int64)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if not output_shape.size and auto in ("NOTSET", "VALID"):
        pads = np.array(get("pads", (0,) * 2 * n) if auto == "NOTSET" else (0,) * 2 * n, np.int64)
        return padded(windows, pads[:n], pads[n:] - beyond)
    extents = reach(op, windows, weight)
    if not output_shape.size:  # the output is as long as the input times the stride
        totals = at_least_zero(op, extents + (added - strides))
        begin, end = halves(op, totals, auto == "SAME_UPPER")
        return padded(windows, begin, end - beyond)
    length, extents = unified(op, run_time_lengths(op, node.inputs[0]), extents)
    excess = (length - 1) * strides + extents - output_shape
    begin, _ = halves(op, at_least_zero(op, excess + added), auto == "SAME_UPPER")
    return padded(windows, begin, excess - begin)
