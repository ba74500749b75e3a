"""Operators that `prepare` rewrites, so that no rule has to know them.

A lowering takes the node and returns the values that take the place of its outputs, or None to
leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, equal, rank

Lowering = Callable[[Emit, ir.Node], "list[ir.Value] | None"]
LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowering(op_type: str, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Register the function below as the lowering of an operator."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS[domain, op_type] = function
        return function

    return register


@lowering("Identity")
@lowering("Cast")
@lowering("Reshape")
@lowering("Dropout")
def no_operation(op: Emit, node: Any) -> list[ir.Value] | None:
    """A node that hands on its input is dropped, unless it makes an output of the graph."""
    x, (y, *others) = node.inputs[0], node.outputs
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    same = {
        "Identity": True,
        "Cast": x.dtype is not None and x.dtype == y.dtype,
        "Reshape": equal(dims(x), dims(y)),
        "Dropout": not others and (training is None or op.is_all(training, False)),
    }[node.op_type]
    return [x] if same and y not in op.graph.outputs else None


@lowering("MatMul")
def matmul(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Rank one on either side becomes rank two, and the added axis is taken away again."""
    a, b = node.inputs
    if 1 not in (rank(a), rank(b)):
        return None
    y = op.MatMul(
        op.Unsqueeze(a, [0]) if rank(a) == 1 else a, op.Unsqueeze(b, [1]) if rank(b) == 1 else b
    )
    axes = [-2] * (rank(a) == 1) + [-1] * (rank(b) == 1)
    return [op.Squeeze(y, axes)]


@lowering("LinearRegressor", "ai.onnx.ml")
def linear_regressor(op: Emit, node: ir.Node) -> list[ir.Value]:
    """y = post(x CT + b)."""
    return [_post_transform(op, node, _linear(op, node, node.attributes.get_int("targets", 1)))]


@lowering("LinearClassifier", "ai.onnx.ml")
def linear_classifier(op: Emit, node: ir.Node) -> list[ir.Value]:
    """scores = post(x CT + b), label = class of the largest score.

    With one row of coefficients and two classes, the score of the first class is the second's
    complement, as onnxruntime computes it.
    """
    strings = node.attributes.get_strings("classlabels_strings", None)
    labels = strings or node.attributes.get_ints("classlabels_ints", None) or []
    rows = len(node.attributes.get_floats("intercepts", ()) or ())
    rows = rows or max(len(labels) if len(labels) != 2 else 1, 1)
    raw = _linear(op, node, rows)
    post = node.attributes.get_string("post_transform", "NONE")
    if rows > 1 or len(labels) != 2:
        scores = _post_transform(op, node, raw)
        winner = op.ArgMax(raw, axis=1, keepdims=0)
    else:
        positive = op.Sigmoid(raw) if post == "LOGISTIC" else raw
        negative = op.Sigmoid(op.Neg(raw)) if post == "LOGISTIC" else op.Sub(1.0, raw)
        scores = op.Concat(negative, positive, axis=1)
        winner = op.Cast(op.Squeeze(op.Greater(raw, 0.0), [1]), to=ir.DataType.INT64)
    table = np.array(list(labels) or list(range(rows)), dtype=object if strings else np.int64)
    label = op.Gather(op.value(table), winner, axis=0)
    return [label, scores]


def _linear(op: Emit, node: ir.Node, rows: int) -> ir.Value:
    x, coefficients, intercepts = (*node.inputs, None)[:3]
    x = op.Cast(x, to=ir.DataType.FLOAT)
    if rank(x) == 1:
        x = op.Unsqueeze(x, [0])
    y = op.MatMul(x, op.Transpose(op.Reshape(coefficients, [rows, -1]), perm=[1, 0]))
    return y if intercepts is None else op.Add(y, intercepts)


def _post_transform(op: Emit, node: ir.Node, y: ir.Value) -> ir.Value:
    post = node.attributes.get_string("post_transform", "NONE")
    if post == "NONE":
        return y
    if post == "LOGISTIC":
        return op.Sigmoid(y)
    if post == "SOFTMAX":
        return op.Softmax(y, axis=-1)
    raise NoGradientRule(
        f"{node.op_type} (node {node.name!r}): post_transform {post!r} has no gradient; "
        "use NONE, LOGISTIC or SOFTMAX"
    )


@lowering("Scaler", "ai.onnx.ml")
def scaler(op: Emit, node: ir.Node) -> list[ir.Value]:
    """y = (x - offset) scale."""
    x, offset, scale = (*node.inputs, None, None)[:3]
    x = op.Cast(x, to=ir.DataType.FLOAT)
    y = x if offset is None else op.Sub(x, offset)
    return [y if scale is None else op.Mul(y, scale)]


@lowering("Normalizer", "ai.onnx.ml")
def normalizer(op: Emit, node: ir.Node) -> list[ir.Value]:
    """y = x / norm of the row: its largest element (MAX), sum of moduli (L1), Euclidean (L2)."""
    x = op.Cast(node.inputs[0], to=ir.DataType.FLOAT)
    norm = node.attributes.get_string("norm", "MAX")
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[norm]
    size = reduce(x, [-1], keepdims=1)
    return [op.Div(x, op.Where(op.Equal(size, 0.0), 1.0, size))]
