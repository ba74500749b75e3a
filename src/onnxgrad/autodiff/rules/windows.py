"""The geometry that convolutions and pooling share, and the adjoints that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import onnx_ir as ir

from onnxgrad.autodiff.rules.registry import Refused
from onnxgrad.graph.shapes import dims, static

AUTO_PAD = Refused(
    "auto_pad with strides needs the lengths of its input: fix them in the model's input"
)
_MOST_COLUMNS = 64  # elements of a window that are worth a node each
_LAST = 2**63 - 1  # as the end of a Slice: up to the last element


@dataclass(frozen=True)
class Windows:
    """Where windows lie on an input of `spatial` axes: one entry per spatial axis in each field."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]  # padding
    end: tuple[int, ...]

    @property
    def extents(self) -> list[int]:
        """Elements from the first to the last of a window."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def attributes(self) -> dict[str, list[int]]:
        """Kernel, strides and dilations, as the attributes of a node."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
        }


def lengths(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the lengths of the spatial axes, the third and later, when all are known."""
    shape = None if value is None else dims(value)
    return None if shape is None else static(shape[2:])


def windows(node: ir.Node, kernel: tuple[int, ...] = ()) -> Windows | None:
    """Return the windows of a Conv or pooling node, or None where they depend on unknown lengths.

    `kernel` is that of the weight, where `kernel_shape` may be missing.
    """
    get = node.attributes.get_ints
    kernel = tuple(get("kernel_shape", kernel))
    n = len(kernel)
    strides, dilations = tuple(get("strides", (1,) * n)), tuple(get("dilations", (1,) * n))
    pads = tuple(get("pads", (0,) * 2 * n))
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    made = Windows(kernel, strides, dilations, pads[:n], pads[n:])
    if auto == "NOTSET":
        return made
    if auto == "VALID":
        return Windows(kernel, strides, dilations, (0,) * n, (0,) * n)
    known = lengths(node.inputs[0])
    if known is None and max(strides) > 1:
        return None
    totals = [  # so that there are ceil(length / stride) windows
        max((-(-m // s) - 1) * s + e - m, 0) if s > 1 else e - 1
        for m, s, e in zip(known or (1,) * n, strides, made.extents, strict=True)
    ]
    return Windows(kernel, strides, dilations, *halves(totals, auto == "SAME_UPPER"))


def halves(totals: list[int], more_at_end: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding at the begin and at the end of each axis that makes up `totals`."""
    less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (less, more) if more_at_end else (more, less)


def scatter_windows(op, g, weight, where: Windows, like, group: int = 1):
    """Return the adjoint of taking windows of `like`: each element of g adds its multiple of
    `weight` (C, M / group, kernel) at its window.
    """
    known, counts = lengths(like), lengths(g)
    attributes = {**where.attributes, "group": group}
    if known is not None and counts is not None:
        reached = [
            (o - 1) * s + e - b
            for o, s, e, b in zip(counts, where.strides, where.extents, where.begin, strict=True)
        ]
        beyond = [r - m for r, m in zip(reached, known, strict=True)]
        attributes["pads"] = [*where.begin, *(max(n, 0) for n in beyond)]
        attributes["output_padding"] = [max(-n, 0) for n in beyond]
        return op.like(op.ConvTranspose(g, weight, **attributes), like)
    if max(where.strides) == 1:
        attributes["pads"] = [*where.begin, *where.end]
        return op.like(op.ConvTranspose(g, weight, **attributes), like)
    attributes["output_padding"] = [s - 1 for s in where.strides]
    whole, begin = op.ConvTranspose(g, weight, **attributes), op.value(list(where.begin))
    axes = list(range(2, 2 + len(where.kernel)))
    return op.like(op.Slice(whole, begin, begin + op.Shape(like, start=2), axes), like)


def correlate(op, x, g, where: Windows, weight, group: int):
    """Return the gradient of `weight` (M, C / group, kernel): for every place k in a window, the
    sum over rows and windows of g (N, M, windows) times the x (N, C, ...) there.

    As one product of matrices: faster than a convolution with g as its kernel, unless the windows
    are large.
    """
    shape, kernel = static(dims(weight)), where.kernel
    swap = [1, 0, *range(2, 2 + len(kernel))]
    x, g = op.Transpose(x, perm=swap), op.Transpose(g, perm=swap)
    if group == 1 and (shape is None or prod(kernel) > _MOST_COLUMNS):
        return op.like(op.Transpose(_convolved(op, x, g, where), perm=swap), weight)
    if shape is None:
        return Refused("the shape of its weight is not known")
    made, per_group, *_ = shape
    if any(where.begin) or any(where.end):
        x = op.Pad(x, [0, 0, *where.begin, 0, 0, *where.end])
    columns = [_column(op, x, place, where) for place in product(*map(range, kernel))]
    stacked = columns[0] if len(columns) == 1 else op.Concat(*columns, axis=1)
    stacked = op.Reshape(stacked, [group, per_group * len(columns), -1])
    g = op.Reshape(g, [group, made // group, -1])
    product_ = op.MatMul(g, op.Transpose(stacked, perm=[0, 2, 1]))
    return op.like(op.Reshape(product_, list(shape)), weight)


def _convolved(op, x, g, where: Windows):
    """Return x (C, N, ...) convolved with g (M, N, windows), strides and dilations exchanged."""
    attributes = {"strides": list(where.dilations), "dilations": list(where.strides)}
    y = op.Conv(x, g, pads=[*where.begin, *where.end], **attributes)
    n = len(where.kernel)  # what no window reached makes y longer than the kernel
    return op.Slice(y, [0] * n, list(where.kernel), list(range(2, 2 + n)))


def _column(op, x, place: tuple[int, ...], where: Windows):
    """Return the element at `place` of every window of the padded x."""
    starts = [p * d for p, d in zip(place, where.dilations, strict=True)]
    left = [e - 1 - p for p, e in zip(starts, where.extents, strict=True)]
    if not any(starts) and not any(left) and max(where.strides) == 1:
        return x
    ends = [-m if m else _LAST for m in left]
    axes = list(range(2, 2 + len(place)))
    return op.Slice(x, starts, ends, axes, list(where.strides))
