"""Convolutions."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.autodiff.rules.windows import (
    AUTO_PAD,
    Windows,
    correlate,
    halves,
    lengths,
    scatter_windows,
    windows,
)

_UNKNOWN = Refused("the size of its kernel is not known")


@rule("Conv")
def conv(op, node, g):
    """y = x * w + b:  dx = g *T w, dw = x correlated with g, db = sum g over all but channels.

    *T is the transposed convolution. Dumoulin & Visin 2016, arXiv:1603.07285.
    """
    x, w, b = (*node.inputs, None)[:3]
    kernel = lengths(w)
    if kernel is None:
        return _UNKNOWN
    where = windows(node, kernel)
    if where is None:
        return AUTO_PAD
    group = node.attributes.get_int("group", 1)
    dx = scatter_windows(op, g, w, where, x, group)
    dw = correlate(op, x, g, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, kernel)


@rule("ConvTranspose")
def conv_transpose(op, node, g):
    """y = x *T w + b:  dx = g * w, dw = g correlated with x, db = sum g over all but channels."""
    x, w, b = (*node.inputs, None)[:3]
    kernel = lengths(w)
    if kernel is None:
        return _UNKNOWN
    where = _transposed_windows(node, kernel)
    if isinstance(where, Refused):
        return where
    group = node.attributes.get_int("group", 1)
    attributes = {**where.attributes, "pads": [*where.begin, *where.end], "group": group}
    dx = op.like(op.Conv(g, w, **attributes), x)
    dw = correlate(op, g, x, where, w, group)
    return dx, dw, None if b is None else _per_channel(op, g, kernel)


def _per_channel(op, g, kernel):
    return op.ReduceSum(g, [0, *range(2, 2 + len(kernel))], keepdims=0)


def _transposed_windows(node, kernel: tuple[int, ...]) -> Windows | Refused:
    """Return the windows on the output of a ConvTranspose whose adjoint it is."""
    n, get = len(kernel), node.attributes.get_ints
    strides, dilations = tuple(get("strides", (1,) * n)), tuple(get("dilations", (1,) * n))
    pads, added = tuple(get("pads", (0,) * 2 * n)), tuple(get("output_padding", (0,) * n))
    if any(a >= s for a, s in zip(added, strides, strict=True)):
        return Refused("output_padding must be less than the stride")
    made = Windows(kernel, strides, dilations, pads[:n], pads[n:])
    auto, asked = node.attributes.get_string("auto_pad", "NOTSET"), tuple(get("output_shape", ()))
    if not asked and auto in ("NOTSET", "VALID"):
        return made
    known = lengths(node.inputs[0])
    if asked and known is None:
        return Refused("output_shape needs the lengths of its input: fix them in the model")
    known = known or (1,) * n  # without output_shape, the padding does not depend on them
    wanted = asked[-n:] or tuple(m * s for m, s in zip(known, strides, strict=True))
    totals = [
        max(s * (m - 1) + a + e - w, 0)
        for m, s, a, e, w in zip(known, strides, added, made.extents, wanted, strict=True)
    ]
    return Windows(kernel, strides, dilations, *halves(totals, auto == "SAME_UPPER"))
