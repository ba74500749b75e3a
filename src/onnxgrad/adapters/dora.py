"""DoRA: the columns of an adapted weight have trained lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.adapters.graph import Additions, adapter_dtype, product
from onnxgrad.adapters.uses import LINEAR, Target, Use, attributes


def unfit(target: Target) -> str:
    """Return why a weight, which can have an adapter, cannot have one with lengths; or ""."""
    uses = target.uses
    plain = all(use.form == LINEAR and len(use.shape) == 2 and not use.node.domain for use in uses)
    if target.quantized or not plain or any(use.perm != uses[0].perm for use in uses):
        return "use_dora needs a matrix of floats by which MatMul or Gemm multiplies from the right"
    return ""


def lengths(weight: np.ndarray) -> np.ndarray:
    """Return the 2-norm of each column of a weight, [inputs, outputs]."""
    return np.sqrt(np.square(weight.astype(np.float64)).sum(0))


def write(
    add: Additions,
    use: Use,
    base: ir.Value,
    data: tuple[ir.Value, bool],
    factors: tuple[ir.Value, ir.Value, ir.Value],
) -> tuple[ir.Value, str]:
    """Write the product of the data and m / n (W + P Q); return it, and the name of n.

    n are the 2-norms of the columns of W + P Q (Liu et al. 2024, "DoRA: Weight-Decomposed
    Low-Rank Adaptation", equation 5). With data (x, True), x is behind a dropout, which acts on all
    but the product of the layer itself, as in PEFT.
    """
    (x, dropped), (p, q, magnitude), dtype = data, factors, adapter_dtype(use)
    weight = add.cast(add.value(use.node.input[1], use.dtype), dtype)
    options = attributes(use.node)
    if options.get("transB"):
        weight = add.emit("Transpose", weight, perm=[1, 0])
    total = add.emit("Add", weight, add.emit("MatMul", p, q))
    size = add.emit("Constant", value=ir.tensor(np.array([use.shape[0]], np.int64)))
    ones = add.emit("ConstantOfShape", size, value=ir.tensor(np.ones(1, dtype.numpy())))
    squares = add.emit("MatMul", ones, add.emit("Mul", total, total))
    norm = add.emit("Sqrt", squares)
    norm.name = add.name(f"{use.node.output[0]}.norm")
    ratio = add.emit("Div", magnitude, norm)
    if not dropped:
        plain = _without_bias(add, use, add.cast(base, dtype), options)
    else:
        plain = add.emit("MatMul", x, weight)
        if use.factor != 1:
            plain = add.emit("Mul", plain, add.number(use.factor, dtype))
    more = add.emit("Mul", plain, add.emit("Sub", ratio, add.number(1.0, dtype)))
    low = add.emit("Mul", product(add, use, x, (p, q)), ratio)
    added = add.cast(add.emit("Add", more, low), use.dtype)
    return add.emit("Add", base, added), str(norm.name)


def _without_bias(add: Additions, use: Use, y: ir.Value, options: dict[str, Any]) -> ir.Value:
    """Return the output of a layer without the bias that a Gemm adds."""
    if use.node.op_type != "Gemm" or len(use.node.input) < 3 or not use.node.input[2]:
        return y
    assert y.dtype is not None
    bias = add.cast(add.value(use.node.input[2], use.dtype), y.dtype)
    beta = float(options.get("beta", 1.0))
    if beta != 1:
        bias = add.emit("Mul", bias, add.number(beta, y.dtype))
    return add.emit("Sub", y, bias)
