"""Convolutions, and windows of an image as columns of a matrix: Col2Im and DeformConv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import first_axis_only, only_first_operand
from onnxgrad.operators.records import Unsupported, declare_operators, rule
from onnxgrad.operators.rule_nodes import wide_dtype
from onnxgrad.operators.sampling import axis_taps, interpolation_samples
from onnxgrad.operators.shapes import count_bias_additions, dims, rank, static
from onnxgrad.operators.windows import (
    UNKNOWN_RANK,
    Windows,
    all_numbers_or_values,
    at_least_zero,
    auto_pad,
    explicit_windows,
    floor_quotient,
    padded_windows,
    run_time_lengths,
    scatter_windows,
    split_padding,
    weigh_windows,
    window_extents,
    with_padding,
)


def convolution_macs(weight: int, bias: int) -> Callable[[ir.Node, Callable], int]:
    """Return the function that counts the multiply-adds of a convolution, given the operand indices
    of its weight and bias.
    """

    def count_multiply_adds(node: ir.Node, lengths_of: Callable) -> int:
        products = prod(lengths_of(node.outputs[0])) * prod(lengths_of(node.inputs[weight])[1:])
        return products + count_bias_additions(node, bias, lengths_of)

    return count_multiply_adds


def _transposed_convolution_macs(node: ir.Node, lengths_of: Callable) -> int:
    products = prod(lengths_of(node.inputs[0])) * prod(lengths_of(node.inputs[1])[1:])
    return products + count_bias_additions(node, 2, lengths_of)


_CONVOLUTION: dict[str, Any] = {
    "roles": "xfb",
    "axes": only_first_operand(first_axis_only),
    "features": (1, 1),
}

declare_operators("Conv", "convolution quantizable", **_CONVOLUTION, work=convolution_macs(1, 2))
declare_operators("ConvTranspose", "convolution", **_CONVOLUTION, work=_transposed_convolution_macs)
declare_operators("DeformConv", roles="xfxbx", features=(1, 1), work=convolution_macs(1, 3))
declare_operators("ConvInteger", "convolution", features=(1, 1), work=convolution_macs(1, 4))
declare_operators("QLinearConv", "convolution", features=(3, 1), work=convolution_macs(3, 8))


@rule("Conv", "ConvTranspose")
def convolution(op, node, g):
    """y = x * w + b:  dx = g *T w,  dw = x correlated with g,  db = sum g over all but axis 1;
    y = x *T w + b:  dx = g * w,  dw = g correlated with x.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    forward, group = node.op_type == "Conv", int_attribute(node, "group")
    windows = (padded_windows if forward else _conv_transpose_windows)(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    if forward:
        dx = scatter_windows(op, g, w, windows, x, group)
    else:
        dx = weigh_windows(op, g, w, windows, group)
    dw = _weight_gradient(op, *((x, g) if forward else (g, x)), windows, w, group)
    db = None if b is None else op.ReduceSum(g, [0, *windows.axes], keepdims=0)
    return op.set_type_like(dx, x), dw, db


def _weight_gradient(op, x, g, windows: Windows, w, group: int):
    """Return the gradient w.r.t. the kernel w of a convolution: x convolved with g.

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


def _conv_transpose_windows(op, node, weight) -> Windows | Unsupported:
    """Return the windows of the convolution whose adjoint a ConvTranspose is.

    They lie on the output of the node, one for each spatial position of its input.
    """
    windows = explicit_windows(node, weight)
    if windows is None:
        return UNKNOWN_RANK
    n, get = len(windows.strides), node.attributes.get_ints
    strides, auto = np.array(windows.strides), auto_pad(node)
    added = np.array(get("output_padding", (0,) * n), np.int64)
    # an output_padding of a stride or more has room for one more window
    beyond = np.where(added < strides, 0, added)
    output_shape = np.array(get("output_shape", ())[-n:], np.int64)
    if not output_shape.size and not auto.startswith("SAME"):
        return replace(windows, end=windows.end - beyond)
    extents = window_extents(op, windows, weight)
    if not output_shape.size:  # the output is as long as the input times the stride
        totals = at_least_zero(op, extents + (added - strides))
        begin, end = split_padding(op, totals, auto == "SAME_UPPER")
        return replace(windows, begin=begin, end=end - beyond)
    length, extents = all_numbers_or_values(op, run_time_lengths(op, node.inputs[0]), extents)
    excess = (length - 1) * strides + extents - output_shape
    begin, _ = split_padding(op, at_least_zero(op, excess + added), auto == "SAME_UPPER")
    return replace(windows, begin=begin, end=excess - begin)


# -- columns ---------------------------------------------------------------------------------------


@rule("Col2Im")
def col2im(op, node, g):
    """y = the columns of x, each added to its window of the image:  dx = the windows of g."""
    x, _, block = node.inputs
    get = node.attributes.get_ints
    stated = (get(name, ()) for name in ("strides", "dilations"))
    counts = [*map(len, stated), len(get("pads", ())) // 2, (rank(node.outputs[0]) or 2) - 2]
    n = max(*counts, *((static(dims(v)) or (0,))[0] for v in node.inputs[1:]))
    if not n:
        return Unsupported("the rank of its output is not known; state its shape in the model")
    pads = get("pads", [0] * 2 * n)
    kernel, index = op.known_value(block), None
    for i, (stride, dilation) in enumerate(
        zip(get("strides", [1] * n), get("dilations", [1] * n), strict=True)
    ):
        length = op.dim(node.outputs[0], 2 + i) + (pads[i] + pads[n + i])
        k = op.Slice(block, [i], [i + 1], [0]) if kernel is None else int(kernel[i])
        reach = (k - 1) * dilation + 1
        count = floor_quotient(op, length - reach, stride) + 1
        inner, first = op.arange(k) * dilation, op.arange(count) * stride
        inner = op.Unsqueeze(inner, [a for a in range(2 * n) if a != i])
        along = inner + op.Unsqueeze(first, [a for a in range(2 * n) if a != n + i])
        index = along if index is None else index * op.const(length, ir.DataType.INT64) + along
    if any(pads):
        g = op.Pad(g, [0, 0, *pads[:n], 0, 0, *pads[n:]])
    flat = op.Reshape(g, [0, 0, -1])
    return op.reshape_like(op.Gather(flat, index, axis=2), x), None, None


@rule("DeformConv")
def deform_conv(op, node, g):
    """y = w c + b, columns c = m x(p + u), m the mask, p positions in a window, u their offsets:
    dw = g cT,  db = sum g,  dm = x wT g,  dx = m wT g at p + u,  du = m x'(p + u) wT g.

    Dai et al. 2017, arXiv:1703.06211; Zhu et al. 2019, arXiv:1811.11168.
    """
    x, w, offset, b, mask = (*node.inputs, None, None)[:5]
    windows = padded_windows(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    kernel = windows.kernel or [op.dim(w, axis) for axis in windows.axes]
    dtype, group = wide_dtype(x.dtype), int_attribute(node, "group")
    rows = op.dim(x, 0) * int_attribute(node, "offset_group")  # images times offset groups
    count, width, total = op.numel(offset, 2), op.numel(w, 1), op.numel(offset, 2)
    for k in kernel:
        total = k * total
    samples = _interpolate_at_offsets(op, node, windows, kernel, rows, total)
    elements = samples.read(op)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, group, -1, count))
    matrix = op.Reshape(op.Cast(w, to=dtype), op.vector(group, -1, width))
    dc = op.MatMul(op.Transpose(matrix, perm=[0, 2, 1]), g)
    dc = op.Reshape(dc, op.vector(rows, -1, total))
    columns, dm = samples.values(op, elements), None
    if mask is not None:
        m = op.Reshape(op.Cast(mask, to=dtype), op.vector(rows, 1, total))
        dm = op.ReduceSum(dc * columns, [1])
        dc, columns = dc * m, columns * m
    columns = op.Reshape(columns, op.vector(op.dim(x, 0), group, width, count))
    dw = op.ReduceSum(op.MatMul(g, op.Transpose(columns, perm=[0, 1, 3, 2])), [0])
    by_axis = samples.positions_gradient(op, elements, dc)
    du = op.Concat(*(op.Reshape(d, op.vector(0, -1, 1, count)) for d in by_axis), axis=2)
    gradients = [samples.images_gradient(op, dc), dw, du, op.ReduceSum(g, [0, 3]), dm]
    return [
        None if v is None else op.reshape_like(op.Cast(d, to=v.dtype), v)
        for d, v in zip(gradients, (x, w, offset, b, mask), strict=True)
    ]


def _interpolate_at_offsets(op, node, windows, kernel, rows, total):
    """Return the samples at the positions of all windows plus their offsets, for `rows` images."""
    x, _, offset = node.inputs[:3]
    n, count, dtype = len(kernel), op.numel(offset, 2), wide_dtype(x.dtype)
    images = op.Reshape(op.Cast(x, to=dtype), op.vector(rows, -1, op.numel(x, 2)))
    offsets = op.Reshape(op.Cast(offset, to=dtype), op.vector(rows, -1, n, count))
    lengths, axes = [op.dim(x, 2 + i) for i in range(n)], []
    for i, length in enumerate(lengths):
        firsts = [op.dim(offset, 2 + k) for k in range(n)]
        starts = _indices_along_axis(op, firsts, i) * windows.strides[i] - windows.begin[i]
        first = op.Reshape(starts, [1, -1])
        within = op.Reshape(_indices_along_axis(op, kernel, i) * windows.dilations[i], [-1, 1])
        position = op.Gather(offsets, np.int64(i), axis=2) + op.Cast(first + within, to=dtype)
        axes.append(axis_taps(op, op.Reshape(position, op.vector(0, total)), length, "linear"))
    return interpolation_samples(op, images, op.dim(images, 1), total, axes, lengths)


def _indices_along_axis(op, lengths: list, axis: int):
    """Return the index along `axis` of each element of an array with these lengths."""
    along = [-1 if a == axis else 1 for a in range(len(lengths))]
    return op.Expand(op.Reshape(op.arange(lengths[axis]), along), op.vector(*lengths))
