"""Gradients of convolutions and pools, w.r.t. their weights and their inputs.

The gradient of a weight is a product of cotangents with the windows of the input. A product reads
matrices, and windows overlap, so that elements are copied before. The forms differ in how many
elements they copy, and in the shape of their products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.forms.arithmetic import GRADIENT
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by, marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.resize import LARGEST_BLOCK
from onnxgrad.operators.shapes import constant, dims, static
from onnxgrad.operators.windows import (
    Windows,
    explicit_windows,
    spatial_lengths,
    weigh_windows,
    window_extents,
    windows_partition,
    with_padding,
)

_LAST = 2**63 - 1  # end of a Slice up to the last element
_SPLIT_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # dtypes of SpaceToDepth in onnxruntime

Shape = tuple[int, ...]

# -- sizes and times that choose between forms, measured on one core of one processor (2.5 GHz) ----
# They change results by rounding only.

# Elements in the copies of all windows of an image, from which they exceed the cache. For large
# images, a convolution with the flipped kernel takes 0.6 to 0.9 of the time of a ConvTranspose.
LEAST_LARGE_COPIES = 2**19
# Channels below which a product takes longer than copying its operands.
LEAST_CHANNELS = 8
# Elements of a weight from which it exceeds the cache, and windows of an image up to which it is
# read more often than it pays. Measured for 8 images of 4 to 49 windows: a ConvTranspose takes 1.5
# to 6 times as long as one product for all images, 1.1 times for a weight of half the size.
LEAST_HEAVY_WEIGHT, MOST_HEAVY_WINDOWS = 2**18, 64
# Elements of a window up to which each element gets a node in the gradient of a weight.
MOST_COLUMNS = 64
# Windows of an image from which a product for each of its channels pays.
LEAST_LONG_IMAGE = 128

# ns for each element: of a copy, of a slice of all images, of a slice with steps, of moving strides
# into channels, of a multiply-add, of the sum of the products of images
COPY, SLICE, STRIDED_SLICE, SPLIT, MULTIPLY, ADD = 0.6, 0.9, 3.6, 3.0, 0.025, 1.5
LANES = 16  # columns that a product computes at once


def copies_exceed_cache(shape: tuple[int, ...] | None, counts: tuple[int, ...] | None) -> bool:
    """Return whether one product for each kernel element is faster than one product over copies of
    all windows.

    It is for many channels, in the `shape` of the weight, where the copies of `counts` windows per
    image exceed the cache.
    """
    if shape is None or counts is None or shape[1] < LEAST_CHANNELS:
        return False
    return prod(shape[1:]) * prod(counts) >= LEAST_LARGE_COPIES


def weight_exceeds_cache(shape: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Return whether reading a convolution's weight for every image takes longer than copying all
    windows.
    """
    few, overlapping = prod(counts) <= MOST_HEAVY_WINDOWS, prod(shape[2:]) > 1
    return overlapping and few and prod(shape) >= LEAST_HEAVY_WEIGHT


# -- the gradient of a weight ---------------------------------------------------------------------


@rewrites("Transpose", group=GRADIENT)
def multiply_windows(op, node):
    """The gradient of a weight (M, C / group, kernel): for each element of the kernel, the sum
    over batch and windows of g (N, M, windows) times that element of each window of x.

    The rules write it as a convolution of x with g, which is as large as an image.
    """
    found, dw, new = _match_weight_gradient(node), node.outputs[0], None
    if found is None:
        return None
    x, g, windows, group = found
    shape = static(dims(dw))
    if shape is not None and windows.kernel and prod(windows.kernel) <= MOST_COLUMNS:
        new = op.set_type_like(_write_fastest_products(op, x, g, windows, shape, group), dw)
    (new or dw).meta[marks.WEIGHT_GRADIENT] = found
    return None if new is None else [new]


