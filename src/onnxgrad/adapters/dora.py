"""DoRA: adapters that also train the lengths (2-norms) of the columns of a weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.adapters.graph import AdapterWriter, adapter_dtype, write_product
from onnxgrad.adapters.uses import LINEAR, Target, Use, attribute_values


def reason_without_dora(target: Target) -> str:
    """Return the reason why a weight cannot have a DoRA adapter, or "" if it can."""
    uses = target.uses
    plain = all(use.form == LINEAR and len(use.shape) == 2 and not use.node.domain for use in uses)
    if target.quantized or not plain or any(use.perm != uses[0].perm for use in uses):
        return "use_dora needs a matrix of floats by which MatMul or Gemm multiplies from the right"
    return ""


def column_lengths(weight: np.ndarray) -> np.ndarray:
    """Return the 2-norm of each column of a weight of shape (inputs, outputs)."""
    return np.sqrt(np.square(weight.astype(np.float64)).sum(0))


def write_layer(
    writer: AdapterWriter,
    use: Use,
    base: ir.Value,
    data: tuple[ir.Value, bool],
    factors: tuple[ir.Value, ir.Value, ir.Value],
) -> tuple[ir.Value, str]:
    """Write a layer with DoRA, y = x (W + P Q) m / n + b; return y and the name of the norms n.

    n are the 2-norms of the columns of W + P Q (Liu et al. 2024, "DoRA: Weight-Decomposed
    Low-Rank Adaptation", equation 5).

    Args:
        writer: writes the nodes.
        use: the use of the weight W.
        base: the output of the layer without adapter, x W + b.
        data: x, and whether it is behind a Dropout, which does not act on `base`, as in PEFT.
        factors: P, Q and m.
    """
    (x, dropped), (p, q, magnitude), dtype = data, factors, adapter_dtype(use)
    weight = writer.cast(ir.val(use.node.input[1], use.dtype), dtype)
    options = attribute_values(use.node)
    if options.get("transB"):
        weight = writer.emit("Transpose", weight, perm=[1, 0])
    total = writer.emit("Add", weight, writer.emit("MatMul", p, q))
    size = writer.emit("Constant", value=ir.tensor(np.array([use.shape[0]], np.int64)))
    ones = writer.emit("ConstantOfShape", size, value=ir.tensor(np.ones(1, dtype.numpy())))
    squares = writer.emit("MatMul", ones, writer.emit("Mul", total, total))
    norm = writer.emit("Sqrt", squares)
    norm.name = writer.free_name(f"{use.node.output[0]}.norm")
    ratio = writer.emit("Div", magnitude, norm)
    if not dropped:
        plain = _subtract_bias(writer, use, writer.cast(base, dtype), options)
    else:
        plain = writer.emit("MatMul", x, weight)
        if use.factor != 1:
            plain = writer.emit("Mul", plain, writer.scalar(use.factor, dtype))
    more = writer.emit("Mul", plain, writer.emit("Sub", ratio, writer.scalar(1.0, dtype)))
    low = writer.emit("Mul", write_product(writer, use, x, (p, q)), ratio)
    added = writer.cast(writer.emit("Add", more, low), use.dtype)
    return writer.emit("Add", base, added), str(norm.name)


def _subtract_bias(
    writer: AdapterWriter, use: Use, y: ir.Value, options: dict[str, Any]
) -> ir.Value:
    """Return the output `y` of a layer minus the bias, if the layer is a Gemm with a bias."""
    if use.node.op_type != "Gemm" or len(use.node.input) < 3 or not use.node.input[2]:
        return y
    assert y.dtype is not None
    bias = writer.cast(ir.val(use.node.input[2], use.dtype), y.dtype)
    beta = float(options.get("beta", 1.0))
    if beta != 1:
        bias = writer.emit("Mul", bias, writer.scalar(beta, y.dtype))
    return writer.emit("Sub", y, bias)
