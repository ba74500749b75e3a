"""Windows of convolutions and pooling, and the adjoints of sums over windows.

Numbers per axis are numpy vectors if they are static, else int64 values [axes]. The same formulas
serve both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.records import Unsupported
from onnxgrad.operators.shapes import dims, rank, static

Vector = Any  # np.ndarray | ir.Value: one int64 per spatial axis

UNKNOWN_RANK = Unsupported("the rank of its inputs is not known; state their shapes in the model")


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pool on an input (N, C, ...): each field has one number for
    each spatial axis.
    """

    kernel: tuple[int, ...]  # empty if it is the shape of a weight, known at run time
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: Vector  # padding at the begin
    end: Vector  # padding at the end, negative if the last elements are in no window

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
        """The padding as the attribute `pads` of a node; None if it is computed at run time, or
        negative.
        """
        if isinstance(self.begin, ir.Value) or isinstance(self.end, ir.Value):
            return None
        both = [*self.begin.tolist(), *self.end.tolist()]
        return both if min(both, default=0) >= 0 else None

    @property
    def of_images(self) -> Windows:
        """These windows, where those on a sequence (N, C, W) are on an image of height 1.

        The padding must be static.
        """
        if len(self.strides) > 1:
            return self
        begin, end = (np.array([0, *pads]) for pads in (self.begin, self.end))
        return Windows((1, *self.kernel), (1, *self.strides), (1, *self.dilations), begin, end)

    @property
    def transposed(self) -> Windows:
        """These windows with the spatial axes in reverse order."""
        fields = (self.kernel, self.strides, self.dilations, self.begin, self.end)
        return Windows(*(numbers[::-1] for numbers in fields))

    @property
    def are_disjoint(self) -> bool:
        """Whether no element is in two windows; False for windows with gaps inside."""
        pairs = zip(self.kernel, self.strides, strict=True)
        return max(self.dilations) == 1 and all(k <= s for k, s in pairs)


