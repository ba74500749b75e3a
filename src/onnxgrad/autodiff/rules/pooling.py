"""Pooling."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.autodiff.rules.shape import scatter_flat
from onnxgrad.autodiff.rules.windows import AUTO_PAD, Windows, lengths, scatter_windows, windows
from onnxgrad.graph.shapes import dims, rank, static


@rule("MaxPool")
def max_pool(op, node, g, g_indices=None):
    """y = max of a window of x:  dx = g added where the maximum was, the first of several."""
    (x,) = node.inputs
    where = windows(node)
    indices = _indices(op, node)
    if where is not None and x.dtype == ir.DataType.FLOAT and _tiles(x, where):
        windows_ = {"kernel_shape": list(where.kernel), "strides": list(where.strides)}
        return (op.like(op.MaxUnpool(g, indices, **windows_), x),)
    shape = dims(x)
    row = static(None if shape is None else shape[1:])
    if row is None:
        return (scatter_flat(op, x, indices, g),)
    # rows apart: their number need not be known
    n = prod(row)
    positions = op.Reshape(op.Mod(indices, np.int64(n)), [0, -1])
    flat = op.Reshape(g, [0, -1])
    zeros = op.Pad(op.Slice(flat, [0], [0], [1]), [0, 0, 0, n])
    made = op.ScatterElements(zeros, positions, flat, axis=1, reduction="add")
    return (op.like(op.Reshape(made, [0, *row]), x),)


def _indices(op, node):
    """Return where in the flat input each maximum was."""
    (x,) = node.inputs
    if node.attributes.get_int("storage_order", 0):
        attributes = {a.name: a.value for a in node.attributes.values()} | {"storage_order": 0}
        _, indices = op.emit("MaxPool", [x], attributes, outputs=2)
    else:
        if len(node.outputs) < 2:
            node.resize_outputs(2)
            node.outputs[1].name = op.name("indices")
        indices = node.outputs[1]
    indices.dtype, indices.shape = ir.DataType.INT64, node.outputs[0].shape
    return indices


def _tiles(x, where: Windows) -> bool:
    """Tell whether the windows cover `x` once."""
    known = lengths(x)
    return (
        known is not None
        and where.kernel == where.strides
        and not any(where.begin)
        and not any(where.end)
        and max(where.dilations) == 1
        and not any(m % k for m, k in zip(known, where.kernel, strict=True))
    )


@rule("MaxUnpool")
def max_unpool(op, node, g):
    """y = zero but for x at the given places:  dx = g there."""
    x, indices = node.inputs[:2]
    return op.like(op.Gather(op.Reshape(g, [-1]), indices, axis=0), x), None


@rule("AveragePool")
def average_pool(op, node, g):
    """y = mean of a window of x:  dx = each g, divided as in the forward, added to its window."""
    (x,) = node.inputs
    where, shape = windows(node), dims(x)
    if where is None:
        return AUTO_PAD
    channels = None if shape is None else shape[1]
    if not isinstance(channels, int):
        return Refused("the number of channels of its input is not known")
    divisor = _divisor(op, node, where)
    if isinstance(divisor, Refused):
        return divisor
    ones = op.value(np.ones((channels, 1, *where.kernel), x.dtype.numpy()))
    return (scatter_windows(op, g / divisor, ones, where, x, group=channels),)


def _divisor(op, node, where: Windows):
    """Return what each window's sum is divided by: its size, or how much of it is no padding."""
    (x,) = node.inputs
    padded = any(where.begin) or any(where.end)
    all_counts = bool(node.attributes.get_int("count_include_pad", 0))
    rounded_up = bool(node.attributes.get_int("ceil_mode", 0)) and max(where.strides) > 1
    if not rounded_up and (all_counts or not padded):
        return float(prod(where.kernel))
    known, counts = lengths(x), lengths(node.outputs[0])
    if known is not None and counts is not None:
        divisor = np.ones((), x.dtype.numpy())
        for i, (m, o) in enumerate(zip(known, counts, strict=True)):
            starts = np.arange(o) * where.strides[i] - where.begin[i]
            places = starts[:, None] + np.arange(where.kernel[i]) * where.dilations[i]
            low, high = (-where.begin[i], m + where.end[i]) if all_counts else (0, m)
            inside = ((places >= low) & (places < high)).sum(axis=1)
            divisor = divisor[..., None] * inside.astype(divisor.dtype)
        return op.value(divisor)
    if rounded_up:
        return Refused("ceil_mode needs the lengths of its input: fix them in the model's input")
    dtype = x.dtype.numpy()
    ones = op.Expand(dtype.type(1), op.Concat([1, 1], op.Shape(x, start=2), axis=0))
    pads = [*where.begin, *where.end]
    return op.Conv(ones, np.ones((1, 1, *where.kernel), dtype), pads=pads, **where.attributes)


@rule("GlobalAveragePool")
def global_average_pool(op, node, g):
    """y = mean of each channel:  dx = g / n."""
    x, y = node.inputs[0], node.outputs[0]
    known = lengths(x)
    n = op.Cast(op.Size(x) / op.Size(y), to=x.dtype) if known is None else float(prod(known))
    return (op.spread(g / n, x),)


@rule("GlobalMaxPool")
def global_max_pool(op, node, g):
    """y = max of each channel:  g goes to the elements that are y, in equal shares."""
    x, y = node.inputs[0], node.outputs[0]
    n = rank(x)
    if n is None:
        return Refused("the rank of its input is not known")
    hits = op.Cast(op.Equal(x, y), to=x.dtype)
    return (hits * (g / op.ReduceSum(hits, [*range(2, n)], keepdims=1)),)
