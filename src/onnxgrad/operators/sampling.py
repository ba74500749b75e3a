"""Interpolation of images: GridSample, AffineGrid, samples of DeformConv, and pooling over regions.

A sample is a weighted sum of the elements around its position. The weights are polynomials of the
position along each axis. Half precision is computed in float32.

Samples are along the last axis of all tensors: broadcasting along a short last axis is slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.axes import OutputAxis
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.records import Unsupported, declare_operators, rule
from onnxgrad.operators.rule_nodes import wide_dtype
from onnxgrad.operators.shapes import rank


def _axis_after_grid_sample(_node: Any, operand: int, axis: int) -> OutputAxis:
    return axis if axis < 2 - operand else None


declare_operators("GridSample", "float32_in_reference", roles="xv", axes=_axis_after_grid_sample)

_LAST = 2**63 - 1  # end of a Slice up to the last element
_A = -0.75  # coefficient of cubic convolution (Keys 1981), as GridSample specifies
# the weights of neighboring elements as polynomials of the distance t of the position from the
# element at or before it: one row per power of t
_WEIGHTS = {
    "nearest": [[1.0]],
    "linear": [[1.0, 0.0], [-1.0, 1.0]],
    "cubic": [
        [0.0, 1.0, 0.0, 0.0],
        [_A, 0.0, -_A, 0.0],
        [-2 * _A, -(_A + 3), 2 * _A + 3, _A],
        [_A, _A + 2, -(_A + 2), -_A],
    ],
}


@dataclass(frozen=True)
class Taps:
    """The elements (taps) that P interpolated samples of B images read along one axis: each tensor
    is (B, taps of a sample, P).
    """

    index: ir.Value  # int64, within the axis
    weight: ir.Value
    slope: ir.Value | None  # d weight / d position; None if it is zero everywhere
    count: int  # taps per sample


def axis_taps(
    op, position, length, mode: str, padding: str = "zeros", aligned: bool = False
) -> Taps:
    """Return the elements to read (`Taps`) for interpolation at `position`, in elements, along an
    axis of length `length`.
    """
    powers = [np.array(row, position.dtype.numpy()).reshape(-1, 1) for row in _WEIGHTS[mode]]
    count, derivative = len(powers[0]), [n * row for n, row in enumerate(powers)][1:]
    inner = None
    if mode == "linear" and padding != "zeros":
        real = as_real(op, length, position.dtype)
        position, inner = _move_into_image(op, position, real, padding, aligned)
    first = op.Round(position) if mode == "nearest" else op.Floor(position)
    t = op.Unsqueeze(position - first, [1])
    neighbors = np.arange(count).reshape(-1, 1) - (1 if mode == "cubic" else 0)
    index = op.Unsqueeze(op.Cast(first, to=ir.DataType.INT64), [1]) + neighbors
    weight, slope = _evaluate_polynomial(op, t, powers), _evaluate_polynomial(op, t, derivative)
    last = length - 1 if isinstance(length, ir.Value) else np.int64(length - 1)
    if padding == "reflection" and mode != "linear":
        index = _reflect_index(op, index, length, aligned)
    clipped = op.Max(op.Min(index, last), np.int64(0))
    if padding == "zeros":
        inside = op.Cast(op.Equal(index, clipped), to=position.dtype)
        weight, slope = weight * inside, None if slope is None else slope * inside
    if inner is not None:
        slope = slope * op.Unsqueeze(inner, [1])
    return Taps(clipped, weight, slope, count)


def as_real(op, number, dtype):
    """Return an int, or an int64 tensor, as a tensor of a floating-point dtype."""
    if isinstance(number, ir.Value):
        return op.Cast(number, to=dtype)
    return op.const(np.array([number], dtype.numpy()))


def _evaluate_polynomial(op, t, rows: list[np.ndarray]):
    """Return rows[0] + rows[1] t + rows[2] t^2 + ..., by Horner's rule."""
    if not rows:
        return None
    y = op.const(rows[-1])
    if len(rows) == 1:
        return op.Expand(y, op.Shape(t))
    for row in rows[-2::-1]:
        y = y * t + row
    return y


