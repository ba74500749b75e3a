"""Fused products and activations of `com.microsoft`, as the operators that were fused.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Where the kernels of
onnxruntime deviate from it, they are the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import pi, sqrt
from typing import Any

import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.convolutions import convolution_macs
from onnxgrad.operators.elementwise import shape_of_broadcast
from onnxgrad.operators.microsoft import (
    contrib_lowering,
    declare_contrib,
    divide_length,
    shape_of_first_twice,
)
from onnxgrad.operators.outputs import shape_of_first
from onnxgrad.operators.products import matrix_product, shape_of_gemm, shape_of_matmul
from onnxgrad.operators.records import lowering
from onnxgrad.operators.recurrent import ACTIVATIONS
from onnxgrad.operators.rule_nodes import attributes_of, optional_inputs, sum_terms
from onnxgrad.operators.shapes import Dims, broadcast, known_shape, rank

# the activations of recurrent operators and further ones, by the values of the attribute
# `activation`: the function, and None for each number that it needs
_FUSED_ACTIVATIONS: dict[str, tuple[Any, ...]] = ACTIVATIONS | {
    "hardswish": (lambda op, x: op.HardSwish(x),),
    "celu": (lambda op, x, a: op.Celu(x, alpha=a), None),
    "selu": (lambda op, x, a, gamma: op.Selu(x, alpha=a, gamma=gamma), None, None),
    "clip": (lambda op, x, low, high: op.Clip(x, low, high), None, None),
    "parametricsoftplus": (lambda op, x, a, b: a * op.Softplus(b * x), None, None),
}

# operators that have no lowering
declare_contrib("FusedMatMulActivation", traits="product", roles="f")
declare_contrib("GemmFloat8", traits="product", roles="ffb")
declare_contrib("NhwcConv", traits="convolution", roles="xfb")
declare_contrib("NhwcFusedConv", traits="convolution", roles="xfba")
declare_contrib("Inverse", shape=shape_of_first)


def _mixture_of_experts_remedy(_node: ir.Node) -> str:
    return (
        "the gradient of a mixture of experts is not supported: train what comes behind the last "
        "one only, as lm_head and the normalization before it"
    )


declare_contrib("MoE", shape=shape_of_first, roles="xxfbfbfb", remedy=_mixture_of_experts_remedy)
declare_contrib("QMoE", shape=shape_of_first, roles="q", remedy=_mixture_of_experts_remedy)


# -- products ------------------------------------------------------------------------------------


def _shape_of_fused_matmul(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of a product of matrices that may be transposed."""
    a, b = (_shape_after_transpose(inputs[i], "AB"[i], attributes) for i in (0, 1))
    if min(len(a), len(b)) == 1:
        return a[:-1] if len(b) == 1 else (*b[:-2], b[-1])
    return (*(broadcast(a[:-2], b[:-2]) or ()), a[-2], b[-1])


