"""Convolutions."""

from __future__ import annotations

import numpy as np

from onnxgrad.autodiff.rules.registry import Unsupported, rule
from onnxgrad.autodiff.rules.windows import (
    Windows,
    alike,
    at_least_zero,
    correlate,
    halves,
    opened,
    padded,
    reach,
    run_time_lengths,
    scatter_windows,
    weigh_windows,
    windows,
)


@rule("Conv")
def conv(op, node, g):
    """y = x * w + b:  dx = g *T w, dw = x correlated with g, db = sum g over all but channels.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    where = windows(op, node, w)
    if isinstance(where, Unsupported):
        return where
    group = node.attributes.get_int("group", 1)
    dx = op.set_type_like(scatter_windows(op, g, w, where, x, group), x)
    dw = correlate(op, x, g, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, where)


@rule("ConvTranspose")
def conv_transpose(op, node, g):
    """y = x *T w + b:  dx = g * w, dw = g correlated with x, db = sum g over all but channels."""
    x, w, b = (*node.inputs, None)[:3]
    where = _transposed_windows(op, node, w)
    if isinstance(where, Unsupported):
        return where
    group = node.attributes.get_int("group", 1)
    dx = op.set_type_like(weigh_windows(op, g, w, where, group), x)
    dw = correlate(op, g, x, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, where)


def _per_channel(op, g, where: Windows):
    return op.ReduceSum(g, [0, *where.axes], keepdims=0)


def _transposed_windows(op, node, weight) -> Windows | Unsupported:
    """Return the windows on the output of a ConvTranspose whose adjoint it is: as many as its
    input is long.
    """
    made = opened(op, node, weight)
    if isinstance(made, Unsupported):
        return made
    n, get = len(made.strides), node.attributes.get_ints
    strides = np.array(made.strides)
    added = np.array(get("output_padding", (0,) * n), np.int64)
    beyond = np.where(added < strides, 0, added)  # in which one more window would fit
    asked = np.array(get("output_shape", ())[-n:], np.int64)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if not asked.size and auto in ("NOTSET", "VALID"):
        pads = np.array(get("pads", (0,) * 2 * n) if auto == "NOTSET" else (0,) * 2 * n, np.int64)
        return padded(made, pads[:n], pads[n:] - beyond)
    extents = reach(op, made, weight)
    if not asked.size:  # as long as the input times the stride
        totals = at_least_zero(op, extents + (added - strides))
        begin, end = halves(op, totals, auto == "SAME_UPPER")
        return padded(made, begin, end - beyond)
    length, extents = alike(op, run_time_lengths(op, node.inputs[0]), extents)
    excess = (length - 1) * strides + extents - asked
    begin, _ = halves(op, at_least_zero(op, excess + added), auto == "SAME_UPPER")
    return padded(made, begin, excess - begin)