def spatial_lengths(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the lengths of the spatial axes, the third and later, or None if one is not static."""
    shape = None if value is None else dims(value)
    return None if shape is None else static(shape[2:])


def run_time_lengths(op, value) -> Vector:
    """Return the lengths of the spatial axes: an array if they are static, else an int64 tensor."""
    shape = spatial_lengths(value)
    return op.Shape(value, start=2) if shape is None else np.array(shape, np.int64)


def explicit_windows(node, weight=None) -> Windows | None:
    """Return the windows of a node by its attributes except `auto_pad`: without padding where that
    is set.

    The kernel may be the shape of `weight`. None if the number of axes is unknown.
    """
    get = node.attributes.get_ints
    kernel = tuple(get("kernel_shape", ())) or spatial_lengths(weight) or ()
    ranks = [rank(v) for v in (*node.inputs[:2], node.outputs[0])]
    counts = [len(get(name, ())) for name in ("strides", "dilations")]
    counts += [len(get("pads", ())) // 2, len(kernel), *(r - 2 for r in ranks if r)]
    n = max(counts, default=0)
    if not n:
        return None
    ones, none = (1,) * n, (0,) * 2 * n
    pads = np.array(get("pads", none) if auto_pad(node) == "NOTSET" else none, np.int64)
    strides, dilations = tuple(get("strides", ones)), tuple(get("dilations", ones))
    return Windows(kernel, strides, dilations, pads[:n], pads[n:])


def auto_pad(node) -> str:
    """Return the attribute `auto_pad` of a node, "NOTSET" for operators that lack it."""
    return node.attributes.get_string("auto_pad", "NOTSET")


def padded_windows(op, node, weight=None) -> Windows | Unsupported:
    """Return the windows of a Conv or pooling node, with the padding of `pads` or `auto_pad`."""
    windows, auto = explicit_windows(node, weight), auto_pad(node)
    if windows is None:
        return UNKNOWN_RANK
    if not auto.startswith("SAME"):
        return windows
    strides = np.array(windows.strides)
    extents = window_extents(op, windows, weight)
    if max(windows.strides) == 1:
        totals = extents - 1
    else:  # padding for ceil(length / stride) windows
        length, extents = all_numbers_or_values(op, run_time_lengths(op, node.inputs[0]), extents)
        totals = (
            (floor_quotient(op, length + (strides - 1), strides) - 1) * strides + extents - length
        )
    begin, end = split_padding(op, at_least_zero(op, totals), auto == "SAME_UPPER")
    return replace(windows, begin=begin, end=end)


def windows_partition(x, windows: Windows) -> bool:
    """Return whether every element of `x`, of static lengths, is in exactly one window."""
    shape = spatial_lengths(x)
    if shape is None or any(windows.pads or (1,)) or max(windows.dilations) > 1:
        return False
    sizes = zip(shape, windows.kernel, windows.strides, strict=True)
    return all(k == s and m % k == 0 for m, k, s in sizes)


def window_extents(op, windows: Windows, weight=None) -> Vector:
    """Return the extent of a window: its length along each axis, dilation included."""
    dilations = np.array(windows.dilations)
    size = np.array(windows.kernel) if windows.kernel else op.Shape(weight, start=2)
    return (size - 1) * dilations + 1


def all_numbers_or_values(op, *vectors: Vector) -> tuple[Vector, ...]:
    """Return all vectors as arrays, or all as int64 tensors if one of them is a tensor."""
    if any(isinstance(v, ir.Value) for v in vectors):
        return tuple(op.const(v) for v in vectors)
    return vectors


def floor_quotient(op, v: Vector, by) -> Vector:
    """Return v // by, for positive numbers, arrays or tensors."""
    return op.Div(v, by) if isinstance(v, ir.Value) else v // by


def at_least_zero(op, v: Vector) -> Vector:
    """Return max(v, 0) of an array or a tensor."""
    return op.Max(v, 0) if isinstance(v, ir.Value) else np.maximum(v, 0)


def split_padding(op, totals: Vector, more_at_end: bool) -> tuple[Vector, Vector]:
    """Return the padding at the begin and at the end of each axis, in sum `totals`."""
    less = floor_quotient(op, totals, 2)
    more = totals - less
    return (less, more) if more_at_end else (more, less)


def with_padding(op, x, windows: Windows, value: np.generic | None = None):
    """Return x (N, C, ...) padded by `windows.begin` and `windows.end`, with zeros or
    with `value`.
    """
    begin, end = all_numbers_or_values(op, windows.begin, windows.end)
    if isinstance(begin, ir.Value):
        return op.Pad(x, op.Concat([0, 0], begin, [0, 0], end, axis=0), value)
    if not begin.any() and not end.any():
        return x
    y, have = op.Pad(x, [0, 0, *begin.tolist(), 0, 0, *end.tolist()], value), spatial_lengths(x)
    if have is not None:
        y.shape = ir.Shape([*x.shape[:2], *(np.array(have) + begin + end).tolist()])
    return y


def weigh_windows(op, x, weight, windows: Windows, group: int = 1):
    """Return the sum over each window of x times `weight` (M, C / group, kernel)."""
    if windows.pads is None:
        return op.Conv(with_padding(op, x, windows), weight, group=group, **windows.attributes)
    return op.Conv(x, weight, pads=windows.pads, group=group, **windows.attributes)


def scatter_windows(op, g, weight, windows: Windows, like, group: int = 1):
    """Return the adjoint (transpose) of `weigh_windows`, in the shape of `like`.

    Each element of g adds its multiple of `weight` (C, M / group, kernel) to its window.
    """
    shape, counts, pads = spatial_lengths(like), spatial_lengths(g), windows.pads
    attributes = {**windows.attributes, "group": group}
    if pads is not None and windows.kernel and shape is not None and counts is not None:
        reached = (
            (np.array(counts) - 1) * windows.strides + window_extents(op, windows) - windows.begin
        )
        beyond = reached - shape
        attributes["pads"] = [*windows.begin.tolist(), *np.maximum(beyond, 0).tolist()]
        attributes["output_padding"] = np.maximum(-beyond, 0).tolist()
        images = op.ConvTranspose(g, weight, **attributes)
        images.shape = ir.Shape([g.shape[0], None, *shape])
        return images
    if pads is not None and max(windows.strides) == 1:
        return op.ConvTranspose(g, weight, pads=pads, **attributes)
    attributes["output_padding"] = [s - 1 for s in windows.strides]
    whole, begin = op.ConvTranspose(g, weight, **attributes), op.const(windows.begin)
    return op.Slice(whole, begin, begin + op.Shape(like, start=2), windows.axes)