def _move_into_image(op, position, length, padding: str, aligned: bool):
    """Return the position clamped to the image or reflected into it, and its derivative.

    The derivative is 0 where the position is clamped, and at the border itself, as in PyTorch.
    """
    last, sign = length - 1.0, None
    if padding == "reflection":
        low, half = (0.0, op.Max(last, 1.0)) if aligned else (-0.5, length)
        from_low, period = position - low, 2.0 * half
        phase = op.Abs(from_low) - period * op.Floor(op.Abs(from_low) / period)
        back = op.Greater(phase, half)
        position = op.Where(back, period - phase, phase) + low
        one, minus_one = op.const(1.0, position.dtype), op.const(-1.0, position.dtype)
        sign = op.Where(op.Xor(back, op.Less(from_low, 0.0)), minus_one, one)
    inside = op.And(op.Greater(position, 0.0), op.Less(position, last))
    clamped = op.Min(op.Max(position, 0.0), last)
    derivative = op.Cast(inside, to=position.dtype)
    return clamped, derivative if sign is None else derivative * sign


def _reflect_index(op, index, length, aligned: bool):
    """Return indices reflected at the first and last element, or half an element beyond them."""
    edge = 0 if aligned else 1
    period = op.Max(op.const(np.int64(2)) * length - 2 * (1 - edge), np.int64(1))
    phase = op.Mod(index, period)
    return op.Min(phase, period - edge - phase)


# -- samples from the taps of all axes ------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """P interpolated samples of each of B images (B, C, elements), each from T image elements."""

    images: ir.Value
    index: ir.Value  # (B, C, T P)
    weight: ir.Value  # (B, 1, T, P)
    slopes: list[ir.Value]  # d weight / d position along each axis, each (B, 1, T, P)
    unfolded: Any  # the shape (B, C, T, P) for a Reshape
    folded: Any  # (B, C, T P)

    def read(self, op):
        """Return the T image elements that each of P samples is interpolated from: (B, C, T, P)."""
        return op.Reshape(op.GatherElements(self.images, self.index, axis=2), self.unfolded)

    def values(self, op, elements):
        """Return the interpolated samples: B images, C channels, P samples."""
        return op.ReduceSum(elements * self.weight, [2], keepdims=0)

    def images_gradient(self, op, g):
        """Return the gradient w.r.t. the images, from the cotangent g (B, C, P) of the samples."""
        parts = op.Reshape(op.Unsqueeze(g, [2]) * self.weight, self.folded)
        zeros = op.zeros_like(self.images)
        return op.ScatterElements(zeros, self.index, parts, axis=2, reduction="add")

    def positions_gradient(self, op, elements, g):
        """Return the gradient w.r.t. the positions of all samples along each axis, (B, P) each."""
        by_weight = op.ReduceSum(op.Unsqueeze(g, [2]) * elements, [1], keepdims=1)
        return [op.ReduceSum(by_weight * slope, [1, 2], keepdims=0) for slope in self.slopes]


def interpolation_samples(op, images, channels, count, axes: list[Taps], lengths: list) -> Samples:
    """Return `count` interpolated samples of each image, from the `Taps` of each axis."""
    n, size = len(axes), prod(tap.count for tap in axes)

    def spread_axis(i: int, v):  # (B, taps, P) -> (B, taps of axis 0, taps of axis 1, ..., P)
        return op.Unsqueeze(v, [1 + k for k in range(n) if k != i]) if n > 1 else v

    def multiply_axes(parts: list):
        y = op.Reshape(reduce(op.Mul, parts), op.vector(0, size, count))
        return op.Unsqueeze(y, [1])

    index = spread_axis(0, axes[0].index)
    for i in range(1, n):
        index = index * op.const(lengths[i], ir.DataType.INT64) + spread_axis(i, axes[i].index)
    folded = op.vector(0, 0, count * size)
    index = op.Reshape(index, op.vector(0, 1, count * size))
    weights = [spread_axis(i, tap.weight) for i, tap in enumerate(axes)]
    slopes = [
        multiply_axes([spread_axis(i, tap.slope) if k == i else w for k, w in enumerate(weights)])
        for i, tap in enumerate(axes)
        if tap.slope is not None
    ]
    index = op.Expand(index, op.vector(1, channels, 1))
    unfolded = op.vector(0, 0, size, count)
    return Samples(images, index, multiply_axes(weights), slopes, unfolded, folded)


