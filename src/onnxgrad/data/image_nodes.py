"""Transforms of images as ONNX nodes, with the results of Pillow.

Images are uint8 (N, height, width, channels). `Resize` with `antialias` follows Pillow's bilinear
filter to rounding: no value differs by more than one level of 255.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators import marks
from onnxgrad.operators.shapes import dims


def write_resize(op: Any, x: ir.Value, size: int | tuple[int, int]) -> ir.Value:
    """Write the image in another size: (height, width), or the length of the shorter side."""
    if not isinstance(size, int):
        return x if _static(x) == size else _to(op, x, list(size), size)
    short = op.ReduceMin(_sides(op, x), keepdims=1)
    with op:
        exact = op.Cast(_sides(op, x) * [size], to=ir.DataType.DOUBLE)
        sides = op.Round(exact / op.Cast(short, to=ir.DataType.DOUBLE))
        sides = op.Max(op.Cast(sides, to=ir.DataType.INT64), [1])
    return _to(op, x, sides, (size, size))


def write_cover(op: Any, x: ir.Value, size: tuple[int, int], only_small: bool = False) -> ir.Value:
    """Write the image resized so that it just covers `size`, unless it has this size.

    With `only_small`, only an image that is smaller on one side is resized.
    """
    least = x.meta.get(marks.LEAST_SIDES, (1, 1))
    if _static(x) == size or (only_small and all(n >= s for n, s in zip(least, size, strict=True))):
        return x
    want = op.const(list(size))
    with op:
        real = op.Cast(_sides(op, x), to=ir.DataType.DOUBLE)
        scale = op.ReduceMax(op.Cast(want, to=ir.DataType.DOUBLE) / real, keepdims=1)
        if only_small:
            scale = op.Max(scale, 1.0)
        sides = op.Max(op.Cast(op.Round(real * scale), to=ir.DataType.INT64), want)
    return _to(op, x, sides, size)


def write_center(op: Any, x: ir.Value, size: tuple[int, int]) -> ir.Value:
    """Write the part in the middle of an image that is not smaller than `size`."""
    if _static(x) == size:
        return x
    with op:
        start = (_sides(op, x) - list(size)) / np.array([2, 2])
        y = op.Slice(x, start, start + list(size), [1, 2])
    return _with_shape(y, x, size)


def write_scale(op: Any, x: ir.Value, scale: float = 1.0) -> ir.Value:
    """Write the values as float32 from 0 to `scale`."""
    x = op.Cast(x, to=ir.DataType.FLOAT)
    return x if scale == 255 else op.Div(x, 255.0 / scale)


def _sides(op: Any, x: ir.Value) -> ir.Value:
    """Write height and width, int64 [2]."""
    return op.Shape(x, start=1, end=3)


def _static(x: ir.Value) -> tuple[Any, ...]:
    return (dims(x) or (None,) * 4)[1:3]


def _to(op: Any, x: ir.Value, sides: Any, least: tuple[int, int]) -> ir.Value:
    if (dims(x) or (None,))[-1] == 4:
        raise ValueError(
            "images with an alpha channel cannot be resized inside of a model, as Pillow weights "
            "their colors by it: use a model of 3 channels, or resize them beside it"
        )
    # weights outside of the image are zero, as in Pillow; by default, they go to its border
    y = op.Resize(x, None, None, sides, mode="linear", antialias=1, exclude_outside=1, axes=[1, 2])
    y.dtype = x.dtype
    return _with_shape(y, x, tuple(sides) if isinstance(sides, list) else (None, None), least)


def _with_shape(
    y: ir.Value, x: ir.Value, sides: tuple[Any, ...], least: tuple[int, int] | None = None
) -> ir.Value:
    before = dims(x) or (None,) * 4
    y.shape = ir.Shape([before[0], *sides, before[3]])
    y.meta[marks.LEAST_SIDES] = sides if least is None else least
    return y
