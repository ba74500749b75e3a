"""Reductions along axes, and running sums and products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import (
    SUMMED,
    OutputAxis,
    axes_named_by,
    axis_unless_named,
    named_axes,
    only_first_operand,
)
from onnxgrad.operators.layouts import FIRST
from onnxgrad.operators.outputs import (
    DimArray,
    none_if_unknown,
    product_of_lengths,
    range_of_first,
    shape_of_first,
)
from onnxgrad.operators.records import INDEX, ListedAxes, declare_operators, elementwise, rule
from onnxgrad.operators.rule_nodes import product_of_others
from onnxgrad.operators.shapes import Dims, dims, known_shape, rank, static


def _reduced_axes(n: int, _inputs: Sequence, attributes: Mapping) -> Sequence[int]:
    return [] if attributes.get("noop_with_empty_axes") else range(n)


def _shape_of_reduction(op_type: str) -> Callable[[Sequence, Mapping[str, Any]], Dims | None]:
    """Return the `shape` function of a reduction operator."""

    def shape_after_reduction(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
        shape, keeps = known_shape(inputs[0]), attributes.get("keepdims", 1)
        named = axes_named_by(op_type, inputs, attributes)
        if named is None:
            return (None,) * len(shape) if keeps else None
        if keeps:
            return tuple(1 if i in named else d for i, d in enumerate(shape))
        return tuple(d for i, d in enumerate(shape) if i not in named)

    return shape_after_reduction


def _axis_after_reduction(node: Any, _operand: int, axis: int) -> OutputAxis:
    named = named_axes(node)
    if named is None:
        return None
    if axis in named:
        return SUMMED if node.op_type in _SUMS else None
    keeps = node.attributes.get_int("keepdims", 1)
    return axis if keeps else axis - sum(a < axis for a in {*named})


def _product_of_elements(
    node: ir.Node, x: DimArray, axes: DimArray | None = None
) -> DimArray | None:
    if x.ndim > 1:
        return None
    if node.attributes.get_int("noop_with_empty_axes", 0) and (axes is None or not axes.size):
        return x
    result = product_of_lengths(x.flat)
    return result.reshape(1) if node.attributes.get_int("keepdims", 1) and x.ndim else result


def _declare_reduction(name: str, traits: str = "", **fields: Any) -> None:
    declare_operators(
        name,
        f"reduces {traits}",
        shape=_shape_of_reduction(name),
        naming=ListedAxes("axes", 1, _reduced_axes),
        axes=only_first_operand(_axis_after_reduction),
        **fields,
    )


_SUMS = ("ReduceL1", "ReduceSum", "ReduceSumSquare")  # the sum of one function of each element

_declare_reduction("ReduceL1", terms=lambda op, x: op.Abs(x))
_declare_reduction("ReduceL2", "moments")
_declare_reduction("ReduceLogSum", finite_at=((0, 1.0),))
_declare_reduction("ReduceLogSumExp")
_declare_reduction("ReduceMax", value_range=range_of_first)
_declare_reduction("ReduceMean", "moments", terms=lambda op, x: x, value_range=range_of_first)
_declare_reduction("ReduceMin", value_range=range_of_first)
_declare_reduction("ReduceProd", elements=none_if_unknown(_product_of_elements))
_declare_reduction("ReduceSum", "moments", terms=lambda op, x: x)
_declare_reduction("ReduceSumSquare", "moments", terms=lambda op, x: op.Mul(x, x))
declare_operators(
    "ArgMax ArgMin",
    "int64 searches",
    naming=FIRST,
    axes=only_first_operand(_axis_after_reduction),
    no_gradient=INDEX,
)
declare_operators(
    "CumProd CumSum",
    "unary",
    shape=shape_of_first,
    naming=ListedAxes("axis", 1),
    axes=only_first_operand(axis_unless_named),
)


# -- gradients -------------------------------------------------------------------------------------


def _axes_operand(op, node):
    """Return the `axes` input, or None if all axes are reduced; for a global pool, the axes from
    the third to the last.
    """
    if node.op_type.startswith("Global"):
        n = rank(node.inputs[0])
        if n is not None:
            return op.const([*range(2, n)])
        return op.Range(np.int64(2), op.Size(op.Shape(node.inputs[0])), np.int64(1))
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    numbers = op.known_value(axes)
    return None if numbers is not None and numbers.size == 0 else axes


def _keep_reduced_axes(op, node, v):
    """Return `v`, of the shape of the output, with the reduced axes kept with length one."""
    axes = _axes_operand(op, node)
    if node.attributes.get_int("keepdims", 1) or axes is None:  # global pools lack it
        return v  # without axes and keepdims, v is a scalar, which broadcasts
    return op.Unsqueeze(v, axes)


def _reduces_nothing(op, node):
    return bool(_noop_attribute(node)) and _axes_operand(op, node) is None


def _reduced_element_count(op, node):
    """Return the number of elements per output element: a float, or a scalar of the dtype of x."""
    x, axes = node.inputs[0], op.known_value(_axes_operand(op, node))
    shape = dims(x)
    if shape is not None:
        reduced = shape if axes is None else tuple(shape[a] for a in axes.tolist())
        if static(reduced) is not None and (axes is not None or _axes_operand(op, node) is None):
            return float(prod(static(reduced)))
    sizes = [op.Cast(op.Size(v), to=ir.DataType.DOUBLE) for v in (x, node.outputs[0])]
    return op.Cast(op.Div(*sizes), to=x.dtype)  # as floats: both may be zero


@rule("ReduceSum")
def reduce_sum(op, node, g):
    """y = sum x:  dx = g."""
    x = node.inputs[0]
    return (g if _reduces_nothing(op, node) else op.expand_to(_keep_reduced_axes(op, node, g), x),)


@rule("ReduceMean", "GlobalAveragePool")
def reduce_mean(op, node, g):
    """y = sum x / n, n the number of elements in the sum:  dx = g / n."""
    x = node.inputs[0]
    if _reduces_nothing(op, node):
        return (g,)
    return (op.expand_to(_keep_reduced_axes(op, node, g) / _reduced_element_count(op, node), x),)


@rule("ReduceMax", "ReduceMin", "GlobalMaxPool")
def reduce_extremum(op, node, g):
    """y = max x:  g in equal shares to the elements that equal y."""
    x = node.inputs[0]
    if _reduces_nothing(op, node):
        return (g,)
    hits = op.Cast(op.Equal(x, _keep_reduced_axes(op, node, node.outputs[0])), to=x.dtype)
    share = _keep_reduced_axes(op, node, g) / _reduce_like_node(op, node, op.ReduceSum, hits)
    return (hits * share,)


@rule("ReduceProd")
def reduce_prod(op, node, g):
    """y = prod x:  dx = g times the product of the other elements, right where some are zero."""
    x = node.inputs[0]
    if _reduces_nothing(op, node):
        return (g,)
    multiplied = partial(_reduce_like_node, op, node, op.ReduceProd)
    added = partial(_reduce_like_node, op, node, op.ReduceSum)
    return (_keep_reduced_axes(op, node, g) * product_of_others(op, x, multiplied, added),)


def _reduce_like_node(op, node, reduce, v):
    return reduce(v, _axes_operand(op, node), keepdims=1, **_noop_attribute(node))


def _noop_attribute(node):
    noop = node.attributes.get_int("noop_with_empty_axes", 0)  # global pools lack it
    return {"noop_with_empty_axes": 1} if noop else {}


elementwise(  # right where no axis is reduced, too
    _keep_reduced_axes,
    ReduceL1=lambda op, x, y: op.Sign(x),
    ReduceL2=lambda op, x, y: x / op.Where(op.Equal(y, 0.0), 1.0, y),
    ReduceLogSum=lambda op, x, y: op.Exp(op.expand_to(-y, x)),
    ReduceLogSumExp=lambda op, x, y: op.Exp(x - y),
    ReduceSumSquare=lambda op, x, y: 2.0 * x,
)


@rule("CumSum")
def cum_sum(op, node, g):
    """y_i = sum of x_j, j <= i:  dx_j = sum of g_i, i >= j."""
    return _accumulate_along(op.CumSum, node, g, backwards=True), None


@rule("CumProd")
def cum_prod(op, node, g):
    """y_i = prod of x_j, j <= i:  dx_k = sum over i >= k of g_i times the product without x_k.

    Right where some x_j are zero. The product without x_k is computed from the product of all
    nonzero factors, divided by x_k if that is not zero; it is zero if another factor is. A single
    other zero stays a factor, so that second derivatives are right too.
    """
    x = node.inputs[0]
    zero = op.Equal(x, 0.0)
    nonzero = op.Where(zero, 1.0, x)
    product = g * _accumulate_along(op.CumProd, node, nonzero)
    zeros = _accumulate_along(op.CumSum, node, op.Cast(zero, to=x.dtype))  # number of zeros up to i
    factor = _accumulate_along(op.CumSum, node, op.Where(zero, x, 0.0))

    def sum_selected(count, factor=None):
        """Return the running sum of the products with `count` zeros among their factors, times
        `factor`.
        """
        selected = op.Where(op.Equal(zeros, count), product, 0.0)
        return _accumulate_along(
            op.CumSum, node, selected if factor is None else selected * factor, backwards=True
        )

    of_zero = sum_selected(1.0) + (sum_selected(2.0, factor) - x * sum_selected(2.0))
    return op.Where(zero, of_zero, (sum_selected(0.0) + sum_selected(1.0, factor)) / nonzero), None


def _accumulate_along(cumulate, node, v, backwards=False):
    reverse = int_attribute(node, "reverse")
    exclusive = int_attribute(node, "exclusive")
    return cumulate(
        v, node.inputs[1], exclusive=exclusive, reverse=1 - reverse if backwards else reverse
    )
