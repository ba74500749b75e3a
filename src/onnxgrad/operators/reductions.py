"""Reductions along axes, and running sums and products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.operators.axes import (
    SUMMED,
    Place,
    axes_named_by,
    axis_unless_named,
    first_operand,
    named_axes,
)
from onnxgrad.operators.elements import Elements, of_known, product_of_lengths
from onnxgrad.operators.layouts import FIRST
from onnxgrad.operators.outputs import like_first
from onnxgrad.operators.records import Naming, declare_operators
from onnxgrad.operators.shapes import Dims, dims


def _reduced_axes(n: int, _inputs: Sequence, attributes: Mapping) -> Sequence[int]:
    return [] if attributes.get("noop_with_empty_axes") else range(n)


def _shape_of_reduction(op_type: str) -> Callable[[Sequence, Mapping[str, Any]], Dims | None]:
    """Return the function of the shape after a reduction, as far as its axes are known."""

    def reduced(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
        shape, keeps = dims(inputs[0]), attributes.get("keepdims", 1)
        if shape is None:
            return None
        named = axes_named_by(op_type, inputs, attributes)
        if named is None:
            return (None,) * len(shape) if keeps else None
        if keeps:
            return tuple(1 if i in named else d for i, d in enumerate(shape))
        return tuple(d for i, d in enumerate(shape) if i not in named)

    return reduced


def _axis_without_named(node: Any, _operand: int, axis: int) -> Place:
    named = named_axes(node)
    if named is None:
        return None
    if axis in named:
        return SUMMED if node.op_type in _SUMS else None
    keeps = node.attributes.get_int("keepdims", 1)
    return axis if keeps else axis - sum(a < axis for a in {*named})


def _product_of_elements(node: ir.Node, x: Elements, axes: Elements | None = None) -> Elements:
    if node.attributes.get_int("noop_with_empty_axes", 0) and (axes is None or not axes.size):
        return x
    result = product_of_lengths(x.flat)
    return result.reshape(1) if node.attributes.get_int("keepdims", 1) and x.ndim else result


_SUMS = ("ReduceL1", "ReduceSum", "ReduceSumSquare")  # of the same function of each element
_OTHERS = "ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd".split()
for _name in (*_SUMS, *_OTHERS):
    declare_operators(
        _name,
        shape=_shape_of_reduction(_name),
        naming=Naming("axes", 1, _reduced_axes),
        axes=first_operand(_axis_without_named),
    )
declare_operators("ReduceProd", elements=of_known(_product_of_elements))
declare_operators("ArgMax ArgMin", "int64", naming=FIRST, axes=first_operand(_axis_without_named))
declare_operators(
    "CumProd CumSum",
    "unary",
    shape=like_first,
    naming=Naming("axis", 1),
    axes=first_operand(axis_unless_named),
)
