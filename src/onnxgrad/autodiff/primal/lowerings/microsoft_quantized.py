"""Quantized operators of `com.microsoft` as the float operators between standard quantization.

onnxruntime fuses the results back to the kernels of the operators that were lowered, except where
the gradient needs what is in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings.basic import total
from onnxgrad.autodiff.primal.lowerings.microsoft import DOMAIN, softmax_from
from onnxgrad.autodiff.registry import lowering
from onnxgrad.autodiff.rules.common import attributes_of
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import OPERATORS
from onnxgrad.graph.shapes import Dims, dims, rank

FLOAT = ir.DataType.FLOAT
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_ATTRIBUTES = {  # those that an operator keeps without quantization
    "AveragePool": _POOL,
    "Concat": ("axis",),
    "LeakyRelu": ("alpha",),
    "Softmax": ("axis",),
}


def dequantized(
    op: Emit, x: ir.Value, scale: ir.Value, zero_point: ir.Value | None = None, axis: int = 1
) -> ir.Value:
    """Return scale (x - zero_point); scales of several elements are along `axis`."""
    operands = [x, scale] if zero_point is None else [x, scale, zero_point]
    y = op.DequantizeLinear(*operands, axis=axis)
    y.type, y.shape = ir.TensorType(scale.dtype or FLOAT), x.shape
    return y


def quantized(
    op: Emit, x: ir.Value, scale: ir.Value, zero_point: ir.Value | None, like: ir.Value
) -> ir.Value:
    """Return x / scale + zero_point, rounded to the integers of `like` if there is no zero point"""
    if zero_point is None:
        assert like.dtype is not None
        zero_point = op.const(np.zeros((), like.dtype.numpy()))
    y = op.QuantizeLinear(x, scale, zero_point)
    y.type, y.shape = ir.TensorType(zero_point.dtype or like.dtype or FLOAT), x.shape
    return y


def _operands(node: ir.Node, count: int) -> list[Any]:
    """Return `count` operands, None for those that are left out."""
    return [*node.inputs, *[None] * count][:count]


def _is_quantized(*values: ir.Value | None) -> bool:
    return all(v is not None and v.dtype in _BYTES for v in values)


@lowering("QLinearAdd", DOMAIN)
@lowering("QLinearAveragePool", DOMAIN)
@lowering("QLinearConcat", DOMAIN)
@lowering("QLinearGlobalAveragePool", DOMAIN)
@lowering("QLinearLeakyRelu", DOMAIN)
@lowering("QLinearMul", DOMAIN)
@lowering("QLinearSigmoid", DOMAIN)
@lowering("QLinearSoftmax", DOMAIN)
@lowering("QLinearWhere", DOMAIN)
def between_quantizations(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = Q(f(a, b, ...)), f the operator without the prefix QLinear."""
    # each quantized operand is followed by its scale and zero point; those of the result are last,
    # but the first of a Concat, and a Where has its condition in front
    name = node.op_type.removeprefix("QLinear")
    plain = 1 if name == "Where" else 0
    if name == "Concat":
        y_scale, y_zero, *triples = node.inputs
    else:
        count = plain + 3 * (2 if name in ("Add", "Mul", "Where") else 1)
        *triples, y_scale, y_zero = _operands(node, count + 2)[plain:]
    parts = [triples[i : i + 3] for i in range(0, len(triples), 3)]
    if not _is_quantized(*(x for x, *_ in parts)):
        return None
    y = _applied(op, node, name, [*node.inputs[:plain], *(dequantized(op, *p) for p in parts)])
    return None if y is None else [quantized(op, y, y_scale, y_zero, parts[0][0])]


def _applied(op: Emit, node: ir.Node, name: str, operands: list[Any]) -> ir.Value | None:
    """Return the result of the operator without quantization, None if it takes an unknown rank."""
    get, x = node.attributes, operands[0]
    if name == "Softmax" and get.get_int("opset", 13) < 13:
        return softmax_from(op, x, get.get_int("axis", -1))
    attributes = {key: get[key].value for key in _ATTRIBUTES.get(name, ()) if key in get}
    if not get.get_int("channels_last", 0):
        return op.emit(name, operands, attributes)
    n = rank(x)
    if n is None:
        return None
    y = op.emit(name, [op.Transpose(x, perm=[0, n - 1, *range(1, n - 1)])], attributes)
    return op.Transpose(y, perm=[0, *range(2, n), 1])


