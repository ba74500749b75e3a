"""Operators that read shapes, or make tensors of shapes and numbers; random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import Place, first_operand
from onnxgrad.operators.elements import (
    INTEGERS,
    MOST_ELEMENTS,
    Elements,
    of_known,
    product_of_lengths,
)
from onnxgrad.operators.layouts import nonnegative_lengths
from onnxgrad.operators.records import INDEX, OF_SETTINGS, OF_SHAPE, declare_operators
from onnxgrad.operators.shapes import Dims, dims


def _shape_of_shape(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    shape = dims(inputs[0])
    if shape is None:
        return None
    return (len(shape[attributes.get("start", 0) : attributes.get("end")]),)


def _lengths_as_elements(node: ir.Node, _operands: Sequence) -> Elements | None:
    shape = dims(node.inputs[0])
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return None if shape is None else np.array(shape[start:end], object)


def _size_as_element(node: ir.Node, _operands: Sequence) -> Elements | None:
    shape = dims(node.inputs[0])
    return None if shape is None else product_of_lengths(shape)


def _filled_elements(node: ir.Node, shape: Elements) -> Elements | None:
    value = node.attributes.get_tensor("value", None)
    if value is None or value.dtype not in INTEGERS:
        return None
    if shape.shape != (1,) or shape[0] > MOST_ELEMENTS:
        return None
    return np.array(value.numpy().tolist() * shape[0], object)


def _filled_lengths(_node: ir.Node, operands: Sequence[Elements | None]) -> Dims | None:
    return None if operands[0] is None else nonnegative_lengths(operands[0])


def _elements_of_range(
    _node: ir.Node, start: Elements, end: Elements, step: Elements
) -> Elements | None:
    numbers = range(*(int(v.item()) for v in (start, end, step)))
    return np.array(numbers, object) if len(numbers) <= MOST_ELEMENTS else None


def _length_of_range(_node: ir.Node, operands: Sequence[Elements | None]) -> Dims | None:
    """Return the shape of the numbers from 0 to a length, in steps of one."""
    start, end, step = operands
    if start is None or end is None or step is None or (start.tolist(), step.tolist()) != (0, 1):
        return None
    return nonnegative_lengths(end)


def _axis_beside_classes(node: Any, _operand: int, axis: int) -> Place:
    new = node.attributes.get_int("axis", -1) % (len(node.inputs[0].shape) + 1)
    return axis + (axis >= new)


_RANDOM = "random: depends on the shape, or is a draw"

declare_operators(
    "Shape",
    "view cheap shape int64",
    shape=_shape_of_shape,
    elements=_lengths_as_elements,
    no_gradient=OF_SHAPE,
)
declare_operators(
    "Size",
    "view cheap shape int64",
    shape=lambda *_: (),
    elements=_size_as_element,
    no_gradient=OF_SHAPE,
)
declare_operators("ConstantOfShape EyeLike", "cheap shape", no_gradient=OF_SHAPE)
declare_operators("ConstantOfShape", elements=of_known(_filled_elements), lengths=_filled_lengths)
declare_operators(
    "BlackmanWindow Constant HammingWindow HannWindow MelWeightMatrix", no_gradient=OF_SETTINGS
)
declare_operators(
    "Range", "cheap arithmetic", elements=of_known(_elements_of_range), lengths=_length_of_range
)
declare_operators("OneHot", "cheap", axes=first_operand(_axis_beside_classes))
declare_operators("NonMaxSuppression NonZero", "int64", no_gradient=INDEX)
declare_operators(
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "random",
    no_gradient=_RANDOM,
)
declare_operators("AffineGrid MelWeightMatrix NonMaxSuppression OneHot Range", roles="c")
declare_operators(
    "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    no_gradient="works on strings or encoded images",
)
