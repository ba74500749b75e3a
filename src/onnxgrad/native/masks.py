"""Masks of gradients as factors, instead of a Where or of two Casts.

onnxruntime's `Where` runs on one thread, in three passes that branch at every element: where signs
are random, it takes 6 to 20 times as long as a Cast and a Mul. `HardSigmoid` runs on all threads,
and a Cast on one.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import VIEWS
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import constant, dims, equal, static
from onnxgrad.native.phases import NODES

_FLOAT = ir.DataType.FLOAT
_STEEP = float(np.finfo(np.float32).max)  # its product with any normal number is 4 or more
_NEAR = 8  # nodes between a convolution and a mask


@rewrites("Cast", group=NODES)
def relu_slope(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """1 where y is not 0, else 0, for y = Relu(x), is HardSigmoid(alpha y) with a huge alpha."""
    (mask,) = node.inputs
    cast = None if mask is None or mask.dtype != ir.DataType.BOOL else mask.producer()
    if cast is None or cast.op_type != "Cast" or cast.domain or node.outputs[0].dtype != _FLOAT:
        return None
    (y,) = cast.inputs
    relu = None if y is None or y.dtype != _FLOAT else y.producer()
    if relu is None or relu.op_type != "Relu" or relu.domain:
        return None
    return [op.HardSigmoid(y, alpha=_STEEP, beta=0.0)]


@rewrites("Where", group=NODES)
def clip_gradient(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Where(mask, g, 0) = g mask, for the mask of a Clip and a `g` that comes from a convolution.

    A Where of the file may hide NaN, and 0 times it is NaN.
    """
    mask, g, other = node.inputs
    if mask is None or g is None or not _is_zero(other) or not _is_inside(mask):
        return None
    shape = dims(node.outputs[0])
    same = equal(dims(mask), shape) and equal(dims(g), shape)
    if not same or g.dtype != _FLOAT or not _is_from_convolution(g):
        return None
    return [op.Mul(g, op.set_type_like(op.Cast(mask, to=_FLOAT), g))]


def _is_inside(mask: ir.Value) -> bool:
    """Return whether `mask` tells where a Clip does not change its input."""
    node = mask.producer()
    if node is None or node.op_type != "Equal" or node.domain:
        return False
    x, y = node.inputs
    clip = None if y is None else y.producer()
    return clip is not None and clip.op_type == "Clip" and clip.inputs[0] is x


def _is_zero(x: ir.Value | None) -> bool:
    array = constant(x)
    return array is not None and not array.any()


def _is_from_convolution(g: ir.Value, near: int = _NEAR) -> bool:
    """Return whether `g` is finite, or else not finite for a whole image or channel.

    It is the sum of convolutions, times numbers of channels. Then a mask does not hide infinity.
    """
    node = g.producer()
    if node is None or not near:
        return False
    if node.op_type in ("Conv", "ConvTranspose"):
        return True
    if node.op_type in ("Add", "Sub", "Mul") and not node.domain:
        shape = dims(g)
        return all(
            (equal(dims(x), shape) and _is_from_convolution(x, near - 1)) or _is_per_channel(x)
            for x in node.inputs
            if x is not None
        )
    if node.op_type in VIEWS and node.inputs[0] is not None and not node.domain:
        return _is_from_convolution(node.inputs[0], near - 1)
    return False


def _is_per_channel(x: ir.Value) -> bool:
    shape = static(dims(x))
    return shape is not None and prod(shape) == max(shape, default=1)
