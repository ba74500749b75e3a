"""Gradients of convolutions w.r.t. inputs and weights in onnxruntime's blocked layout, NCHWc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.native.blocked_layout import BlockedLayout, Pixels, image_dims, known_dims
from onnxgrad.operators.windows import Windows

# Elements of a cotangent with zeros between its images, for each of its elements, up to which the
# blocked gradient of a dilated kernel is faster than products of matrices: with 1.34 it takes 0.8
# times as long, with 1.84 1.2 times.
MOST_PADDING = 1.6


def transposed_conv(
    layout: BlockedLayout,
    g: ir.Value,
    weight: ir.Value,
    windows: Windows,
    pixels: Pixels,
    group: int,
    bias: ir.Value | None = None,
) -> ir.Value | None:
    """Return the transposed convolution of g (N, M, ...) by `weight`, (M, C / group, kernel).

    The result is in the NCHWc layout, (N, C, pixels); None if attributes or padding prevent this.
    """
    if group > 1:
        return _transposed_depthwise_conv(layout, g, weight, windows, pixels, bias)
    strided = max(windows.strides) > 1
    if strided and max(windows.dilations) > 1:
        return None
    w = windows
    rows = zip(
        image_dims(g)[2:],
        w.kernel,
        w.strides,
        w.dilations,
        w.begin.tolist(),
        pixels,
        strict=True,
    )
    axes = [_split_axis_by_stride(*row) for row in rows]
    if any(min(a.pads) < 0 for a in axes):
        return None
    x = layout.to_nchwc(g)
    weight = _reverse_weight(layout, weight, windows, axes)
    attributes = {
        "pads": [a.pads[0] for a in axes] + [a.pads[1] for a in axes],
        "dilations": list(windows.dilations),
    }
    if bias is not None and strided:
        bias = layout.op.Concat(*[bias] * prod(windows.strides), axis=0)
    y = layout.convolve(x, weight, [a.count for a in axes], attributes, bias)
    return _interleave_strides(layout, y, windows.strides, pixels) if strided else y


@dataclass(frozen=True)
class _StridedAxis:
    """One spatial axis of a transposed convolution of stride s, as s convolutions of stride 1.

    Elements i = s j + r of the result are a convolution with elements r, r + s, r + 2 s, ... of the
    kernel. `front` zeros before the kernel make the padding a multiple of s.

    Attributes:
        front: number of zeros before the kernel.
        taps: number of elements of each of the s kernels.
        pads: padding of x before and after.
        count: number of elements j.
    """

    front: int
    taps: int
    pads: tuple[int, int]
    count: int


def _split_axis_by_stride(
    count: int, kernel: int, stride: int, dilation: int, begin: int, length: int
) -> _StridedAxis:
    """Return one spatial axis of a transposed convolution, from `count` windows to `length` pixels,
    as convolutions of stride 1.
    """
    front = -begin % stride
    taps = -(-(kernel + front) // stride)
    shift = (begin + front) // stride
    before = (taps - 1) * dilation - shift
    steps = -(-length // stride)
    after = steps - count + shift
    return _StridedAxis(front, taps, (before, after), steps)


def _reverse_weight(
    layout: BlockedLayout, weight: ir.Value, windows: Windows, axes: Sequence[_StridedAxis]
) -> ir.Value:
    """Return a ConvTranspose's weight as an NCHWc weight (strides * C, M, taps) of a Conv."""
    op, b = layout.op, layout.block
    rows, channels, *kernel = known_dims(weight)
    strides = windows.strides
    lengths = [a.taps * s for a, s in zip(axes, strides, strict=True)]
    back = [n - k - a.front for n, k, a in zip(lengths, kernel, axes, strict=True)]
    if lengths != kernel:
        weight = op.Pad(weight, [0, 0, *(a.front for a in axes), 0, 0, *back])
        weight.shape = ir.Shape([rows, channels, *lengths])
    cells = layout.kernel_elements(weight)
    high, wide = axes
    grid = np.arange(prod(lengths)).reshape(high.taps, strides[0], wide.taps, strides[1])
    order = grid[::-1, :, ::-1].transpose(1, 3, 0, 2).ravel().tolist()
    if order != sorted(order):
        cells = op.Gather(cells, order, axis=2)
    taps, phases = prod(a.taps for a in axes), prod(strides)
    cells = layout.reshape(cells, [rows // b, b, channels // b, phases, taps, b])
    cells = op.Transpose(cells, perm=[3, 2, 0, 4, 1, 5])
    return layout.reshape(cells, [phases * channels, rows, *(a.taps for a in axes)])


def _interleave_strides(
    layout: BlockedLayout, y: ir.Value, strides: Pixels, pixels: Pixels
) -> ir.Value:
    """Return y (N, strides * C, counts) as (N, C, pixels): stride phases become pixels."""
    op, b = layout.op, layout.block
    _, channels, *counts = known_dims(y)
    blocks = channels // prod(strides) // b
    cells = layout.reshape(y, [0, *strides, blocks, *counts, b])
    cells = op.Transpose(cells, perm=[0, 3, 4, 1, 5, 2, 6])
    lengths = [n * s for n, s in zip(counts, strides, strict=True)]
    if lengths != list(pixels):
        cells = layout.reshape(cells, [0, blocks, *lengths, b])
        cells = op.Slice(cells, [0, 0], list(pixels), [2, 3])
    return layout.reshape(cells, [0, blocks * b, *pixels])


def _transposed_depthwise_conv(
    layout: BlockedLayout,
    g: ir.Value,
    weight: ir.Value,
    windows: Windows,
    pixels: Pixels,
    bias: ir.Value | None,
) -> ir.Value | None:
    """Return the transposed convolution of g by a depthwise weight, in NCHWc layout.

    With strides, zeros are inserted between the elements of g, as there are few products.
    """
    op, b = layout.op, layout.block
    channels, counts, strides = known_dims(weight)[0], image_dims(g)[2:], windows.strides
    extents = [(k - 1) * d for k, d in zip(windows.kernel, windows.dilations, strict=True)]
    begin = [e - p for e, p in zip(extents, windows.begin.tolist(), strict=True)]
    spread = [n * s for n, s in zip(counts, strides, strict=True)]
    end = [m - n + e - p for m, n, e, p in zip(pixels, spread, extents, begin, strict=True)]
    if min(*begin, *end) < 0:
        return None
    x = layout.to_nchwc(g)
    if max(strides) > 1:
        cells = layout.reshape(x, [0, channels // b, counts[0], 1, counts[1], 1, b])
        cells = op.Pad(cells, [0] * 10 + [strides[0] - 1, 0, strides[1] - 1, 0])
        x = layout.reshape(cells, [0, channels, *spread])
    taps = prod(windows.kernel)
    cells = layout.reshape(layout.conv_weight(weight), [channels // b, taps, b])
    cells = op.Gather(cells, list(range(taps))[::-1], axis=1)
    w = layout.reshape(cells, [channels, 1, *windows.kernel])
    attributes = {"pads": begin + end, "dilations": list(windows.dilations), "group": channels}
    return layout.convolve(x, w, pixels, attributes, bias)


def correlate_images(
    layout: BlockedLayout, x: ir.Value, g: ir.Value, weight: ir.Value, windows: Windows, group: int
) -> ir.Value | None:
    """Return a convolution's weight gradient from its input x and cotangent g, all in NCHW layout;
    None where a dilated kernel needs more than `MOST_PADDING`.

    It is a convolution of x with g as its kernel, of images one below the other, with rows of zeros
    between them. The channels of x within a block are columns, so that only whole images are
    transposed. For 32 images (16, 32, 32) and 3 x 3, it takes 5 ms, and a product of matrices over
    copies of all windows 14 ms. With a kernel dilated by d, the columns j, j + d, j + 2 d, ... are
    an image, so that no result between the elements of the kernel is computed. Sequences are images
    of height 1, or of width 1 where that is faster.
    """
    b, (_, channels, *lengths), (_, rows, *counts) = layout.block, image_dims(x), image_dims(g)
    cell = b if layout.is_whole_blocks(channels) else channels
    if _is_faster_upright(layout, x, g, windows):
        lengths, counts, windows = lengths[::-1], counts[::-1], windows.transposed
    kernel = windows.kernel
    (s, across), (d, _), (top, left) = windows.strides, windows.dilations, windows.begin.tolist()
    reach = [(k - 1) * n + 1 for k, n in zip(kernel, windows.dilations, strict=True)]
    pitch = max(-(-(lengths[0] + top) // s), -(-((counts[0] - 1) * s + reach[0] - top) // s))
    phases = windows.dilations[1] if across == 1 else 1
    columns = -(-counts[1] // phases)
    if phases > 1:
        reach[1] = kernel[1]
    padding = pitch * columns * phases / prod(counts)
    if max(windows.dilations) > 1 and padding > MOST_PADDING:
        return None
    width = (columns - 1) * across + reach[1]
    if cell == b:
        images = layout.reshape(layout.to_nchwc(x), [0, channels // b, *lengths, b])
    else:  # all channels are columns
        last = layout.op.Transpose(x, perm=[0, *range(2, len(known_dims(x))), 1])
        images = layout.reshape(last, [0, 1, *lengths, channels])
    at_once = _images_per_group(layout, layout.op.dim(images, 0) * phases)
    kernels = layout.reshape(layout.to_nchwc(g), [0, rows // b, *counts, b])
    below, right = pitch * s - lengths[0], width * phases - left - lengths[1]
    images = _channels_before_rows(layout, images, (0, left), (below, right), phases)
    beyond = (pitch - counts[0], columns * phases - counts[1])
    kernels = _channels_before_rows(layout, kernels, (0, 0), beyond, phases)
    bottom = max(0, reach[0] - top - s)
    attributes = {"pads": [top, 0, bottom, 0], "strides": [d, 1]}
    down = (top + bottom + s - 1) // d + 1
    if group > 1:
        images = layout.reshape(images, [1, channels, -1, width])
        kernels = layout.reshape(kernels, [rows, 1, -1, columns])
        attributes |= {"dilations": [s, across], "group": channels}
        y = layout.to_nchw(layout.convolve(images, kernels, [down, reach[1]], attributes))
        y = layout.reshape(y, [rows, 1, down, reach[1], 1])
    else:
        images = layout.reshape(images, [channels // cell, at_once, -1, width * cell])
        kernels = layout.reshape(kernels, [rows, at_once, -1, columns])
        attributes["dilations"] = [s, across * cell]
        y = layout.to_nchw(layout.convolve(images, kernels, [down, reach[1] * cell], attributes))
        y = layout.reshape(y, [channels // cell, rows, down, reach[1], cell])
    return layout.reshape(_weight_from_correlation(layout, y, windows), list(known_dims(weight)))


def _is_faster_upright(layout: BlockedLayout, x: ir.Value, g: ir.Value, windows: Windows) -> bool:
    """Return whether images of height 1 are correlated faster as images of width 1.

    Upright, no result between the elements of a dilated kernel is computed, and onnxruntime, which
    divides a result among threads by blocks of channels and by rows, has a row for each element.
    Channels that fill no block are too few columns then.
    """
    _, channels, height, _ = image_dims(x)
    flat = height == image_dims(g)[2] == windows.kernel[0] == 1 and not windows.begin[0]
    if not flat or windows.dilations[1] > 1:
        return flat
    few = channels // layout.block < layout.op.target.threads
    return few and layout.is_whole_blocks(channels)


def _channels_before_rows(
    layout: BlockedLayout, cells: ir.Value, begin: Pixels, end: Pixels, phases: int
) -> ir.Value:
    """Return x (N, C / block, H, W, block) as (C / block, N, ...), padding the pixels; with
    `phases`, every so many columns are an image: (C / block, N, phases, H, W / phases, block).
    """
    rows, blocks, *pixels, cell = known_dims(cells)
    if any((*begin, *end)):
        cells = layout.op.Pad(cells, [0, 0, *begin, 0, 0, 0, *end, 0])
        pixels = [d + p + q for d, p, q in zip(pixels, begin, end, strict=True)]
        cells.shape = ir.Shape([rows, blocks, *pixels, cell])
    if phases > 1:
        height, width = pixels
        cells = layout.reshape(cells, [0, blocks, height, width // phases, phases, cell])
        return layout.op.Transpose(cells, perm=[1, 0, 4, 2, 3, 5])
    return cells if blocks == 1 else layout.op.Transpose(cells, perm=[1, 0, 2, 3, 4])


def _images_per_group(layout: BlockedLayout, count: int | ir.Value) -> ir.Value:
    """Return the largest divisor of the `count` of images that is less than the channel block's
    size.

    This many images are channels of the convolution, and other images are stacked below them, so
    that the kernels of one channel stay in the cache for all columns.
    """
    op, candidates = layout.op, np.arange(1, layout.block)
    if isinstance(count, int):
        return op.const([max(n for n in candidates.tolist() if count % n == 0)])
    divides = op.Equal(op.Mod(count, candidates), [0])
    return op.ReduceMax(op.Where(divides, candidates, [1]), keepdims=1)


def _weight_from_correlation(layout: BlockedLayout, y: ir.Value, windows: Windows) -> ir.Value:
    """Return y (C / cell, M, rows, columns, cell) as a weight (M, C, kernel), cropping rows."""
    op, (k, m), d = layout.op, windows.kernel, windows.dilations[1]
    blocks, rows, down, columns, cell = known_dims(y)
    if down > k or columns > m:
        y = op.Slice(y, [0, 0], [k, columns], [2, 3], [1, d])
    if blocks > 1:  # onnxruntime joins two Transposes into a slow one
        y = op.Transpose(layout.reshape(y, [blocks, rows, k * m * cell]), perm=[1, 0, 2])
    if cell == layout.block:  # onnxruntime transposes small matrices slowly on several threads
        y = layout.to_nchw(layout.reshape(y, [rows * blocks, cell, k * m, 1]))
    else:
        y = op.Transpose(layout.reshape(y, [rows * blocks, k * m, cell]), perm=[0, 2, 1])
    return layout.reshape(y, [rows, blocks * cell, k, m])
