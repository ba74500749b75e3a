"""Masks of gradients as factors, instead of a Where or of two Casts.

onnxruntime's `Where` runs on one thread, in three passes that branch at every element: where signs
are random, it takes 6 to 20 times as long as a Cast and a Mul. `HardSigmoid` runs on all threads,
and a Cast on one.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.operators import VIEWS
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import constant, dims, equal, static
from onnxgrad.graph.traversal import made_by
from onnxgrad.native.phases import NODES

_FLOAT = ir.DataType.FLOAT
_STEEP = float(np.finfo(np.float32).max)  # its product with any normal number is 4 or more
_NEAR = 8  # nodes between a convolution and a mask


@rewrites("Cast", group=NODES)
def relu_slope(op, node):
    """1 where y is not 0, else 0, for y = Relu(x), is HardSigmoid(alpha y) with a huge alpha."""
    cast = made_by(node.inputs[0], "Cast")
    y = cast.inputs[0] if cast else None
    if y is None or not made_by(y, "Relu") or node.inputs[0].dtype != ir.DataType.BOOL:
        return None
    real = y.dtype == node.outputs[0].dtype == _FLOAT
    return [op.HardSigmoid(y, alpha=_STEEP, beta=0.0)] if real else None


@rewrites("Where", group=NODES)
def clip_gradient(op, node):
    """Where(mask, g, 0) = g mask, for the mask of a Clip and a `g` that comes from a convolution.

    A Where of the file may hide NaN, and 0 times it is NaN.
    """
    mask, g, other = node.inputs
    array, equality, shape = constant(other), made_by(mask, "Equal"), dims(node.outputs[0])
    if array is None or array.any() or not equality:
        return None
    x, y = equality.inputs
    clip = made_by(y, "Clip")
    inside = clip is not None and clip.inputs[0] is x
    same = equal(dims(mask), shape) and equal(dims(g), shape)
    if not inside or not same or g.dtype != _FLOAT or not _is_from_convolution(g):
        return None
    return [op.Mul(g, op.set_type_like(op.Cast(mask, to=_FLOAT), g))]


def _is_from_convolution(g: ir.Value | None, near: int = _NEAR) -> bool:
    """Return whether `g` is finite, or else not finite for a whole image or channel.

    It is the sum of convolutions, times numbers of channels. Then a mask does not hide infinity.
    """
    if not near or made_by(g, "Conv", "ConvTranspose"):
        return near > 0
    if node := made_by(g, "Add", "Sub", "Mul"):
        return all(
            (equal(dims(x), dims(g)) and _is_from_convolution(x, near - 1)) or _is_per_channel(x)
            for x in node.inputs
        )
    view = made_by(g, *VIEWS)
    return view is not None and _is_from_convolution(view.inputs[0], near - 1)


def _is_per_channel(x: ir.Value | None) -> bool:
    shape = static(dims(x))
    return shape is not None and prod(shape) == max(shape, default=1)