def _match_weight_gradient(node):
    """Return (x, g, windows, group) if `node` ends the convolution of x with g that is a weight's
    gradient; else None.

    Batch and channels are exchanged, and so are strides and dilations. There may be more windows
    than elements of the kernel, of which a Slice leaves the first ones.
    """
    dw = node.outputs[0]
    part, shape = made_by(_operand_of_transpose(dw, 1, 0), "Slice"), dims(dw) or ()
    if part is None or len(part.inputs) != 4:
        return None
    conv, starts, _, axes = made_by(part.inputs[0], "Conv"), *part.inputs[1:]
    begins, along, n = constant(starts), constant(axes), len(shape) - 2
    first = begins is not None and not begins.any()
    spatial = along is not None and along.tolist() == [*range(2, n + 2)]
    if not first or not spatial or conv is None:
        return None
    (x, g, *bias), group = conv.inputs, int_attribute(conv, "group")
    get, ones = conv.attributes.get_ints, (1,) * n
    x = _operand_of_grouping(x, group) if group > 1 else _operand_of_transpose(x, 1, 0)
    g = _operand_of_transpose(g, 1, 0)
    if x is None or g is None or any(bias) or "auto_pad" in conv.attributes:
        return None
    exchanged = tuple(get("dilations", ones)), tuple(get("strides", ones))
    begin, end = np.array(get("pads", (0,) * 2 * n), np.int64).reshape(2, n)
    return x, g, Windows(static(shape[2:]) or (), *exchanged, begin, end), group


def _operand_of_transpose(v: Any, *first: int) -> Any:
    """Return the operand of the Transpose that computes `v` if it permutes the first axes to the
    order `first`; else None.
    """
    node = made_by(v, "Transpose")
    perm = node.attributes.get_ints("perm", ()) if node else ()
    same = perm and [*perm] == [*first, *range(len(first), len(perm))]
    return node.inputs[0] if node and same else None


def _operand_of_grouping(v: Any, group: int) -> Any:
    """Return x (N, C, ...) if `v` is x regrouped as (C / group, group N, ...); else None."""
    permuted, space = _operand_of_reshape(v, [0, -1])
    split = None if permuted is None else _operand_of_transpose(permuted, 2, 1, 0)
    x, same = _operand_of_reshape(split, [0, group, -1])
    shape = made_by(space, "Shape")
    if shape is None or space is not same or shape.inputs[0] is not x:
        return None
    return x if int_attribute(shape, "start") == 2 and "end" not in shape.attributes else None


def _operand_of_reshape(v: Any, lead: list[int]) -> tuple[Any, Any]:
    """Return (x, space) if `v` is x reshaped to (*lead, *space); (None, None) otherwise."""
    node = made_by(v, "Reshape")
    concat = made_by(node.inputs[1], "Concat") if node else None
    if node is None or concat is None or len(concat.inputs) != 2:
        return None, None
    first = constant(concat.inputs[0])
    if first is None or first.tolist() != lead or int_attribute(node, "allowzero"):
        return None, None
    return node.inputs[0], concat.inputs[1]


def _write_fastest_products(op, x, g, windows: Windows, shape: Shape, group: int):
    """Return the gradient of a convolution's weight as matrix products, in the form estimated as
    fastest.
    """
    have, counts = spatial_lengths(x), spatial_lengths(g)
    if windows.pads is None or have is None or counts is None or 0 in counts:
        return multiply_columns(op, x, g, windows, shape, group)
    strided, overlapping = max(windows.strides) > 1, prod(windows.kernel) > 1
    if shape[:2] == (group, 1) and overlapping and (strided or prod(counts) < LEAST_LONG_IMAGE):
        return _depthwise_weight_gradient(op, x, g, windows, shape, counts)
    if strided and overlapping:
        splits = group == 1 and _can_split(x, windows) and is_split_faster(windows, shape, counts)
        return (_strided_products if splits else multiply_columns)(op, x, g, windows, shape, group)
    # drop the elements of x that are in no window
    if strided or (any(windows.pads) and not overlapping):
        x = _window_element(op, with_padding(op, x, windows), (0,) * len(counts), windows, counts)
        windows = _unit_stride_windows(windows.kernel)
    times = estimated_times(windows, shape, counts, group)
    return min(times, key=lambda form: times[form])(op, x, g, windows, shape, group)


