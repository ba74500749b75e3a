"""Helpers of rules of several families."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import rank


def attributes_of(node):
    """Return the attributes of a node as the keyword arguments of another."""
    return {a.name: a.value for a in node.attributes.values()}


def output(op, node, i: int, dtype: ir.DataType) -> ir.Value:
    """Return output `i` of the node, which is added if the model omits it."""
    if len(node.outputs) <= i:
        node.resize_outputs(i + 1)
    y = node.outputs[i]
    if not y.name:
        y.name, y.dtype = op.name(f"{node.op_type.lower()}_{i}"), dtype
    return y


def positions_of(op, x):
    """Return the positions 0, ..., n-1 of the elements of flattened `x`, in the shape of `x`."""
    return op.Reshape(op.Range(np.int64(0), op.Size(x), np.int64(1)), op.shape_of(x), allowzero=1)


def wide(dtype: ir.DataType) -> ir.DataType:
    """Return the dtype in which sums and products of `dtype` are computed.

    For half precision that is float32: sums need it, and onnxruntime has few kernels for less.
    """
    return dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def widened(op, x, *values):
    """Return x and `values` in the wide dtype of x; None stays None."""
    dtype = wide(x.dtype)
    return [None if v is None else op.Cast(v, to=dtype) for v in (x, *values)]


def narrowed(op, gradients, inputs):
    """Return the gradients in the dtypes of their inputs."""
    pairs = zip(gradients, inputs, strict=False)
    return [g if g is None or x.dtype is None else op.Cast(g, to=x.dtype) for g, x in pairs]


def gated(op, x, g):
    """Return `x`, which is no scalar, available when `g` is: a Reshape that keeps all lengths.

    What is computed from constants only, onnxruntime computes when it loads the model, and keeps.
    """
    keep = op.Mul(op.const([0] * rank(x)), op.Size(g))
    return op.set_type_like(op.Reshape(x, keep), x)
