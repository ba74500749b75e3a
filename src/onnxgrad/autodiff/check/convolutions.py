"""Conv and ConvTranspose for `onnx.reference`, as products of matrices.

The operators of `onnx.reference` loop over positions or channels. Here, each element of the kernel
is a product of matrices with the images, moved by this element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.ops import op_conv, op_conv_transpose


class Conv(op_conv.Conv):
    """The operator as products of matrices; `onnx.reference` runs nodes with `auto_pad`."""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray]:
        x, w, bias = (*inputs, None)[:3]
        if _computes_padding(attributes) or x.ndim < 3:
            return super()._run(*inputs, **attributes)
        strides, dilations, pads, group = _window_attributes(attributes, x.ndim - 2)
        n = len(strides)
        if any(pads):
            x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
        sizes = [
            (length - d * (k - 1) - 1) // s + 1
            for length, d, k, s in zip(x.shape[2:], dilations, w.shape[2:], strides, strict=True)
        ]
        factors = w.reshape(group, -1, *w.shape[1:])
        y: Any = 0.0
        for offset in np.ndindex(*w.shape[2:]):
            part = x[(..., *_positions_at(offset, strides, dilations, sizes))]
            part = part.reshape(len(x), group, w.shape[1], -1)
            y = y + factors[(..., *offset)] @ part
        y = y.reshape(len(x), w.shape[0], *sizes)
        return (_with_bias(y, bias).astype(x.dtype),)


class ConvTranspose(op_conv_transpose.ConvTranspose):
    """The operator as products of matrices; `onnx.reference` runs nodes with `auto_pad`."""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray]:
        x, w, bias = (*inputs, None)[:3]
        if _computes_padding(attributes) or attributes.get("output_shape") or x.ndim < 3:
            return super()._run(*inputs, **attributes)
        strides, dilations, pads, group = _window_attributes(attributes, x.ndim - 2)
        n, sizes = len(strides), x.shape[2:]
        more = attributes.get("output_padding") or [0] * n
        whole = [
            s * (length - 1) + d * (k - 1) + 1 + e
            for length, s, d, k, e in zip(sizes, strides, dilations, w.shape[2:], more, strict=True)
        ]
        factors = w.reshape(group, -1, *w.shape[1:])  # (groups, features, units, ...)
        images = x.reshape(len(x), group, x.shape[1] // group, -1)
        y = np.zeros((len(x), group * w.shape[1], *whole), x.dtype)
        for offset in np.ndindex(*w.shape[2:]):
            part = np.swapaxes(factors[(..., *offset)], 1, 2) @ images
            places = (..., *_positions_at(offset, strides, dilations, sizes))
            y[places] += part.reshape(len(x), -1, *sizes)
        kept: list[Any] = [
            slice(begin, length - end)
            for begin, length, end in zip(pads[:n], whole, pads[n:], strict=True)
        ]
        return (_with_bias(y[(..., *kept)], bias).astype(x.dtype),)


def _computes_padding(attributes: dict[str, Any]) -> bool:
    return attributes.get("auto_pad") not in (None, "NOTSET")


def _window_attributes(
    attributes: dict[str, Any], n: int
) -> tuple[Sequence, Sequence, Sequence, int]:
    """Return strides, dilations, padding and the number of groups, for `n` axes."""
    get = attributes.get
    ones = [1] * n
    return (
        get("strides") or ones,
        get("dilations") or ones,
        get("pads") or [0] * 2 * n,
        (get("group") or 1),
    )


def _positions_at(
    offset: Sequence[int], strides: Sequence[int], dilations: Sequence[int], sizes: Sequence[int]
) -> list[Any]:
    """Return the positions of the image that the kernel element at `offset` multiplies."""
    return [
        slice(o * d, o * d + s * (length - 1) + 1, s)
        for o, s, d, length in zip(offset, strides, dilations, sizes, strict=True)
    ]


def _with_bias(y: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))