def estimated_times(
    windows: Windows, shape: Shape, counts: Shape, group: int
) -> dict[Callable, float]:
    """Return `{function: ns}` for an image of windows of stride 1: the estimated time of each
    function that computes a weight's gradient.

    They are within a third of measured times for 3 to 128 channels, 4 to 64 rows and kernels of
    1 to 5; products of more channels are faster.
    """
    m, c, first, inner = shape[0], shape[1], windows.kernel[0], prod(windows.kernel[1:])
    size, elements, channels = prod(counts), prod(windows.kernel), c * group
    taller = size + (first - 1) * windows.dilations[0] * prod(counts[1:])
    added, copied, sliced = ADD * m * c * elements, elements > 1, inner > 1

    copies = (copied * (first * m + channels) + sliced * inner * channels) * taller
    multiplied = taller * first * m * inner * _round_up_to_lanes(c)
    cotangents = COPY * copies + MULTIPLY * multiplied + added

    copies = (copied * (1 + elements) + 2 * sliced * inner) * channels * size
    multiplied = size * first * m * _round_up_to_lanes(c * inner)
    inputs = COPY * copies + MULTIPLY * multiplied + added

    whole = _time_of_multiply_columns(shape, size, group, SLICE)
    return {multiply_shifted_g: cotangents, multiply_shifted_x: inputs, multiply_columns: whole}


def _time_of_multiply_columns(shape: Shape, size: int, group: int, slicing: float) -> float:
    """Return the estimated ns that `multiply_columns` takes for an image of `size` windows."""
    m, channels, elements = shape[0], shape[1] * group, prod(shape[2:])
    copies = channels + m + (elements > 1) * channels * (1 + elements)
    sliced = (elements > 1) * slicing * channels * elements
    multiplied = 1.3 * MULTIPLY * m * shape[1] * elements
    return (SLICE * copies + sliced + multiplied) * size


def is_split_faster(windows: Windows, shape: Shape, counts: Shape) -> bool:
    """Return whether `_strided_products` is estimated to be faster than `multiply_columns`."""
    whole, kernel = _split_weight_shape(windows, shape)
    elements = whole[1] * prod(n + k - 1 for n, k in zip(counts, kernel, strict=True))
    times = estimated_times(_unit_stride_windows(kernel), whole, counts, 1)
    split = SPLIT * elements + min(times.values())
    return split < _time_of_multiply_columns(shape, prod(counts), 1, STRIDED_SLICE)


def _split_weight_shape(windows: Windows, shape: Shape) -> tuple[Shape, Shape]:
    """Return the shape of the weight, and its kernel, after `_split_strides` has moved strides to
    channels.
    """
    stride, n = windows.strides[0], len(windows.strides)
    kernel = tuple(ceil(k / stride) for k in windows.kernel)
    return (shape[0], shape[1] * stride**n, *kernel), kernel


def _round_up_to_lanes(columns: int) -> int:
    return ceil(columns / LANES) * LANES


def _unit_stride_windows(kernel: Shape) -> Windows:
    """Return windows of size `kernel` and stride 1, without padding and dilation."""
    none = np.zeros(len(kernel), np.int64)
    return Windows(kernel, (1,) * len(kernel), (1,) * len(kernel), none, none)


def _window_element(op, x, offset: Shape, windows: Windows, counts: Shape):
    """Return the element at `offset` within each of the first `counts` windows of the padded x."""
    starts = [i * d for i, d in zip(offset, windows.dilations, strict=True)]
    spans = [(n - 1) * s + 1 for n, s in zip(counts, windows.strides, strict=True)]
    ends = [start + span for start, span in zip(starts, spans, strict=True)]
    if spatial_lengths(x) == tuple(spans) == counts:
        return x
    steps = list(windows.strides) if max(windows.strides) > 1 else None
    return op.Slice(x, starts, ends, windows.axes, steps)


# -- one product for each image and channel group ------------------------------------------------


