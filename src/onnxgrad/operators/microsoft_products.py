"""Fused products and activations of `com.microsoft`, as the operators that were fused.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Where the kernels of
onnxruntime deviate from it, they are the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from math import pi, sqrt
from typing import Any

import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.kernels import has_kernel
from onnxgrad.operators.products import product
from onnxgrad.operators.recurrent import ACTIVATIONS
from onnxgrad.operators.registry import lowering
from onnxgrad.operators.rule_nodes import attributes_of, total
from onnxgrad.operators.shapes import dims, rank

DOMAIN = "com.microsoft"
_QUANTIZED = re.compile(r"Q[A-Z]|.*Quant|.*NBits|.*Bnb4|.*FpQ4|.*Integer|NhwcMaxPool")

# beside those of recurrent operators: the function, and None for each number that it takes
_ACTIVATIONS: dict[str, tuple[Any, ...]] = ACTIVATIONS | {
    "hardswish": (lambda op, x: op.HardSwish(x),),
    "celu": (lambda op, x, a: op.Celu(x, alpha=a), None),
    "selu": (lambda op, x, a, gamma: op.Selu(x, alpha=a, gamma=gamma), None, None),
    "clip": (lambda op, x, low, high: op.Clip(x, low, high), None, None),
    "parametricsoftplus": (lambda op, x, a, b: a * op.Softplus(b * x), None, None),
}
_REFUSED = {  # operator -> {attribute that is not zero: why it has no lowering}
    "Attention": {
        "do_rotary": "onnxruntime has no kernel for do_rotary on the CPU; use the model as it was "
        "before optimization, or with MultiHeadAttention and RotaryEmbedding"
    },
    "GroupQueryAttention": {
        "sliding_window_cache": "its cache is a ring of rows; use the model without cache",
        "kv_cache_bit_width": "its cache is quantized; use the model without cache",
    },
}


def refusal(node: ir.Node) -> str | None:
    """Return why a lowering does not take the attributes or inputs of `node`, None if it does."""
    for attribute, why in _REFUSED.get(node.op_type, {}).items():
        if node.attributes.get_int(attribute, 0) and not (
            attribute == "sliding_window_cache" and _begins_empty(node)
        ):
            return why
    beams = node.inputs[9:10] if node.op_type.endswith("MultiHeadAttention") else ()
    if any(v is not None for v in beams):
        return "cache_indirection is of a beam search; use the model with a single beam"
    return None


def is_empty_past(past: ir.Value | None) -> bool:
    """Return whether a cache (batch, heads, rows, size) has no rows, whatever is fed."""
    return (dims(past) or ())[-2:-1] == (0,)


def _begins_empty(node: ir.Node) -> bool:
    """Return whether a node with a cache has none yet, and nothing reads the next one."""
    read = (y for y in node.outputs[1:3] if y.uses() or y.is_graph_output())
    return is_empty_past(node.inputs[3]) and not any(read)


def remedy(node: ir.Node) -> str | None:
    """Return the remedy for an operator of onnxruntime without lowering, None for others."""
    if not node.domain.startswith(DOMAIN):
        return None
    if node.op_type in ("MoE", "QMoE"):
        return (
            "the gradient of a mixture of experts is not supported: train what comes behind the "
            "last one only, as lm_head and the normalization before it"
        )
    if _QUANTIZED.match(node.op_type):
        return "it computes with quantized numbers; use the model as it was before quantization"
    if not has_kernel(node.domain, node.op_type):
        return "the installed onnxruntime does not run it on a CPU; write it with operators of ONNX"
    level = "ORT_ENABLE_EXTENDED" if node.domain.endswith("nchwc") else "ORT_ENABLE_BASIC"
    before = f"use the model as it was before optimization, or optimized at {level} at most"
    return refusal(node) or before


def has_output(node: ir.Node, index: int) -> bool:
    """Return whether `node` has the optional output `index`."""
    return index < len(node.outputs) and bool(node.outputs[index].name)


# -- products ------------------------------------------------------------------------------------


@lowering("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_matmul(op: Any, node: Any) -> list[ir.Value] | None:
    """y = alpha A' B', A' being A, or A with its last two axes swapped (transA), or with its first
    axis moved behind the other batch axes (transBatchA).
    """
    flags, n = node.attributes, rank(node.inputs[1])
    batch = flags.get_int("transBatchA", 0) or flags.get_int("transBatchB", 0)
    if (n is None and batch) or (n == 1 and int_attribute(node, "transA")):
        return None  # onnxruntime 1.31 does not transpose A if B is a vector
    a, b = (_transposed(op, node, x, side) for x, side in zip(node.inputs, "AB", strict=True))
    alpha = float_attribute(node, "alpha")
    y = product(op, a, b)
    return [y if alpha == 1 else y * alpha]


def _transposed(op: Any, node: ir.Node, x: ir.Value, side: str) -> ir.Value:
    n = rank(x)
    if node.attributes.get_int(f"transBatch{side}", 0):
        assert n is not None  # both operands have the same rank
        x = op.Transpose(x, perm=[*range(1, n - 1), 0, n - 1])
    swapped = int_attribute(node, f"trans{side}") and n != 1
    return op.mT(x) if swapped else x


@lowering("FusedGemm", domain=DOMAIN)
def fused_gemm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = f(alpha A' B' + beta C)."""
    get = node.attributes
    second = "gamma" if get.get_string("activation", "") == "Selu" else "beta"
    stated = (get.get(f"activation_{name}") for name in ("alpha", second))
    numbers = [a.as_float() for a in takewhile(lambda a: a is not None, stated)]
    y = op.emit("Gemm", node.inputs, attributes_without(node, "activation"))
    return _activated(op, node, y, numbers)