@rule("GridSample")
def grid_sample(op, node, g):
    """y = sum w(u) x over the elements around each u of the grid:  dx = g w,  du = sum g x dw/du.

    Where u is clamped to the border, and at the border itself, du is zero, as in PyTorch.
    """
    x, grid = node.inputs
    n = rank(x) or rank(grid)
    if n is None:
        return Unsupported("the rank of its input is not known; state its shape in the model")
    aligned = bool(int_attribute(node, "align_corners"))
    mode = string_attribute(node, "mode").removeprefix("bi")
    padding = string_attribute(node, "padding_mode")
    dtype, count = wide_dtype(x.dtype), op.numel(grid, 1, -1)
    lengths = [op.dim(x, i) for i in range(2, n)]
    points = op.Reshape(op.Cast(grid, to=dtype), op.vector(0, count, n - 2))
    axes, factors = [], []
    for i, length in enumerate(lengths):  # the last axis of x comes first in the grid
        u, real = op.Gather(points, np.int64(n - 3 - i), axis=2), as_real(op, length, dtype)
        position = (u + 1.0) * 0.5 * (real - 1.0) if aligned else ((u + 1.0) * real - 1.0) * 0.5
        axes.append(axis_taps(op, position, length, mode, padding, aligned))
        factors.append(0.5 * (real - 1.0) if aligned else 0.5 * real)
    images = op.Reshape(op.Cast(x, to=dtype), op.vector(0, 0, op.numel(x, 2)))
    samples = interpolation_samples(op, images, op.dim(x, 1), count, axes, lengths)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, 0, count))
    dx = op.reshape_like(op.Cast(samples.images_gradient(op, g), to=x.dtype), x)
    if mode == "nearest":
        return dx, None
    by_axis = zip(samples.positions_gradient(op, samples.read(op), g), factors, strict=True)
    du = op.Concat(*(op.Unsqueeze(d * f, [2]) for d, f in reversed([*by_axis])), axis=2)
    return dx, op.reshape_like(op.Cast(du, to=grid.dtype), grid)


declare_operators("AffineGrid", roles="v")


@rule("AffineGrid")
def affine_grid(op, node, g):
    """y = theta b, b = (x, y, 1) at each position:  dtheta = sum over positions of g bT.

    The positions are computed by an AffineGrid of the unit matrix.
    """
    theta, size = node.inputs
    dtype = wide_dtype(theta.dtype)
    n = op.dim(theta, 1)
    unit = op.EyeLike(op.Expand(op.const(0.0, dtype), op.vector(n, op.dim(theta, 2))))
    one_of = op.Concat([1], op.Slice(size, [1], [_LAST], [0]), axis=0)
    aligned = int_attribute(node, "align_corners")
    grid = op.AffineGrid(op.Unsqueeze(unit, [0]), one_of, align_corners=aligned)
    grid = op.Reshape(grid, op.vector(-1, n))
    b = op.Concat(grid, op.Expand(op.const(1.0, dtype), op.vector(op.dim(grid, 0), 1)), axis=1)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, -1, n))
    dtheta = op.MatMul(op.Transpose(g, perm=[0, 2, 1]), b)
    return op.set_type_like(op.Cast(dtheta, to=theta.dtype), theta), None


# -- pooling over regions of an image: RoiAlign and MaxRoiPool -------------------------------------


def _axis_after_roi_pool(_node: Any, operand: int, axis: int) -> OutputAxis:
    # channels of the images, rows of the regions and of their batch indices
    return axis if axis == (operand == 0) else None


declare_operators("RoiAlign", roles="xi", axes=_axis_after_roi_pool)

_LONG = ir.DataType.INT64


@dataclass(frozen=True)
class RegionSamples:
    """The sample points of R regions along one axis: up to I points in each of P bins."""

    first: ir.Value  # (R, P, I), index of the element at or before each sample
    t: ir.Value  # the distance of the sample from this element
    used: ir.Value  # 1 if the sample counts, 0 beyond the image or the count
    moving: ir.Value  # 1 if the sample counts and moves with the region, 0 if clamped
    by_end: ir.Value  # d position / d end of the region; d position / d start is 1 - this
    count: ir.Value  # samples per bin
    bins: int
    length: int | ir.Value  # of the axis


@rule("RoiAlign")
def roi_align(op, node, g):
    """y = Ay x AxT, a matrix for each region and axis, whose rows are means of interpolations:
    dx = AyT g Ax,  dAy = g Ax xT,  dAx = gT Ay x, and from these drois.

    In mode max, y is the first maximum of w x over single elements x with their weights w, not over
    interpolations. He et al. 2017, arXiv:1703.06870.
    """
    x, rois, _ = node.inputs
    dtype = wide_dtype(x.dtype)
    lines, g = [_bin_sample_points(op, node, axis, dtype) for axis in (0, 1)], op.Cast(g, to=dtype)
    if string_attribute(node, "mode") == "max":
        dx, ends = _max_roi_gradients(op, node, lines, g)
    else:
        dx, ends = _mean_roi_gradients(op, node, lines, g)
    (top, bottom), (left, right) = ends
    scale = float_attribute(node, "spatial_scale")
    drois = op.Concat(left, top, right, bottom, axis=1) * scale
    return (
        op.reshape_like(op.Cast(dx, to=x.dtype), x),
        op.set_type_like(op.Cast(drois, to=rois.dtype), rois),
        None,
    )


