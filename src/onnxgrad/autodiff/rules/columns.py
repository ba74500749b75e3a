"""Windows of an image as columns of a matrix: Col2Im and DeformConv."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.autodiff.rules.common import wide
from onnxgrad.autodiff.rules.sampling import samples_of, taps
from onnxgrad.autodiff.rules.windows import quotient, windows_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import dims, rank, static


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
        count = quotient(op, length - reach, stride) + 1
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
    windows = windows_of(op, node, w)
    if isinstance(windows, Unsupported):
        return windows
    kernel = windows.kernel or [op.dim(w, axis) for axis in windows.axes]
    dtype, group = wide(x.dtype), int_attribute(node, "group")
    rows = op.dim(x, 0) * int_attribute(node, "offset_group")  # images times offset groups
    count, width, total = op.numel(offset, 2), op.numel(w, 1), op.numel(offset, 2)
    for k in kernel:
        total = k * total
    samples = _samples_at_offsets(op, node, windows, kernel, rows, total)
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


def _samples_at_offsets(op, node, windows, kernel, rows, total):
    """Return the samples at the positions of all windows plus their offsets, for `rows` images."""
    x, _, offset = node.inputs[:3]
    n, count, dtype = len(kernel), op.numel(offset, 2), wide(x.dtype)
    images = op.Reshape(op.Cast(x, to=dtype), op.vector(rows, -1, op.numel(x, 2)))
    offsets = op.Reshape(op.Cast(offset, to=dtype), op.vector(rows, -1, n, count))
    lengths, axes = [op.dim(x, 2 + i) for i in range(n)], []
    for i, length in enumerate(lengths):
        firsts = [op.dim(offset, 2 + k) for k in range(n)]
        first = op.Reshape(_mesh(op, firsts, i) * windows.strides[i] - windows.begin[i], [1, -1])
        within = op.Reshape(_mesh(op, kernel, i) * windows.dilations[i], [-1, 1])
        position = op.Gather(offsets, np.int64(i), axis=2) + op.Cast(first + within, to=dtype)
        axes.append(taps(op, op.Reshape(position, op.vector(0, total)), length, "linear"))
    return samples_of(op, images, op.dim(images, 1), total, axes, lengths)


def _mesh(op, lengths: list, axis: int):
    """Return the index along `axis` of each element of an array with these lengths."""
    along = [-1 if a == axis else 1 for a in range(len(lengths))]
    return op.Expand(op.Reshape(op.arange(lengths[axis]), along), op.vector(*lengths))
