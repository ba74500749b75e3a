"""Operators that read or write at indices.

Kinks follow PyTorch: where several are the largest, they share equally.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import attributes_of, output, positions_of, wide
from onnxgrad.autodiff.rules.registry import rule
from onnxgrad.autodiff.rules.shape import moved, scatter_flat


@rule("GatherElements")
def gather_elements(op, node, g):
    """y = x[i] along an axis:  dx = zero but for g added at i."""
    x, i = node.inputs
    dtype = wide(x.dtype)
    zeros = op.Expand(op.const(0.0, dtype), op.shape_of(x))
    dx = op.ScatterElements(zeros, i, op.Cast(g, to=dtype), axis=_axis(node), reduction="add")
    return op.Cast(dx, to=x.dtype), None


@rule("GatherND", "Compress")
def gather_nd(op, node, g):
    """y = x[i], i a list of places or conditions:  dx = zero but for g added at i."""
    return moved(op, node, g), None


@rule("ScatterElements")
def scatter_elements(op, node, g):
    """y = x with u at i:  dx = g, zero at i,  du = g[i];  x with u added at i:  dx = g,  du = g[i].

    Without a reduction the specification allows no place twice in i: each u there would get g.
    """
    x, i, u = node.inputs
    reduction, axis = node.attributes.get_string("reduction", "none"), _axis(node)
    if reduction not in ("none", "add"):
        dx, du = _reduced(op, reduction, x, i, u, g, axis)
        return dx, None, du
    dx = g if reduction == "add" else op.ScatterElements(g, i, op.zeros_like(u), axis=axis)
    return dx, None, op.GatherElements(g, i, axis=axis)


@rule("ScatterND")
def scatter_nd(op, node, g):
    """y = x with u at the places i, or added there:  as ScatterElements.

    The other reductions are those of ScatterElements on flat tensors.
    """
    x, i, u = node.inputs
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        positions = op.GatherND(positions_of(op, x), i)
        flat = [op.Reshape(v, [-1]) for v in (x, positions, u, g)]
        dx, du = _reduced(op, reduction, *flat, axis=0)
        return op.reshape_like(dx, x), None, op.reshape_like(du, u)
    dx = g if reduction == "add" else op.ScatterND(g, i, op.zeros_like(u))
    return dx, None, op.GatherND(g, i)


def _axis(node):
    return node.attributes.get_int("axis", 0)


def _reduced(op, reduction, x, i, u, g, axis):
    """Return the gradients of x and u where u is not just added to x at i."""
    dtype = x.dtype
    x, u, g = (op.Cast(v, to=wide(dtype)) for v in (x, u, g))
    if reduction == "mul":
        made = _multiplied(op, x, i, u, g, axis)
    else:
        made = _extremum(op, reduction, x, i, u, g, axis)
    return [op.Cast(v, to=dtype) for v in made]


def _multiplied(op, x, i, u, g, axis):
    """y = x prod of the u at a place:  dx = g prod u,  du = g x times the product of the others.

    Right where some are zero: the others' product is zero if two of them are, else the product of
    those that are not zero, times the zero among them, whose slope counts.
    """

    def of_place(v, start, reduction):
        v = op.ScatterElements(start, i, v, axis=axis, reduction=reduction)
        return op.GatherElements(v, i, axis=axis)

    ones, none, zero = op.ones_like(x), op.zeros_like(x), op.Equal(u, 0.0)
    counted, zeros, nonzero = (
        op.Cast(zero, to=u.dtype),
        op.Where(zero, u, 0.0),
        op.Where(zero, 1.0, u),
    )
    rest = of_place(nonzero, ones, "mul") / nonzero
    left = of_place(counted, none, "add") - counted  # zeros among the others
    rest_with_zero = rest * (of_place(zeros, none, "add") - zeros)
    others = op.Where(op.Equal(left, 0.0), rest, op.Where(op.Equal(left, 1.0), rest_with_zero, 0.0))
    dx = g * op.ScatterElements(ones, i, u, axis=axis, reduction="mul")
    return dx, op.GatherElements(g * x, i, axis=axis) * others


def _extremum(op, reduction, x, i, u, g, axis):
    """y = max of x and the u at a place:  g goes to those that are y, in equal shares."""
    y = op.ScatterElements(x, i, u, axis=axis, reduction=reduction)
    x_hits = op.Cast(op.Equal(x, y), to=x.dtype)
    u_hits = op.Cast(op.Equal(u, op.GatherElements(y, i, axis=axis)), to=x.dtype)
    share = g / op.ScatterElements(x_hits, i, u_hits, axis=axis, reduction="add")
    return share * x_hits, op.GatherElements(share, i, axis=axis) * u_hits


@rule("TensorScatter")
def tensor_scatter(op, node, g):
    """y = x with u from a place on along an axis:  dx = g, zero there,  du = g from there on.

    Where u went is learnt from the node itself: it writes the positions of u into a tensor of
    numbers that are none.
    """
    x, u, *start = node.inputs
    attributes = attributes_of(node)
    dx = op.TensorScatter(g, op.zeros_like(u), *start, **attributes)
    nowhere = op.Expand(op.Size(u), op.shape_of(x))
    written = op.TensorScatter(nowhere, positions_of(op, u), *start, **attributes)
    n = op.Reshape(op.Size(u), [1])
    places = op.ScatterElements(
        op.Expand(np.int64(0), n + 1),
        op.Reshape(written, [-1]),
        op.Reshape(positions_of(op, x), [-1]),
        axis=0,
        reduction="max",  # any would do: only what is nowhere has several
    )
    du = op.Gather(op.Reshape(g, [-1]), op.Slice(places, [0], n), axis=0)
    return dx, op.reshape_like(du, u), None


@rule("TopK")
def top_k(op, node, g):
    """y = the k largest of x along an axis:  dx = zero but for g where they were."""
    x, axis = node.inputs[0], node.attributes.get_int("axis", -1)
    return op.ScatterElements(
        op.zeros_like(x), output(op, node, 1, ir.DataType.INT64), g, axis=axis
    ), None


@rule("Unique")
def unique(op, node, g):
    """y = the different elements of x:  dx = zero but for g where each occurred first."""
    (x,), i = node.inputs, output(op, node, 1, ir.DataType.INT64)
    if "axis" in node.attributes:
        i = op.Gather(positions_of(op, x), i, axis=_axis(node))
    return (scatter_flat(op, x, i, g),)


@rule("OneHot")
def one_hot(op, node, g):
    """y = v1 at i, v0 elsewhere:  dv1 = sum of g at i,  dv0 = sum of g elsewhere."""
    i, depth, v = node.inputs
    off_on, axis = np.array([0, 1], np.float32), node.attributes.get_int("axis", -1)
    hot = op.OneHot(i, depth, off_on, axis=axis)  # onnxruntime has no kernel for float64
    hot.dtype = ir.DataType.FLOAT
    hot = op.Cast(hot, to=v.dtype)
    sums = [op.ReduceSum(g * mask, keepdims=0) for mask in (1.0 - hot, hot)]
    return None, None, op.Concat(*(op.Reshape(s, [1]) for s in sums), axis=0)
