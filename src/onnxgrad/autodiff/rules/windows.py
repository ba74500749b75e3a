"""The geometry that convolutions and pooling share, and the adjoints that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import onnx_ir as ir

from onnxgrad.autodiff.rules.registry import Refused
from onnxgrad.graph.shapes import dims, static

AUTO_PAD = Refused(
    "auto_pad with strides needs the lengths of its input: fix them in the model's input"
)
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


def windows(node: ir.Node, kernel: tuple[int, ...] | None = None) -> Windows | None:
    """Return the windows of a Conv or pooling node, or None where they depend on unknown lengths.

    `kernel` is that of the weight, where `kernel_shape` may be missing.
    """
    kernel = tuple(node.attributes.get_ints("kernel_shape", None) or kernel or ())
    n = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", None) or [1] * n)
    dilations = tuple(node.attributes.get_ints("dilations", None) or [1] * n)
    pads = list(node.attributes.get_ints("pads", None) or [0] * 2 * n)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    made = Windows(kernel, strides, dilations, tuple(pads[:n]), tuple(pads[n:]))
    if auto == "VALID":
        return Windows(kernel, strides, dilations, (0,) * n, (0,) * n)
    if auto == "NOTSET" or not n:
        return made if n else None
    shape = dims(node.inputs[0])
    lengths = static(None if shape is None else shape[2:]) or (0,) * n
    if 0 in lengths and any(s > 1 for s in strides):
        return None
    totals = [  # so that there are ceil(length / stride) windows
        max((-(-m // s) - 1) * s + e - m, 0) if s > 1 else e - 1
        for m, s, e in zip(lengths, strides, made.extents, strict=True)
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
    wanted, have = dims(like), dims(g)
    lengths = static(None if wanted is None else wanted[2:])
    counts = static(None if have is None else have[2:])
    attributes = {**where.attributes, "group": group}
    if lengths is not None and counts is not None:
        rest = [
            m + b - (o - 1) * s - e
            for m, b, o, s, e in zip(
                lengths, where.begin, counts, where.strides, where.extents, strict=True
            )
        ]
        attributes["pads"] = [*where.begin, *(max(-r, 0) for r in rest)]
        attributes["output_padding"] = [max(r, 0) for r in rest]
        return op.like(op.ConvTranspose(g, weight, **attributes), like)
    if max(where.strides) == 1:
        attributes["pads"] = [*where.begin, *where.end]
        return op.like(op.ConvTranspose(g, weight, **attributes), like)
    attributes["output_padding"] = [s - 1 for s in where.strides]
    whole = op.ConvTranspose(g, weight, **attributes)
    n = len(where.kernel)
    begin = op.value(list(where.begin))
    return op.like(
        op.Slice(whole, begin, begin + op.Shape(like, start=2), [*range(2, 2 + n)]), like
    )


def correlate(op, x, g, where: Windows, weight, group: int):
    """Return the gradient of `weight` (M, C / group, kernel): for every place k in a window, the
    sum over rows and windows of g (N, M, windows) times the x (N, C, ...) there.

    As one product of matrices: faster than a convolution with g as its kernel.
    """
    made, per_group, *kernel = static(dims(weight))
    swap = [1, 0, *range(2, 2 + len(kernel))]
    x, g = op.Transpose(x, perm=swap), op.Transpose(g, perm=swap)
    if any(where.begin) or any(where.end):
        x = op.Pad(x, [0, 0, *where.begin, 0, 0, *where.end])
    columns = [_column(op, x, place, where) for place in product(*map(range, where.kernel))]
    stacked = columns[0] if len(columns) == 1 else op.Concat(*columns, axis=1)
    stacked = op.Reshape(stacked, [group, per_group * len(columns), -1])
    g = op.Reshape(g, [group, made // group, -1])
    return op.like(
        op.Reshape(op.MatMul(g, op.Transpose(stacked, perm=[0, 2, 1])), [made, per_group, *kernel]),
        weight,
    )


def _column(op, x, place: tuple[int, ...], where: Windows):
    """Return the element at `place` of every window of the padded x."""
    starts = [p * d for p, d in zip(place, where.dilations, strict=True)]
    left = [e - 1 - p for p, e in zip(starts, where.extents, strict=True)]
    if not any(starts) and not any(left) and max(where.strides) == 1:
        return x
    ends = [-m if m else _LAST for m in left]
    axes = list(range(2, 2 + len(place)))
    return op.Slice(x, starts, ends, axes, list(where.strides))