def _bin_sample_points(op, node, axis: int, dtype) -> RegionSamples:
    """Return the sample points of all regions along the rows (axis 0) or the columns (axis 1) of
    the image.
    """
    x, rois, _ = node.inputs
    length, scale = op.dim(x, 2 + axis), float_attribute(node, "spatial_scale")
    half = string_attribute(node, "coordinate_transformation_mode") == "half_pixel"
    bins = int_attribute(node, "output_width" if axis else "output_height")
    ends = op.Cast(rois, to=dtype) * scale - (0.5 if half else 0.0)
    start, end = (op.Reshape(op.Gather(ends, [i - axis], axis=1), [-1, 1, 1]) for i in (1, 3))
    extent, real = end - start, as_real(op, length, dtype)
    clamped_extent = extent if half else op.Max(extent, 1.0)
    ratio = int_attribute(node, "sampling_ratio")
    count, i, counted = op.const(float(ratio), dtype), op.Cast(op.arange(ratio), to=dtype), None
    if ratio <= 0:
        count = op.Max(op.Ceil(clamped_extent / float(bins)), 0.0)
        i = op.Cast(op.arange(_largest_count(op, count)), to=dtype)
        counted, count = op.Less(i, count), op.Max(count, 1.0)
    p = op.const(np.arange(bins, dtype=dtype.numpy()).reshape(-1, 1))
    u = (p + (i + 0.5) / count) / float(bins)
    position = start + clamped_extent * u
    used = op.And(op.GreaterOrEqual(position, -1.0), op.LessOrEqual(position, real))
    used = used if counted is None else op.And(used, counted)
    moving = op.And(op.Greater(position, 0.0), op.Less(position, real - 1.0))
    clamped = op.Min(op.Max(position, 0.0), real - 1.0)
    by_end = u if half else u * op.Cast(op.GreaterOrEqual(extent, 1.0), to=dtype)
    first, (used, moving) = op.Floor(clamped), (op.Cast(v, to=dtype) for v in (used, moving))
    return RegionSamples(first, clamped - first, used, used * moving, by_end, count, bins, length)


def _largest_count(op, counts):
    """Return the largest of `counts`, at least one, as an int64 tensor [1]."""
    flat = op.Concat(op.Reshape(counts, [-1]), op.const(np.ones(1, counts.dtype.numpy())), axis=0)
    return op.Cast(op.ReduceMax(flat, keepdims=1), to=_LONG)


# -- RoiAlign in mode avg -------------------------------------------------------------------------


def _mean_roi_gradients(op, node, lines: list[RegionSamples], g):
    """Return the gradients of RoiAlign in mode avg w.r.t. the image x, and w.r.t. start and end of
    the regions along both axes.

    The matrices Ay span all images of the batch, with zeros outside the image of the region, so
    that all regions are one product.
    """
    x, rois, batch = node.inputs
    x = op.Cast(x, to=g.dtype)
    images, channels, regions = op.dim(x, 0), op.dim(x, 1), op.dim(rois, 0)
    own = op.Equal(op.Unsqueeze(batch, [1, 2, 3]), op.Unsqueeze(op.arange(images), [1]))
    own = op.Cast(own, to=g.dtype)  # (R, 1, B, 1)
    weights = [_interpolation_weights(op, line) for line in lines]
    matrices = [op.ReduceSum(weight, [2], keepdims=0) for weight, _ in weights]
    dx, ends = None, list[Any]()
    for axis, (line, (_, slope)) in enumerate(zip(lines, weights, strict=True)):
        other, g_ = lines[1 - axis], op.Transpose(g, perm=[0, 1, 3, 2]) if axis else g
        across = op.MatMul(g_, op.Unsqueeze(matrices[1 - axis], [1]))  # (R, C, P, other length)
        across = op.Transpose(across, perm=[0, 2, 1, 3])
        across = op.Reshape(across, op.vector(regions * line.bins, channels * other.length))
        if dx is None:
            rows = op.Unsqueeze(matrices[0], [2]) * own
            rows = op.Reshape(rows, op.vector(regions * line.bins, images * line.length))
            dx = op.MatMul(op.Transpose(rows, perm=[1, 0]), across)
            dx = op.Reshape(dx, op.vector(images, line.length, channels, other.length))
            dx = op.Transpose(dx, perm=[0, 2, 1, 3])
        pixels = op.Transpose(x, perm=[1, 3, 0, 2] if axis == 0 else [1, 2, 0, 3])
        pixels = op.Reshape(pixels, op.vector(channels * other.length, images * line.length))
        d = op.MatMul(across, pixels)
        d = op.Reshape(d, op.vector(regions, line.bins, images, line.length))
        d = op.Unsqueeze(op.ReduceSum(d * own, [2], keepdims=0), [2])
        ends.append(_region_end_gradients(op, line, op.ReduceSum(d * slope, [3], keepdims=0)))
    return dx, ends


