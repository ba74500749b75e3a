"""Convolutions."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.autodiff.rules.windows import (
    AUTO_PAD,
    Windows,
    correlate,
    halves,
    scatter_windows,
    windows,
)
from onnxgrad.graph.shapes import dims, static

_UNKNOWN = Refused("the shape of its weight is not known")


@rule("Conv")
def conv(op, node, g):
    """y = x * w + b:  dx = g *T w, dw = x correlated with g, db = sum g over all but channels.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    shape = static(dims(w))
    if shape is None:
        return _UNKNOWN
    where = windows(node, shape[2:])
    if where is None:
        return AUTO_PAD
    group = node.attributes.get_int("group", 1)
    dx = scatter_windows(op, g, w, where, x, group)
    dw = correlate(op, x, g, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, shape)


@rule("ConvTranspose")
def conv_transpose(op, node, g):
    """y = x *T w + b:  dx = g * w, dw = g correlated with x, db = sum g over all but channels."""
    x, w, b = (*node.inputs, None)[:3]
    shape = static(dims(w))
    if shape is None:
        return _UNKNOWN
    where = _transposed_windows(node, shape[2:])
    if isinstance(where, Refused):
        return where
    group = node.attributes.get_int("group", 1)
    attributes = {**where.attributes, "pads": [*where.begin, *where.end], "group": group}
    dx = op.like(op.Conv(g, w, **attributes), x)
    dw = correlate(op, g, x, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, shape)


def _per_channel(op, g, shape):
    return op.ReduceSum(g, [0, *range(2, len(shape))], keepdims=0)


def _transposed_windows(node, kernel: tuple[int, ...]) -> Windows | Refused:
    """Return the windows on the output of a ConvTranspose whose adjoint it is."""
    n = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", None) or [1] * n)
    added = tuple(node.attributes.get_ints("output_padding", None) or [0] * n)
    if any(a >= s for a, s in zip(added, strides, strict=True)):
        return Refused("output_padding must be less than the stride")
    dilations = tuple(node.attributes.get_ints("dilations", None) or [1] * n)
    pads = tuple(node.attributes.get_ints("pads", None) or [0] * 2 * n)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    made = Windows(kernel, strides, dilations, pads[:n], pads[n:])
    asked = node.attributes.get_ints("output_shape", None)
    if asked is None and auto in ("NOTSET", "VALID"):
        return made
    shape = dims(node.inputs[0])
    lengths = static(None if shape is None else shape[2:])
    if lengths is None and asked is not None:
        return Refused("output_shape needs the lengths of its input: fix them in the model")
    totals = [
        max(s * (m - 1) + a + e - (asked[-n:][i] if asked else m * s), 0)
        for i, (m, s, a, e) in enumerate(
            zip(lengths or (1,) * n, strides, added, made.extents, strict=True)
        )
    ]
    return Windows(kernel, strides, dilations, *halves(totals, auto == "SAME_UPPER"))
