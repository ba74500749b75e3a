"""Operators that choose elements by indices, or put them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import Place, axis_unless_named, first_operand, named_axes
from onnxgrad.operators.elements import Elements, of_known
from onnxgrad.operators.layouts import FIRST
from onnxgrad.operators.normalizations import LAST
from onnxgrad.operators.outputs import first_dtype, like_first
from onnxgrad.operators.records import Naming, declare_operators
from onnxgrad.operators.shapes import Dims, dims, rank


def _gathered_axis(node: Any, operand: int, axis: int) -> Place:
    named, n = named_axes(node), rank(node.inputs[1])
    if named is None or n is None or (operand == 0 and axis in named):
        return None
    if operand:
        return named[0] + axis
    return axis + n - 1 if named[0] < axis else axis


def _gathered_elements(node: ir.Node, x: Elements, i: Elements) -> Elements | None:
    if x.ndim != 1 or not all(isinstance(e, int) for e in i.flat):
        return None
    picked = [x[int(e)] for e in i.flat]
    return np.array(picked, object).reshape(i.shape)


def _like_indices(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    return None if dims(inputs[0]) is None else dims(inputs[1])


def _axis_of_gather_elements(node: Any, operand: int, axis: int) -> Place:
    return axis if operand else axis_unless_named(node, operand, axis)


def _axis_of_gather_nd(node: Any, operand: int, axis: int) -> Place:
    kept = len(node.inputs[1].shape) - 1 if operand else node.attributes.get_int("batch_dims", 0)
    return axis if axis < kept else None


def _axis_of_reversed(node: Any, operand: int, axis: int) -> Place:
    if operand:
        return node.attributes.get_int("batch_axis", 1)
    return axis_unless_named(node, operand, axis)


def _types_of_top_k(inputs: Sequence, _attributes: Mapping[str, Any]) -> list:
    dtype = first_dtype(inputs)
    return [None if dtype is None else ir.TensorType(dtype), ir.TensorType(ir.DataType.INT64)]


_unless_named = first_operand(axis_unless_named)

declare_operators(
    "Gather",
    "cheap selects",
    naming=FIRST,
    axes=_gathered_axis,
    elements=of_known(_gathered_elements),
)
declare_operators(
    "GatherElements", "selects", shape=_like_indices, naming=FIRST, axes=_axis_of_gather_elements
)
declare_operators("GatherND", "selects", axes=_axis_of_gather_nd)
declare_operators("Compress", "selects", naming=Naming("axis"), axes=_unless_named)
declare_operators("ScatterElements ScatterND", shape=like_first)
declare_operators("ScatterElements", naming=FIRST)
declare_operators("TopK", naming=LAST, axes=_unless_named, result_type=_types_of_top_k)
declare_operators(
    "ReverseSequence",
    "reorders",
    naming=Naming("time_axis", default=lambda *_: [0]),
    axes=_axis_of_reversed,
)
declare_operators("Gather GatherElements GatherND", roles="tc")
