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
    """Write nodes that resize images to (height, width), or the shorter side to a length."""
    if not isinstance(size, int):
        return x if _declared_size(x) == size else _write_resize_node(op, x, list(size), size)
    short = op.ReduceMin(_write_height_and_width(op, x), keepdims=1)
    with op:
        exact = op.Cast(_write_height_and_width(op, x) * [size], to=ir.DataType.DOUBLE)
        sides = op.Round(exact / op.Cast(short, to=ir.DataType.DOUBLE))
        sides = op.Max(op.Cast(sides, to=ir.DataType.INT64), [1])
    return _write_resize_node(op, x, sides, (size, size))


def write_resize_to_cover(
    op: Any, x: ir.Value, size: tuple[int, int], only_small: bool = False
) -> ir.Value:
    """Write nodes that resize images so that they just cover `size`, (height, width).

    With `only_small`, only images with a smaller side are resized.
    """
    least = x.meta.get(marks.LEAST_SIDES, (1, 1))
    covers = all(n >= s for n, s in zip(least, size, strict=True))
    if _declared_size(x) == size or (only_small and covers):
        return x
    want = op.const(list(size))
    with op:
        real = op.Cast(_write_height_and_width(op, x), to=ir.DataType.DOUBLE)
        scale = op.ReduceMax(op.Cast(want, to=ir.DataType.DOUBLE) / real, keepdims=1)
        if only_small:
            scale = op.Max(scale, 1.0)
        sides = op.Max(op.Cast(op.Round(real * scale), to=ir.DataType.INT64), want)
    return _write_resize_node(op, x, sides, size)


def write_center_crop(op: Any, x: ir.Value, size: tuple[int, int]) -> ir.Value:
    """Write nodes that crop images to `size`, (height, width), in the middle."""
    if _declared_size(x) == size:
        return x
    with op:
        start = (_write_height_and_width(op, x) - list(size)) / np.array([2, 2])
        y = op.Slice(x, start, start + list(size), [1, 2])
    return _declare_image_shape(y, x, size)


def write_rescaling(op: Any, x: ir.Value, scale: float = 1.0) -> ir.Value:
    """Write nodes that map pixel values from 0..255 to float32 values from 0 to `scale`."""
    x = op.Cast(x, to=ir.DataType.FLOAT)
    return x if scale == 255 else op.Div(x, 255.0 / scale)


def _write_height_and_width(op: Any, x: ir.Value) -> ir.Value:
    """Write nodes that compute height and width of images, int64 [2]."""
    return op.Shape(x, start=1, end=3)


def _declared_size(x: ir.Value) -> tuple[Any, ...]:
    """Return the declared (height, width) of images, with None or a symbol where not static."""
    return (dims(x) or (None,) * 4)[1:3]


def _write_resize_node(op: Any, x: ir.Value, sides: Any, least: tuple[int, int]) -> ir.Value:
    """Write a Resize of images to `sides` (height, width), each of which is proven to be `least` or
    more.
    """
    if (dims(x) or (None,))[-1] == 4:
        raise ValueError(
            "images with an alpha channel cannot be resized inside of a model, as Pillow weights "
            "their colors by it: use a model of 3 channels, or resize images before the model"
        )
    # exclude_outside gives weight zero to pixels outside of the image, as Pillow does; by default,
    # Resize gives their weight to the pixels at the border
    y = op.Resize(x, None, None, sides, mode="linear", antialias=1, exclude_outside=1, axes=[1, 2])
    y.dtype = x.dtype
    return _declare_image_shape(
        y, x, tuple(sides) if isinstance(sides, list) else (None, None), least
    )


def _declare_image_shape(
    y: ir.Value, x: ir.Value, sides: tuple[Any, ...], least: tuple[int, int] | None = None
) -> ir.Value:
    """Declare the shape of the images `y`: the batch size and channels of `x`, with `sides` as
    height and width; return `y`.
    """
    before = dims(x) or (None,) * 4
    y.shape = ir.Shape([before[0], *sides, before[3]])
    y.meta[marks.LEAST_SIDES] = sides if least is None else least
    return y
