"""Windows of convolutions and pooling, and the adjoints of sums over windows.

Numbers per axis are numpy vectors if they are static, else int64 values [axes]. The same formulas
serve both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.registry import Unsupported
from onnxgrad.operators.shapes import dims, rank, static

LARGE = 2**19  # elements of all windows of an image, from which they exceed the cache
HEAVY = 2**18  # elements of a weight, from which it exceeds the cache
_FEW = 64  # windows of an image, up to which the copies of all images are small
_NARROW = 8  # channels, below which a product takes longer than copying its operands
_LAST = 2**63 - 1  # end of a Slice up to the last element

Vector = Any  # np.ndarray | ir.Value: one int64 per spatial axis


@dataclass(frozen=True)
class Windows:
    """Windows on an input (N, C, ...): each field has one entry per spatial axis."""

    kernel: tuple[int, ...]  # empty if only the shape of the weight tells it, at run time
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: Vector  # padding
    end: Vector  # padding, below zero if the last elements are in no window

    @property
    def axes(self) -> list[int]:
        """The spatial axes: the third and later."""
        return list(range(2, 2 + len(self.strides)))

    @property
    def attributes(self) -> dict[str, list[int]]:
        """Kernel, strides and dilations, as the attributes of a node."""
        sizes = {"kernel_shape": list(self.kernel)} if self.kernel else {}
        return {**sizes, "strides": list(self.strides), "dilations": list(self.dilations)}

    @property
    def pads(self) -> list[int] | None:
        """The padding as an attribute of a node, or None if it is dynamic or below zero."""
        if isinstance(self.begin, ir.Value) or isinstance(self.end, ir.Value):
            return None
        both = [*self.begin.tolist(), *self.end.tolist()]
        return both if min(both, default=0) >= 0 else None


def lengths(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the lengths of the spatial axes, the third and later, or None if one is dynamic."""
    shape = None if value is None else dims(value)
    return None if shape is None else static(shape[2:])


def run_time_lengths(op, value) -> Vector:
    """Return the lengths of the spatial axes, as numbers or as a value."""
    shape = lengths(value)
    return op.Shape(value, start=2) if shape is None else np.array(shape, np.int64)


