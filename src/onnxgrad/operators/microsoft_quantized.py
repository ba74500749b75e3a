"""Quantized operators of `com.microsoft` as the float operators between standard quantization.

onnxruntime fuses the results back to the kernels of the operators that were lowered, except where
the gradient needs a value in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.elementwise import shape_of_broadcast
from onnxgrad.operators.microsoft import DOMAIN, contrib_lowering, declare_contrib
from onnxgrad.operators.microsoft_products import attributes_without, softmax_from
from onnxgrad.operators.outputs import like_first
from onnxgrad.operators.products import shape_of_gemm, shape_of_matmul
from onnxgrad.operators.registry import lowering
from onnxgrad.operators.rule_nodes import Operand, attributes_of, optional_inputs, sum_terms
from onnxgrad.operators.shapes import Dims, known_shape, rank

FLOAT = ir.DataType.FLOAT
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)

# operators that have no lowering
declare_contrib(
    "DynamicQuantizeLSTM QAttention QEmbedLayerNormalization QLinearConv QOrderedMatMul", roles="q"
)


def shape_by_columns(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape of a product with a weight (N, K) of few bits."""
    return (*known_shape(inputs[0])[:-1], attributes["N"])


declare_contrib("MatMulBnb4", traits="product", shape=shape_by_columns, roles="q")


def dequantized(
    op: Any, x: ir.Value, scale: ir.Value, zero_point: Operand = None, axis: int = 1
) -> ir.Value:
    """Return scale (x - zero_point); scales of several elements are along `axis`."""
    y = op.DequantizeLinear(*_without_last(x, scale, zero_point), axis=axis)
    y.type, y.shape = ir.TensorType(scale.dtype or FLOAT), x.shape
    return y


def quantized(
    op: Any, x: ir.Value, scale: ir.Value, zero_point: Operand, like: ir.Value
) -> ir.Value:
    """Return x / scale + zero_point, rounded to the integers of `like` if there is no zero point"""
    if zero_point is None:
        assert like.dtype is not None
        zero_point = op.const(np.zeros((), like.dtype.numpy()))
    y = op.QuantizeLinear(x, scale, zero_point)
    y.type, y.shape = ir.TensorType(zero_point.dtype or like.dtype or FLOAT), x.shape
    return y


def _without_last(*operands: Operand) -> list[Any]:
    """Return operands without those at their end that are left out."""
    count = max(i for i, v in enumerate(operands, 1) if v is not None)
    return list(operands[:count])


def _is_quantized(*values: Operand) -> bool:
    return all(v is not None and v.dtype in _BYTES for v in values)


declare_contrib(
    "QLinearAdd QLinearMul",
    # the second operand stands behind scale and zero point of the first
    shape=lambda inputs, attributes: shape_of_broadcast([inputs[0], inputs[3]], attributes),
    roles="q",
)
declare_contrib("QLinearLeakyRelu QLinearSigmoid QLinearSoftmax", shape=like_first, roles="q")
declare_contrib("QLinearAveragePool", shape_like=("AveragePool", 1), roles="q")
declare_contrib("QLinearGlobalAveragePool", shape_like=("GlobalAveragePool", 1), roles="q")
declare_contrib("QLinearConcat", roles="q")


@lowering(
    *"QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool".split(),
    *"QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere".split(),
    domain=DOMAIN,
)
def between_quantizations(op: Any, node: Any) -> list[ir.Value] | None:
    """y = Q(f(a, b, ...)), f the operator without the prefix QLinear."""
    # scale and zero point follow each quantized operand; scale and zero point of the result are
    # last, but first in a Concat. A Where has its condition in front.
    name = node.op_type.removeprefix("QLinear")
    plain = 1 if name == "Where" else 0
    if name == "Concat":
        y_scale, y_zero, *triples = node.inputs
    else:
        count = plain + 3 * (2 if name in ("Add", "Mul", "Where") else 1)
        *triples, y_scale, y_zero = optional_inputs(node.inputs, count + 2)[plain:]
    parts = [triples[i : i + 3] for i in range(0, len(triples), 3)]
    if not _is_quantized(*(x for x, *_ in parts)):
        return None
    y = _apply_unquantized(
        op, node, name, [*node.inputs[:plain], *(dequantized(op, *p) for p in parts)]
    )
    return None if y is None else [quantized(op, y, y_scale, y_zero, parts[0][0])]


