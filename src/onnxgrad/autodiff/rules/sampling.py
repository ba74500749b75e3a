"""Reading an image between its elements: GridSample, AffineGrid, DeformConv.

A sample is the sum of a few elements around its place, each times a weight that is a polynomial of
the place along each axis. Half precision is computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import wide
from onnxgrad.autodiff.rules.registry import Unsupported, rule
from onnxgrad.graph.shapes import rank

_LAST = 2**63 - 1  # as the end of a Slice: up to the last element
_A = -0.75  # of the cubic convolution (Keys 1981), fixed by the specification of GridSample
# the weights of neighbouring elements as polynomials of the distance t from the first at or before
# the place: one row per power of t
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
    """The elements that samples (B, P) read along one axis: each field is (B, P, taps)."""

    index: ir.Value  # int64, within the axis
    weight: ir.Value
    slope: ir.Value | None  # of the weight by the place; None where it is zero everywhere
    taken: int  # taps


def taps(op, place, length, mode: str, padding: str = "zeros", aligned: bool = False) -> Taps:
    """Return what is read along an axis of some length at `place`, counted in elements."""
    powers = [np.array(row, place.dtype.numpy()) for row in _WEIGHTS[mode]]
    count, derivative = len(powers[0]), [n * row for n, row in enumerate(powers)][1:]
    turn = None
    if mode == "linear" and padding != "zeros":
        place, turn = _inside(op, place, as_real(op, length, place.dtype), padding, aligned)
    first = op.Round(place) if mode == "nearest" else op.Floor(place)
    t = op.Unsqueeze(place - first, [-1])
    neighbours = np.arange(count) - (1 if mode == "cubic" else 0)
    index = op.Unsqueeze(op.Cast(first, to=ir.DataType.INT64), [-1]) + neighbours
    weight, slope = _polynomial(op, t, powers), _polynomial(op, t, derivative)
    last = length - 1 if isinstance(length, ir.Value) else np.int64(length - 1)
    if padding == "reflection" and mode != "linear":
        index = _mirrored(op, index, length, aligned)
    clipped = op.Max(op.Min(index, last), np.int64(0))
    if padding == "zeros":
        there = op.Cast(op.Equal(index, clipped), to=place.dtype)
        weight, slope = weight * there, None if slope is None else slope * there
    if turn is not None:
        slope = slope * op.Unsqueeze(turn, [-1])
    return Taps(clipped, weight, slope, count)


def as_real(op, number, dtype):
    """Return an int, or an int64 value, in another dtype."""
    if isinstance(number, ir.Value):
        return op.Cast(number, to=dtype)
    return op.const(np.array([number], dtype.numpy()))


def arange(op, n):
    """Return 0, 1, ..., n - 1 as int64."""
    if isinstance(n, int):
        return op.const(np.arange(n))
    return op.Range(np.int64(0), op.Squeeze(n, [0]), np.int64(1))


def _polynomial(op, t, rows: list[np.ndarray]):
    """Return rows[0] + rows[1] t + rows[2] t^2 + ..., by Horner's rule."""
    if not rows:
        return None
    y = op.const(rows[-1])
    if len(rows) == 1:
        return op.Expand(y, op.Shape(t))
    for row in rows[-2::-1]:
        y = y * t + row
    return y


def _inside(op, place, length, padding: str, aligned: bool):
    """Return the place moved into the image, and its derivative: 0 where it is held at the border.

    As in PyTorch the border belongs to what is held.
    """
    last, sign = length - 1.0, None
    if padding == "reflection":
        low, half = (0.0, op.Max(last, 1.0)) if aligned else (-0.5, length)
        from_low, period = place - low, 2.0 * half
        turned = op.Abs(from_low) - period * op.Floor(op.Abs(from_low) / period)
        back = op.Greater(turned, half)
        place = op.Where(back, period - turned, turned) + low
        one, other = op.const(1.0, place.dtype), op.const(-1.0, place.dtype)
        sign = op.Where(op.Xor(back, op.Less(from_low, 0.0)), other, one)
    free = op.And(op.Greater(place, 0.0), op.Less(place, last))
    held = op.Min(op.Max(place, 0.0), last)
    moving = op.Cast(free, to=place.dtype)
    return held, moving if sign is None else moving * sign


def _mirrored(op, index, length, aligned: bool):
    """Return integer places reflected at the first and last element, or half an element beyond."""
    edge = 0 if aligned else 1
    period = op.Max(op.const(np.int64(2)) * length - 2 * (1 - edge), np.int64(1))
    turned = op.Mod(index, period)
    return op.Min(turned, period - edge - turned)


