"""The linear operators of `ai.onnx.ml` as arithmetic.

The kernels of onnxruntime are the reference, where they leave the specification.
"""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.lowerings.registry import lowering
from onnxgrad.graph.shapes import dims, rank, static


@lowering("LinearRegressor", "ai.onnx.ml")
def linear_regressor(op: Emit, node: ir.Node) -> list[ir.Value]:
    """y = post(x CT + b)."""
    rows = node.attributes.get_int("targets", 1)
    return [_post_transform(op, node, _linear(op, node, rows), rows)]


@lowering("LinearClassifier", "ai.onnx.ml")
def linear_classifier(op: Emit, node: ir.Node) -> list[ir.Value]:
    """scores = post(x CT + b), label = class of the largest score.

    With one row of coefficients and two classes, the score of the first class is the second's
    complement.
    """
    strings = node.attributes.get_strings("classlabels_strings", ())
    labels = strings or node.attributes.get_ints("classlabels_ints", ())
    intercepts = node.inputs[2] if len(node.inputs) > 2 else None
    rows = prod(static(dims(intercepts)) or (len(labels),))
    raw = _linear(op, node, rows)
    scores = _post_transform(op, node, raw, rows)
    if rows > 1:
        winner = op.ArgMax(raw, axis=1, keepdims=0)
    else:
        winner = op.Cast(op.Squeeze(op.Greater(raw, 0.0), [1]), to=ir.DataType.INT64)
        if len(labels) == 2:
            logistic = node.attributes.get_string("post_transform", "NONE") == "LOGISTIC"
            pair = (op.Sigmoid(op.Neg(raw)), op.Sigmoid(raw)) if logistic else (1.0 - raw, raw)
            scores = op.Concat(*pair, axis=1)
    if strings:
        table = op.Constant(value_strings=strings)
        table.dtype = ir.DataType.STRING
    else:
        table = op.value(list(labels) or [0, 1])
    return [op.Gather(table, winner, axis=0), scores]


def _linear(op: Emit, node: ir.Node, rows: int) -> ir.Value:
    x, coefficients, intercepts = (*node.inputs, None)[:3]
    x = op.Cast(x, to=ir.DataType.FLOAT)
    if rank(x) == 1:
        x = op.Unsqueeze(x, [0])
    y = op.MatMul(x, op.Transpose(op.Reshape(coefficients, [rows, -1]), perm=[1, 0]))
    return op.Add(y, intercepts) if dims(intercepts) == (rows,) else y  # others are not read


def _post_transform(op: Emit, node: ir.Node, y: ir.Value, rows: int) -> ir.Value:
    post = node.attributes.get_string("post_transform", "NONE")
    if post == "NONE" or (rows == 1 and post in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")):
        return y  # one score is handed on as it is
    if post == "LOGISTIC":
        return op.Sigmoid(y)
    if post == "SOFTMAX":
        return op.Softmax(y, axis=-1)
    raise NoGradientRule(
        f"{node.op_type} (node {node.name!r}, output {node.outputs[-1].name!r}): post_transform "
        f"{post!r} has no gradient; use NONE, LOGISTIC or SOFTMAX"
    )


@lowering("Scaler", "ai.onnx.ml")
def scaler(op: Emit, node: Any) -> list[ir.Value]:
    """y = (x - offset) scale, in float64 when x is."""
    x, offset, scale = (*node.inputs, None, None)[:3]
    dtype = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    y = op.Cast(x, to=dtype)
    if offset is not None:
        y = y - op.Cast(offset, to=dtype)
    if scale is not None:
        y = y * op.Cast(scale, to=dtype)
    return [op.Cast(y, to=ir.DataType.FLOAT)]


@lowering("Normalizer", "ai.onnx.ml")
def normalizer(op: Emit, node: ir.Node) -> list[ir.Value]:
    """y = x / norm of the row: its largest element (MAX), sum of moduli (L1), Euclidean (L2).

    A row of norm zero stays as it is.
    """
    x = op.Cast(node.inputs[0], to=ir.DataType.FLOAT)
    norm = node.attributes.get_string("norm", "MAX")
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[norm]
    size = reduce(x, [-1], keepdims=1)
    return [x / op.Where(op.Equal(size, 0.0), 1.0, size)]
