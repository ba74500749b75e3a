"""Fused products and activations of `com.microsoft`, written as what they were fused from.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; the kernels of
onnxruntime are the reference, where they leave it.
"""

from __future__ import annotations

import re
from math import pi, sqrt
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings.basic import product
from onnxgrad.autodiff.primal.lowerings.registry import lowering
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import rank

DOMAIN = "com.microsoft"
_QUANTIZED = re.compile(r"Q[A-Z]|.*Quant|.*NBits|.*Bnb4|.*FpQ4|.*Integer|NhwcMaxPool")

_OF_CONV = ("group", "pads", "strides", "dilations", "kernel_shape", "auto_pad")
_OF_GEMM = ("alpha", "beta", "transA", "transB")
_PARAMETERS = {  # of the activations that are standard operators
    **dict.fromkeys("HardSwish Relu Sigmoid Softplus Softsign Tanh".split(), ()),
    **dict.fromkeys("Celu Elu LeakyRelu ThresholdedRelu".split(), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}


def remedy(node: ir.Node) -> str | None:
    """Return what to do about an operator of onnxruntime's own that is not lowered, None for
    another's.
    """
    if not node.domain.startswith(DOMAIN):
        return None
    if _QUANTIZED.match(node.op_type):
        return "it works on quantized numbers: give the model as it was before quantization"
    level = "ORT_ENABLE_EXTENDED" if node.domain.endswith("nchwc") else "ORT_ENABLE_BASIC"
    return f"give the model as it was before optimization, or optimized at {level} at most"


def wanted(node: ir.Node, place: int) -> bool:
    """Tell whether `node` states an output at `place`."""
    return place < len(node.outputs) and bool(node.outputs[place].name)


# -- products ------------------------------------------------------------------------------------


@lowering("FusedMatMul", DOMAIN)
@lowering("TransposeMatMul", DOMAIN)
def fused_matmul(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = alpha A' B', A' = A with its last two axes swapped, or its first one behind the others
    of the batch.
    """
    flags, n = node.attributes, rank(node.inputs[1])
    batch = flags.get_int("transBatchA", 0) or flags.get_int("transBatchB", 0)
    if n is None and batch:
        return None
    if n == 1 and flags.get_int("transA", 0):
        return None  # onnxruntime 1.31 takes A for its transpose there
    a, b = (_transposed(op, node, x, side) for x, side in zip(node.inputs, "AB", strict=True))
    alpha = node.attributes.get_float("alpha", 1.0)
    y = product(op, a, b)
    return [y if alpha == 1 else y * alpha]


def _transposed(op: Emit, node: ir.Node, x: ir.Value, side: str) -> ir.Value:
    n = rank(x)
    if node.attributes.get_int(f"transBatch{side}", 0):
        assert n is not None  # of both the same
        x = op.Transpose(x, perm=[*range(1, n - 1), 0, n - 1])
    swapped = node.attributes.get_int(f"trans{side}", 0) and n != 1
    return op.mT(x) if swapped else x


@lowering("FusedGemm", DOMAIN)
def fused_gemm(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = f(alpha A' B' + beta C)."""
    get = node.attributes
    parameters = {
        name: get.get_float(f"activation_{name}")
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in get
    }
    y = op.emit("Gemm", node.inputs, _chosen(node, _OF_GEMM))
    return _activated(op, y, get.get_string("activation", ""), parameters)


@lowering("FusedConv", DOMAIN)
def fused_conv(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = f(conv(x, w) + b + z)."""
    *operands, z = (*node.inputs, None, None)[:4]
    y = op.emit("Conv", operands, _chosen(node, _OF_CONV))
    y = y if z is None else op.set_type_like(y + z, z)
    kind = node.attributes.get_string("activation", "")
    names = ("min", "max") if kind == "Clip" else _PARAMETERS.get(kind, ())
    given = node.attributes.get_floats("activation_params", ())
    return _activated(op, y, kind, dict(zip(names, given, strict=False)))


def _chosen(node: ir.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: node.attributes[name].value for name in names if name in node.attributes}


def _activated(op: Emit, y: ir.Value, kind: str, given: dict[str, float]) -> list[ir.Value] | None:
    """Return f(y), None where f is not known or lacks a parameter."""
    if kind == "":
        return [y]
    if kind == "Clip" and len(given) == 2:
        return [op.Clip(y, given["min"], given["max"])]
    if kind in ("ParametricSoftplus", "ScaledTanh") and {"alpha", "beta"} <= given.keys():
        f = op.Tanh if kind == "ScaledTanh" else op.Softplus
        return [f(y * given["beta"]) * given["alpha"]]
    if kind not in _PARAMETERS or not given.keys() >= set(_PARAMETERS[kind]):
        return None
    attributes = {name: given[name] for name in _PARAMETERS[kind]}
    return [op.set_type_like(op.emit(kind, [y], attributes), y)]


# -- activations ---------------------------------------------------------------------------------


@lowering("Gelu", DOMAIN)
@lowering("BiasGelu", DOMAIN)
def bias_gelu(op: Emit, node: Any) -> list[ir.Value]:
    """y = x P(x), x = a + b, P the standard normal distribution."""
    return [_gelu(op, _biased(node))]


@lowering("FastGelu", DOMAIN)
def fast_gelu(op: Emit, node: Any) -> list[ir.Value]:
    """y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, x = a + b."""
    x = _biased(node)
    if op.opset >= 20:
        return [op.Gelu(x, approximate="tanh")]
    inner = (x + 0.044715 * (x * x * x)) * sqrt(2 / pi)
    return [0.5 * x * (op.Tanh(inner) + 1.0)]


@lowering("QuickGelu", DOMAIN)
def quick_gelu(op: Emit, node: Any) -> list[ir.Value]:
    """y = x sigmoid(alpha x)."""
    x, alpha = node.inputs[0], node.attributes.get_float("alpha", 1.702)
    return [x * op.Sigmoid(x if alpha == 1 else alpha * x)]


@lowering("BiasSplitGelu", DOMAIN)
def bias_split_gelu(op: Emit, node: Any) -> list[ir.Value]:
    """y = l gelu(r), [l, r] = x + b."""
    left, right = op.emit_many("Split", [_biased(node)], {"axis": -1, "num_outputs": 2}, outputs=2)
    return [left * _gelu(op, right)]


def _biased(node: Any) -> ir.Value:
    x, bias = (*node.inputs, None)[:2]
    return x if bias is None else x + bias


def _gelu(op: Emit, x: ir.Value) -> ir.Value:
    if op.opset >= 20:
        return op.Gelu(x)
    return 0.5 * x * (op.Erf(x * sqrt(0.5)) + 1.0)


# -- others --------------------------------------------------------------------------------------


@lowering("BiasAdd", DOMAIN)
def bias_add(op: Emit, node: Any) -> list[ir.Value]:
    """y = x + b + z."""
    x, bias, skip = node.inputs
    return [x + bias + skip]


@lowering("BiasDropout", DOMAIN)
def bias_dropout(op: Emit, node: Any) -> list[ir.Value]:
    """y = dropout(x + b) + z."""
    x, bias, residual, *how = (*node.inputs, None, None, None)[:5]
    y, mask = op.emit_many("Dropout", [x + bias, *how], _chosen(node, ("seed",)), outputs=2)
    mask.dtype = ir.DataType.BOOL
    y = op.set_type_like(y, x)
    return [y if residual is None else y + residual, mask][: len(node.outputs)]


@lowering("BiasSoftmax", DOMAIN)
def bias_softmax(op: Emit, node: Any) -> list[ir.Value]:
    """y = softmax(x + b), over all axes from the named one on."""
    scores, axis = _biased(node), node.attributes.get_int("axis", 1)
    n = rank(scores)
    if axis == -1 or (n is not None and axis == n - 1):
        return [op.Softmax(scores, axis=-1)]
    return [op.reshape_like(op.Softmax(op.Flatten(scores, axis=axis), axis=-1), scores)]


@lowering("GatherND", DOMAIN)
@lowering("Pad", DOMAIN)
@lowering("Trilu", DOMAIN)
def standard(op: Emit, node: Any) -> list[ir.Value]:
    """y = that of the standard operator of the same name, which came later."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    inputs = list(node.inputs)
    if node.op_type == "GatherND":
        inputs[1] = op.Cast(inputs[1], to=ir.DataType.INT64)
    return [op.emit(node.op_type, inputs, attributes)]


@lowering("ExpandDims", DOMAIN)
def expand_dims(op: Emit, node: Any) -> list[ir.Value]:
    """y = x with one axis more."""
    x, axis = node.inputs
    return [op.Unsqueeze(x, op.Reshape(op.Cast(axis, to=ir.DataType.INT64), [1]))]