def _interpolation_weights(op, line: RegionSamples):
    """Return the interpolation weights of all elements along one axis, (regions, bins, samples,
    length), and their derivatives w.r.t. the sample's position.
    """
    first, t = op.Unsqueeze(line.first, [-1]), op.Unsqueeze(line.t, [-1])
    index = op.Cast(op.arange(line.length), to=line.first.dtype)
    at_first, at_next = (op.Cast(op.Equal(first, i), to=t.dtype) for i in (index, index - 1.0))
    share, moving = line.used / line.count, line.moving / line.count
    rise = at_next - at_first
    return (at_first + rise * t) * op.Unsqueeze(share, [-1]), rise * op.Unsqueeze(moving, [-1])


def _region_end_gradients(op, line: RegionSamples, d):
    """Return the gradients (R, 1) w.r.t. start and end of the regions, from `d`, the gradient
    w.r.t. the positions of the samples.
    """
    end = op.ReduceSum(d * line.by_end, [1, 2], keepdims=0)
    start = op.ReduceSum(d, [1, 2], keepdims=0) - end
    return op.Unsqueeze(start, [1]), op.Unsqueeze(end, [1])


# -- RoiAlign in mode max, and MaxRoiPool ---------------------------------------------------------


@dataclass(frozen=True)
class Maxima:
    """The maximum of each bin among its S candidates: each field is (R, C, P, Q, 1)."""

    index: ir.Value  # among the candidates
    position: ir.Value  # in the flattened images
    value: ir.Value
    shape: ir.Value  # (R, C, P, Q, S)

    def select(self, op, v):
        """Return the elements of `v` at the maxima; `v` broadcasts to `shape`."""
        return op.GatherElements(op.Expand(v, self.shape), self.index, axis=4)


def _find_bin_maxima(op, x, batch, rows, columns, score) -> Maxima:
    """Return the first maximum of `score(elements)` in each bin.

    The candidates are the elements of x at `rows` (R, P, I) and `columns` (R, Q, J), I times J.
    """
    channels = op.dim(x, 1)
    plane = op.Unsqueeze(batch, [1]) * op.const(channels, _LONG) + op.arange(channels)
    row = op.Unsqueeze(plane, [2, 3]) * op.const(op.dim(x, 2), _LONG) + op.Unsqueeze(rows, [1])
    row = op.Unsqueeze(row * op.const(op.dim(x, 3), _LONG), [3, 5])
    positions = _merge_last_axes(op, row + op.Unsqueeze(columns, [1, 2, 4]), 4)
    elements = op.Gather(op.Reshape(x, [-1]), positions, axis=0)
    index = op.ArgMax(score(elements), axis=4, keepdims=1)
    position, value = (op.GatherElements(v, index, axis=4) for v in (positions, elements))
    return Maxima(index, position, value, op.Shape(positions))


def _merge_last_axes(op, v, axis: int):
    """Return `v` with its axes from `axis` on merged, also if there are no regions."""
    shape = op.Concat(op.Shape(v, start=0, end=axis), op.vector(op.numel(v, axis)), axis=0)
    shape.shape = ir.Shape([axis + 1])
    return op.Reshape(v, shape, allowzero=1)


def _outer_product(op, rows, columns):
    """Return the products (R, 1, P, Q, I J) of region row values and region column values."""
    return _merge_last_axes(op, op.Unsqueeze(rows, [1, 3, 5]) * op.Unsqueeze(columns, [1, 2, 4]), 4)


