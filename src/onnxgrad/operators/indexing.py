"""Operators that choose elements by indices, or put them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import OutputAxis, axis_unless_named, named_axes, only_first_operand
from onnxgrad.operators.layouts import FIRST, scatter_flat, scatter_moved
from onnxgrad.operators.member_forms import shift_all_operands, shift_named_axes
from onnxgrad.operators.normalizations import LAST
from onnxgrad.operators.outputs import DimArray, first_dtype, none_if_unknown, shape_of_first
from onnxgrad.operators.records import ListedAxes, declare_operators, member_form, rule
from onnxgrad.operators.rule_nodes import (
    attributes_of,
    node_output,
    positions_of,
    product_of_others,
    wide_dtype,
    zero_overwritten_elements,
    zero_overwritten_rows,
)
from onnxgrad.operators.shapes import dims, rank, static


def _axis_after_gather(node: Any, operand: int, axis: int) -> OutputAxis:
    named, n = named_axes(node), rank(node.inputs[1])
    if named is None or n is None or (operand == 0 and axis in named):
        return None
    if operand:
        return named[0] + axis
    return axis + n - 1 if named[0] < axis else axis


def _elements_after_gather(node: ir.Node, x: DimArray, i: DimArray) -> DimArray | None:
    if x.ndim != 1 or not all(isinstance(e, int) for e in i.flat):
        return None
    picked = [x[int(e)] for e in i.flat]
    return np.array(picked, object).reshape(i.shape)


def _axis_after_gather_nd(node: Any, operand: int, axis: int) -> OutputAxis:
    kept = len(node.inputs[1].shape) - 1 if operand else int_attribute(node, "batch_dims")
    return axis if axis < kept else None


def _top_k_result_types(inputs: Sequence, _attributes: Mapping[str, Any]) -> list:
    dtype = first_dtype(inputs)
    return [None if dtype is None else ir.TensorType(dtype), ir.TensorType(ir.DataType.INT64)]


declare_operators("Gather GatherElements GatherND", "selects", roles="ti", finite_at=((1, 0),))
declare_operators("GatherElements ScatterElements", naming=FIRST, members=shift_all_operands)
declare_operators("ScatterElements ScatterND", shape=shape_of_first)
declare_operators(
    "Gather",
    "cheap moves aligned",
    naming=FIRST,
    axes=_axis_after_gather,
    elements=none_if_unknown(_elements_after_gather),
    lookup_operand=1,
)
declare_operators(
    "GatherElements",
    shape=lambda inputs, _: None if dims(inputs[0]) is None else dims(inputs[1]),
    axes=lambda node, operand, axis: axis if operand else axis_unless_named(node, 0, axis),
)
declare_operators("GatherND", axes=_axis_after_gather_nd)
_KEPT: dict[str, Any] = {"axes": only_first_operand(axis_unless_named), "roles": "xl"}
declare_operators("Compress", "moves selects", naming=ListedAxes("axis"), **_KEPT)
declare_operators(
    "TopK",
    "searches",
    result_type=_top_k_result_types,
    naming=LAST,
    **_KEPT,
    settings=(1,),
    fitted=(
        "selects the nearest of stored rows: such a model is its data, and is fitted by storing "
        "others"
    ),
)


# -- gradients -------------------------------------------------------------------------------------


@rule("Gather")
def gather(op, node, g):
    """y = x[i]:  dx = zeros with g added at i."""
    x, i = node.inputs
    axis = int_attribute(node, "axis")
    shape, pads = dims(x), _pads_of_gather_adjoint(op, node)
    if pads is not None:
        part = op.Unsqueeze(g, [axis]) if rank(i) == 0 else g
        whole = isinstance(pads, list) and not any(pads)
        return part if whole else op.Pad(part, pads), None
    if axis == 0 or (shape is not None and axis == -len(shape)):
        return scatter_rows(op, x, i, g), None
    return scatter_moved(op, node, g), None


def _pads_of_gather_adjoint(op, node):
    """Return the pads by which a Pad is the adjoint of a Gather; None if its indices are not
    constant and consecutive.

    There is one for a constant index, and for constant indices that follow one another.
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
        g = op.Reshape(op.Cast(g, to=wide_dtype(x.dtype)), [-1, *row])
        rows = op.Expand(op.Reshape(i, [-1] + [1] * len(row)), op.shape_of(g))
        zeros = op.Expand(op.const(0.0, g.dtype), op.shape_of(x))
        return op.Cast(op.ScatterElements(zeros, rows, g, axis=0, reduction="add"), to=x.dtype)
    width = op.ReduceProd(op.Shape(x, start=1), keepdims=0) if row is None else prod(row)
    first = op.Unsqueeze(op.Cast(i, to=ir.DataType.INT64) * width, [-1])
    positions = first + op.arange(op.const(width, first.dtype))
    return scatter_flat(op, x, positions, g)


@rule("GatherElements")
def gather_elements(op, node, g):
    """y = x[i] along an axis:  dx = zeros with g added at i."""
    (x, i), axis = node.inputs, int_attribute(node, "axis")
    dtype = wide_dtype(x.dtype)
    zeros = op.Expand(op.const(0.0, dtype), op.shape_of(x))
    dx = op.ScatterElements(zeros, i, op.Cast(g, to=dtype), axis=axis, reduction="add")
    return op.Cast(dx, to=x.dtype), None


@rule("GatherND", "Compress")
def gather_nd(op, node, g):
    """y = x[i], i a list of indices or conditions:  dx = zeros with g added at i."""
    return scatter_moved(op, node, g), None