@lowering("QGemm", DOMAIN)
def gemm(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = Q(alpha (A B + c)), the steps of c being products of those of A and B."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = _operands(node, 9)
    if not _is_quantized(a, b):
        return None
    flags, transposed = node.attributes, node.attributes.get_int("transB", 0)
    right = dequantized(op, b, b_scale, b_zero, axis=0 if transposed else 1)
    operands = [dequantized(op, a, a_scale, a_zero), right]
    alpha = flags.get_float("alpha", 1.0)
    if c is not None:
        operands.append(op.Cast(c, to=FLOAT) * (a_scale * b_scale))
    attributes = {"transA": flags.get_int("transA", 0), "transB": transposed}
    y = op.emit("Gemm", operands, attributes | {"alpha": alpha, "beta": alpha})
    return [y if y_scale is None else quantized(op, y, y_scale, y_zero, a)]


@lowering("DynamicQuantizeMatMul", DOMAIN)
def dynamic_matmul(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = a b + c, a rounded to 256 steps over its range."""
    a, b, scale, zero, bias = _operands(node, 5)
    if not _is_quantized(b):
        return None
    q, a_scale, a_zero = op.emit_many("DynamicQuantizeLinear", [a], {}, 3)
    q.type = a_zero.type = ir.TensorType(ir.DataType.UINT8)
    q.shape, a_scale.type = a.shape, ir.TensorType(FLOAT)
    a_scale.shape = a_zero.shape = ir.Shape([])
    return [_integer_product(op, q, b, a_scale * scale, a_zero, zero, bias)]


@lowering("MatMulIntegerToFloat", DOMAIN)
def integer_matmul(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = a_scale b_scale (a - a_zero) (b - b_zero) + c."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = _operands(node, 7)
    if not _is_quantized(a, b):
        return None
    return [_integer_product(op, a, b, a_scale * b_scale, a_zero, b_zero, bias)]


def _integer_product(
    op: Emit,
    a: ir.Value,
    b: ir.Value,
    scale: ir.Value,
    a_zero: ir.Value | None,
    b_zero: ir.Value | None,
    bias: ir.Value | None,
) -> ir.Value:
    operands = [a, b, a_zero, b_zero]
    while operands[-1] is None:
        operands.pop()
    product = op.MatMulInteger(*operands)
    product.dtype = ir.DataType.INT32
    return total(op.Cast(product, to=FLOAT) * scale, bias)


@lowering("QuantizeLinear", DOMAIN)
@lowering("DequantizeLinear", DOMAIN)
def standard(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = the result of the standard operator of the same name."""
    x, scale, zero = _operands(node, 3)
    integer = x if node.op_type == "DequantizeLinear" else zero
    if integer is None or (integer.dtype not in _BYTES and op.opset < 21):
        return None
    operands = [x, scale] if zero is None else [x, scale, zero]
    y = op.emit(node.op_type, operands, attributes_of(node))
    y.type = ir.TensorType(scale.dtype if integer is x else integer.dtype)
    y.shape = x.shape
    return [y]


QUANTIZED = {
    name for (_, name), operator in OPERATORS.items()
    if operator.lowering is not None and operator.lowering.__module__ == __name__
}  # fmt: skip


# -- operators whose weights are kept in few bits: onnx does not infer the shape of their result --


@lowering("MatMulNBits", DOMAIN)
def state_product(op: Emit, node: Any) -> None:
    """Set the type and shape of the result of a product; the node stays, as it has a rule."""
    _state(node, [*(dims(node.inputs[0]) or ())[:-1], node.attributes.get_int("N")])


@lowering("GatherBlockQuantized", DOMAIN)
def state_rows(op: Emit, node: Any) -> None:
    """Set the type and shape of gathered rows; the node stays, as it has a rule."""
    data, indices, scales = node.inputs[:3]
    shape, n = dims(data), rank(indices)
    axis = node.attributes.get_int("gather_axis", 0)
    node.outputs[0].type = scales.type
    if shape is None or n is None:
        return
    lengths = list(shape)
    packed = 8 // node.attributes.get_int("bits", 4) if data.dtype == ir.DataType.UINT8 else 1
    lengths[-1] = lengths[-1] * packed if isinstance(lengths[-1], int) else None
    axis %= len(lengths)
    _state(node, [*lengths[:axis], *(dims(indices) or ()), *lengths[axis + 1 :]], scales)


def _state(node: Any, shape: list[Any] | Dims, like: ir.Value | None = None) -> None:
    like = node.inputs[0] if like is None else like
    node.outputs[0].type = like.type
    if rank(node.inputs[0]) is not None:
        node.outputs[0].shape = ir.Shape(shape)