@lowering("FusedConv", domain=DOMAIN)
def fused_conv(op: Any, node: Any) -> list[ir.Value] | None:
    """y = f(conv(x, w) + b + z)."""
    *operands, z = (*node.inputs, None, None)[:4]
    y = op.emit("Conv", operands, attributes_without(node, "activation"))
    y = y if z is None else op.set_type_like(y + z, z)
    return _activated(op, node, y, node.attributes.get_floats("activation_params", ()))


def attributes_without(node: ir.Node, *prefixes: str) -> dict[str, Any]:
    """Return the attributes of `node` whose names do not begin with one of `prefixes`."""
    return {k: v for k, v in attributes_of(node).items() if not k.startswith(prefixes)}


def _activated(op: Any, node: Any, y: ir.Value, numbers: Sequence[float]) -> list[ir.Value] | None:
    """Return f(y), or None if f is unknown or lacks a number."""
    kind = node.attributes.get_string("activation", "")
    if not kind:
        return [y]
    function, *defaults = _ACTIVATIONS.get(kind.lower(), (None,))
    if function is None or len(numbers) < len(defaults):
        return None
    return [op.set_type_like(function(op, y, *numbers[: len(defaults)]), y)]


@lowering("GemmFastGelu", domain=DOMAIN)
def gemm_fast_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = fast_gelu(x w + b)."""
    x, w, *bias = node.inputs
    return [_fast_gelu(op, total(op.MatMul(x, w), *bias))]


# -- activations ---------------------------------------------------------------------------------


@lowering("Gelu", "BiasGelu", domain=DOMAIN)
def bias_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = x F(x), x = a + b, F the standard normal distribution function."""
    return [_gelu(op, total(*node.inputs[:2]))]


