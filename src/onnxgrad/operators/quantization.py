"""Quantization: rounded values have no gradient, their scales have one.

Weights that are kept in few bits are unpacked for the backward pass only. Quantized operators of
`com.microsoft` are lowered to the float operators between standard quantization. onnxruntime fuses
the results back to the kernels of the operators that were lowered, except where the gradient needs
a value in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators import marks
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.elementwise import shape_of_broadcast
from onnxgrad.operators.microsoft import DOMAIN, contrib_lowering, declare_contrib, static_product
from onnxgrad.operators.microsoft_products import attributes_without, flattened_softmax
from onnxgrad.operators.outputs import shape_of_first
from onnxgrad.operators.products import shape_of_gemm, shape_of_matmul
from onnxgrad.operators.records import INTEGER, Unsupported, declare_operators, lowering, rule
from onnxgrad.operators.rule_nodes import (
    Operand,
    attributes_of,
    cast_to_wide,
    delay_until,
    optional_inputs,
    sum_terms,
)
from onnxgrad.operators.shapes import Dims, dims, known_shape, rank, static

FLOAT = ir.DataType.FLOAT

_FROZEN = Unsupported(
    "it is part of a quantized weight, whose integers do not train: train adapters beside it or "
    "other weights, and name them"
)


# -- straight-through gradients: the same computation in floats, in units of the scale -------------


def _quantize_in_floats(walk: Any, node: ir.Node) -> list[ir.Value]:
    """y = x / s, s the scale, clipped to the range of the integers: QuantizeLinear without
    rounding.
    """
    x, scale, zero = (*node.inputs, None)[:3]
    axis, block = (int_attribute(node, name) for name in ("axis", "block_size"))
    return [walk.steps_within_range(x, scale, zero, node.outputs[0], axis, block)]


def _dequantize_in_floats(walk: Any, node: ir.Node) -> list[ir.Value] | None:
    """y = s (q - z): DequantizeLinear of floats; None for stored integers q, whose rule gives the
    gradient of the scale s.
    """
    if not walk.reads_steps(node):
        return None
    x, scale, zero = (*node.inputs, None)[:3]
    axis, block = (int_attribute(node, name) for name in ("axis", "block_size"))
    y = walk.scaled_steps(x, zero, axis, scale, block)
    return [walk.op.Cast(y, to=node.outputs[0].dtype)]


def _dynamic_quantize_in_floats(walk: Any, node: ir.Node) -> list[ir.Value]:
    """y = x / s: DynamicQuantizeLinear without rounding; its scale s is taken as a constant."""
    x, (_, scale, zero) = node.inputs[0], node.outputs
    walk.stopped += [scale, zero]
    return [x / scale]


def _product_in_floats(walk: Any, node: Any) -> list[ir.Value]:
    """y = a b, or conv(a, b) + c: a product of integers without rounding, divided by the scale of
    the result and clipped to the range of its integers.

    The result of operators named Integer has no range.
    """
    inputs, bias, rounds = node.inputs, None, node.op_type.startswith("QLinear")
    if rounds:
        a, a_scale, a_zero, b, b_scale, b_zero, scale, zero, bias = (*inputs, None)[:9]
    else:
        a, b, a_zero, b_zero = (*inputs, None, None)[:4]
        a_scale = b_scale = None
    kind, axes = ("Conv", (None, 0)) if "Conv" in node.op_type else ("MatMul", (-2, -1))
    operands = [
        walk.scaled_steps(a, a_zero, axes[0], a_scale),
        walk.scaled_steps(b, b_zero, axes[1], b_scale),
    ]
    if bias is not None:
        operands.append(walk.op.Cast(bias, to=FLOAT) * (a_scale * b_scale))
    y = walk.op.emit(kind, operands, attributes_of(node))
    y.type, y.shape = ir.TensorType(FLOAT), node.outputs[0].shape
    return [walk.steps_within_range(y, scale, zero, node.outputs[0]) if rounds else y]


declare_operators("DequantizeLinear QuantizeLinear", "aligned", roles="xq")
declare_operators(
    "QuantizeLinear", "quantized rounds", straight_through=_quantize_in_floats, no_gradient=INTEGER
)
declare_operators(
    "DequantizeLinear", scaled_operands=((0, 1, 2),), straight_through=_dequantize_in_floats
)
declare_operators(
    "DynamicQuantizeLinear",
    "rounds aligned",
    roles="x",
    straight_through=_dynamic_quantize_in_floats,
)
declare_operators(
    "ConvInteger MatMulInteger QLinearConv QLinearMatMul",
    "quantized",
    roles="q",
    straight_through=_product_in_floats,
    no_gradient=INTEGER,
)
declare_operators("QLinearConv QLinearMatMul", "rounds", scaled_operands=((0, 1, 2), (3, 4, 5)))


# -- gradients -------------------------------------------------------------------------------------


@rule("DequantizeLinear")
def dequantize_linear(op, node, g):
    """y = s (x - z):  ds = g (x - z), summed over the elements that share a scale."""
    x, scale, *zero_point = node.inputs
    if scale.dtype is None or scale.dtype.bitwidth < 16:
        return Unsupported("its scale's dtype is too coarse for a gradient; use float16 or wider")
    ones = op.Expand(op.const(1.0, scale.dtype), op.shape_of(scale))
    steps = op.DequantizeLinear(x, ones, *zero_point, **attributes_of(node))
    g, steps = cast_to_wide(op, g, op.set_type_like(steps, node.outputs[0]))
    dscale = op.Cast(_sums_per_scale(op, node, g * steps), to=scale.dtype)
    dx = None
    if x.dtype.is_floating_point():
        dx = Unsupported(f"{x.dtype.name} is too coarse for a gradient; use float16 or wider")
    return dx, op.reshape_like(dscale, scale), None


def _sums_per_scale(op, node, v):
    """Return the sums of v over the elements that share a scale.

    All elements share a scale, or elements with the same index on `axis`, or one block along it.
    """
    x, scale = node.inputs[:2]
    axis, block = int_attribute(node, "axis"), int_attribute(node, "block_size")
    before = op.numel(x, 0, axis)
    if not block:
        shape = static(dims(scale))
        length = op.Reshape(op.Size(scale), [1]) if shape is None else prod(shape)
        rows, shared = op.Reshape(v, op.vector(before, length, -1)), [0, 2]
    else:
        blocks = op.dim(scale, axis)
        padded = op.Pad(v, op.vector(0, blocks * block - op.dim(x, axis)), None, [axis])
        rows, shared = op.Reshape(padded, op.vector(before, blocks, block, -1)), [2]
    return op.ReduceSum(rows, shared, keepdims=0)


@rule("DynamicQuantizeLinear")
def dynamic_quantize_linear(op, node, g, g_scale=None):
    """scale = (max(x, 0) - min(x, 0)) / 255:  g / 255 in equal shares to the largest elements,
    -g / 255 to the smallest; half of it where they are 0.
    """
    (x,) = node.inputs
    terms = []
    for reduce, side in ((op.ReduceMax, 1.0), (op.ReduceMin, -1.0)):
        extreme = reduce(x, keepdims=0)
        hits = op.Cast(op.Equal(x, extreme), to=x.dtype)
        beyond = side + op.Sign(extreme)  # 2 side; side if the extreme is 0; 0 if 0 is the extreme
        terms.append(hits * (g_scale * beyond / (2.0 * 255.0) / op.ReduceSum(hits, keepdims=0)))
    return (op.total(terms),)


def _shape_of_packed_product(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape of the product with a packed weight (N, K), of a few bits an element."""
    return (*known_shape(inputs[0])[:-1], attributes["N"])