@rule("ScatterElements")
def scatter_elements(op, node, g):
    """y = x with u at i:  dx = g, 0 at i,  du = g[i];  with u added at i:  dx = g,  du = g[i].

    Where an index occurs twice, the last u is written over the others: du = 0 for them.
    """
    x, i, u = node.inputs
    reduction, axis = string_attribute(node, "reduction"), int_attribute(node, "axis")
    if reduction not in ("none", "add"):
        dx, du = _scatter_reduction_gradients(op, reduction, x, i, u, g, axis)
        return dx, None, du
    du = op.GatherElements(g, i, axis=axis)
    if reduction == "add":
        return g, None, du
    dx = op.ScatterElements(g, i, op.zeros_like(u), axis=axis)
    return dx, None, zero_overwritten_elements(op, du, x, i, axis)


@rule("ScatterND")
def scatter_nd(op, node, g):
    """y = x with u at i:  dx = g, 0 at i,  du = g[i];  with u added at i:  dx = g,  du = g[i].

    Where an index occurs twice, the last u is written over the others: du = 0 for them. The other
    reductions are computed as by ScatterElements on flat tensors.
    """
    x, i, u = node.inputs
    reduction = string_attribute(node, "reduction")
    if reduction not in ("none", "add"):
        positions = op.GatherND(positions_of(op, x), i)
        flat = [op.Reshape(v, [-1]) for v in (x, positions, u, g)]
        dx, du = _scatter_reduction_gradients(op, reduction, *flat, axis=0)
        return op.reshape_like(dx, x), None, op.reshape_like(du, u)
    du = op.GatherND(g, i)
    if reduction == "add":
        return g, None, du
    return op.ScatterND(g, i, op.zeros_like(u)), None, zero_overwritten_rows(op, du, x, i)


def _scatter_reduction_gradients(op, reduction, x, i, u, g, axis):
    """Return the gradients of the data x and the updates u of a scatter, for the reductions mul,
    max and min.
    """
    dtype = x.dtype
    x, u, g = (op.Cast(v, to=wide_dtype(dtype)) for v in (x, u, g))
    if reduction == "mul":
        gradients = _scatter_product_gradients(op, x, i, u, g, axis)
    else:
        gradients = _scatter_extremum_gradients(op, reduction, x, i, u, g, axis)
    return [op.Cast(v, to=dtype) for v in gradients]


def _scatter_product_gradients(op, x, i, u, g, axis):
    """y = x prod u, over u with the same index:  dx = g prod u,  du = g x prod of the other u."""

    def combine_by_index(start, reduction, v):
        v = op.ScatterElements(start, i, v, axis=axis, reduction=reduction)
        return op.GatherElements(v, i, axis=axis)

    ones = op.ones_like(x)
    added = partial(combine_by_index, op.zeros_like(x), "add")
    others = product_of_others(op, u, partial(combine_by_index, ones, "mul"), added)
    dx = g * op.ScatterElements(ones, i, u, axis=axis, reduction="mul")
    return dx, op.GatherElements(g * x, i, axis=axis) * others


def _scatter_extremum_gradients(op, reduction, x, i, u, g, axis):
    """y = max of x and the u with its index:  g in equal shares to the x and u that equal y."""
    y = op.ScatterElements(x, i, u, axis=axis, reduction=reduction)
    x_hits = op.Cast(op.Equal(x, y), to=x.dtype)
    u_hits = op.Cast(op.Equal(u, op.GatherElements(y, i, axis=axis)), to=x.dtype)
    share = g / op.ScatterElements(x_hits, i, u_hits, axis=axis, reduction="add")
    return share * x_hits, op.GatherElements(share, i, axis=axis) * u_hits


@rule("TensorScatter")
def tensor_scatter(op, node, g):
    """y = x with u written from an index on along an axis:  dx = g, 0 where u is written,
    du = g where u is written.

    The positions of u in y are computed by the same node, applied to the positions 0, 1, ... of u
    and an invalid position for each element of x.
    """
    x, u, *start = node.inputs
    attributes = attributes_of(node)
    dx = op.TensorScatter(g, op.zeros_like(u), *start, **attributes)
    invalid = op.Expand(op.Size(u), op.shape_of(x))
    written = op.TensorScatter(invalid, positions_of(op, u), *start, **attributes)
    with_invalid = op.Pad(op.Reshape(u, [-1]), [0, 1])
    du = op.Slice(scatter_flat(op, with_invalid, written, g), [0], [-1])
    return dx, op.reshape_like(du, u), None


@rule("TopK")
def top_k(op, node, g):
    """y = the k largest of x along an axis:  dx = zeros with g at their indices."""
    (x, _), i = node.inputs, node_output(op, node, 1, ir.DataType.INT64)
    zeros, axis = op.zeros_like(x), int_attribute(node, "axis")
    return op.ScatterElements(zeros, i, g, axis=axis), None


@rule("Unique")
def unique(op, node, g):
    """y = the distinct elements of x:  dx = zeros with g at the first occurrence of each."""
    (x,), i = node.inputs, node_output(op, node, 1, ir.DataType.INT64)
    if "axis" in node.attributes:
        i = op.Gather(positions_of(op, x), i, axis=int_attribute(node, "axis"))
    return (scatter_flat(op, x, i, g),)


# -- members ---------------------------------------------------------------------------------------


@member_form("Gather")
def write_gather_for_members(m, node):
    """Write one Gather for all members of a `TrainerStack`; members with different indices must
    gather from one shared tensor.
    """
    data, indices = node.inputs
    if indices not in m:
        return shift_named_axes(m, node)
    from_shared_rows = data not in m and named_axes(node) == [0]
    return m.write_node(node, [data, m.value_for(indices)], axis=0) if from_shared_rows else None
