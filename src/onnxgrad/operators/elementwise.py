"""Elementwise operators: arithmetic, comparisons, logic, activations."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import broadcast_axis
from onnxgrad.operators.elements import (
    INTEGERS,
    Elements,
    multiply_lengths,
    number_or_none,
    of_each,
    of_known,
    of_numbers,
)
from onnxgrad.operators.outputs import first_dtype, like_first
from onnxgrad.operators.records import operators
from onnxgrad.operators.shapes import Dims, broadcast, dims


def broadcast_operands(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape to which all operands broadcast."""
    return broadcast(*(dims(v) for v in inputs if v is not None))


def _type_of_cast(_inputs: Sequence, attributes: Mapping[str, Any]) -> ir.TypeProtocol:
    return ir.TensorType(ir.DataType(attributes["to"]))


def _type_of_where(inputs: Sequence, _attributes: Mapping[str, Any]) -> ir.TypeProtocol | None:
    """Return the type of the branches: the condition is bool."""
    dtype = first_dtype(inputs[1:])
    return None if dtype is None else ir.TensorType(dtype)


def _truncated_quotient(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _are_equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    lengths = [v for v in (a, b) if isinstance(v, str)]
    negative = any(isinstance(v, int) and v < 0 for v in (a, b))
    return False if lengths and negative else None  # no length is negative


def _cast_elements(node: ir.Node, x: Elements, *_like: Elements | None) -> Elements | None:
    if node.outputs[0].dtype == ir.DataType.BOOL:
        return np.vectorize(number_or_none(bool), [object])(x)
    return x if node.outputs[0].dtype in INTEGERS else None


_BROADCAST: dict[str, Any] = {"shape": broadcast_operands, "axes": broadcast_axis}
_LIKE_FIRST: dict[str, Any] = {"shape": like_first, "axes": broadcast_axis}

operators(
    "Add Ceil Div Floor Max Min Mul Neg Round Sub", "elementwise cheap arithmetic", **_BROADCAST
)
operators(
    "Abs BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Mean Mod Reciprocal Relu Sign Sqrt Sum Where",
    "elementwise cheap",
    **_BROADCAST,
)
operators(
    "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor",
    "elementwise cheap boolean",
    **_BROADCAST,
)
operators(
    "CastLike Clip HardSigmoid HardSwish LeakyRelu PRelu Shrink ThresholdedRelu",
    "elementwise unary cheap",
    **_LIKE_FIRST,
)
operators("Cast", "elementwise cheap reorders", result_type=_type_of_cast, **_BROADCAST)
operators(
    "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Gelu Log Mish Pow Sigmoid Sin Sinh Softplus "
    "Swish Tan Tanh",
    "elementwise transcendental",
    **_BROADCAST,
)
operators("Celu Elu Selu Softsign", "elementwise unary transcendental", **_LIKE_FIRST)
operators("Dropout", "unary random", roles="xc", **_LIKE_FIRST)
operators("Where", result_type=_type_of_where, roles="cw")
operators("PRelu", roles="xp")
operators("Clip", roles="xc")
operators("Min Max Pow Mod Equal Greater GreaterOrEqual Less LessOrEqual", roles="c")

operators("Cast CastLike", elements=of_known(_cast_elements))
operators("Add", elements=of_numbers(operator.add))
operators("Sub", elements=of_numbers(operator.sub))
operators("Mul", elements=of_each(multiply_lengths))
operators("Div", elements=of_numbers(_truncated_quotient))
operators("Mod", elements=of_numbers(lambda a, b: None if b == 0 or a < 0 or b < 0 else a % b))
operators("Equal", elements=of_each(_are_equal))
operators("Greater", elements=of_numbers(operator.gt))
operators("GreaterOrEqual", elements=of_numbers(operator.ge))
operators("Less", elements=of_numbers(operator.lt))
operators("LessOrEqual", elements=of_numbers(operator.le))
operators("And", elements=of_numbers(lambda a, b: bool(a and b)))
operators("Or", elements=of_numbers(lambda a, b: bool(a or b)))
operators("Not", elements=of_numbers(operator.not_))
operators("Where", elements=of_each(lambda c, a, b: None if c is None else a if c else b))