def _packed_product_macs(node: ir.Node, lengths_of: Callable) -> int:
    sizes = map(node.attributes.get_int, "KN", (1, 1))
    return prod((*lengths_of(node.outputs[0])[:-1], *sizes))


declare_contrib(
    "MatMulNBits",
    traits="product",
    shape=_shape_of_packed_product,
    roles="xqqqqb",
    scaled_operands=((1, 2, 3),),
    features=(1, -1),
    work=_packed_product_macs,
)


@rule("MatMulNBits", domain=DOMAIN)
def matmul_n_bits(op, node, g):
    """y = x WT + c, W = scale (q - zero):  dx = g W,  dc = g."""
    bias = optional_inputs(node.inputs, 6)[5]
    bits = int_attribute(node, "bits")
    if node.inputs[1].dtype != ir.DataType.UINT8 or bits not in (2, 4, 8):
        return Unsupported("its weight is not uint8 with 2, 4 or 8 bits: quantize it so")
    dbias = None if bias is None else op.sum_to(g, bias)
    parts = node.meta.get(marks.UNPACKED) or unpacked_weight(op, node, g)
    return _multiply_by_weight(op, g, parts, node), None, _FROZEN, _FROZEN, None, dbias


def _shape_of_gathered_blocks(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape of rows gathered from a table that packs several elements into a byte."""
    (*lengths, last), rows = known_shape(inputs[0]), known_shape(inputs[1])
    is_packed = inputs[0].dtype == ir.DataType.UINT8
    shape = (*lengths, static_product(last, 8 // attributes.get("bits", 4) if is_packed else 1))
    axis = attributes.get("gather_axis", 0) % len(shape)
    return (*shape[:axis], *rows, *shape[axis + 1 :])


declare_contrib("GatherBlockQuantized", shape=_shape_of_gathered_blocks)


@rule("GatherBlockQuantized", domain=DOMAIN)
def gather_block_quantized(op, node, g):
    """Return no gradients: in a table of quantized rows, only the scales would have one."""
    return None, None, _FROZEN


def unpacked_weight(op, node, g):
    """Return the dequantized weight W (N, K) of a MatMulNBits in parts, each with every n-th
    column, computed after `g`.

    Part i of n has the columns i, i + n, ...: a byte holds n of them, which are not brought beside
    each other, as that copies them one by one.
    """
    packed, scales, zeros, order = optional_inputs(node.inputs, 5)[1:]
    n, k, bits, block = (int_attribute(node, name) for name in ("N", "K", "bits", "block_size"))
    blocks, count = -(-k // block), 8 // bits
    scales = op.Reshape(scales, [n, blocks])
    if zeros is not None and zeros.dtype != scales.dtype:
        zeros = op.Slice(op.Reshape(_unpack_bytes(op, zeros, bits), [n, -1]), [0], [blocks], [1])
        zeros.type = packed.type
    packed = delay_until(op, packed, g)
    if order is not None or op.opset < 21 or (zeros is not None and zeros.dtype == scales.dtype):
        return [_dequantize_weight(op, _unpack_bytes(op, packed, bits), scales, zeros, node)]
    if zeros is None:
        zeros = op.Expand(ir.DataType.UINT8.numpy().type(2 ** (bits - 1)), [n, blocks])
    packed = op.Reshape(packed, [n, -1])
    parts = []
    for part in _unpack_to_list(op, packed, bits):
        w = op.DequantizeLinear(part, scales, zeros, axis=1, block_size=block // count)
        w.type, w.shape = scales.type, ir.Shape([n, blocks * block // count])
        parts.append(w)
    return parts


def _multiply_by_weight(op, g, parts, node):
    """Return g W, W given as the parts (column subsets) that `unpacked_weight` returns."""
    products = [op.MatMul(g, part) for part in parts]
    k = int_attribute(node, "K")
    n, width = rank(g), len(parts) * ((dims(parts[0]) or (None, k))[1])
    every = products[0]
    if len(parts) > 1:
        beside = op.Concat(*(op.Unsqueeze(v, [n]) for v in products), axis=n)
        every = op.Reshape(beside, [*[0] * (n - 1), width])
    return every if width == k else op.Slice(every, [0], [k], [n - 1])


def _dequantize_weight(op, steps, scales, zeros, node):
    """Return the dequantized weight W of a MatMulNBits as one matrix: scale (q - zero)."""
    order = optional_inputs(node.inputs, 5)[4]
    n, k, bits, block = (int_attribute(node, name) for name in ("N", "K", "bits", "block_size"))
    blocks = -(-k // block)
    steps = op.Cast(op.Reshape(steps, [n, -1]), to=scales.dtype)
    if zeros is None:
        zeros = float(2 ** (bits - 1))
    else:
        zeros = op.Cast(op.Reshape(zeros, [n, blocks]), to=scales.dtype)
    if order is not None:  # `order` is the index of the block of every column
        scales, zeros = (
            v if isinstance(v, float) else op.Gather(v, order, axis=1) for v in (scales, zeros)
        )
        return (op.Slice(steps, [0], [k], [1]) - zeros) * scales
    steps = op.Reshape(steps, [n, blocks, block])
    if not isinstance(zeros, float):
        zeros = op.Unsqueeze(zeros, [2])
    weight = op.Reshape((steps - zeros) * op.Unsqueeze(scales, [2]), [n, blocks * block])
    return weight if blocks * block == k else op.Slice(weight, [0], [k], [1])


def _unpack_bytes(op, x, bits):
    """Return the elements of `bits` bits that are packed into bytes, the lowest bits first, on a
    new last axis.
    """
    if bits == 8:
        return x
    return op.Concat(*(op.Unsqueeze(part, [-1]) for part in _unpack_to_list(op, x, bits)), axis=-1)


def _unpack_to_list(op, x, bits):
    """Return the elements of `bits` bits that are packed into bytes: a list of tensors, the lowest
    bits of all bytes first.
    """
    byte = ir.DataType.UINT8.numpy().type
    if bits == 8:
        return [x]
    parts = [
        x,
        *(op.BitShift(x, op.const(byte(i)), direction="RIGHT") for i in range(bits, 8, bits)),
    ]
    mask = op.const(byte(2**bits - 1))  # the last shift leaves no other bits
    return [op.BitwiseAnd(part, mask) for part in parts[:-1]] + parts[-1:]


# -- lowerings of quantized operators of com.microsoft --------------------------------------------

_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)

_QUANTIZED: dict[str, Any] = {"traits": "quantized", "roles": "q"}

# operators that have no lowering
declare_contrib("DynamicQuantizeLSTM", **_QUANTIZED)
declare_contrib("QAttention", "attention quantized", roles="q")
declare_contrib("QLinearConv", "convolution quantized", roles="q")
declare_contrib("QLinearReduceMean", "quantized")
declare_contrib("MatMulInteger16", "product quantized")
declare_contrib("QEmbedLayerNormalization QOrderedMatMul", roles="q")
declare_contrib("MatMulBnb4", "product", shape=_shape_of_packed_product, roles="q")


def dequantized_value(
    op: Any, x: ir.Value, scale: ir.Value, zero_point: Operand = None, axis: int = 1
) -> ir.Value:
    """Return scale (x - zero_point); scales of several elements are along `axis`."""
    y = op.DequantizeLinear(*_drop_trailing_none(x, scale, zero_point), axis=axis)
    y.type, y.shape = ir.TensorType(scale.dtype or FLOAT), x.shape
    return y


def quantized_value(
    op: Any, x: ir.Value, scale: ir.Value, zero_point: Operand, like: ir.Value
) -> ir.Value:
    """Return x / scale + zero_point, rounded to the dtype of the zero point, or of `like` without
    zero point.
    """
    if zero_point is None:
        assert like.dtype is not None
        zero_point = op.const(np.zeros((), like.dtype.numpy()))
    y = op.QuantizeLinear(x, scale, zero_point)
    y.type, y.shape = ir.TensorType(zero_point.dtype or like.dtype or FLOAT), x.shape
    return y


def _drop_trailing_none(*operands: Operand) -> list[Any]:
    """Return the operands without the Nones at the end."""
    count = max(i for i, v in enumerate(operands, 1) if v is not None)
    return list(operands[:count])


def _is_quantized(*values: Operand) -> bool:
    return all(v is not None and v.dtype in _BYTES for v in values)


declare_contrib(
    "QLinearAdd QLinearMul",
    **_QUANTIZED,
    # the second operand stands behind scale and zero point of the first
    shape=lambda inputs, attributes: shape_of_broadcast([inputs[0], inputs[3]], attributes),
)
declare_contrib(
    "QLinearLeakyRelu QLinearSigmoid QLinearSoftmax", **_QUANTIZED, shape=shape_of_first
)
declare_contrib("QLinearAveragePool", **_QUANTIZED, shape_like=("AveragePool", 1))
declare_contrib("QLinearGlobalAveragePool", **_QUANTIZED, shape_like=("GlobalAveragePool", 1))
declare_contrib("QLinearConcat", **_QUANTIZED)
declare_contrib("QLinearWhere", "quantized")


@lowering(
    *"QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool".split(),
    *"QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere".split(),
    domain=DOMAIN,
)
def lower_qlinear_operator(op: Any, node: Any) -> list[ir.Value] | None:
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
    y = _apply_in_floats(
        op, node, name, [*node.inputs[:plain], *(dequantized_value(op, *p) for p in parts)]
    )
    return None if y is None else [quantized_value(op, y, y_scale, y_zero, parts[0][0])]


def _apply_in_floats(op: Any, node: ir.Node, name: str, operands: list[Any]) -> ir.Value | None:
    """Return the result of the float operator `name`; None if `channels_last` is set and the rank
    is unknown.
    """
    get, x = node.attributes, operands[0]
    if name == "Softmax" and get.get_int("opset", 13) < 13:
        return flattened_softmax(op, x, int_attribute(node, "axis"))
    attributes = attributes_without(node, "channels_last", "opset")
    if not get.get_int("channels_last", 0):
        return op.emit(name, operands, attributes)
    n = rank(x)
    if n is None:
        return None
    y = op.emit(name, [op.Transpose(x, perm=[0, n - 1, *range(1, n - 1)])], attributes)
    return op.Transpose(y, perm=[0, *range(2, n), 1])


# the second matrix stands behind scale and zero point of the first
@contrib_lowering(
    "QGemm",
    "product quantized",
    shape=lambda x, given: shape_of_gemm([x[0], x[3]], given),
    roles="q",
)
def gemm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = Q(alpha (A B + c)), Q the quantization; the scale of the integers c is the product of the
    scales of A and B.
    """
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = optional_inputs(node.inputs, 9)
    if not _is_quantized(a, b):
        return None
    attributes = attributes_of(node)
    axis, alpha = 1 - int_attribute(node, "transB"), float_attribute(node, "alpha")
    operands = [
        dequantized_value(op, a, a_scale, a_zero),
        dequantized_value(op, b, b_scale, b_zero, axis),
    ]
    if c is not None:
        operands.append(op.Cast(c, to=FLOAT) * (a_scale * b_scale))
    y = op.emit("Gemm", operands, attributes | {"beta": alpha})
    return [y if y_scale is None else quantized_value(op, y, y_scale, y_zero, a)]


@contrib_lowering(
    "DynamicQuantizeMatMul", "product quantized", shape=shape_of_matmul, roles="xqqqb"
)
def dynamic_matmul(op: Any, node: Any) -> list[ir.Value] | None:
    """y = a b + c, a quantized to 8 bits over its range of values."""
    a, b, scale, zero, bias = optional_inputs(node.inputs, 5)
    if not _is_quantized(b):
        return None
    q, a_scale, a_zero = op.emit_many("DynamicQuantizeLinear", [a], {}, 3)
    q.type = a_zero.type = ir.TensorType(ir.DataType.UINT8)
    q.shape, a_scale.type = a.shape, ir.TensorType(FLOAT)
    a_scale.shape = a_zero.shape = ir.Shape([])
    return [_integer_product(op, (q, b, a_zero, zero), a_scale * scale, bias)]


@contrib_lowering(
    "MatMulIntegerToFloat", "product quantized", shape=shape_of_matmul, roles="xqqqqqb"
)
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
    product = op.MatMulInteger(*_drop_trailing_none(*operands))
    product.dtype = ir.DataType.INT32
    return sum_terms(op.Cast(product, to=FLOAT) * scale, bias)


declare_contrib("QuantizeLinear", "quantized", shape=shape_of_first, roles="xq")
declare_contrib("DequantizeLinear", shape=shape_of_first, roles="xq", scaled_operands=((0, 1, 2),))


@lowering("QuantizeLinear", "DequantizeLinear", domain=DOMAIN)
def write_standard_quantization(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the result of the standard operator of the same name."""
    x, scale, zero = optional_inputs(node.inputs, 3)
    integer = x if node.op_type == "DequantizeLinear" else zero
    if integer is None or (integer.dtype not in _BYTES and op.opset < 21):
        return None
    y = op.emit(node.op_type, _drop_trailing_none(x, scale, zero), attributes_of(node))
    y.type = ir.TensorType(scale.dtype if integer is x else integer.dtype)
    y.shape = x.shape
    return [y]
