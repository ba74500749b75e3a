"""Operators that only move, repeat, mask or crop elements."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.registry import rule
from onnxgrad.autodiff.rules.common import attributes_of, positions_of, wide
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.shapes import dims, rank, static


@rule("Identity", "Optional", "OptionalGetElement")
def identity(op, node, g):
    """y = x:  dx = g."""
    return (g,)


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(op, node, g):
    """y = x in another shape:  dx = g in the shape of x."""
    return (op.reshape_like(g, node.inputs[0]),)


@rule("Transpose")
def transpose(op, node, g):
    """y = x with its axes permuted:  dx = g with its axes permuted back."""
    perm = node.attributes.get_ints("perm", None)
    if perm is None:  # reversed: its own inverse
        return (op.Transpose(g),)
    return (op.Transpose(g, perm=[list(perm).index(i) for i in range(len(perm))]),)


@rule("Expand")
def expand(op, node, g):
    """y = x repeated:  dx = g summed over the repeats."""
    return (op.sum_to(g, node.inputs[0]),)


@rule("Concat")
def concat(op, node, g):
    """y = [a, b, ...]:  da, db, ... = the parts of g."""
    axis = int_attribute(node, "axis")
    if len(node.inputs) == 1:
        return (g,)
    lengths = op.vector(*(op.dim(x, axis) for x in node.inputs))
    return op.emit_many("Split", [g, lengths], {"axis": axis}, outputs=len(node.inputs))


@rule("Split")
def split(op, node, *gs):
    """[a, b, ...] = x:  dx = [da, db, ...]."""
    parts = [
        op.set_type_like(op.Expand(op.const(0.0, y.dtype), op.shape_of(y)), y) if g is None else g
        for y, g in zip(node.outputs, gs, strict=True)
    ]
    return (op.Concat(*parts, axis=int_attribute(node, "axis")),)


@rule("Slice")
def slice_(op, node, g):
    """y = x[start:end:step]:  dx = zeros with g in that slice."""
    pads = _pads_of_slice(op, node, g)
    return (moved(op, node, g) if pads is None else op.Pad(g, pads),)


def _pads_of_slice(op, node, g):
    """Return the padding that is the adjoint of a Slice of step one, or None if it is dynamic."""
    x, first, *others = node.inputs
    shape, count = dims(x), static(dims(first))
    starts, ends, axes, steps = (op.known_value(v) for v in (first, *others, None, None)[:4])
    dynamic = any(v is not None and op.known_value(v) is None for v in others[1:])
    if shape is None or dynamic or (steps is not None and np.any(steps != 1)) or count is None:
        return None
    begin, end = [0] * len(shape), [0] * len(shape)
    for i, axis in enumerate(range(*count) if axes is None else axes.tolist()):
        n = shape[axis]
        lo, hi = (None if v is None else int(v[i]) for v in (starts, ends))
        if isinstance(n, int) and lo is not None and hi is not None:
            lo, hi, _ = slice(lo, hi).indices(n)
            begin[axis], end[axis] = min(lo, hi), n - hi
        elif hi is not None and hi >= 2**31 - 1:  # up to the end, whatever the length
            begin[axis] = op.dim(x, axis) - op.dim(g, axis)
        elif lo == 0:
            end[axis] = op.dim(x, axis) - op.dim(g, axis)
        else:
            return None
    return op.vector(*begin, *end)


@rule("Pad")
def pad(op, node, g):
    """y = x with a border of v:  dx = g without the border,  dv = sum of g over the border."""
    x, pads, value, axes = (*node.inputs, None, None)[:4]
    if string_attribute(node, "mode") != "constant":
        return moved(op, node, g, pads, None, axes), None, None
    dx = op.Pad(g, -pads, None, axes)  # negative pads crop
    if value is None:
        return dx, None, None
    border = op.Pad(op.zeros_like(x), pads, 1.0, axes)
    return dx, None, op.reshape_like(op.ReduceSum(g * border, keepdims=0), value)


def moved(op, node, g, *operands):
    """Return the gradient of the first input of a node that only moves its elements.

    The node is applied to the positions 0, ..., n-1 of its input, and g is added at the positions
    that it returns. That is right for all attributes and for dynamic indices. `operands` replace
    the other inputs of the node.
    """
    x, *rest = node.inputs
    inputs = [positions_of(op, x), *(operands or rest)]
    positions = op.emit(node.op_type, inputs, attributes_of(node), domain=node.domain)
    return scatter_flat(op, x, positions, g)


def scatter_flat(op, x, positions, g):
    """Return zeros of the shape of `x` with `g` added at flat `positions`.

    Not by ScatterND: onnxruntime's threads overwrite each other's sums in it.
    """
    shape = static(dims(x))
    n = op.Reshape(op.Size(x), [1]) if shape is None else [prod(shape)]
    dtype = wide(x.dtype)
    flat = op.ScatterElements(
        op.Expand(op.const(0.0, dtype), n),
        op.Reshape(positions, [-1]),
        op.Reshape(op.Cast(g, to=dtype), [-1]),
        axis=0,
        reduction="add",
    )
    return op.reshape_like(op.Cast(flat, to=x.dtype), x)


@rule("Gather")
def gather(op, node, g):
    """y = x[i]:  dx = zeros with g added at i."""
    x, i = node.inputs
    axis = int_attribute(node, "axis")
    shape, pads = dims(x), _pads_of_gather(op, node)
    if pads is not None:
        part = op.Unsqueeze(g, [axis]) if rank(i) == 0 else g
        whole = isinstance(pads, list) and not any(pads)
        return part if whole else op.Pad(part, pads), None
    if axis == 0 or (shape is not None and axis == -len(shape)):
        return scatter_rows(op, x, i, g), None
    return moved(op, node, g), None


def _pads_of_gather(op, node):
    """Return the padding that is the adjoint of a Gather, or None.

    That is for a constant index, or for constant indices that follow one another.
    """
    x, i = node.inputs
    shape, index, axis = dims(x), op.known_value(i), int_attribute(node, "axis")
    if shape is None or index is None or index.ndim > 1 or not index.size:
        return None
    first, last = int(index.flat[0]), int(index.flat[-1])
    if first < 0 <= last or not np.array_equal(index.flat, range(first, last + 1)):
        return None
    n, axis = op.dim(x, axis), axis % len(shape)
    before, after = [0] * len(shape), [0] * len(shape)
    ends = (first, n - (last + 1)) if first >= 0 else (n + first, -1 - last)
    before[axis], after[axis] = ends
    return op.vector(*before, *after)


def scatter_rows(op, x, i, g):
    """Return zeros of the shape of `x` with the rows of `g` added at row indices `i`.

    Rows of a static shape stay rows: embeddings are large, and to reshape an output copies it.
    """
    shape = dims(x)
    row = None if shape is None else static(shape[1:])
    if row is not None and prod(row):
        g = op.Reshape(op.Cast(g, to=wide(x.dtype)), [-1, *row])
        rows = op.Expand(op.Reshape(i, [-1] + [1] * len(row)), op.shape_of(g))
        zeros = op.Expand(op.const(0.0, g.dtype), op.shape_of(x))
        return op.Cast(op.ScatterElements(zeros, rows, g, axis=0, reduction="add"), to=x.dtype)
    width = op.ReduceProd(op.Shape(x, start=1), keepdims=0) if row is None else prod(row)
    first = op.Unsqueeze(op.Cast(i, to=ir.DataType.INT64) * width, [-1])
    positions = first + op.arange(op.const(width, first.dtype))
    return scatter_flat(op, x, positions, g)


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
    """y = x cropped or padded with zeros about its center:  dx = g padded or cropped back.

    Both round the center in the same direction, so that each is the adjoint of the other.
    """
    shape, axes = op.shape_of(node.inputs[0]), node.attributes.get_ints("axes", None)
    if axes is not None:
        shape = op.Gather(shape, list(axes), axis=0)
    return op.CenterCropPad(g, shape, **attributes_of(node)), None


@rule("DepthToSpace")
def depth_to_space(op, node, g):
    """y = x with blocks of channels laid out in space:  dx = g with them moved back."""
    (x,), b = node.inputs, int_attribute(node, "blocksize")
    if string_attribute(node, "mode") == "DCR":
        return (op.set_type_like(op.SpaceToDepth(g, blocksize=b), x),)
    lengths = [op.dim(g, 0), op.dim(g, 1), op.dim(x, 2), b, op.dim(x, 3), b]
    blocks = op.Reshape(g, op.vector(*lengths), allowzero=1)
    return (op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x),)


@rule("SpaceToDepth")
def space_to_depth(op, node, g):
    """y = x with blocks of space laid out as channels:  dx = g with them moved back."""
    return (op.set_type_like(op.DepthToSpace(g, **attributes_of(node)), node.inputs[0]),)