def windows_without_padding(op, node, weight=None) -> Windows | Unsupported:
    """Return the windows of a node without padding; the kernel may be that of `weight`."""
    get = node.attributes.get_ints
    kernel = tuple(get("kernel_shape", ())) or lengths(weight) or ()
    ranks = [rank(v) for v in (*node.inputs[:2], node.outputs[0])]
    counts = [len(get(name, ())) for name in ("strides", "dilations")]
    counts += [len(get("pads", ())) // 2, len(kernel), *(r - 2 for r in ranks if r)]
    n = max(counts, default=0)
    if not n:
        return Unsupported("the rank of its inputs is not known; state their shapes in the model")
    ones, none = (1,) * n, np.zeros(n, np.int64)
    strides, dilations = tuple(get("strides", ones)), tuple(get("dilations", ones))
    return Windows(kernel, strides, dilations, none, none)


def windows_of(op, node, weight=None) -> Windows | Unsupported:
    """Return the windows of a Conv or pooling node, with the padding of `pads` or `auto_pad`."""
    windows = windows_without_padding(op, node, weight)
    auto = node.attributes.get_string("auto_pad", "NOTSET")  # a DeformConv lacks it
    if isinstance(windows, Unsupported) or auto == "VALID":
        return windows
    n, strides = len(windows.strides), np.array(windows.strides)
    if auto == "NOTSET":
        pads = np.array(node.attributes.get_ints("pads", (0,) * 2 * n), np.int64)
        return replace(windows, begin=pads[:n], end=pads[n:])
    extents = reach(op, windows, weight)
    if max(windows.strides) == 1:
        totals = extents - 1
    else:  # so that there are ceil(length / stride) windows
        length, extents = unified(op, run_time_lengths(op, node.inputs[0]), extents)
        totals = (quotient(op, length + (strides - 1), strides) - 1) * strides + extents - length
    begin, end = halves(op, at_least_zero(op, totals), auto == "SAME_UPPER")
    return replace(windows, begin=begin, end=end)


def tile(x, windows: Windows) -> bool:
    """Return whether every element of `x`, of static lengths, is in exactly one window."""
    shape = lengths(x)
    if shape is None or any(windows.pads or (1,)) or max(windows.dilations) > 1:
        return False
    sizes = zip(shape, windows.kernel, windows.strides, strict=True)
    return all(k == s and m % k == 0 for m, k, s in sizes)


def reach(op, windows: Windows, weight=None) -> Vector:
    """Return the extent of a window: its length along each axis, dilation included."""
    dilations = np.array(windows.dilations)
    size = np.array(windows.kernel) if windows.kernel else op.Shape(weight, start=2)
    return (size - 1) * dilations + 1


def unified(op, *vectors: Vector) -> tuple[Vector, ...]:
    """Return all vectors as numbers, or all as values if one is a value."""
    if any(isinstance(v, ir.Value) for v in vectors):
        return tuple(op.const(v) for v in vectors)
    return vectors


def quotient(op, v: Vector, by) -> Vector:
    """Return v // by, for positive numbers."""
    return op.Div(v, by) if isinstance(v, ir.Value) else v // by


def at_least_zero(op, v: Vector) -> Vector:
    """Return max(v, 0)."""
    return op.Max(v, 0) if isinstance(v, ir.Value) else np.maximum(v, 0)


def halves(op, totals: Vector, more_at_end: bool) -> tuple[Vector, Vector]:
    """Return the padding at the begin and at the end of each axis, `totals` in all."""
    less = quotient(op, totals, 2)
    more = totals - less
    return (less, more) if more_at_end else (more, less)


def with_padding(op, x, windows: Windows, value: np.generic | None = None):
    """Return x (N, C, ...) padded as its windows are, with zeros or with `value`."""
    begin, end = unified(op, windows.begin, windows.end)
    if isinstance(begin, ir.Value):
        return op.Pad(x, op.Concat([0, 0], begin, [0, 0], end, axis=0), value)
    if not begin.any() and not end.any():
        return x
    y, have = op.Pad(x, [0, 0, *begin.tolist(), 0, 0, *end.tolist()], value), lengths(x)
    if have is not None:
        y.shape = ir.Shape([*x.shape[:2], *(np.array(have) + begin + end).tolist()])
    return y


def weigh_windows(op, x, weight, windows: Windows, group: int = 1):
    """Return the sum over each window of x times `weight` (M, C / group, kernel)."""
    if windows.pads is None:
        return op.Conv(with_padding(op, x, windows), weight, group=group, **windows.attributes)
    return op.Conv(x, weight, pads=windows.pads, group=group, **windows.attributes)


def scatter_windows(op, g, weight, windows: Windows, like, group: int = 1):
    """Return the adjoint of `weigh_windows`, in the shape of `like`.

    Each element of g adds its multiple of `weight` (C, M / group, kernel) to its window.
    """
    shape, counts, pads = lengths(like), lengths(g), windows.pads
    attributes = {**windows.attributes, "group": group}
    if pads is not None and windows.kernel and shape is not None and counts is not None:
        # onnxruntime has no other Col2Im, and that along one axis is wrong
        has_col2im = like.dtype == ir.DataType.FLOAT and len(shape) == 2
        if group == 1 and has_col2im and _is_heavy(weight, counts):
            return _as_one_product(op, g, weight, windows, shape, counts)
        reached = (np.array(counts) - 1) * windows.strides + reach(op, windows) - windows.begin
        beyond = reached - shape
        if max(windows.strides) == 1 and _prefers_convolution(weight, counts, group):
            gradient = _as_convolution(op, g, weight, windows, beyond, group)
            if gradient is not None:
                return gradient
        attributes["pads"] = [*windows.begin.tolist(), *np.maximum(beyond, 0).tolist()]
        attributes["output_padding"] = np.maximum(-beyond, 0).tolist()
        return op.ConvTranspose(g, weight, **attributes)
    if pads is not None and max(windows.strides) == 1:
        return op.ConvTranspose(g, weight, pads=pads, **attributes)
    attributes["output_padding"] = [s - 1 for s in windows.strides]
    whole, begin = op.ConvTranspose(g, weight, **attributes), op.const(windows.begin)
    return op.Slice(whole, begin, begin + op.Shape(like, start=2), windows.axes)


def is_large(shape: tuple[int, ...] | None, counts: tuple[int, ...] | None) -> bool:
    """Return whether a product per kernel element is faster than one over copies of all windows.

    It is if the copies, `counts` windows per image, exceed the cache, and the channels in `shape`,
    that of the weight, are many.
    """
    if shape is None or counts is None or shape[1] < _NARROW:
        return False
    return prod(shape[1:]) * prod(counts) >= LARGE


def _prefers_convolution(weight, counts: tuple[int, ...], group: int) -> bool:
    """Return whether `_as_convolution` is faster than ConvTranspose.

    Measured on one core: 1.1 to 2.5 times for kernels of one element, 1.3 to 1.4 times for one
    channel a group, 1.1 to 1.7 times for large images.
    """
    shape = static(dims(weight))
    if shape is None:
        return False
    one_channel = shape[:2] == (group, 1)
    return one_channel or prod(shape[2:]) == 1 or is_large(shape, counts)


def _is_heavy(weight, counts: tuple[int, ...]) -> bool:
    """Return whether reading the weight for every image takes longer than copying all windows.

    Measured on one core for 8 images of 4 to 49 windows: 1.5 to 6 times for weights that exceed the
    cache, 1.1 times for half of that.
    """
    shape = static(dims(weight))
    if shape is None or prod(shape[2:]) == 1:
        return False
    return prod(shape) >= HEAVY and prod(counts) <= _FEW


def _as_one_product(op, g, weight, windows: Windows, shape, counts: tuple[int, ...]):
    """Return `scatter_windows` as one product with the windows of all images, and their sum."""
    rows, channels, *kernel = static(dims(weight)) or ()
    matrix = op.Reshape(op.Transpose(g, perm=[0, *windows.axes, 1]), [-1, rows])
    columns = op.MatMul(matrix, op.Reshape(weight, [rows, channels * prod(kernel)]))
    columns = op.Reshape(columns, [-1, prod(counts), channels * prod(kernel)])
    attributes = {"strides": windows.strides, "dilations": windows.dilations, "pads": windows.pads}
    columns = op.Transpose(columns, perm=[0, 2, 1])
    return op.Col2Im(columns, list(shape), kernel, **attributes)


def _as_convolution(op, g, weight, windows: Windows, beyond: np.ndarray, group: int):
    """Return `scatter_windows` of stride 1 as a convolution with the flipped kernel, or None if its
    padding would be below zero.

    onnxruntime's ConvTranspose stores all windows at once, its Conv a few at a time.
    """
    extents, swap = reach(op, windows), [1, 0, *windows.axes]
    begin, end = extents - 1 - windows.begin, extents - 1 - beyond
    mirrored = replace(windows, begin=begin, end=end)
    if mirrored.pads is None:
        return None
    if group == 1:
        flipped = op.Transpose(weight, perm=swap)
    else:  # (group M, C / group, ...) -> (C, M, ...)
        rows, per_group, *kernel = static(dims(weight)) or ()
        split = op.Reshape(weight, [group, rows // group, per_group, *kernel])
        split = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in windows.axes)])
        flipped = op.Reshape(split, [group * per_group, rows // group, *kernel])
    if max(windows.kernel) > 1:
        last = [-1] * len(windows.axes)
        turned = op.Slice(flipped, last, [-_LAST] * len(windows.axes), windows.axes, last)
        flipped = op.set_type_like(turned, flipped)
    return weigh_windows(op, g, flipped, mirrored, group)