def multiply_shifted_g(op, x, g, windows: Windows, shape: Shape, group: int):
    """Return the weight's gradient from copies of g, one for each element of the kernel's first
    axis.

    Each copy begins a row later, between rows of zeros, so that a product with all rows of x is one
    with every window. Along the other axes, x is sliced.
    """
    first, step, counts = windows.kernel[0], windows.dilations[0], spatial_lengths(g) or ()
    rows, kept = counts[0] + (first - 1) * step, [0] * len(windows.axes)
    copies = g
    if first > 1:
        apart = op.Pad(g, [0, 0, *kept, 0, 0, first * step, *kept[1:]])
        copies = op.Concat(*[apart] * (first - 1), g, axis=2)
    taller = (rows, *counts[1:])
    copies = _reshape_to_matrices(op, copies, shape[0] * first, prod(taller), group)
    x, terms = with_padding(op, x, windows), []
    for offset in product(*map(range, windows.kernel[1:])):
        part = _window_element(op, x, (0, *offset), windows, taller)
        if shape[1] == 1:  # a vector for each group, which needs no Transpose
            part = _reshape_to_matrices(op, part, prod(taller) * group, 1, group)
            term = op.ReduceSum(op.MatMul(copies, part), [0], keepdims=0)
        else:
            part = _reshape_to_matrices(op, part, shape[1] * group, prod(taller), group)
            term = _product_summed_over_images(op, copies, part, group)
        terms.append(op.Reshape(term, [shape[0], first, shape[1], 1]))
    dw = op.Concat(*terms, axis=3) if len(terms) > 1 else terms[0]
    return op.Reshape(op.Transpose(dw, perm=[0, 2, 1, 3]) if first > 1 else dw, list(shape))


def multiply_shifted_x(op, x, g, windows: Windows, shape: Shape, group: int):
    """Return the weight's gradient from copies of x, one for each element of the kernel's later
    axes.

    Along the first axis, the copies are sliced, which leaves whole rows.
    """
    first, step, counts = windows.kernel[0], windows.dilations[0], spatial_lengths(g) or ()
    rows, rest = counts[0] + (first - 1) * step, prod(counts[1:])
    x = with_padding(op, x, windows)
    offsets = list(product(*map(range, windows.kernel[1:])))
    parts = [_window_element(op, x, (0, *o), windows, (rows, *counts[1:])) for o in offsets]
    copies = op.Concat(*parts, axis=2) if len(parts) > 1 else parts[0]
    copies = op.Reshape(copies, [0, shape[1] * group, len(parts), rows * rest])
    g, terms = _reshape_to_matrices(op, g, shape[0], prod(counts), group), []
    for i in range(first):
        start = i * step * rest
        part = op.Slice(copies, [start], [start + prod(counts)], [3]) if first > 1 else copies
        part = _reshape_to_matrices(op, part, shape[1] * group * len(parts), prod(counts), group)
        term = _product_summed_over_images(op, g, part, group)
        terms.append(op.Reshape(term, [shape[0], shape[1], 1, len(parts)]))
    return op.Reshape(op.Concat(*terms, axis=2) if len(terms) > 1 else terms[0], list(shape))


