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
from onnxgrad.operators.records import declare_operators
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

declare_operators(
    "Add Ceil Div Floor Max Min Mul Neg Round Sub", "elementwise cheap arithmetic", **_BROADCAST
)
declare_operators(
    "Abs BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Mean Mod Reciprocal Relu Sign Sqrt Sum Where",
    "elementwise cheap",
    **_BROADCAST,
)
declare_operators(
    "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor",
    "elementwise cheap boolean",
    **_BROADCAST,
)
declare_operators(
    "CastLike Clip HardSigmoid HardSwish LeakyRelu PRelu Shrink ThresholdedRelu",
    "elementwise unary cheap",
    **_LIKE_FIRST,
)
declare_operators("Cast", "elementwise cheap reorders", result_type=_type_of_cast, **_BROADCAST)
declare_operators(
    "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Gelu Log Mish Pow Sigmoid Sin Sinh Softplus "
    "Swish Tan Tanh",
    "elementwise transcendental",
    **_BROADCAST,
)
declare_operators("Celu Elu Selu Softsign", "elementwise unary transcendental", **_LIKE_FIRST)
declare_operators("Dropout", "unary random", roles="xc", **_LIKE_FIRST)
declare_operators("Where", result_type=_type_of_where, roles="cw")
declare_operators("PRelu", roles="xp")
declare_operators("Clip", roles="xc")
declare_operators("Min Max Pow Mod Equal Greater GreaterOrEqual Less LessOrEqual", roles="c")

declare_operators("Cast CastLike", elements=of_known(_cast_elements))
declare_operators("Add", elements=of_numbers(operator.add))
declare_operators("Sub", elements=of_numbers(operator.sub))
declare_operators("Mul", elements=of_each(multiply_lengths))
declare_operators("Div", elements=of_numbers(_truncated_quotient))
declare_operators(
    "Mod", elements=of_numbers(lambda a, b: None if b == 0 or a < 0 or b < 0 else a % b)
)
declare_operators("Equal", elements=of_each(_are_equal))
declare_operators("Greater", elements=of_numbers(operator.gt))
declare_operators("GreaterOrEqual", elements=of_numbers(operator.ge))
declare_operators("Less", elements=of_numbers(operator.lt))
declare_operators("LessOrEqual", elements=of_numbers(operator.le))
declare_operators("And", elements=of_numbers(lambda a, b: bool(a and b)))
declare_operators("Or", elements=of_numbers(lambda a, b: bool(a or b)))
declare_operators("Not", elements=of_numbers(operator.not_))
declare_operators("Where", elements=of_each(lambda c, a, b: None if c is None else a if c else b))
