"""Convolutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.autodiff.rules.windows import (
    Windows,
    at_least_zero,
    halves,
    reach,
    run_time_lengths,
    scatter_windows,
    unified,
    weigh_windows,
    windows_of,
    windows_without_padding,
    with_padding,
)
from onnxgrad.operators.attributes import int_attribute, string_attribute


@rule("Conv")
def conv(op, node, g):
    """y = x * w + b:  dx = g *T w,  dw = x correlated with g,  db = sum g over all but axis 1.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    windows = windows_of(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    group = int_attribute(node, "group")
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
    group = int_attribute(node, "group")
    dx = op.set_type_like(weigh_windows(op, g, w, windows, group), x)
    dw = _weight_gradient(op, g, x, windows, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, windows)


def _weight_gradient(op, x, g, windows: Windows, w, group: int):
    """Return x convolved with g, for each element of the kernel of w.

    Batch and channels are exchanged, and so are strides and dilations.
    """
    swap, pads = [1, 0, *windows.axes], windows.pads
    if pads is None:
        x, pads = with_padding(op, x, windows), [0, 0] * len(windows.axes)
    if group == 1:
        x = op.Transpose(x, perm=swap)
    else:  # (N, group, C / group, ...) -> (C / group, group N, ...)
        space = op.Shape(x, start=2)
        split = op.Reshape(x, op.Concat([0, group, -1], space, axis=0))
        split = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in windows.axes)])
        x = op.Reshape(split, op.Concat([0, -1], space, axis=0))
    exchanged = {"strides": windows.dilations, "dilations": windows.strides}
    y = op.Conv(x, op.Transpose(g, perm=swap), pads=pads, group=group, **exchanged)
    size = list(windows.kernel) or op.Shape(w, start=2)
    # y is longer than the kernel if the last elements of x are in no window
    dw = op.Slice(y, [0] * len(windows.axes), size, windows.axes)
    return op.set_type_like(op.Transpose(dw, perm=swap), w)


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
    auto = string_attribute(node, "auto_pad")
    if not output_shape.size and auto in ("NOTSET", "VALID"):
        pads = np.array(get("pads", (0,) * 2 * n) if auto == "NOTSET" else (0,) * 2 * n, np.int64)
        return replace(windows, begin=pads[:n], end=pads[n:] - beyond)
    extents = reach(op, windows, weight)
    if not output_shape.size:  # the output is as long as the input times the stride
        totals = at_least_zero(op, extents + (added - strides))
        begin, end = halves(op, totals, auto == "SAME_UPPER")
        return replace(windows, begin=begin, end=end - beyond)
    length, extents = unified(op, run_time_lengths(op, node.inputs[0]), extents)
    excess = (length - 1) * strides + extents - output_shape
    begin, _ = halves(op, at_least_zero(op, excess + added), auto == "SAME_UPPER")
    return replace(windows, begin=begin, end=excess - begin)