def _max_roi_gradients(op, node, lines: list[RegionSamples], g):
    """Return the gradients of RoiAlign in mode max w.r.t. the image x, and w.r.t. start and end of
    the regions along both axes.
    """
    x, _, batch = node.inputs
    x, g = op.Cast(x, to=g.dtype), op.Unsqueeze(g, [-1])
    (rows, *down), (columns, *right) = (_sampled_element_pairs(op, line) for line in lines)
    weight = _outer_product(op, down[0], right[0])
    maxima = _find_bin_maxima(op, x, batch, rows, columns, lambda elements: elements * weight)
    gx, ends = g * maxima.value, []
    for slopes in ([(d, right[0]) for d in down[1:]], [(down[0], d) for d in right[1:]]):
        by = (gx * maxima.select(op, _outer_product(op, *pair)) for pair in slopes)
        ends.append([op.ReduceSum(d, [1, 2, 3], keepdims=0) for d in by])
    return scatter_flat(op, x, maxima.position, g * maxima.select(op, weight)), ends


def _sampled_element_pairs(op, line: RegionSamples):
    """Return, for the two elements that each sample reads along an axis, index, weight, and the
    weight's derivatives w.r.t. start and end of the region.

    Each sample reads two: every result is (R, P, 2 I).
    """
    last = op.const(line.length, _LONG) - np.int64(1)
    first = op.Unsqueeze(op.Cast(line.first, to=_LONG), [-1])
    rise, at_first = op.const([-1, 1]), op.const([1, 0])
    rise, at_first = (op.Cast(v, to=line.t.dtype) for v in (rise, at_first))
    by_start = line.moving * (1.0 - line.by_end)
    fields = (
        op.Min(first + np.arange(2), last),
        op.Unsqueeze(line.used, [-1]) * (op.Unsqueeze(line.t, [-1]) * rise + at_first),
        op.Unsqueeze(by_start, [-1]) * rise,
        op.Unsqueeze(line.moving * line.by_end, [-1]) * rise,
    )
    return [_merge_last_axes(op, v, 2) for v in fields]


@rule("MaxRoiPool")
def max_roi_pool(op, node, g):
    """y = max of a bin of a region:  dx = zeros with g added at the first maximum of each bin.

    Regions are rounded to whole elements, and so have no gradient.
    """
    x, rois = node.inputs
    dtype = wide_dtype(x.dtype)
    regions = op.Cast(rois, to=dtype) * op.const(
        np.array([1.0] + [float_attribute(node, "spatial_scale")] * 4, dtype.numpy())
    )
    batch = op.Cast(op.Gather(regions, np.int64(0), axis=1), to=_LONG)
    rows, columns = (_element_indices_of_bins(op, node, regions, axis) for axis in (0, 1))
    within = op.Greater(_outer_product(op, rows[1], columns[1]), 0.0)
    lowest = op.const(-np.inf, dtype)
    maxima = _find_bin_maxima(
        op, op.Cast(x, to=dtype), batch, rows[0], columns[0], lambda v: op.Where(within, v, lowest)
    )
    g = op.Unsqueeze(op.Cast(g, to=dtype), [-1])
    return scatter_flat(op, x, maxima.position, op.Where(maxima.select(op, within), g, 0.0)), None


def _element_indices_of_bins(op, node, regions, axis: int):
    """Return the indices of the elements of each bin along one axis, (regions, bins, elements), and
    1 for elements in their bin, else 0.
    """
    count, dtype = node.attributes.get_ints("pooled_shape")[axis], regions.dtype
    real = as_real(op, op.dim(node.inputs[0], 2 + axis), dtype)
    start, end = (
        op.Reshape(_round_half_away(op, op.Gather(regions, [i - axis], axis=1)), [-1, 1])
        for i in (2, 4)
    )
    bin_ = op.Max(end - start + 1.0, 1.0) / float(count)
    p = op.const(np.arange(count, dtype=dtype.numpy()))
    low, high = (
        op.Unsqueeze(op.Min(op.Max(v + start, 0.0), real), [-1])
        for v in (op.Floor(p * bin_), op.Ceil((p + 1.0) * bin_))
    )
    element = low + op.Cast(op.arange(_largest_count(op, high - low)), to=dtype)
    index = op.Cast(op.Min(element, real - 1.0), to=_LONG)
    return index, op.Cast(op.Less(element, high), to=dtype)


def _round_half_away(op, v):
    """Return `v` rounded, halves away from zero, as the kernels do."""
    size = op.Abs(v)
    whole = op.Floor(size)
    up = op.Cast(op.GreaterOrEqual(size - whole, 0.5), to=v.dtype)
    return op.Sign(v) * (whole + up)