def _reshape_to_matrices(op, x, rows: int, columns: int, group: int):
    """Return x (N, ...) reshaped to (N, rows, columns), or to (N, group, rows / group, columns)."""
    lead = [0] if group == 1 else [0, group]
    return op.Reshape(x, [*lead, rows // group, columns])


def _product_summed_over_images(op, a, b, group: int):
    """Return the sum over images, the first axis, of the matrix products a bT."""
    perm = [0, 2, 1] if group == 1 else [0, 1, 3, 2]
    return op.ReduceSum(op.MatMul(a, op.Transpose(b, perm=perm)), [0], keepdims=0)


# -- strides, and one channel for each group -----------------------------------------------------


def _can_split(x, windows: Windows) -> bool:
    """Return whether `_split_strides` can move the strides of these windows into channels."""
    one, n = len(set(windows.strides)) == 1 == max(windows.dilations), len(windows.strides)
    return one and (n == 1 or (n == 2 and x.dtype in _SPLIT_TYPES))


def _split_strides(op, x, channels: int, windows: Windows, counts: Shape):
    """Return x with strides moved into channels, so that windows have stride 1.

    Channel p C + c has the elements of channel c that are p beyond a multiple of the stride, p
    counted over all axes. The kernel is longer where its length is no multiple of the stride.
    """
    stride, n = windows.strides[0], len(counts)
    split = [m + ceil(k / stride) - 1 for m, k in zip(counts, windows.kernel, strict=True)]
    ends = np.array(split) * stride - np.array(spatial_lengths(x) or ()) - windows.begin
    x = with_padding(op, x, replace(windows, end=ends))
    if n == 2:
        phases = op.SpaceToDepth(x, blocksize=stride)
    else:
        phases = op.Transpose(op.Reshape(x, [0, channels, *split, stride]), perm=[0, 3, 1, 2])
        phases = op.Reshape(phases, [0, channels * stride, *split])
    phases.shape = ir.Shape([x.shape[0], channels * stride**n, *split])
    return phases


def _strided_products(op, x, g, windows: Windows, shape: Shape, group: int):
    """Return the weight's gradient for strided windows, computed by windows of stride 1 on more
    channels.
    """
    stride, n = windows.strides[0], len(windows.strides)
    whole, kernel = _split_weight_shape(windows, shape)
    x = _split_strides(op, x, shape[1], windows, spatial_lengths(g) or ())
    dw = _write_fastest_products(op, x, g, _unit_stride_windows(kernel), whole, group)
    dw = op.Reshape(dw, [shape[0], *[stride] * n, shape[1], *kernel])
    inner = [axis for i in range(n) for axis in (n + 2 + i, 1 + i)]
    dw = op.Transpose(dw, perm=[0, n + 1, *inner])
    dw = op.Reshape(dw, [*shape[:2], *(k * stride for k in kernel)])
    if all(k % stride == 0 for k in windows.kernel):
        return dw
    return op.Slice(dw, [0] * n, list(windows.kernel), windows.axes)


def _depthwise_weight_gradient(op, x, g, windows: Windows, shape: Shape, counts: Shape):
    """Return the weight's gradient of a depthwise convolution, as sums of elementwise products."""
    channels, stride, terms = shape[0], windows.strides[0], []
    splits = stride > 1 and len(counts) == 2 and _can_split(x, windows)
    x = _split_strides(op, x, channels, windows, counts) if splits else with_padding(op, x, windows)
    for offset in product(*map(range, windows.kernel)):
        if splits:
            (a, p), (b, q) = (divmod(i, stride) for i in offset)
            start = (p * stride + q) * channels
            ends = [start + channels, a + counts[0], b + counts[1]]
            part = op.Slice(x, [start, a, b], ends, [1, 2, 3])
        else:
            part = _window_element(op, x, offset, windows, counts)
        term = op.ReduceSum(op.Mul(part, g), [0, *windows.axes], keepdims=0)
        terms.append(op.Reshape(term, [channels, 1]))
    return op.Reshape(op.Concat(*terms, axis=1), list(shape))


# -- any windows -----------------------------------------------------------------------------------


def multiply_columns(op, x, g, windows: Windows, shape: Shape, group: int):
    """Return the weight's gradient as one product of g and a matrix of all windows, or for large
    images as one product for each element of the kernel.
    """
    kernel, swap = windows.kernel, [1, 0, *windows.axes]
    rows, per_group, *_ = shape
    x = with_padding(op, op.Transpose(x, perm=swap), windows)
    columns = [_window_column(op, x, offset, windows) for offset in product(*map(range, kernel))]
    if len(columns) > 1 and not copies_exceed_cache(shape, spatial_lengths(g)):
        columns = [op.Concat(*columns, axis=1)]
    g = op.Reshape(op.Transpose(g, perm=swap), [group, rows // group, -1])
    elements = per_group * prod(kernel) // len(columns)
    stacked = [op.Reshape(c, [group, elements, -1]) for c in columns]
    products = [op.MatMul(g, op.Transpose(c, perm=[0, 2, 1])) for c in stacked]
    if len(products) > 1:  # one product for each element of the kernel
        products = [op.Concat(*(op.Unsqueeze(p, [-1]) for p in products), axis=-1)]
    return op.Reshape(products[0], list(shape))


def _window_column(op, x, offset: Shape, windows: Windows):
    """Return the element at `offset` within every window of the padded x."""
    starts = [p * d for p, d in zip(offset, windows.dilations, strict=True)]
    left = [int(e) - 1 - p for p, e in zip(starts, window_extents(op, windows), strict=True)]
    if not any(starts) and not any(left) and max(windows.strides) == 1:
        return x
    ends = [-m if m else _LAST for m in left]
    return op.Slice(x, starts, ends, windows.axes, list(windows.strides))


# -- the gradient of an input, which rules write as a ConvTranspose --------------------------------


@rewrites("ConvTranspose", group=GRADIENT)
def scatter_cotangents(op, node):
    """Rewrite a convolution's input gradient, the sum over windows of g times a weight (M, C /
    group, kernel), in the fastest form.
    """
    (g, weight, *bias), (dx,) = node.inputs, node.outputs
    shape, counts, sizes = spatial_lengths(dx), spatial_lengths(g), static(dims(weight))
    windows, group = explicit_windows(node, weight), int_attribute(node, "group")
    if not op.is_own(node) or bias or not windows or not shape or not counts or not sizes:
        return None
    added = node.attributes.get_ints("output_padding", (0,) * len(windows.strides))
    reached = replace(windows, end=windows.end - added)  # x up to the end of the last window
    if _repeats_cotangents(op, weight, dx, reached):
        return [_repeat_over_windows(op, g, windows)]
    # onnxruntime's Col2Im is for float32 only, and wrong for one spatial axis
    has_col2im = dx.dtype == ir.DataType.FLOAT and len(counts) == 2
    if has_col2im and group == 1 and weight_exceeds_cache(sizes, counts):
        return [_scatter_by_one_product(op, g, weight, windows, shape)]
    # a Conv with the flipped kernel, measured on one core, is 1.1 to 2.5 times faster for kernels
    # of one element, 1.3 to 1.4 times for one channel a group, 1.1 to 1.7 times for large images
    one_channel, one_element = sizes[:2] == (group, 1), prod(sizes[2:]) == 1
    converts = one_channel or one_element or copies_exceed_cache(sizes, counts)
    if max(windows.strides) > 1 or not converts:
        return None
    extents = window_extents(op, windows) - 1
    mirrored = replace(windows, begin=extents - windows.begin, end=extents - reached.end)
    if mirrored.pads is None:
        return None
    return [weigh_windows(op, g, _flipped_kernel(op, weight, windows, group), mirrored, group)]


def _repeats_cotangents(op, weight, dx, windows: Windows) -> bool:
    """Return whether `dx` repeats each cotangent over all elements of its window.

    Such a `dx` is the gradient of an average over windows that do not overlap. The values of
    `weight` decide only if the rule of a pool has written it.
    """
    if op.primal is None or op.primal.op_type not in ("AveragePool", "LpPool"):
        return False
    ones = constant(weight)
    short = dx.dtype == ir.DataType.FLOAT and 1 < max(windows.kernel) <= LARGEST_BLOCK
    return short and windows_partition(dx, windows) and ones is not None and bool(np.all(ones == 1))


def _repeat_over_windows(op, g, windows: Windows):
    """Return each element of g repeated for all elements of its window, by a Resize."""
    scales = op.const(np.array([1, 1, *windows.kernel], np.float32))
    floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return op.Resize(g, None, scales, mode="nearest", **floor)


def _scatter_by_one_product(op, g, weight, windows: Windows, shape: tuple[int, ...]):
    """Return the input gradient as one matrix product for the windows of all images, then
    Col2Im.
    """
    rows, channels, *kernel = static(dims(weight)) or ()
    matrix = op.Reshape(op.Transpose(g, perm=[0, *windows.axes, 1]), [-1, rows])
    columns = op.MatMul(matrix, op.Reshape(weight, [rows, channels * prod(kernel)]))
    columns = op.Reshape(columns, [-1, prod(spatial_lengths(g) or ()), channels * prod(kernel)])
    attributes = {"strides": windows.strides, "dilations": windows.dilations, "pads": windows.pads}
    return op.Col2Im(op.Transpose(columns, perm=[0, 2, 1]), list(shape), kernel, **attributes)


def _flipped_kernel(op, weight, windows: Windows, group: int):
    """Return the weight with which a Conv computes a ConvTranspose of stride 1 with `weight`.

    onnxruntime's ConvTranspose stores all windows at once, its Conv a few at a time.
    """
    if group == 1:
        flipped = op.Transpose(weight, perm=[1, 0, *windows.axes])
    else:  # (group M, C / group, ...) -> (C, M, ...)
        rows, per_group, *kernel = static(dims(weight)) or ()
        split = op.Reshape(weight, [group, rows // group, per_group, *kernel])
        split = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in windows.axes)])
        flipped = op.Reshape(split, [group * per_group, rows // group, *kernel])
    if max(windows.kernel) == 1:
        return flipped
    last = [-1] * len(windows.axes)
    turned = op.Slice(flipped, last, [-_LAST] * len(windows.axes), windows.axes, last)
    return op.set_type_like(turned, flipped)