@lowering("FastGelu", domain=DOMAIN)
def fast_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, x = a + b."""
    return [_fast_gelu(op, total(*node.inputs[:2]))]


def _fast_gelu(op: Any, x: ir.Value) -> ir.Value:
    if op.opset >= 20:
        return op.Gelu(x, approximate="tanh")
    inner = (x + 0.044715 * (x * x * x)) * sqrt(2 / pi)
    return 0.5 * x * (op.Tanh(inner) + 1.0)


@lowering("Swish")  # onnxruntime 1.31 runs it at opset 24 only
@lowering("QuickGelu", domain=DOMAIN)
def swish(op: Any, node: Any) -> list[ir.Value]:
    """y = x sigmoid(alpha x)."""
    x, alpha = node.inputs[0], float_attribute(node, "alpha")
    return [x * op.Sigmoid(x if alpha == 1 else alpha * x)]


@lowering("BiasSplitGelu", domain=DOMAIN)
def bias_split_gelu(op: Any, node: Any) -> list[ir.Value]:
    """y = l gelu(r), [l, r] = x + b."""
    left, right = op.split(total(*node.inputs[:2]), 2, -1)
    return [left * _gelu(op, right)]


def _gelu(op: Any, x: ir.Value) -> ir.Value:
    if op.opset >= 20:
        return op.Gelu(x)
    return 0.5 * x * (op.Erf(x * sqrt(0.5)) + 1.0)


@lowering("BiasAdd", domain=DOMAIN)
def bias_add(op: Any, node: Any) -> list[ir.Value]:
    """y = x + b + z."""
    return [total(*node.inputs)]


@lowering("BiasDropout", domain=DOMAIN)
def bias_dropout(op: Any, node: Any) -> list[ir.Value]:
    """y = dropout(x + b) + z."""
    x, bias, residual, *ratio_and_mode = (*node.inputs, None, None, None)[:5]
    y, mask = op.emit_many("Dropout", [x + bias, *ratio_and_mode], attributes_of(node), outputs=2)
    mask.dtype = ir.DataType.BOOL
    y = op.set_type_like(y, x)
    return [total(y, residual), mask][: len(node.outputs)]


@lowering("BiasSoftmax", domain=DOMAIN)
def bias_softmax(op: Any, node: Any) -> list[ir.Value]:
    """y = softmax(x + b), over all axes from `axis` on."""
    return [softmax_from(op, total(*node.inputs[:2]), int_attribute(node, "axis"))]


def softmax_from(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """Return softmax(x) over all axes from `axis` on."""
    if axis in (-1, (rank(x) or 0) - 1):
        return op.Softmax(x, axis=-1)
    return op.reshape_like(op.Softmax(op.Flatten(x, axis=axis), axis=-1), x)


@lowering("GridSample", domain=DOMAIN)
def grid_sample(op: Any, node: Any) -> list[ir.Value]:
    """y = the result of the standard operator, whose modes have other names since opset 20."""
    names = {"bilinear": "linear", "bicubic": "cubic"} if op.opset >= 20 else {}
    mode = string_attribute(node, "mode")
    attributes = attributes_of(node) | {"mode": names.get(mode, mode)}
    return [op.emit("GridSample", node.inputs, attributes)]


@lowering("ConvTransposeWithDynamicPads", domain=DOMAIN)
def conv_transpose(op: Any, node: Any) -> list[ir.Value] | None:
    """y = ConvTranspose(x, w, b) without pads, cropped by those of an operand."""
    x, w, pads, bias = (*node.inputs, None, None)[:4]
    n = rank(x)
    if n is None:
        return None
    y = op.emit("ConvTranspose", [x, w, bias], attributes_of(node))
    if pads is None:
        return [y]
    starts, after = op.split(pads, 2, 0)
    return [op.Slice(y, starts, op.Shape(y, start=2) - after, list(range(2, n)))]


@lowering("GatherND", "Pad", "Trilu", domain=DOMAIN)
def standard(op: Any, node: Any) -> list[ir.Value]:
    """y = the result of the standard operator of the same name, which was added to ONNX later."""
    inputs = list(node.inputs)
    if node.op_type == "GatherND":
        inputs[1] = op.Cast(inputs[1], to=ir.DataType.INT64)
    return [op.emit(node.op_type, inputs, attributes_of(node))]


@lowering("ExpandDims", domain=DOMAIN)
def expand_dims(op: Any, node: Any) -> list[ir.Value]:
    """y = x with one more axis."""
    x, axis = node.inputs
    return [op.Unsqueeze(x, op.Reshape(op.Cast(axis, to=ir.DataType.INT64), [1]))]


@lowering("ComplexMul", "ComplexMulConj", domain=DOMAIN)
def complex_product(op: Any, node: Any) -> list[ir.Value]:
    """y = a b or a conj(b) of complex numbers, whose two parts are along the last axis."""
    (a, c), (b, d) = (op.split(v, 2, -1) for v in node.inputs)
    d = -d if node.op_type == "ComplexMulConj" else d
    return [op.Concat(a * b - c * d, a * d + c * b, axis=-1)]


@lowering("CDist", domain=DOMAIN)
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
