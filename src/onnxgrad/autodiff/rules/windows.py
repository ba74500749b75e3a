"""The geometry that convolutions and pooling share, and the adjoints that follow from it.

Per-axis numbers are numpy vectors where they are known, else int64 values [axes]: the same
formulas serve both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.registry import Unsupported
from onnxgrad.graph.shapes import dims, rank, static

_MOST_COLUMNS = 64  # elements of a window that are worth a node each
_LARGE = 2**21  # elements of all windows of an image: more than a cache holds
_NARROW = 8  # channels: a product with fewer takes longer than to go through memory
_LAST = 2**63 - 1  # as the end of a Slice: up to the last element

Vector = Any  # np.ndarray | ir.Value: one int64 per spatial axis


@dataclass(frozen=True)
class Windows:
    """Where windows lie on an input of some spatial axes: one entry per axis in each field."""

    kernel: tuple[int, ...]  # none where it is known only at run time, from the weight
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: Vector  # padding
    end: Vector  # padding, below zero where the input is longer than what windows reach

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
        """The padding as an attribute of a node, or None where it cannot be one."""
        if isinstance(self.begin, ir.Value) or isinstance(self.end, ir.Value):
            return None
        both = [*self.begin.tolist(), *self.end.tolist()]
        return both if min(both, default=0) >= 0 else None


def lengths(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the lengths of the spatial axes, the third and later, when all are known."""
    shape = None if value is None else dims(value)
    return None if shape is None else static(shape[2:])


def run_time_lengths(op, value) -> Vector:
    """Return the lengths of the spatial axes, as numbers or as a value known when it runs."""
    known = lengths(value)
    return op.Shape(value, start=2) if known is None else np.array(known, np.int64)


