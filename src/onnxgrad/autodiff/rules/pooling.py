"""Pooling."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import attributes_of, output
from onnxgrad.autodiff.rules.registry import rule
from onnxgrad.autodiff.rules.shape import scatter_flat
from onnxgrad.autodiff.rules.windows import (
    Windows,
    lengths,
    padded,
    reach,
    scatter_windows,
    weigh_windows,
    windows,
    with_padding,
)
from onnxgrad.graph.shapes import dims, rank, static


@rule("MaxPool")
def max_pool(op, node, g, g_indices=None):
    """y = max of a window of x:  dx = g added where the maximum was, the first of several."""
    (x,) = node.inputs
    indices = _indices(op, node)
    if x.dtype == ir.DataType.FLOAT and lengths(x) is not None:
        where = windows(op, node)
        if _tiles(x, where):
            windows_ = {"kernel_shape": list(where.kernel), "strides": list(where.strides)}
            return (op.set_type_like(op.MaxUnpool(g, indices, **windows_), x),)
    if max(node.attributes.get_ints("dilations", (1,))) > 1:
        g, indices = _without_empty(op, node, g, indices)
    shape = dims(x)
    row = static(None if shape is None else shape[1:])
    if row is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return (scatter_flat(op, x, indices, g),)
    # rows apart: their number need not be known
    n = prod(row)
    positions = op.Reshape(op.Mod(indices, np.int64(n)), [0, -1])
    flat = op.Reshape(g, [0, -1])
    zeros = op.Pad(op.Slice(flat, [0], [0], [1]), [0, 0, 0, n])
    made = op.ScatterElements(zeros, positions, flat, axis=1, reduction="add")
    return (op.set_type_like(op.Reshape(made, [0, *row]), x),)


def _indices(op, node):
    """Return where in the flat input each maximum was."""
    (x,) = node.inputs
    if node.attributes.get_int("storage_order", 0):
        attributes = attributes_of(node) | {"storage_order": 0}
        _, indices = op.emit_many("MaxPool", [x], attributes, outputs=2)
    else:
        indices = output(op, node, 1, ir.DataType.INT64)
    indices.dtype, indices.shape = ir.DataType.INT64, node.outputs[0].shape
    return indices


def _without_empty(op, node, g, indices):
    """Return g and indices without what comes from dilated windows that lie between the elements
    of x: their maximum is the lowest number, at an index of another row.
    """
    y = node.outputs[0]
    wide = y.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    found = op.Greater(y, np.finfo(y.dtype.numpy()).min if wide else -np.inf)
    return op.Where(found, g, 0.0), op.Where(found, indices, np.int64(0))


def _tiles(x, where: Windows) -> bool:
    """Tell whether the windows cover `x` once."""
    known = lengths(x)
    return (
        known is not None
        and where.kernel == where.strides
        and not any(where.pads or (1,))
        and max(where.dilations) == 1
        and not any(m % k for m, k in zip(known, where.kernel, strict=True))
    )


@rule("MaxUnpool")
def max_unpool(op, node, g):
    """y = zero but for x at the given places:  dx = g there, for the last of several at one place.

    Places count in the flat output, also where `output_shape` is given: as in onnxruntime and
    PyTorch, unlike the node case of onnx, which moves them.
    """
    x, indices = node.inputs[:2]
    dx = op.Gather(op.Reshape(g, [-1]), indices, axis=0)
    if not _distinct(indices):
        flat = op.Reshape(indices, [-1])
        turns = op.Range(np.int64(0), op.Size(indices), np.int64(1))
        none = op.Expand(np.int64(-1), op.Shape(op.Reshape(g, [-1])))
        last = op.ScatterElements(none, flat, turns, axis=0, reduction="max")
        wins = op.Equal(op.Gather(last, flat, axis=0), turns)
        dx = op.Where(op.Reshape(wins, op.Shape(indices), allowzero=1), dx, 0.0)
    return op.set_type_like(dx, x), None, None


def _distinct(indices) -> bool:
    """Tell whether the indices are proven to differ: those of a MaxPool without overlap."""
    node = indices.producer()
    if node is None or node.op_type != "MaxPool" or node.domain:
        return False
    get, kernel = node.attributes.get_ints, node.attributes.get_ints("kernel_shape", ())
    ones = (1,) * len(kernel)
    sizes = zip(kernel, get("strides", ones), get("dilations", ones), strict=True)
    return all(k <= s and d == 1 for k, s, d in sizes)


@rule("AveragePool")
def average_pool(op, node, g):
    """y = mean of a window of x:  dx = each g, divided as in the forward, added to its window."""
    where = windows(op, node)
    return (_spread(op, g / _divisor(op, node, where), where, node.inputs[0]),)


@rule("LpPool")
def lp_pool(op, node, g):
    """y = (sum over a window of |x|^p)^(1/p):  dx = sign(x) |x|^(p-1) sum of g y^(1-p) over the
    windows of x, zero where y is: the smallest subgradient.
    """
    (x,), where = node.inputs, windows(op, node)
    outer, inner = _slopes_of_norm(op, node)
    return (inner * _spread(op, g if outer is None else g * outer, where, x),)


@rule("GlobalLpPool")
def global_lp_pool(op, node, g):
    """y = (sum over a channel of |x|^p)^(1/p):  dx = g y^(1-p) sign(x) |x|^(p-1), zero where y is:
    the smallest subgradient.
    """
    outer, inner = _slopes_of_norm(op, node)
    return ((g if outer is None else g * outer) * inner,)


def _slopes_of_norm(op, node):
    """Return the slope of y by the sum of powers, and of that by x, without the factors p, 1/p."""
    x, y, p = node.inputs[0], node.outputs[0], node.attributes.get_int("p", 2)
    if p == 1:
        return None, op.Sign(x)
    nonzero = op.Greater(y, 0.0)
    outer = op.Where(nonzero, op.Pow(op.Where(nonzero, y, 1.0), float(1 - p)), 0.0)
    return outer, x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), float(p - 1))


def _spread(op, g, where: Windows, x):
    """Return the adjoint of the sum over windows of each channel of x."""
    shape = dims(x)
    channels = None if shape is None else shape[1]
    if isinstance(channels, int):
        ones = op.const(np.ones((channels, 1, *where.kernel), x.dtype.numpy()))
        return op.set_type_like(scatter_windows(op, g, ones, where, x, group=channels), x)
    ones = op.const(np.ones((1, 1, *where.kernel), x.dtype.numpy()))
    rows = op.ReduceProd(op.Shape(g, start=0, end=2), [0], keepdims=1)
    flat = op.Reshape(g, op.Concat(rows, [1], op.Shape(g, start=2), axis=0), allowzero=1)
    return op.reshape_like(scatter_windows(op, flat, ones, where, x), x)


def _divisor(op, node, where: Windows):
    """Return what each window's sum is divided by: its size, or how much of it is no padding."""
    (x,), y = node.inputs, node.outputs[0]
    unpadded = where.pads is not None and not any(where.pads)
    all_counts = bool(node.attributes.get_int("count_include_pad", 0))
    rounded_up = bool(node.attributes.get_int("ceil_mode", 0)) and max(where.strides) > 1
    if not rounded_up and (all_counts or unpadded):
        return float(prod(where.kernel))
    known, counts = lengths(x), lengths(y)
    if known is not None and counts is not None:
        divisor = np.ones((), x.dtype.numpy())
        for i, (m, o) in enumerate(zip(known, counts, strict=True)):
            starts = np.arange(o) * where.strides[i] - where.begin[i]
            places = starts[:, None] + np.arange(where.kernel[i]) * where.dilations[i]
            low, high = (-where.begin[i], m + where.end[i]) if all_counts else (0, m)
            inside = ((places >= low) & (places < high)).sum(axis=1)
            divisor = divisor[..., None] * inside.astype(divisor.dtype)
        return op.const(divisor)
    # ones where an element counts, zeros up to the end of the last window, added up by window
    one = x.dtype.numpy().type(1)
    counted = op.Expand(op.const(one), op.Concat([1, 1], op.Shape(x, start=2), axis=0))
    counted = with_padding(op, counted, where, one if all_counts else None)
    end = op.Sub(op.Shape(y, start=2), 1) * np.array(where.strides) + reach(op, where)
    none = np.zeros(len(where.axes), np.int64)
    last = padded(where, none, end - op.Shape(counted, start=2))
    return weigh_windows(op, counted, op.const(np.ones((1, 1, *where.kernel), one.dtype)), last)


@rule("GlobalAveragePool")
def global_average_pool(op, node, g):
    """y = mean of each channel:  dx = g / n."""
    x, y = node.inputs[0], node.outputs[0]
    known = lengths(x)
    n = op.Cast(op.Size(x) / op.Size(y), to=x.dtype) if known is None else float(prod(known))
    return (op.expand_to(g / n, x),)


@rule("GlobalMaxPool")
def global_max_pool(op, node, g):
    """y = max of each channel:  g goes to the elements that are y, in equal shares."""
    x, y = node.inputs[0], node.outputs[0]
    n = rank(x)
    axes = op.Range(np.int64(2), op.Size(op.Shape(x)), np.int64(1)) if n is None else [*range(2, n)]
    hits = op.Cast(op.Equal(x, y), to=x.dtype)
    return (hits * (g / op.ReduceSum(hits, axes, keepdims=1)),)