def _apply_unquantized(op: Any, node: ir.Node, name: str, operands: list[Any]) -> ir.Value | None:
    """Return the result of the operator without quantization, None if it takes an unknown rank."""
    get, x = node.attributes, operands[0]
    if name == "Softmax" and get.get_int("opset", 13) < 13:
        return softmax_from(op, x, int_attribute(node, "axis"))
    attributes = attributes_without(node, "channels_last", "opset")
    if not get.get_int("channels_last", 0):
        return op.emit(name, operands, attributes)
    n = rank(x)
    if n is None:
        return None
    y = op.emit(name, [op.Transpose(x, perm=[0, n - 1, *range(1, n - 1)])], attributes)
    return op.Transpose(y, perm=[0, *range(2, n), 1])


# the second matrix stands behind scale and zero point of the first
@contrib_lowering("QGemm", shape=lambda x, given: shape_of_gemm([x[0], x[3]], given), roles="q")
def gemm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = Q(alpha (A B + c)), a step of c being the product of a step of A and a step of B."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = optional_inputs(node.inputs, 9)
    if not _is_quantized(a, b):
        return None
    attributes = attributes_of(node)
    axis, alpha = 1 - int_attribute(node, "transB"), float_attribute(node, "alpha")
    operands = [dequantized(op, a, a_scale, a_zero), dequantized(op, b, b_scale, b_zero, axis)]
    if c is not None:
        operands.append(op.Cast(c, to=FLOAT) * (a_scale * b_scale))
    y = op.emit("Gemm", operands, attributes | {"beta": alpha})
    return [y if y_scale is None else quantized(op, y, y_scale, y_zero, a)]


@contrib_lowering("DynamicQuantizeMatMul", shape=shape_of_matmul, roles="xqqqb")
def dynamic_matmul(op: Any, node: Any) -> list[ir.Value] | None:
    """y = a b + c, a rounded to 256 steps over its range."""
    a, b, scale, zero, bias = optional_inputs(node.inputs, 5)
    if not _is_quantized(b):
        return None
    q, a_scale, a_zero = op.emit_many("DynamicQuantizeLinear", [a], {}, 3)
    q.type = a_zero.type = ir.TensorType(ir.DataType.UINT8)
    q.shape, a_scale.type = a.shape, ir.TensorType(FLOAT)
    a_scale.shape = a_zero.shape = ir.Shape([])
    return [_integer_product(op, (q, b, a_zero, zero), a_scale * scale, bias)]


@contrib_lowering("MatMulIntegerToFloat", shape=shape_of_matmul, roles="xqqqqqb")
def integer_matmul(op: Any, node: Any) -> list[ir.Value] | None:
    """y = a_scale b_scale (a - a_zero) (b - b_zero) + c."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = optional_inputs(node.inputs, 7)
    if not _is_quantized(a, b):
        return None
    return [_integer_product(op, (a, b, a_zero, b_zero), a_scale * b_scale, bias)]


def _integer_product(
    op: Any, operands: Sequence[Operand], scale: ir.Value, bias: Operand
) -> ir.Value:
    """Return scale (a - a_zero) (b - b_zero) + bias of the operands (a, b, a_zero, b_zero)."""
    product = op.MatMulInteger(*_without_last(*operands))
    product.dtype = ir.DataType.INT32
    return sum_terms(op.Cast(product, to=FLOAT) * scale, bias)


declare_contrib("DequantizeLinear QuantizeLinear", shape=like_first, roles="xq")
declare_contrib("DequantizeLinear", scaled_operands=((0, 1, 2),))


@lowering("QuantizeLinear", "DequantizeLinear", domain=DOMAIN)
def standard(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the result of the standard operator of the same name."""
    x, scale, zero = optional_inputs(node.inputs, 3)
    integer = x if node.op_type == "DequantizeLinear" else zero
    if integer is None or (integer.dtype not in _BYTES and op.opset < 21):
        return None
    y = op.emit(node.op_type, _without_last(x, scale, zero), attributes_of(node))
    y.type = ir.TensorType(scale.dtype if integer is x else integer.dtype)
    y.shape = x.shape
    return [y]