def opened(op, node, weight=None) -> Windows | Unsupported:
    """Return the windows of a node without their padding; the kernel may be that of `weight`."""
    get = node.attributes.get_ints
    kernel = tuple(get("kernel_shape", ())) or lengths(weight) or ()
    ranks = [rank(v) for v in (*node.inputs[:2], node.outputs[0])]
    counts = [len(get(name, ())) for name in ("strides", "dilations")]
    counts += [len(get("pads", ())) // 2, len(kernel), *(r - 2 for r in ranks if r)]
    n = max(counts, default=0)
    if not n:
        return Unsupported("the rank of its inputs is not known: fix it in the model's input")
    ones, none = (1,) * n, np.zeros(n, np.int64)
    strides, dilations = tuple(get("strides", ones)), tuple(get("dilations", ones))
    return Windows(kernel, strides, dilations, none, none)


def windows(op, node, weight=None) -> Windows | Unsupported:
    """Return the windows of a Conv or pooling node, with padding as wide as `auto_pad` asks."""
    made = opened(op, node, weight)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if isinstance(made, Unsupported) or auto == "VALID":
        return made
    n, strides = len(made.strides), np.array(made.strides)
    if auto == "NOTSET":
        pads = np.array(node.attributes.get_ints("pads", (0,) * 2 * n), np.int64)
        return padded(made, pads[:n], pads[n:])
    extents = reach(op, made, weight)
    if max(made.strides) == 1:
        totals = extents - 1
    else:  # so that there are ceil(length / stride) windows
        length, extents = alike(op, run_time_lengths(op, node.inputs[0]), extents)
        totals = (quotient(op, length + (strides - 1), strides) - 1) * strides + extents - length
    return padded(made, *halves(op, at_least_zero(op, totals), auto == "SAME_UPPER"))


def padded(made: Windows, begin: Vector, end: Vector) -> Windows:
    """Return the same windows on an input with such padding."""
    return Windows(made.kernel, made.strides, made.dilations, begin, end)


def reach(op, where: Windows, weight=None) -> Vector:
    """Return the number of elements from the first to the last of a window."""
    dilations = np.array(where.dilations)
    size = np.array(where.kernel) if where.kernel else op.Shape(weight, start=2)
    return (size - 1) * dilations + 1


def alike(op, *vectors: Vector) -> tuple[Vector, ...]:
    """Return all as numbers, or where one is known only at run time, all as values."""
    if any(isinstance(v, ir.Value) for v in vectors):
        return tuple(op.const(v) for v in vectors)
    return vectors


def quotient(op, v: Vector, by) -> Vector:
    """Return the integer part of v / by, where both are positive."""
    return op.Div(v, by) if isinstance(v, ir.Value) else v // by


def at_least_zero(op, v: Vector) -> Vector:
    """Return v, or zero where it is less."""
    return op.Max(v, 0) if isinstance(v, ir.Value) else np.maximum(v, 0)


def halves(op, totals: Vector, more_at_end: bool) -> tuple[Vector, Vector]:
    """Return the padding at the begin and at the end of each axis that makes up `totals`."""
    less = quotient(op, totals, 2)
    more = totals - less
    return (less, more) if more_at_end else (more, less)


def with_padding(op, x, where: Windows, value: np.generic | None = None):
    """Return x (N, C, ...) with the padding of its windows, of zeros or of `value`."""
    begin, end = alike(op, where.begin, where.end)
    if isinstance(begin, ir.Value):
        return op.Pad(x, op.Concat([0, 0], begin, [0, 0], end, axis=0), value)
    if not begin.any() and not end.any():
        return x
    return op.Pad(x, [0, 0, *begin.tolist(), 0, 0, *end.tolist()], value)


def weigh_windows(op, x, weight, where: Windows, group: int = 1):
    """Return the sum over each window of x times `weight` (M, C / group, kernel)."""
    if where.pads is None:
        return op.Conv(with_padding(op, x, where), weight, group=group, **where.attributes)
    return op.Conv(x, weight, pads=where.pads, group=group, **where.attributes)


def scatter_windows(op, g, weight, where: Windows, like, group: int = 1):
    """Return the adjoint of taking windows of `like`: each element of g adds its multiple of
    `weight` (C, M / group, kernel) at its window.
    """
    known, counts, pads = lengths(like), lengths(g), where.pads
    attributes = {**where.attributes, "group": group}
    if pads is not None and where.kernel and known is not None and counts is not None:
        reached = (np.array(counts) - 1) * where.strides + reach(op, where) - where.begin
        beyond = reached - known
        if _is_large(weight, counts) and max(where.strides) == 1:
            turned = _turned(op, g, weight, where, beyond, group)
            if turned is not None:
                return turned
        attributes["pads"] = [*where.begin.tolist(), *np.maximum(beyond, 0).tolist()]
        attributes["output_padding"] = np.maximum(-beyond, 0).tolist()
        return op.ConvTranspose(g, weight, **attributes)
    if pads is not None and max(where.strides) == 1:
        return op.ConvTranspose(g, weight, pads=pads, **attributes)
    attributes["output_padding"] = [s - 1 for s in where.strides]
    whole, begin = op.ConvTranspose(g, weight, **attributes), op.const(where.begin)
    return op.Slice(whole, begin, begin + op.Shape(like, start=2), where.axes)


def _is_large(weight, counts: tuple[int, ...] | None) -> bool:
    """Tell whether it costs more to copy all windows of an image, as many as `counts`, than to
    multiply by one place of them after the other: they leave the cache, and have channels enough.
    """
    shape = static(dims(weight))
    if shape is None or counts is None or shape[1] < _NARROW:
        return False
    return prod(shape[1:]) * prod(counts) >= _LARGE


def _turned(op, g, weight, where: Windows, beyond: np.ndarray, group: int):
    """Return `scatter_windows` of stride 1 as a convolution with the kernel turned around, or None
    where its padding would be below zero.

    onnxruntime's ConvTranspose writes all windows at once, its Conv a few at a time.
    """
    extents, swap = reach(op, where), [1, 0, *where.axes]
    begin, end = extents - 1 - where.begin, extents - 1 - beyond
    back = Windows(where.kernel, where.strides, where.dilations, begin, end)
    if back.pads is None:
        return None
    if group == 1:
        turned = op.Transpose(weight, perm=swap)
    else:  # (group M, C / group, ...) -> (C, M, ...)
        made, per_group, *kernel = static(dims(weight)) or ()
        split = op.Reshape(weight, [group, made // group, per_group, *kernel])
        split = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in where.axes)])
        turned = op.Reshape(split, [group * per_group, made // group, *kernel])
    if max(where.kernel) > 1:
        last = [-1] * len(where.axes)
        turned = op.Slice(turned, last, [-_LAST] * len(where.axes), where.axes, last)
    return weigh_windows(op, g, turned, back, group)


def correlate(op, x, g, where: Windows, weight, group: int):
    """Return the gradient of `weight` (M, C / group, kernel): for every place k in a window, the
    sum over rows and windows of g (N, M, windows) times the x (N, C, ...) there.

    As one product of matrices, or for large images one for each place: faster than a convolution
    with g as its kernel, unless the windows are large.
    """
    shape, kernel = static(dims(weight)), where.kernel
    swap = [1, 0, *where.axes]
    if shape is None or not kernel or prod(kernel) > _MOST_COLUMNS:
        return op.set_type_like(
            op.Transpose(_convolved(op, x, g, where, weight, group), perm=swap), weight
        )
    made, per_group, *_ = shape
    x = with_padding(op, op.Transpose(x, perm=swap), where)
    columns = [_column(op, x, place, where) for place in product(*map(range, kernel))]
    if len(columns) > 1 and not _is_large(weight, lengths(g)):
        columns = [op.Concat(*columns, axis=1)]
    g = op.Reshape(op.Transpose(g, perm=swap), [group, made // group, -1])
    stacked = [
        op.Reshape(c, [group, per_group * prod(kernel) // len(columns), -1]) for c in columns
    ]
    products = [op.MatMul(g, op.Transpose(c, perm=[0, 2, 1])) for c in stacked]
    if len(products) > 1:  # a place each
        products = [op.Concat(*(op.Unsqueeze(p, [-1]) for p in products), axis=-1)]
    return op.set_type_like(op.Reshape(products[0], list(shape)), weight)


def _convolved(op, x, g, where: Windows, weight, group: int):
    """Return x convolved with g (N, M, windows), rows and channels exchanged, strides and
    dilations exchanged: (C / group, M, kernel).
    """
    swap = [1, 0, *where.axes]
    if group == 1:
        x = op.Transpose(x, perm=swap)
    else:  # (N, group, C / group, ...) -> (C / group, group N, ...)
        space = op.Shape(x, start=2)
        split = op.Reshape(x, op.Concat([0, group, -1], space, axis=0))
        split = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in where.axes)])
        x = op.Reshape(split, op.Concat([0, -1], space, axis=0))
    turned = Windows((), where.dilations, where.strides, where.begin, where.end)
    y = weigh_windows(op, x, op.Transpose(g, perm=swap), turned, group)
    size = list(where.kernel) or op.Shape(weight, start=2)
    return op.Slice(
        y, [0] * len(where.axes), size, where.axes
    )  # what no window reached makes y longer


def _column(op, x, place: tuple[int, ...], where: Windows):
    """Return the element at `place` of every window of the padded x."""
    starts = [p * d for p, d in zip(place, where.dilations, strict=True)]
    left = [int(e) - 1 - p for p, e in zip(starts, reach(op, where), strict=True)]
    if not any(starts) and not any(left) and max(where.strides) == 1:
        return x
    ends = [-m if m else _LAST for m in left]
    return op.Slice(x, starts, ends, where.axes, list(where.strides))