def _shape_after_transpose(x: Any, side: str, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape of an operand of a FusedMatMul after `transBatchA` and `transA`."""
    shape = known_shape(x)
    if len(shape) < 2:
        return shape
    if attributes.get(f"transBatch{side}"):
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if attributes.get(f"trans{side}") else shape


@contrib_lowering("FusedMatMul TransposeMatMul", "product", shape=_shape_of_fused_matmul, roles="f")
def fused_matmul(op: Any, node: Any) -> list[ir.Value] | None:
    """y = alpha A' B', A' being A, or A with its last two axes swapped (transA), or with its first
    axis moved behind the other batch axes (transBatchA).
    """
    flags, n = node.attributes, rank(node.inputs[1])
    batch = flags.get_int("transBatchA", 0) or flags.get_int("transBatchB", 0)
    if (n is None and batch) or (n == 1 and int_attribute(node, "transA")):
        return None  # onnxruntime 1.31 does not transpose A if B is a vector
    a, b = (_transpose_operand(op, node, i) for i in (0, 1))
    alpha = float_attribute(node, "alpha")
    y = matrix_product(op, a, b)
    return [y if alpha == 1 else y * alpha]


def _transpose_operand(op: Any, node: Any, index: int) -> ir.Value:
    x, side = node.inputs[index], "AB"[index]
    n = rank(x)
    if node.attributes.get_int(f"transBatch{side}", 0):
        assert n is not None  # both operands have the same rank
        x = op.Transpose(x, perm=[*range(1, n - 1), 0, n - 1])
    swapped = int_attribute(node, f"trans{side}") and n != 1
    return op.mT(x) if swapped else x


@contrib_lowering("FusedGemm", "product", shape=shape_of_gemm, roles="ffb")
def fused_gemm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = f(alpha A' B' + beta C), f the activation, A' and B' perhaps transposed."""
    get = node.attributes
    second = "gamma" if get.get_string("activation", "") == "Selu" else "beta"
    stated = (get.get(f"activation_{name}") for name in ("alpha", second))
    numbers = [a.as_float() for a in takewhile(lambda a: a is not None, stated)]
    y = op.emit("Gemm", node.inputs, attributes_without(node, "activation"))
    return _apply_activation(op, node, y, numbers)


@contrib_lowering(
    "FusedConv", "convolution", shape_like=("Conv", 3), roles="xfba", work=convolution_macs(1, 2)
)
def fused_conv(op: Any, node: Any) -> list[ir.Value] | None:
    """y = f(conv(x, w) + b + z), f the activation, z the operand to add."""
    *operands, z = optional_inputs(node.inputs, 4)
    y = op.emit("Conv", operands, attributes_without(node, "activation"))
    y = y if z is None else op.set_type_like(y + z, z)
    return _apply_activation(op, node, y, node.attributes.get_floats("activation_params", ()))


def attributes_without(node: ir.Node, *prefixes: str) -> dict[str, Any]:
    """Return the attributes of `node` whose names do not begin with one of `prefixes`."""
    return {k: v for k, v in attributes_of(node).items() if not k.startswith(prefixes)}


def _apply_activation(
    op: Any, node: Any, y: ir.Value, numbers: Sequence[float]
) -> list[ir.Value] | None:
    """Return f(y), f the attribute `activation`; None if f is unknown, or parameters of f are
    missing.
    """
    if not (kind := node.attributes.get_string("activation", "")):
        return [y]
    function, *defaults = _FUSED_ACTIVATIONS.get(kind.lower(), (None,))
    if function is None or len(numbers) < len(defaults):
        return None
    return [op.set_type_like(function(op, y, *numbers[: len(defaults)]), y)]


@contrib_lowering("GemmFastGelu", "product", shape=shape_of_matmul, roles="ffb")
def gemm_fast_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = fast_gelu(x w + b)."""
    x, w, *bias = node.inputs
    return [_write_fast_gelu(op, sum_terms(op.MatMul(x, w), *bias))]


# -- activations ---------------------------------------------------------------------------------


@contrib_lowering("Gelu", "unary", shape=shape_of_first, roles="x")
@contrib_lowering("BiasGelu", "unary", shape=shape_of_first, roles="xb")
def bias_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = x F(x), x = a + b, F the standard normal distribution function."""
    return [_write_gelu(op, sum_terms(*node.inputs[:2]))]


@contrib_lowering("FastGelu", "unary", shape=shape_of_first, roles="xb")
def fast_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, x = a + b."""
    return [_write_fast_gelu(op, sum_terms(*node.inputs[:2]))]


def _write_fast_gelu(op: Any, x: ir.Value) -> ir.Value:
    if op.opset >= 20:
        return op.Gelu(x, approximate="tanh")
    inner = (x + 0.044715 * (x * x * x)) * sqrt(2 / pi)
    return 0.5 * x * (op.Tanh(inner) + 1.0)


@lowering("Swish")  # onnxruntime 1.31 runs it at opset 24 only
@contrib_lowering("QuickGelu", "unary", shape=shape_of_first, roles="x")
def swish(op: Any, node: Any) -> list[ir.Value]:
    """y = x sigmoid(alpha x)."""
    x, alpha = node.inputs[0], float_attribute(node, "alpha")
    return [x * op.Sigmoid(x if alpha == 1 else alpha * x)]


def _shape_with_half_width(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims:
    *rows, width = known_shape(inputs[0])
    return (*rows, divide_length(width, 2))


@contrib_lowering("BiasSplitGelu", shape=_shape_with_half_width, roles="xb")
def bias_split_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = l gelu(r), [l, r] = x + b."""
    left, right = op.split(sum_terms(*node.inputs[:2]), 2, -1)
    return [left * _write_gelu(op, right)]


def _write_gelu(op: Any, x: ir.Value) -> ir.Value:
    if op.opset >= 20:
        return op.Gelu(x)
    return 0.5 * x * (op.Erf(x * sqrt(0.5)) + 1.0)


@contrib_lowering("BiasAdd", shape=shape_of_first, roles="xba")
def bias_add(op: Any, node: Any) -> list[ir.Value]:
    """y = x + b + z."""
    return [sum_terms(*node.inputs)]


declare_contrib("BitmaskBiasDropout", ratio_operand=3)
declare_contrib("BitmaskDropout", ratio_operand=1)


@contrib_lowering("BiasDropout", shape=shape_of_first_twice, roles="xbac", ratio_operand=3)
def bias_dropout(op: Any, node: Any) -> list[ir.Value]:
    """y = dropout(x + b) + z."""
    x, bias, residual, *ratio_and_mode = optional_inputs(node.inputs, 5)
    y, mask = op.emit_many("Dropout", [x + bias, *ratio_and_mode], attributes_of(node), outputs=2)
    mask.dtype = ir.DataType.BOOL
    y = op.set_type_like(y, x)
    return [sum_terms(y, residual), mask][: len(node.outputs)]


@contrib_lowering("BiasSoftmax", shape=shape_of_first, roles="xm")
def bias_softmax(op: Any, node: Any) -> list[ir.Value]:
    """y = softmax(x + b), over all axes from `axis` on."""
    return [flattened_softmax(op, sum_terms(*node.inputs[:2]), int_attribute(node, "axis"))]


def flattened_softmax(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """Return softmax(x) over all axes from `axis` on."""
    if axis in (-1, (rank(x) or 0) - 1):
        return op.Softmax(x, axis=-1)
    return op.reshape_like(op.Softmax(op.Flatten(x, axis=axis), axis=-1), x)


@contrib_lowering("GridSample", shape_like=("GridSample", 2), roles="xv")
def grid_sample(op: Any, node: Any) -> list[ir.Value]:
    """y = the result of the standard operator, whose modes have other names since opset 20."""
    names = {"bilinear": "linear", "bicubic": "cubic"} if op.opset >= 20 else {}
    mode = string_attribute(node, "mode")
    attributes = attributes_of(node) | {"mode": names.get(mode, mode)}
    return [op.emit("GridSample", node.inputs, attributes)]


@contrib_lowering("ConvTransposeWithDynamicPads", "convolution", roles="xfcb")
def conv_transpose(op: Any, node: Any) -> list[ir.Value] | None:
    """y = ConvTranspose(x, w, b) without pads, cropped by the pads that an operand holds."""
    x, w, pads, bias = optional_inputs(node.inputs, 4)
    n = rank(x)
    if n is None:
        return None
    y = op.emit("ConvTranspose", [x, w, bias], attributes_of(node))
    if pads is None:
        return [y]
    starts, after = op.split(pads, 2, 0)
    return [op.Slice(y, starts, op.Shape(y, start=2) - after, list(range(2, n)))]


@contrib_lowering("GatherND", shape_like=("GatherND", 2))
@contrib_lowering("Pad", shape_like=("Pad", 3))
@contrib_lowering("Trilu", shape=shape_of_first)
def write_standard_operator(op: Any, node: Any) -> list[ir.Value]:
    """y = the result of the standard operator of the same name, which ONNX has had since a later
    opset.
    """
    inputs = list(node.inputs)
    if node.op_type == "GatherND":
        inputs[1] = op.Cast(inputs[1], to=ir.DataType.INT64)
    return [op.emit(node.op_type, inputs, attributes_of(node))]


@contrib_lowering("ExpandDims")
def expand_dims(op: Any, node: Any) -> list[ir.Value]:
    """y = x with one more axis."""
    x, axis = node.inputs
    return [op.Unsqueeze(x, op.Reshape(op.Cast(axis, to=ir.DataType.INT64), [1]))]


@contrib_lowering("ComplexMul ComplexMulConj", shape=shape_of_broadcast, roles="f")
def complex_product(op: Any, node: Any) -> list[ir.Value]:
    """y = a b or a conj(b) of complex numbers, whose two parts are along the last axis."""
    (a, c), (b, d) = (op.split(v, 2, -1) for v in node.inputs)
    d = -d if node.op_type == "ComplexMulConj" else d
    return [op.Concat(a * b - c * d, a * d + c * b, axis=-1)]


@contrib_lowering("CDist", shape=lambda x, _: tuple(known_shape(v)[0] for v in x[:2]))
def cdist(op: Any, node: Any) -> list[ir.Value] | None:
    """y_ij = |a_i - b_j|^2 (sqeuclidean), or its root.

    The differences are computed, as their squares lose no digits where rows are alike; the gradient
    of the root is zero for rows that are equal.
    """
    a, b = node.inputs
    squares = op.ReduceSumSquare(op.Unsqueeze(a, [1]) - op.Unsqueeze(b, [0]), [2], keepdims=0)
    metric = string_attribute(node, "metric")
    if metric == "sqeuclidean":
        return [squares]
    if metric != "euclidean":
        return None
    equal = op.Equal(squares, 0.0)
    return [op.Where(equal, 0.0, op.Sqrt(op.Where(equal, 1.0, squares)))]
