"""Lowerings of the support vector machines of `ai.onnx.ml`: kernels, votes, probabilities.

Where the kernels of onnxruntime deviate from the specification, they are the reference.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings import ml
from onnxgrad.autodiff.registry import lowering
from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.operators import NOT_CLASSES
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.shapes import dims


@lowering("SVMRegressor", domain="ai.onnx.ml")
def svm_regressor(op: Emit, node: Any) -> list[ir.Value]:
    """y = k(x, s) a + rho, or x a + rho without support vectors; with `one_class` its sign, +-1.

    `post_transform` is not read, as there is one score.
    """
    x, coefficients, rho, vectors, *_ = _operands(node)
    count = int_attribute(node, "n_supports")
    if count > 0:
        features = _kernel(op, node, ml.matrix(op, x, vectors, count), vectors, count)
        coefficients = _first(op, coefficients, count)
    else:
        features = ml.matrix(op, x, coefficients, 1)
    y = op.MatMul(features, op.Reshape(coefficients, [-1, 1])) + _first(op, rho, 1)
    if int_attribute(node, "one_class"):
        y = op.Where(op.Greater(y, 0.0), op.const(1.0, ml.FLOAT), -1.0)
    return [y]


def _operands(node: ir.Node) -> Any:
    operands = (*node.inputs, *[None] * 5)[:6]
    if None in operands[:3]:
        raise ml.refused(node, "it has no coefficients or no rho; add them")
    return operands


def _first(op: Emit, values: ir.Value, n: int) -> ir.Value:
    """Return the first `n` of `values`; onnxruntime ignores the others."""
    return values if dims(values) == (n,) else op.Slice(values, [0], [n])


def _kernel(op: Emit, node: ir.Node, x: ir.Value, vectors: ir.Value, count: int) -> ir.Value:
    """Return k(x, s): x sT, or (c x sT + d)^e, or tanh(c x sT + d), or e^(-c |x - s|^2).

    |x - s|^2 is computed as |x|^2 - 2 x sT + |s|^2, which takes less memory than all differences,
    and in float64, so that it loses no digits that matter.
    """
    kind = string_attribute(node, "kernel_type")
    gamma, coef0, degree = node.attributes.get_floats("kernel_params", ()) or (0.0, 0.0, 0.0)
    rbf = kind == "RBF"
    x, s = (op.Cast(v, to=ml.DOUBLE if rbf else ml.FLOAT) for v in (x, vectors))
    s = op.Reshape(s, [count, -1])
    products = op.Gemm(x, s, transB=1)
    if rbf:
        norm = op.ReduceSumSquare(x, [1], keepdims=1) + op.ReduceSumSquare(s, [1], keepdims=0)
        return op.Exp(op.Cast(-gamma * (norm - 2.0 * products), to=ml.FLOAT))
    if kind == "LINEAR":
        return products
    inner = gamma * products + coef0
    if kind == "POLY":
        if degree in (2, 3):
            return inner * inner if degree == 2 else inner * inner * inner
        return op.Pow(inner, degree)
    return op.Tanh(inner)


@lowering("SVMClassifier", domain="ai.onnx.ml")
def svm_classifier(op: Emit, node: Any) -> list[ir.Value]:
    """scores = post(x CT + rho) without support vectors; with them, the scores of all pairs of
    classes, or probabilities coupled from these.

    The label is the class of the largest score, or the class that wins the most pairs.
    """
    x, coefficients, rho, vectors, prob_a, prob_b = _operands(node)
    classes = len(ml.class_labels(node))
    sizes = node.attributes.get_ints("vectors_per_class", ())
    if sum(sizes) == 0:
        raw = ml.linear(op, x, coefficients, classes) + _first(op, rho, 1)
        winner = _largest(op, raw, coefficients, classes, prob_a is not None)
        return [ml.label_of(op, node, winner), ml.post_transform(op, node, raw, classes)]
    if classes < 2:
        raise ml.refused(node, "one class has no scores; use a regressor with one_class")
    x = ml.matrix(op, x, vectors, sum(sizes))
    k = _kernel(op, node, x, vectors, sum(sizes))
    pairs = list(combinations(range(classes), 2))
    raw = _pairwise(op, k, coefficients, rho, sizes, pairs)
    label = ml.label_of(op, node, _most_votes(op, raw, pairs, classes))
    if prob_a is not None:
        a, b = _first(op, prob_a, len(pairs)), _first(op, prob_b, len(pairs))
        scores = _coupled(op, op.Sigmoid(op.Neg(raw * a + b)), pairs, classes)  # Platt 1999
        return [label, ml.post_transform(op, node, scores, classes)]
    if classes > 2:
        scores = ml.post_transform(op, node, raw, len(pairs))
    else:
        scores = ml.two_scores(op, node, raw, 0.0)
    scores.meta[NOT_CLASSES] = _why_not_classes(node, classes)
    return [label, scores]


def _why_not_classes(node: ir.Node, classes: int) -> str:
    """Return what the columns of scores of pairs are, and what to do about it."""
    where, export = f"SVMClassifier (node {node.name!r})", "export the SVC with probability=True"
    if classes > 2:
        return (
            f"has a score for each pair of the {classes} classes, by {where}: {export}, or with "
            "decision_function_shape='ovr'"
        )
    return (
        f"has the scores of both classes, by {where}, in the order opposite to its labels: the "
        f"second column is large for the first class. {export}, or train it by "
        "onnxgrad.sklearn.OnnxClassifier, which reads the order, or pass the labels 1 - y and "
        f"{argument('loss_options', {'from_logits': True})}"
    )


def _largest(op: Emit, raw: ir.Value, coefficients: Any, classes: int, proba: bool) -> ir.Value:
    """Return the class of the largest score; of two classes, the second above a threshold."""
    winner = op.ArgMax(raw, axis=1, keepdims=0)
    if classes != 2 or proba:
        return winner
    positive = op.GreaterOrEqual(op.ReduceMin(coefficients, keepdims=0), 0.0)
    top = op.ReduceMax(raw, [1], keepdims=0)
    above = op.And(op.Greater(top, 0.0), op.Not(positive))
    second = op.Or(above, op.GreaterOrEqual(top, 0.5))
    return op.Where(second, np.int64(1), winner)


def _pairwise(op: Emit, k: Any, coefficients: Any, rho: Any, sizes: Any, pairs: list) -> ir.Value:
    """Return a score for each pair i < j, summed over the vectors of both classes.

    A vector has one coefficient for each other class, in the order of classes. As in onnxruntime,
    sums are in float64.
    """
    others = len(sizes) - 1
    k, table = (op.Cast(v, to=ml.DOUBLE) for v in (k, coefficients))
    table = op.Slice(table, [0], [others * sum(sizes)])
    table = op.Transpose(op.Reshape(table, [others, sum(sizes)]), perm=[1, 0])
    parts = op.split(k, list(sizes), 1)
    tables = op.split(table, list(sizes), 0)
    scores = op.Concat(*map(op.MatMul, parts, tables), axis=1)
    of_first = op.Gather(scores, [i * others + j - 1 for i, j in pairs], axis=1)
    of_second = op.Gather(scores, [j * others + i for i, j in pairs], axis=1)
    rho = op.Cast(_first(op, rho, len(pairs)), to=ml.DOUBLE)
    return op.Cast(of_first + of_second + rho, to=ml.FLOAT)


def _most_votes(op: Emit, raw: ir.Value, pairs: list, classes: int) -> ir.Value:
    """Return the first class with most votes. A pair votes for i if its score is > 0, else j."""
    first, second = (
        np.eye(classes, dtype=np.float32)[list(side)] for side in zip(*pairs, strict=True)
    )
    votes = op.MatMul(op.Cast(op.Greater(raw, 0.0), to=ml.FLOAT), first - second) + second.sum(0)
    return op.ArgMax(votes, axis=1, keepdims=0)


def _coupled(op: Emit, r: ir.Value, pairs: list, classes: int) -> ir.Value:
    """Return the probabilities p of the classes from r, those of class i in the pairs i < j.

    Wu, Lin & Weng 2004, section 2.3: p minimizes sum (r_ji p_i - r_ij p_j)^2 = 2 pT Q p subject to
    sum(p) = 1, so that all elements of (Q + 1) p are equal. onnxruntime, like libsvm, iterates and
    stops within 0.005 of this p; here p is exact, and so is its gradient.
    """
    r = op.Clip(r, 1e-7, 1 - 1e-7)
    if classes == 2:
        return op.Concat(r, 1.0 - r, axis=1)
    columns = np.zeros((classes, classes), np.int64)
    for n, (i, j) in enumerate(pairs):
        columns[i, j], columns[j, i] = n, n + len(pairs)
    one = np.eye(classes, dtype=np.float32)
    r = op.Gather(op.Concat(r, 1.0 - r, axis=1), columns.ravel(), axis=1)
    r = op.Reshape(r, [-1, classes, classes]) * (1 - one)
    q = op.ReduceSum(r * r, [1], keepdims=1) * one - r * op.Transpose(r, perm=[0, 2, 1])
    p = op.Max(_solved(op, q + 1.0, classes), 0.0)  # up to rounding, they are positive
    return p / op.ReduceSum(p, [1], keepdims=1)


def _solved(op: Emit, a: ir.Value, n: int) -> ir.Value:
    """Return y with a y = 1, a positive definite, by Gauss-Jordan elimination without pivots."""
    a = op.Pad(a, [0, 0, 0, 0, 0, 1], 1.0)
    for i, one in enumerate(np.eye(n, dtype=np.float32)[..., None]):
        column, rest = op.Slice(a, [0], [1], [2]), op.Slice(a, [1], [n + 1], [2])
        pivot, row = (op.Slice(v, [i], [i + 1], [1]) for v in (column, rest))
        a = rest - (column - one) * (row / pivot)
    return op.Squeeze(a, [2])