# -- all axes together --------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """What P samples per image read of `images` (B, C, elements): T elements each."""

    images: ir.Value
    index: ir.Value  # (B, C, P T)
    weight: ir.Value  # (B, 1, P, T)
    slopes: list[ir.Value]  # of the weight by the place along each axis, as `weight`
    unfolded: Any  # the shape (B, C, P, T) for a Reshape
    folded: Any  # (B, C, P T)

    def read(self, op):
        """Return the elements (B, C, P, T)."""
        return op.Reshape(op.GatherElements(self.images, self.index, axis=2), self.unfolded)

    def values(self, op, elements):
        """Return the samples (B, C, P)."""
        return op.ReduceSum(elements * self.weight, [3], keepdims=0)

    def into_images(self, op, g):
        """Return the gradient of the images, where g (B, C, P) arrives at the samples."""
        parts = op.Reshape(op.Unsqueeze(g, [-1]) * self.weight, self.folded)
        zeros = op.zeros_like(self.images)
        return op.ScatterElements(zeros, self.index, parts, axis=2, reduction="add")

    def into_places(self, op, elements, g):
        """Return the gradient (B, P) of the places along each axis."""
        by_weight = op.ReduceSum(op.Unsqueeze(g, [-1]) * elements, [1], keepdims=1)
        return [op.ReduceSum(by_weight * slope, [1, 3], keepdims=0) for slope in self.slopes]


def samples(op, images, channels, count, axes: list[Taps], lengths: list) -> Samples:
    """Return what `count` samples read along all axes, which have these lengths."""
    n, taken = len(axes), prod(tap.taken for tap in axes)

    def spread(i: int, v):  # (B, P, taps) with an axis for the taps of each axis
        return op.Unsqueeze(v, [2 + k for k in range(n) if k != i]) if n > 1 else v

    def together(parts: list):
        y = parts[0]
        for part in parts[1:]:
            y = y * part
        return op.Unsqueeze(op.Reshape(y, [0, 0, taken]), [1])

    index = spread(0, axes[0].index)
    for i in range(1, n):
        index = index * op.const(lengths[i], ir.DataType.INT64) + spread(i, axes[i].index)
    folded = op.vector(0, 0, count * taken)
    index = op.Reshape(op.Unsqueeze(op.Reshape(index, [0, 0, taken]), [1]), folded)
    weights = [spread(i, tap.weight) for i, tap in enumerate(axes)]
    slopes = [
        together([spread(i, tap.slope) if k == i else w for k, w in enumerate(weights)])
        for i, tap in enumerate(axes)
        if tap.slope is not None
    ]
    index = op.Expand(index, op.vector(1, channels, 1))
    return Samples(images, index, together(weights), slopes, op.vector(0, 0, count, taken), folded)


# -- operators ----------------------------------------------------------------------------------


@rule("GridSample")
def grid_sample(op, node, g):
    """y = sum w(u) x around each place u of the grid:  dx = g w there,  du = g x dw/du.

    Where a place is held at the border, the border included, its gradient is zero, as in PyTorch.
    """
    x, grid = node.inputs
    n = rank(x) or rank(grid)
    if n is None:
        return Unsupported("the rank of its input is not known")
    aligned = bool(node.attributes.get_int("align_corners", 0))
    mode = node.attributes.get_string("mode", "linear").removeprefix("bi")
    padding = node.attributes.get_string("padding_mode", "zeros")
    dtype, lengths, count = (
        wide(x.dtype),
        [op.dim(x, i) for i in range(2, n)],
        op.numel(grid, 1, -1),
    )
    points = op.Reshape(op.Cast(grid, to=dtype), op.vector(0, count, n - 2))
    axes, factors = [], []
    for i, length in enumerate(lengths):  # the last axis of x comes first in the grid
        u, real = op.Gather(points, np.int64(n - 3 - i), axis=2), as_real(op, length, dtype)
        place = (u + 1.0) * 0.5 * (real - 1.0) if aligned else ((u + 1.0) * real - 1.0) * 0.5
        axes.append(taps(op, place, length, mode, padding, aligned))
        factors.append(0.5 * (real - 1.0) if aligned else 0.5 * real)
    images = op.Reshape(op.Cast(x, to=dtype), op.vector(0, 0, op.numel(x, 2)))
    read = samples(op, images, op.dim(x, 1), count, axes, lengths)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, 0, count))
    dx = op.reshape_like(op.Cast(read.into_images(op, g), to=x.dtype), x)
    if mode == "nearest":
        return dx, None
    by_axis = zip(read.into_places(op, read.read(op), g), factors, strict=True)
    du = op.Concat(*(op.Unsqueeze(d * f, [2]) for d, f in reversed([*by_axis])), axis=2)
    return dx, op.reshape_like(op.Cast(du, to=grid.dtype), grid)


@rule("AffineGrid")
def affine_grid(op, node, g):
    """y = theta b, b = (x, y, 1) of each place:  dtheta = sum over places of g bT.

    The places are those of the unit transformation.
    """
    theta, size = node.inputs
    dtype = wide(theta.dtype)
    n = op.dim(theta, 1)
    unit = op.EyeLike(op.Expand(op.const(0.0, dtype), op.vector(n, op.dim(theta, 2))))
    one_of = op.Concat([1], op.Slice(size, [1], [_LAST], [0]), axis=0)
    aligned = node.attributes.get_int("align_corners", 0)
    places = op.AffineGrid(op.Unsqueeze(unit, [0]), one_of, align_corners=aligned)
    places = op.Reshape(places, op.vector(-1, n))
    b = op.Concat(places, op.Expand(op.const(1.0, dtype), op.vector(op.dim(places, 0), 1)), axis=1)
    g = op.Reshape(op.Cast(g, to=dtype), op.vector(0, -1, n))
    dtheta = op.MatMul(op.Transpose(g, perm=[0, 2, 1]), b)
    return op.set_type_like(op.Cast(dtheta, to=theta.dtype), theta), None
