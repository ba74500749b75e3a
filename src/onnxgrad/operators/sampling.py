"""Interpolation of images: GridSample and AffineGrid, and the samples of DeformConv.

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

from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import Place
from onnxgrad.operators.records import declare_operators
from onnxgrad.operators.registry import Unsupported, rule
from onnxgrad.operators.rule_nodes import wide_dtype
from onnxgrad.operators.shapes import rank


def _sampled_axis(_node: Any, operand: int, axis: int) -> Place:
    return axis if axis < 2 - operand else None


declare_operators("GridSample", "float32_in_reference", roles="xv", axes=_sampled_axis)

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
    """The elements read by P samples of B images along one axis: each field is (B, taps, P)."""

    index: ir.Value  # int64, within the axis
    weight: ir.Value
    slope: ir.Value | None  # d weight / d position; None if it is zero everywhere
    count: int  # taps per sample


def taps(op, position, length, mode: str, padding: str = "zeros", aligned: bool = False) -> Taps:
    """Return the taps along an axis of this length at `position`, in units of elements."""
    powers = [np.array(row, position.dtype.numpy()).reshape(-1, 1) for row in _WEIGHTS[mode]]
    count, derivative = len(powers[0]), [n * row for n, row in enumerate(powers)][1:]
    inner = None
    if mode == "linear" and padding != "zeros":
        real = as_real(op, length, position.dtype)
        position, inner = _move_inside(op, position, real, padding, aligned)
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
    """Return an int, or an int64 value, as a value of a floating-point dtype."""
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


def _move_inside(op, position, length, padding: str, aligned: bool):
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


# -- all axes together --------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """P samples of each of `images` (B, C, elements), each of T elements."""

    images: ir.Value
    index: ir.Value  # (B, C, T P)
    weight: ir.Value  # (B, 1, T, P)
    slopes: list[ir.Value]  # d weight / d position along each axis, each (B, 1, T, P)
    unfolded: Any  # the shape (B, C, T, P) for a Reshape
    folded: Any  # (B, C, T P)

    def read(self, op):
        """Return the elements (B, C, T, P)."""
        return op.Reshape(op.GatherElements(self.images, self.index, axis=2), self.unfolded)

    def values(self, op, elements):
        """Return the samples (B, C, P)."""
        return op.ReduceSum(elements * self.weight, [2], keepdims=0)

    def images_gradient(self, op, g):
        """Return the gradient w.r.t. the images, from the cotangent g (B, C, P) of the samples."""
        parts = op.Reshape(op.Unsqueeze(g, [2]) * self.weight, self.folded)
        zeros = op.zeros_like(self.images)
        return op.ScatterElements(zeros, self.index, parts, axis=2, reduction="add")

    def positions_gradient(self, op, elements, g):
        """Return the gradient (B, P) of the positions along each axis."""
        by_weight = op.ReduceSum(op.Unsqueeze(g, [2]) * elements, [1], keepdims=1)
        return [op.ReduceSum(by_weight * slope, [1, 2], keepdims=0) for slope in self.slopes]


def samples_of(op, images, channels, count, axes: list[Taps], lengths: list) -> Samples:
    """Return `count` samples per image, from their taps along axes of these lengths."""
    n, size = len(axes), prod(tap.count for tap in axes)

    def spread(i: int, v):  # (B, taps, P) -> (B, taps of axis 0, taps of axis 1, ..., P)
        return op.Unsqueeze(v, [1 + k for k in range(n) if k != i]) if n > 1 else v

    def product(parts: list):
        y = op.Reshape(reduce(op.Mul, parts), op.vector(0, size, count))
        return op.Unsqueeze(y, [1])

    index = spread(0, axes[0].index)
    for i in range(1, n):
        index = index * op.const(lengths[i], ir.DataType.INT64) + spread(i, axes[i].index)
    folded = op.vector(0, 0, count * size)
    index = op.Reshape(index, op.vector(0, 1, count * size))
    weights = [spread(i, tap.weight) for i, tap in enumerate(axes)]
    slopes = [
        product([spread(i, tap.slope) if k == i else w for k, w in enumerate(weights)])
        for i, tap in enumerate(axes)
        if tap.slope is not None
    ]
    index = op.Expand(index, op.vector(1, channels, 1))
    return Samples(images, index, product(weights), slopes, op.vector(0, 0, size, count), folded)


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
        axes.append(taps(op, position, length, mode, padding, aligned))
        factors.append(0.5 * (real - 1.0) if aligned else 0.5 * real)
    images = op.Reshape(op.Cast(x, to=dtype), op.vector(0, 0, op.numel(x, 2)))
    samples = samples_of(op, images, op.dim(x, 1), count, axes, lengths)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, 0, count))
    dx = op.reshape_like(op.Cast(samples.images_gradient(op, g), to=x.dtype), x)
    if mode == "nearest":
        return dx, None
    by_axis = zip(samples.positions_gradient(op, samples.read(op), g), factors, strict=True)
    du = op.Concat(*(op.Unsqueeze(d * f, [2]) for d, f in reversed([*by_axis])), axis=2)
    return dx, op.reshape_like(op.Cast(du, to=grid.dtype), grid)


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
