"""Operators of ai.onnx.ml: linear models, scalers, support vector machines.

Where the kernels of onnxruntime deviate from the specification, they are the reference.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from math import isnan, pi, prod, sqrt
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule, argument
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.records import PIECEWISE, declare_operators, lowering
from onnxgrad.operators.rule_nodes import optional_inputs
from onnxgrad.operators.shapes import Dim, Dims, dims, rank, static

_DOMAIN = "ai.onnx.ml"
_declare_ml = partial(declare_operators, domain=_DOMAIN)

_declare_ml("Binarizer", no_gradient=PIECEWISE)
_declare_ml(
    "TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor",
    no_gradient=PIECEWISE,
    fitted=(
        "decides by thresholds, which have no gradient: trees of scikit-learn, LightGBM, XGBoost "
        "and CatBoost are trained by these libraries. As a part of a larger model, trees stay as "
        "they are, and the layers behind them train"
    ),
)
_LOOKUP = "a lookup by equality: zero almost everywhere"
_declare_ml("CategoryMapper OneHotEncoder", no_gradient=_LOOKUP)
_declare_ml("LabelEncoder", lookup_operand=0, no_gradient=_LOOKUP)
_declare_ml("ArrayFeatureExtractor", lookup_operand=1)
_declare_ml("CastMap DictVectorizer ZipMap", "maps")
_SUPPORT_VECTORS = (("coefficients", True), ("rho", True), ("support_vectors", False))
_WEIGHTS = (("coefficients", True), ("intercepts", True))
_declare_ml("LinearClassifier LinearRegressor", coefficients=_WEIGHTS)
_declare_ml("Scaler", coefficients=(("offset", False), ("scale", False)))
_declare_ml("Imputer", coefficients=(("imputed_value_floats", False),))
_declare_ml("SVMRegressor", coefficients=_SUPPORT_VECTORS)
_declare_ml("SVMClassifier", coefficients=(*_SUPPORT_VECTORS, ("prob_a", True), ("prob_b", True)))

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64


# -- linear models -------------------------------------------------------------------------------


@lowering("LinearRegressor", domain=_DOMAIN)
def linear_regressor(op: Any, node: ir.Node) -> list[ir.Value]:
    """y = post(x CT + b), C the coefficients, post the `post_transform`."""
    rows = int_attribute(node, "targets")
    return [post_transform(op, node, _linear_scores(op, node, rows), rows)]


@lowering("LinearClassifier", domain=_DOMAIN)
def linear_classifier(op: Any, node: ir.Node) -> list[ir.Value]:
    """scores = post(x CT + b), post the `post_transform`, label = class of the largest score.

    With two classes and one row of coefficients, that is the score of the second class, and the
    first has its complement. `multi_class` is not read, as it does not change the scores.
    """
    labels = class_labels(node)
    intercepts = node.inputs[2] if len(node.inputs) > 2 else None
    rows = prod(static(dims(intercepts)) or (len(labels),))
    raw = _linear_scores(op, node, rows)
    if rows == len(labels) == 2 and _has_opposite_scores(node):
        raw.meta[marks.OPPOSITE] = True
    if rows > 1:
        winner = op.ArgMax(raw, axis=1, keepdims=0)
    else:
        winner = op.Cast(op.Squeeze(op.Greater(raw, 0.0), [1]), to=INT64)
    if rows > 1 or len(labels) != 2:
        return [winning_labels(op, node, winner), post_transform(op, node, raw, rows)]
    return [winning_labels(op, node, winner), scores_of_two_classes(op, node, raw, 1.0)]


def _has_opposite_scores(node: ir.Node) -> bool:
    """Return whether the coefficients of the two classes of a LinearClassifier are negatives of
    each other, so that its scores are -z and z.
    """
    numbers = [None if x is None else ir.convenience.get_const_tensor(x) for x in node.inputs[1:]]
    for tensor in numbers:
        if tensor is None or tensor.size % 2:
            return False
        first, second = np.split(tensor.numpy().ravel(), 2)
        if not np.allclose(first, -second, rtol=1e-5, atol=1e-6 * np.abs(second).max(initial=0)):
            return False
    return bool(numbers)


def _linear_scores(op: Any, node: ir.Node, rows: int) -> ir.Value:
    x, coefficients, intercepts = optional_inputs(node.inputs, 3)
    y = linear_product(op, x, coefficients, rows)
    # onnxruntime ignores intercepts of another length
    return op.Add(y, intercepts) if dims(intercepts) == (rows,) else y


def linear_product(op: Any, x: Any, coefficients: Any, rows: int) -> ir.Value:
    """Return x CT, C the coefficients as a matrix of `rows` rows."""
    weights = op.Reshape(coefficients, [rows, -1])
    return op.MatMul(as_matrix(op, x, coefficients, rows), op.Transpose(weights, perm=[1, 0]))


# -- shared by classifiers -----------------------------------------------------------------------


def lowering_error(node: ir.Node, why: str) -> NoGradientRule:
    """Return the error for a node that cannot be lowered."""
    where = f"{node.op_type} (node {node.name!r}, output {node.outputs[-1].name!r})"
    return NoGradientRule(f"{where}: {why}, or select outputs before this node")


def as_matrix(op: Any, x: Any, weights: Any, rows: int) -> ir.Value:
    """Return `x` as a float32 matrix whose rows are as long as a row of `weights`, which has `rows`
    rows.
    """
    x = op.Cast(x, to=FLOAT)
    if rank(x) == 2:
        return x
    return op.Reshape(x, [-1, prod(static(dims(weights)) or ()) // rows])


def class_labels(node: ir.Node) -> Any:
    """Return the labels of a classifier, strings or ints."""
    strings = node.attributes.get_strings("classlabels_strings", ())
    return strings or node.attributes.get_ints("classlabels_ints", ())


def winning_labels(op: Any, node: ir.Node, winner: ir.Value) -> ir.Value:
    """Return the labels of classes, given by their indices `winner`."""
    labels = list(class_labels(node)) or [0, 1]
    table = op.const(labels if isinstance(labels[0], int) else np.array(labels, object))
    return op.Gather(table, winner, axis=0)


def post_transform(op: Any, node: ir.Node, y: ir.Value, scores: int) -> ir.Value:
    """Return `y` (N, scores) after `post_transform`; a single score is changed by PROBIT only."""
    post = string_attribute(node, "post_transform")
    transforms = {
        "NONE": lambda op, y: y,
        "LOGISTIC": lambda op, y: op.Sigmoid(y),
        "SOFTMAX": lambda op, y: op.Softmax(y, axis=-1),
        "SOFTMAX_ZERO": _softmax_of_nonzero,
        "PROBIT": _inverse_normal_cdf,
    }
    if post not in transforms:
        raise lowering_error(
            node, f"post_transform {post!r} is not known; use NONE, LOGISTIC or SOFTMAX"
        )
    return y if scores == 1 and post != "PROBIT" else transforms[post](op, y)


def scores_of_two_classes(op: Any, node: ir.Node, y: ir.Value, whole: float) -> ir.Value:
    """Return the scores of two classes, computed from the score of the second: without a
    `post_transform` they add up to `whole`, else to 1.
    """
    post = string_attribute(node, "post_transform")
    if post == "PROBIT":
        raise lowering_error(
            node, "onnxruntime has no PROBIT of two classes from one score; use NONE"
        )
    if post == "LOGISTIC":
        return op.Concat(op.Sigmoid(op.Neg(y)), op.Sigmoid(y), axis=1)
    return op.Concat((whole if post == "NONE" else 1.0) - y, y, axis=1)


def _softmax_of_nonzero(op: Any, y: ir.Value) -> ir.Value:
    """Return softmax(y) over the scores that are not 0; scores of 0 stay almost 0."""
    used = op.Greater(op.Abs(y), 1e-7)
    top = op.ReduceMax(y, [-1], keepdims=1)
    powers = op.Where(used, op.Exp(y - top), 0.0)
    # Rows with a zero have top >= 0; in all other rows, the bound prevents inf.
    zeros = op.Where(used, 0.0, y) * op.Exp(op.Min(-top, 1.0))
    return (powers + zeros) / op.ReduceSum(powers, [-1], keepdims=1)


def _inverse_normal_cdf(op: Any, y: ir.Value) -> ir.Value:
    """Return sqrt(2) erfinv(2 y - 1), with the approximation of erfinv by Winitzki 2008.

    onnxruntime uses it too. Near y = 1/2, where the formula loses digits under its root, it is
    replaced by its Taylor series. The computation is in float64.
    """
    a = 0.147
    z = 2.0 * op.Cast(y, to=DOUBLE) - 1.0
    central = op.Less(op.Abs(z), 4e-3)
    outer = op.Where(central, op.const(0.5, DOUBLE), z)
    inner = op.Log((1.0 - outer) * (1.0 + outer))
    v = 2 / (pi * a) + 0.5 * inner
    size = op.Sqrt(op.Sqrt(v * v - inner / a) - v)
    size = op.Where(op.Less(outer, 0.0), op.Neg(size), size)
    series = sqrt(pi) / 2 * z * (1.0 + (1 / 4 + pi * a / 8 * (1 - pi / 4)) * (z * z))
    return op.Cast(sqrt(2) * op.Where(central, series, size), to=FLOAT)


# -- preprocessing -------------------------------------------------------------------------------


@lowering("Scaler", domain=_DOMAIN)
def scaler(op: Any, node: Any) -> list[ir.Value]:
    """y = (x - offset) scale, in float64 when x is."""
    x, offset, scale = optional_inputs(node.inputs, 3)
    dtype = DOUBLE if x.dtype == DOUBLE else FLOAT
    y = op.Cast(x, to=dtype)
    if offset is not None:
        y = y - op.Cast(offset, to=dtype)
    if scale is not None:
        y = y * op.Cast(scale, to=dtype)
    return [op.Cast(y, to=FLOAT)]


@lowering("Normalizer", domain=_DOMAIN)
def normalizer(op: Any, node: ir.Node) -> list[ir.Value]:
    """y = x / norm of the row: its largest element (MAX), sum of |x| (L1), or Euclidean norm (L2).

    A row of norm zero does not change.
    """
    x = op.Cast(node.inputs[0], to=FLOAT)
    norm = string_attribute(node, "norm")
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[norm]
    size = reduce(x, [-1], keepdims=1)
    return [x / op.Where(op.Equal(size, 0.0), 1.0, size)]


@lowering("Imputer", domain=_DOMAIN)
def imputer(op: Any, node: Any) -> list[ir.Value] | None:
    """y = v where x is the replaced value, else x; v one value, or one for each feature.

    If there are more or fewer values than features, the first value is used for all.
    """
    x, values = optional_inputs(node.inputs, 2)
    if values is None:  # integers: no gradient
        _set_output_types(node, (x.dtype, dims(x)))
        return None
    dtype = x.dtype or FLOAT
    values = op.Cast(values, to=dtype)
    [n] = static(dims(values)) or (1,)
    shape = dims(x)
    features = shape[min(len(shape), 2) - 1] if shape else None
    if n == 1 or (isinstance(features, int) and features != n):
        return [_replace_missing(op, node, x, op.Slice(values, [0], [1]))]
    if features == n and len(shape or ()) <= 2:
        return [_replace_missing(op, node, x, values)]
    columns = op.Gather(op.Shape(x, end=2), [-1], axis=0)
    values = op.Slice(values, [0], op.Where(op.Equal(columns, [n]), op.const([n]), [1]))
    table = op.Reshape(x, op.Concat([-1], op.Shape(values), axis=0))
    return [op.Reshape(_replace_missing(op, node, table, values), op.Shape(x), allowzero=1)]


def _replace_missing(op: Any, node: ir.Node, x: ir.Value, values: ir.Value) -> ir.Value:
    replaced = float_attribute(node, "replaced_value_float")
    return op.Where(op.IsNaN(x) if isnan(replaced) else op.Equal(x, replaced), values, x)


@lowering("FeatureVectorizer", domain=_DOMAIN)
def feature_vectorizer(op: Any, node: ir.Node) -> list[ir.Value]:
    """y = [a, b, ...], each cropped or padded with zeros to `inputdimensions` columns."""
    widths = node.attributes.get_ints("inputdimensions", ())
    if len(widths) != len(node.inputs):
        raise lowering_error(node, "inputdimensions must state a number for each input; correct it")
    parts = [_matrix_with_columns(op, x, n) for x, n in zip(node.inputs, widths, strict=True)]
    return [op.Concat(*parts, axis=1)]


def _matrix_with_columns(op: Any, x: Any, n: int) -> ir.Value:
    """Return `x` as a matrix of `n` columns; a vector is one row."""
    x = op.Cast(x, to=FLOAT)
    if (rank(x) or 0) < 2:
        x = op.Expand(x, [1, 1])
    if rank(x) != 2:
        x = op.Flatten(x, axis=1)
    have = (dims(x) or (None, None))[1]
    missing = max(n - have, 0) if isinstance(have, int) else n
    x = op.Pad(x, [0, 0, 0, missing]) if missing else x
    return x if isinstance(have, int) and have <= n else op.Slice(x, [0], [n], [1])


@lowering("ArrayFeatureExtractor", domain=_DOMAIN)
def array_feature_extractor(op: Any, node: Any) -> list[ir.Value]:
    """y = x[..., i], i flattened; a vector x is a matrix of one row."""
    x, i = node.inputs
    y = op.Gather(x, op.Reshape(i, [-1]), axis=-1)
    return [y if (rank(x) or 0) > 1 else op.Expand(y, [1, 1])]


# -- operators without gradient, whose output types onnx does not infer ---------------------------


def _set_output_types(node: ir.Node, *types: tuple[ir.DataType | None, Dims | None]) -> None:
    """Set dtypes and shapes of the outputs of `node` where they are unknown."""
    for y, (dtype, shape) in zip(node.outputs, types, strict=False):
        if y.dtype is None and dtype is not None:
            y.dtype = dtype
        if y.shape is None and shape is not None:
            y.shape = ir.Shape(shape)


def _row_count(x: Any) -> Dim:
    return 1 if rank(x) == 1 else (dims(x) or (None,))[0]


@lowering("TreeEnsemble", "TreeEnsembleRegressor", domain=_DOMAIN)
def tree_ensemble(op: Any, node: Any) -> None:
    """Set the type and shape of the result: (rows, targets), of the dtype of x since opset 5 of the
    domain; no gradient.
    """
    [x] = node.inputs
    targets = node.attributes.get_int("n_targets", 0) or None
    dtype = x.dtype if node.op_type == "TreeEnsemble" else FLOAT
    _set_output_types(node, (dtype, (_row_count(x), targets)))


@lowering("TreeEnsembleClassifier", domain=_DOMAIN)
def tree_ensemble_classifier(op: Any, node: Any) -> None:
    """Set the types and shapes of the labels (rows) and of the scores (rows, classes); no
    gradient.
    """
    strings = node.attributes.get_strings("classlabels_strings", ())
    classes = len(strings or node.attributes.get_ints("classlabels_int64s", ()))
    rows = _row_count(node.inputs[0])
    label = ir.DataType.STRING if strings else INT64
    _set_output_types(node, (label, (rows,)), (FLOAT, (rows, classes if classes > 1 else None)))


@lowering("LabelEncoder", domain=_DOMAIN)
def label_encoder(op: Any, node: Any) -> None:
    """Set the shape of the result to the shape of x, as onnx does not infer it in opset 1; no
    gradient.
    """
    _set_output_types(node, (None, dims(node.inputs[0])))


# -- support vector machines -----------------------------------------------------------------------


@lowering("SVMRegressor", domain=_DOMAIN)
def svm_regressor(op: Any, node: Any) -> list[ir.Value]:
    """y = k(x, s) a + rho, k the kernel, s the support vectors, or x a + rho without them; with
    `one_class` its sign, +-1.

    `post_transform` is not read, as there is one score.
    """
    x, coefficients, rho, vectors, *_ = _svm_operands(node)
    count = int_attribute(node, "n_supports")
    if count > 0:
        features = _svm_kernel(op, node, as_matrix(op, x, vectors, count), vectors, count)
        coefficients = _first_elements(op, coefficients, count)
    else:
        features = as_matrix(op, x, coefficients, 1)
    y = op.MatMul(features, op.Reshape(coefficients, [-1, 1])) + _first_elements(op, rho, 1)
    if int_attribute(node, "one_class"):
        y = op.Where(op.Greater(y, 0.0), op.const(1.0, FLOAT), -1.0)
    return [y]


def _svm_operands(node: ir.Node) -> Any:
    operands = optional_inputs(node.inputs, 6)
    if None in operands[:3]:
        raise lowering_error(node, "it has no coefficients or no rho; add them")
    return operands


def _first_elements(op: Any, values: ir.Value, n: int) -> ir.Value:
    """Return the first `n` of `values`; onnxruntime ignores the later elements."""
    return values if dims(values) == (n,) else op.Slice(values, [0], [n])


def _svm_kernel(op: Any, node: ir.Node, x: ir.Value, vectors: ir.Value, count: int) -> ir.Value:
    """Return k(x, s), the kernel of rows and support vectors: x sT, or (c x sT + d)^e, or tanh(c x
    sT + d), or e^(-c |x - s|^2).

    |x - s|^2 is computed as |x|^2 - 2 x sT + |s|^2, which takes less memory than all differences,
    and in float64, so that it loses no digits that matter.
    """
    kind = string_attribute(node, "kernel_type")
    gamma, coef0, degree = node.attributes.get_floats("kernel_params", ()) or (0.0, 0.0, 0.0)
    rbf = kind == "RBF"
    x, s = (op.Cast(v, to=DOUBLE if rbf else FLOAT) for v in (x, vectors))
    s = op.Reshape(s, [count, -1])
    products = op.Gemm(x, s, transB=1)
    if rbf:
        norm = op.ReduceSumSquare(x, [1], keepdims=1) + op.ReduceSumSquare(s, [1], keepdims=0)
        return op.Exp(op.Cast(-gamma * (norm - 2.0 * products), to=FLOAT))
    if kind == "LINEAR":
        return products
    inner = gamma * products + coef0
    if kind == "POLY":
        if degree in (2, 3):
            return inner * inner if degree == 2 else inner * inner * inner
        return op.Pow(inner, degree)
    return op.Tanh(inner)


@lowering("SVMClassifier", domain=_DOMAIN)
def svm_classifier(op: Any, node: Any) -> list[ir.Value]:
    """scores = post(x CT + rho), post the `post_transform`, without support vectors; with support
    vectors, the scores of all pairs of classes, or the probabilities of two classes.

    The label is the class of the largest score, or the class that wins the most pairs. Of more
    classes, onnxruntime couples the probabilities of pairs in steps that have no gradient.
    """
    x, coefficients, rho, vectors, prob_a, prob_b = _svm_operands(node)
    classes = len(class_labels(node))
    sizes = node.attributes.get_ints("vectors_per_class", ())
    if sum(sizes) == 0:
        raw = linear_product(op, x, coefficients, classes) + _first_elements(op, rho, 1)
        winner = _top_class(op, raw, coefficients, classes, prob_a is not None)
        return [winning_labels(op, node, winner), post_transform(op, node, raw, classes)]
    if classes < 2:
        raise lowering_error(node, "one class has no scores; use a regressor with one_class")
    if prob_a is not None and classes > 2:
        raise lowering_error(
            node,
            f"it iterates to couple the probabilities of its {classes} classes, which has no "
            "gradient; fit the SVC with probability=False before its export, whose scores train",
        )
    x = as_matrix(op, x, vectors, sum(sizes))
    k = _svm_kernel(op, node, x, vectors, sum(sizes))
    pairs = list(combinations(range(classes), 2))
    raw = _pair_scores(op, k, coefficients, rho, sizes, pairs)
    label = winning_labels(op, node, _class_of_most_votes(op, raw, pairs, classes))
    if prob_a is not None:
        a, b = _first_elements(op, prob_a, 1), _first_elements(op, prob_b, 1)
        first = op.Clip(op.Sigmoid(op.Neg(raw * a + b)), 1e-7, 1 - 1e-7)  # Platt 1999
        return [label, post_transform(op, node, op.Concat(first, 1.0 - first, axis=1), classes)]
    if classes > 2:
        scores = post_transform(op, node, raw, len(pairs))
    else:
        scores = scores_of_two_classes(op, node, raw, 0.0)
    scores.meta[marks.NOT_CLASSES] = _pair_scores_error(node, classes)
    return [label, scores]


def _pair_scores_error(node: ir.Node, classes: int) -> str:
    """Return the error text about training on scores for pairs of classes: what they mean, and what
    to do instead.
    """
    where = f"SVMClassifier (node {node.name!r})"
    if classes > 2:
        return (
            f"has a score for each pair of the {classes} classes, by {where}: export the SVC with "
            "decision_function_shape='ovr'"
        )
    return (
        f"has the scores of both classes, by {where}, in the order opposite to its labels: the "
        "second column is large for the first class. Export the SVC with probability=True, or "
        "train it by onnxgrad.sklearn.OnnxClassifier, which reads the order, or pass the labels "
        f"1 - y and {argument('loss_options', {'from_logits': True})}"
    )


def _top_class(op: Any, raw: ir.Value, coefficients: Any, classes: int, proba: bool) -> ir.Value:
    """Return the class of the largest score; of two classes, the second above a threshold."""
    winner = op.ArgMax(raw, axis=1, keepdims=0)
    if classes != 2 or proba:
        return winner
    positive = op.GreaterOrEqual(op.ReduceMin(coefficients, keepdims=0), 0.0)
    top = op.ReduceMax(raw, [1], keepdims=0)
    above = op.And(op.Greater(top, 0.0), op.Not(positive))
    second = op.Or(above, op.GreaterOrEqual(top, 0.5))
    return op.Where(second, np.int64(1), winner)


def _pair_scores(op: Any, k: Any, coefficients: Any, rho: Any, sizes: Any, pairs: list) -> ir.Value:
    """Return a score for each pair of classes i < j, summed over the support vectors of the two
    classes.

    A vector has one coefficient for each other class, in the order of classes. As in onnxruntime,
    sums are in float64.
    """
    others = len(sizes) - 1
    k, table = (op.Cast(v, to=DOUBLE) for v in (k, coefficients))
    table = op.Slice(table, [0], [others * sum(sizes)])
    table = op.Transpose(op.Reshape(table, [others, sum(sizes)]), perm=[1, 0])
    parts = op.split(k, list(sizes), 1)
    tables = op.split(table, list(sizes), 0)
    scores = op.Concat(*map(op.MatMul, parts, tables), axis=1)
    of_first = op.Gather(scores, [i * others + j - 1 for i, j in pairs], axis=1)
    of_second = op.Gather(scores, [j * others + i for i, j in pairs], axis=1)
    rho = op.Cast(_first_elements(op, rho, len(pairs)), to=DOUBLE)
    return op.Cast(of_first + of_second + rho, to=FLOAT)


def _class_of_most_votes(op: Any, raw: ir.Value, pairs: list, classes: int) -> ir.Value:
    """Return the class with most votes, the first of equals. A pair votes for i if its score is >
    0, else for j.
    """
    first, second = (
        np.eye(classes, dtype=np.float32)[list(side)] for side in zip(*pairs, strict=True)
    )
    votes = op.MatMul(op.Cast(op.Greater(raw, 0.0), to=FLOAT), first - second) + second.sum(0)
    return op.ArgMax(votes, axis=1, keepdims=0)
