"""Operators that read shapes, or make tensors of shapes and numbers; random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import OutputAxis, only_first_operand
from onnxgrad.operators.layouts import nonnegative_lengths
from onnxgrad.operators.outputs import (
    INTEGERS,
    MOST_ELEMENTS,
    DimArray,
    none_if_unknown,
    product_of_lengths,
)
from onnxgrad.operators.records import (
    INDEX,
    OF_SETTINGS,
    OF_SHAPE,
    declare_operators,
    member_form,
    rule,
)
from onnxgrad.operators.shapes import Dims, known_shape, rank


def _shape_of_shape_result(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    return (len(known_shape(inputs[0])[attributes.get("start", 0) : attributes.get("end")]),)


def _elements_of_shape_result(node: ir.Node, _operands: Sequence) -> DimArray:
    start, end = int_attribute(node, "start"), node.attributes.get_int("end", None)
    return np.array(known_shape(node.inputs[0])[start:end], object)


def _constant_of_shape_elements(node: ir.Node, shape: DimArray) -> DimArray | None:
    value = node.attributes.get_tensor("value", None)
    if value is None or value.dtype not in INTEGERS:
        return None
    if shape.shape != (1,) or shape[0] > MOST_ELEMENTS:
        return None
    return np.array(value.numpy().tolist() * shape[0], object)


@none_if_unknown
def _elements_of_range(
    _node: ir.Node, start: DimArray, end: DimArray, step: DimArray
) -> DimArray | None:
    numbers = range(*(int(v.item()) for v in (start, end, step)))
    return np.array(numbers, object) if len(numbers) <= MOST_ELEMENTS else None


def _length_of_range(_node: ir.Node, operands: Sequence[DimArray | None]) -> Dims | None:
    """Return the shape of the result of a Range from 0 in steps of 1; None for other starts or
    steps.
    """
    start, end, step = operands
    if start is None or end is None or step is None or (start.tolist(), step.tolist()) != (0, 1):
        return None
    return nonnegative_lengths(end)


def _axis_after_one_hot(node: Any, _operand: int, axis: int) -> OutputAxis:
    new = int_attribute(node, "axis") % (len(node.inputs[0].shape) + 1)
    return axis + (axis >= new)


declare_operators("Shape Size", "view cheap shape int64 never_fails", no_gradient=OF_SHAPE)
declare_operators("Shape", shape=_shape_of_shape_result, elements=_elements_of_shape_result)
declare_operators(
    "Size",
    shape=lambda *_: (),
    elements=lambda node, _: product_of_lengths(known_shape(node.inputs[0])),
)
declare_operators("EyeLike", "cheap shape", no_gradient=OF_SHAPE)
declare_operators(
    "ConstantOfShape",
    "cheap shape",
    elements=none_if_unknown(_constant_of_shape_elements),
    lengths=lambda _, operands: nonnegative_lengths(operands[0]),
    settings=(0,),
    no_gradient=OF_SHAPE,
)
declare_operators("BlackmanWindow Constant HammingWindow HannWindow", no_gradient=OF_SETTINGS)
declare_operators("MelWeightMatrix", roles="c", no_gradient=OF_SETTINGS)
declare_operators(
    "Range",
    "cheap arithmetic",
    roles="c",
    elements=_elements_of_range,
    lengths=_length_of_range,
    settings=(0, 1, 2),
)
declare_operators(
    "OneHot", "cheap", roles="c", axes=only_first_operand(_axis_after_one_hot), settings=(1,)
)
declare_operators("NonMaxSuppression", "int64", roles="i", no_gradient=INDEX)
declare_operators("NonZero", "int64", no_gradient=INDEX)
declare_operators(
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "random",
    no_gradient="random: depends on the shape, or is a draw",
)
declare_operators(
    "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    no_gradient="works on strings or encoded images",
)


# -- gradients -------------------------------------------------------------------------------------


@rule("Range")
def range_(op, node, g):
    """y_i = a + i d:  da = sum g,  dd = sum i g."""
    start, _, delta = node.inputs
    i = op.Cast(op.arange(op.Size(g)), to=g.dtype)
    dstart, ddelta = (op.ReduceSum(v, keepdims=0) for v in (g, g * i))
    return op.reshape_like(dstart, start), None, op.reshape_like(ddelta, delta)


@rule("OneHot")
def one_hot(op, node, g):
    """y = v1 at i, v0 elsewhere:  dv1 = sum of g at i,  dv0 = sum of g elsewhere."""
    i, depth, v = node.inputs
    off_on, axis = np.array([0, 1], np.float32), int_attribute(node, "axis")
    hot = op.OneHot(i, depth, off_on, axis=axis)  # onnxruntime has no kernel for float64
    hot.dtype = ir.DataType.FLOAT
    hot = op.Cast(hot, to=v.dtype)
    sums = [op.ReduceSum(g * mask, keepdims=0) for mask in (1.0 - hot, hot)]
    return None, None, op.Concat(*(op.Reshape(s, [1]) for s in sums), axis=0)


# -- members ---------------------------------------------------------------------------------------


@member_form("Shape")
def write_shape_for_members(m, node):
    """Write the Shape of a tensor of one member of a `TrainerStack`: all members have the same."""
    n = rank(node.inputs[0])
    if n is None:
        return None
    stated = int_attribute(node, "start"), node.attributes.get_int("end", None)
    start, end, _ = slice(*stated).indices(n)
    new = m.op.Shape(m.value_for(node.inputs[0]), start=start + 1, end=end + 1)
    return [m.replace_shared(node.outputs[0], new)]


@member_form("Size")
def write_size_for_members(m, node):
    """Write the Size of a tensor of one member of a `TrainerStack`: all members have the same."""
    new = m.op.ReduceProd(m.op.Shape(m.value_for(node.inputs[0]), start=1), keepdims=0)
    return [m.replace_shared(node.outputs[0], new)]
