"""Operators that repeat, mask, crop or rearrange whole axes."""

from __future__ import annotations

import numpy as np

from onnxgrad.autodiff.registry import rule
from onnxgrad.autodiff.rules.common import attributes_of
from onnxgrad.graph.shapes import rank


@rule("Tile")
def tile(op, node, g):
    """y = x repeated along its axes:  dx = sum of g over the repeats."""
    x, repeats = node.inputs
    static_repeats, n = op.known_value(repeats), rank(x)
    if static_repeats is not None and n is not None:
        shape, axes = [], []
        for axis, times in enumerate(static_repeats.tolist()):
            if times != 1:  # an axis of the repeats before each repeated axis
                axes.append(len(shape))
                shape.append(times)
            shape.append(op.dim(x, axis))
        if not axes:
            return g, None
        shape = op.vector(*shape)
    else:
        pairs = [op.Unsqueeze(v, [1]) for v in (repeats, op.shape_of(x))]
        shape = op.Reshape(op.Concat(*pairs, axis=1), [-1])
        axes = op.Range(np.int64(0), op.Size(shape), np.int64(2))
    return op.ReduceSum(op.Reshape(g, shape, allowzero=1), axes, keepdims=0), None


@rule("Trilu", "ReverseSequence")
def symmetric(op, node, g):
    """y = A x, A = AT a mask or a reversal:  dx = A g."""
    return op.emit(node.op_type, [g, *node.inputs[1:]], attributes_of(node)), None


@rule("CenterCropPad")
def center_crop_pad(op, node, g):
    """y = x cropped or padded with zeros about its centre:  dx = g padded or cropped back.

    Both round the centre in the same direction, so that each is the adjoint of the other.
    """
    shape, axes = op.shape_of(node.inputs[0]), node.attributes.get_ints("axes", None)
    if axes is not None:
        shape = op.Gather(shape, list(axes), axis=0)
    return op.CenterCropPad(g, shape, **attributes_of(node)), None


@rule("DepthToSpace")
def depth_to_space(op, node, g):
    """y = x with blocks of channels laid out in space:  dx = g with them moved back."""
    (x,), b = node.inputs, node.attributes.get_int("blocksize")
    if node.attributes.get_string("mode", "DCR") == "DCR":
        return (op.set_type_like(op.SpaceToDepth(g, blocksize=b), x),)
    lengths = [op.dim(g, 0), op.dim(g, 1), op.dim(x, 2), b, op.dim(x, 3), b]
    blocks = op.Reshape(g, op.vector(*lengths), allowzero=1)
    return (op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x),)


@rule("SpaceToDepth")
def space_to_depth(op, node, g):
    """y = x with blocks of space laid out as channels:  dx = g with them moved back."""
    return (op.set_type_like(op.DepthToSpace(g, **attributes_of(node)), node.inputs[0]),)
