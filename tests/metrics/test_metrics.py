"""Metrics batch by batch, against scikit-learn's, PyTorch's and torchmetrics' on all the data."""

from __future__ import annotations

import doctest
import importlib
import pickle
import warnings

import numpy as np
import pytest

from onnxgrad.errors import EvaluationError
from onnxgrad.metrics.base import PredictionInfo
from onnxgrad.metrics.classification import (
    F1,
    Accuracy,
    BalancedAccuracy,
    ConfusionMatrix,
    IoU,
    Precision,
    Recall,
    TopK,
)
from onnxgrad.metrics.foreign import FunctionMetric
from onnxgrad.metrics.probabilities import AUC, LogLoss, Perplexity
from onnxgrad.metrics.regression import MAE, MAPE, MSE, R2, RMSE
from onnxgrad.metrics.select import METRICS, select_metric
from tests.support.errors import naming
from tests.support.metric_values import batched_value

ROWS = 203


def class_shares(scores: np.ndarray) -> np.ndarray:
    """Return the softmax along the last axis."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


WEIGHTS = {"equal": None, "weighted": np.random.default_rng(5).uniform(0, 3, ROWS)}


@pytest.fixture(params=WEIGHTS)
def row_weights(request) -> np.ndarray | None:
    return WEIGHTS[request.param]


@pytest.fixture
def sk():
    return pytest.importorskip("sklearn.metrics")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def assert_close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def assert_value(expected, metric, info, *arrays) -> None:
    """Compare with the value of the metric in batches."""
    assert_close(batched_value(metric, info, *arrays), expected)


# -- classes, against scikit-learn -----------------------------------------------------------------


def check_hard_labels(sk, info, true, predicted, average, forms, weight) -> None:
    """Compare all metrics of predicted classes with scikit-learn's, for forms of the arrays."""
    w = {"sample_weight": weight}
    options = w | {"average": average}
    with warnings.catch_warnings(action="ignore"):
        for metric, expected in (
            (Accuracy(), sk.accuracy_score(true, predicted, **w)),
            (BalancedAccuracy(), sk.balanced_accuracy_score(true, predicted, **w)),
            (Precision(average), sk.precision_score(true, predicted, **options)),
            (Recall(average), sk.recall_score(true, predicted, **options)),
            (F1(average), sk.f1_score(true, predicted, **options)),
            (IoU(average), sk.jaccard_score(true, predicted, **options)),
        ):
            for prediction, label in forms:
                assert_value(expected, metric, info, prediction, label, weight)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_classes(average, row_weights, sk, rng):
    """Class 4 is never predicted, and class 5 occurs nowhere."""
    scores, true = rng.normal(size=(ROWS, 6)), rng.integers(0, 5, ROWS)
    scores[:, 4:] -= 100
    column, one_hot = true[:, None], np.eye(6, dtype=np.float32)[true]
    soft = 0.9 * np.eye(6)[true] + 0.1 / 6
    labels = (true, column, one_hot, soft, true.astype(np.float64))
    forms = [(scores.astype(np.float32), label) for label in labels]
    info = PredictionInfo(classes=6, from_logits=True)
    check_hard_labels(sk, info, true, scores.argmax(1), average, forms, row_weights)


@pytest.mark.parametrize("kind", [Precision, Recall, F1, IoU])
def test_each_class(kind, row_weights, sk, rng):
    """A class that is neither label nor prediction has no value; one that is only one has 0."""
    true, predicted = rng.choice([0, 1, 4], ROWS), rng.choice([0, 2, 4], ROWS)
    info = PredictionInfo(classes=6, from_logits=True)
    metric = kind("per_class")
    values = batched_value(metric, info, np.eye(6)[predicted], true, row_weights)
    names = {Precision: "precision", Recall: "recall", F1: "f1", IoU: "jaccard"}
    of_sklearn = getattr(sk, f"{names[kind]}_score")
    options = {
        "labels": range(6),
        "average": None,
        "sample_weight": row_weights,
        "zero_division": 0,
    }
    expected = of_sklearn(true, predicted, **options)
    expected[[3, 5]] = np.nan
    assert_close(values, expected)
    assert metric.name == f"{kind.name}_per_class"
    assert metric.higher_is_better is None
    assert isinstance(select_metric(metric.name), kind)


@pytest.mark.parametrize("average", ["binary", "macro", "micro", "weighted"])
def test_two_classes(average, row_weights, sk, rng):
    """Scores, columns of them, labels that are signs, probabilities, and a score for each class."""
    score, true = rng.normal(size=ROWS), rng.integers(0, 2, ROWS)
    logits = [(score, true), (score[:, None], true), (score, 2 * true - 1)]
    for info, forms in (
        (PredictionInfo(threshold=0.0, from_logits=True), logits),
        (PredictionInfo(threshold=0.5), [(1 / (1 + np.exp(-score)), true)]),
        (PredictionInfo(classes=2), [(np.stack([-score, score], axis=1), true)]),
    ):
        check_hard_labels(sk, info, true, score > 0, average, forms, row_weights)


def test_classes_of_weight_zero(sk, rng):
    """Classes that occur with weight zero alone count as scikit-learn counts them."""
    scores, true = rng.normal(size=(ROWS, 4)), rng.integers(0, 4, ROWS)
    weight = np.where((true == 3) | (scores.argmax(1) == 3), 0.0, 1.0)
    info, forms = PredictionInfo(classes=4), [(scores, true)]
    check_hard_labels(sk, info, true, scores.argmax(1), "macro", forms, weight)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
@pytest.mark.parametrize("zero", [0.0, 1.0])
def test_zero_division(kind, zero, sk):
    """No row is of class 1, and none is predicted so."""
    true, score = np.zeros(ROWS, int), -np.ones(ROWS)
    function = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    expected = function[kind.name](true, score > 0, zero_division=zero)
    assert_value(expected, kind(zero_division=zero), PredictionInfo(threshold=0.0), score, true)


def test_confusion_matrix(row_weights, sk, rng):
    scores, true = rng.normal(size=(ROWS, 4)), rng.integers(0, 3, ROWS)
    actual = batched_value(ConfusionMatrix(), PredictionInfo(classes=4), scores, true, row_weights)
    options = {"labels": range(4), "sample_weight": row_weights}
    assert_close(actual, sk.confusion_matrix(true, scores.argmax(1), **options))
    assert actual.dtype == (np.int64 if row_weights is None else np.float64)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k(k, row_weights, sk, rng):
    scores, true = rng.normal(size=(ROWS, 7)), rng.integers(0, 7, ROWS)
    options = {"k": k, "labels": range(7), "sample_weight": row_weights}
    expected = sk.top_k_accuracy_score(true, scores, **options)
    metric = select_metric(f"top_{k}_accuracy")
    assert metric.name == f"top_{k}_accuracy"
    assert_value(expected, metric, PredictionInfo(classes=7), scores, true, row_weights)


def test_top_1_is_accuracy_also_of_equal_scores(rng):
    scores, true = rng.integers(0, 3, (ROWS, 4)), rng.integers(0, 4, ROWS)
    for info, prediction, label in (
        (PredictionInfo(classes=4), scores, true),
        (PredictionInfo(threshold=1.0), scores[:, 0], true > 1),
    ):
        expected = batched_value(Accuracy(), info, prediction, label)
        assert batched_value(TopK(1), info, prediction, label) == expected
    orders = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    expected = (orders == true[:, None]).any(axis=1).mean()
    assert_value(expected, TopK(2), PredictionInfo(classes=4), scores, true)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_of_two_classes(ties, row_weights, sk, rng):
    score = rng.normal(size=ROWS)
    score = score.round() / 2 if ties else score
    true = (rng.normal(size=ROWS) + score > 0).astype(np.int64)
    expected = sk.roc_auc_score(true, score, sample_weight=row_weights)
    p = score / 8 + 0.5
    for info, prediction in (
        (PredictionInfo(threshold=0.0, from_logits=True), score),
        (PredictionInfo(threshold=0.5), p),
        (PredictionInfo(threshold=0.5), p[:, None]),
        (PredictionInfo(classes=2), np.stack([1 - p, p], axis=1)),
        (PredictionInfo(classes=2, from_logits=True), np.stack([1 - score, 1 + score], axis=1)),
    ):
        assert_value(expected, AUC(), info, prediction, true, row_weights)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_auc_of_more_classes(logits, ties, row_weights, sk, rng):
    scores = rng.normal(size=(ROWS, 4))
    if ties:
        scores = np.sort(scores.round(), axis=1)  # equal rows have equal probabilities
    true = (scores + rng.normal(size=(ROWS, 4))).argmax(axis=1)
    expected = sk.roc_auc_score(
        true, class_shares(scores), multi_class="ovr", sample_weight=row_weights
    )
    prediction = scores if logits else class_shares(scores)
    info = PredictionInfo(classes=4, from_logits=logits)
    assert_value(expected, AUC(), info, prediction, true, row_weights)


def test_auc_without_a_class():
    with pytest.raises(ValueError, match=r"weight above 0.*class 1"):
        batched_value(AUC(), PredictionInfo(threshold=0.5), np.ones(60), np.zeros(60, int))
    with pytest.raises(ValueError, match=naming("of class 2", "evaluate rows")):
        batched_value(AUC(), PredictionInfo(classes=3), np.full((60, 3), 1 / 3), np.arange(60) % 2)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", ["probabilities", "logits", "one-hot"])
def test_log_loss(classes, dtype, form, row_weights, sk, rng):
    """Some probabilities are zero, which is clipped."""
    scores, true = rng.normal(size=(ROWS, classes)), rng.integers(0, classes, ROWS)
    probabilities = class_shares(scores)
    if form != "logits":
        probabilities[:5] = np.eye(classes)[0]
        probabilities = probabilities.astype(dtype)
    options = {"labels": range(classes), "sample_weight": row_weights}
    expected = sk.log_loss(true, probabilities, **options)
    info = PredictionInfo(classes=classes, from_logits=form == "logits")
    label = np.eye(classes)[true] if form == "one-hot" else true
    actual = batched_value(
        LogLoss(), info, scores if form == "logits" else probabilities, label, row_weights
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-12 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("signs", [False, True])
def test_log_loss_of_one_score(logits, signs, row_weights, sk, rng):
    score, true = rng.normal(size=ROWS) * 9, rng.integers(0, 2, ROWS)
    probability = 1 / (1 + np.exp(-score))
    if not logits:
        probability[:2] = 0, 1
    info = PredictionInfo(threshold=0.0 if logits else 0.5, from_logits=logits)
    label = 2 * true - 1 if signs else true
    actual = batched_value(LogLoss(), info, score if logits else probability, label, row_weights)
    expected = sk.log_loss(true, probability, sample_weight=row_weights)
    np.testing.assert_allclose(actual, expected, rtol=1e-12 if not logits else 1e-9)


def test_log_loss_of_large_logits():
    """As probabilities they would be zero."""
    one, two = PredictionInfo(threshold=0.0, from_logits=True), PredictionInfo(2, from_logits=True)
    assert batched_value(LogLoss(), one, np.full(60, -1e4), np.ones(60)) == 1e4
    assert_value(1e4, LogLoss(), two, np.tile([0.0, 1e4], (60, 1)), np.zeros(60, int))
    assert_value(0, LogLoss(), two, np.tile([0.0, -np.inf], (60, 1)), np.eye(2)[np.zeros(60, int)])


def test_log_loss_of_soft_labels(row_weights, rng):
    torch = pytest.importorskip("torch")
    scores, label = rng.normal(size=(ROWS, 4)), class_shares(rng.normal(size=(ROWS, 4)))
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(scores), torch.tensor(label), reduction="none"
    )
    info = PredictionInfo(classes=4, from_logits=True)
    expected = np.average(losses, weights=row_weights)
    assert_value(expected, LogLoss(), info, scores, label, row_weights)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(scores), torch.tensor(label), reduction="none"
    )
    info = PredictionInfo(threshold=0.0, from_logits=True)
    expected = np.average(losses.mean(axis=1), weights=row_weights)
    assert_value(expected, LogLoss(), info, scores, label, row_weights)


def test_perplexity(row_weights, rng):
    torch = pytest.importorskip("torch")
    scores, true = rng.normal(size=(ROWS, 6, 11)), rng.integers(0, 11, (ROWS, 6))
    true[rng.uniform(size=true.shape) < 0.3] = -100
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(scores).mT, torch.tensor(true), ignore_index=-100, reduction="none"
    ).numpy()
    tokens = (true != -100) * (1 if row_weights is None else row_weights[:, None])
    expected = np.exp(np.average(losses, weights=tokens))
    options = {"classes": 11, "ignore_index": -100}
    logits = PredictionInfo(axis=2, from_logits=True, **options)
    assert_value(expected, Perplexity(), logits, scores, true, row_weights)
    second = PredictionInfo(axis=1, from_logits=True, **options)
    assert_value(expected, Perplexity(), second, scores.swapaxes(1, 2), true, row_weights)
    last = PredictionInfo(axis=-1, **options)
    assert_value(expected, Perplexity(), last, class_shares(scores), true[..., None], row_weights)


# -- shapes and ignored labels ---------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_segmentation(axis, sk, rng):
    """Pixels of the ignored label are dropped, and a weight counts for all pixels of its row."""
    true, weight = rng.integers(0, 3, (60, 4, 5)), rng.uniform(size=60)
    scores = rng.normal(size=(60, 4, 5, 3)) + np.eye(3)[true]
    true[rng.uniform(size=true.shape) < 0.2] = 255
    keep, pixels = true != 255, np.broadcast_to(weight[:, None, None], true.shape)
    predicted = scores.argmax(axis=-1)
    w = {"sample_weight": pixels[keep]}
    info = PredictionInfo(classes=3, axis=axis, ignore_index=255)
    prediction = np.moveaxis(scores, -1, axis)
    for metric, expected in (
        (IoU(), sk.jaccard_score(true[keep], predicted[keep], average="macro", **w)),
        (Accuracy(), sk.accuracy_score(true[keep], predicted[keep], **w)),
        (F1("micro"), sk.f1_score(true[keep], predicted[keep], average="micro", **w)),
    ):
        assert_value(expected, metric, info, prediction, true, weight)
        kept = np.expand_dims(true, axis)  # with the axis of classes
        assert_value(expected, metric, info, prediction, kept, weight)


def test_ignored_labels_of_two_classes(sk, rng):
    score, true = rng.normal(size=ROWS), rng.integers(-1, 2, ROWS)
    info = PredictionInfo(threshold=0.0, ignore_index=-1)
    keep = true >= 0
    assert_value(sk.f1_score(true[keep], score[keep] > 0), F1(), info, score, true)


def test_elements_of_several_scores_count_one_by_one(row_weights, sk, rng):
    score, true = rng.normal(size=(ROWS, 3)), rng.integers(0, 2, (ROWS, 3))
    w = None if row_weights is None else row_weights.repeat(3)
    expected = sk.f1_score(true.ravel(), score.ravel() > 0, sample_weight=w)
    assert_value(expected, F1(), PredictionInfo(threshold=0.0), score, true, row_weights)


# -- regression ------------------------------------------------------------------------------------


SKLEARN_NAMES = {
    MAE: "mean_absolute_error",
    MSE: "mean_squared_error",
    RMSE: "root_mean_squared_error",
    MAPE: "mean_absolute_percentage_error",
    R2: "r2_score",
}


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("kind", SKLEARN_NAMES)
def test_regression(kind, shape, row_weights, sk, rng):
    label = rng.normal(size=(ROWS, *shape)) + 20
    label[3] = 0  # for MAPE
    prediction = label + rng.normal(size=label.shape)
    function = getattr(sk, SKLEARN_NAMES[kind])
    expected = function(label, prediction, sample_weight=row_weights)
    assert_value(expected, kind(), PredictionInfo(), prediction, label, row_weights)
    if shape == (1,):
        assert_value(expected, kind(), PredictionInfo(), prediction, label[:, 0], row_weights)


def test_r2_of_labels_far_from_zero(rng):
    """A sum of squares minus the square of the sum would have no digit left."""
    label = rng.integers(-8, 8, ROWS) / 8
    prediction = label + rng.integers(-8, 8, ROWS) / 32
    expected = batched_value(R2(), PredictionInfo(), prediction, label)
    assert_value(expected, R2(), PredictionInfo(), prediction + 2.0**40, label + 2.0**40)


def test_r2_of_constant_labels(sk):
    """Their mean may round; then scikit-learn divides by the square of the rounding error."""
    label = np.full(60, 0.1)
    assert batched_value(R2(), PredictionInfo(), label, label) == 1
    assert batched_value(R2(), PredictionInfo(), label + 1, label) == 0
    label = np.stack([np.full(60, 0.5), np.arange(60.0)], axis=1)
    assert_value(sk.r2_score(label, label + 1), R2(), PredictionInfo(), label + 1, label)


# -- other metrics ---------------------------------------------------------------------------------


def test_functions(row_weights, rng):
    prediction, label = rng.normal(size=(ROWS, 2)), rng.normal(size=ROWS)
    calls = []

    def first_column_error(prediction, label, sample_weight=None):
        calls.append(prediction.shape)
        return np.average(abs(prediction[:, 0] - label), weights=sample_weight)

    metric = select_metric(first_column_error)
    actual = batched_value(metric, PredictionInfo(), prediction, label, row_weights)
    assert_close(actual, np.average(abs(prediction[:, 0] - label), weights=row_weights))
    assert calls == [(ROWS, 2)]
    assert (metric.name, metric.higher_is_better) == ("first_column_error", False)
    assert FunctionMetric(np.max).higher_is_better is None
    assert FunctionMetric(np.max, "score", True).higher_is_better


def test_functions_without_weights():
    metric = select_metric(lambda prediction, label: 0.0)
    metric.begin(PredictionInfo())
    with pytest.raises(ValueError, match=naming("sample_weight", "leave out")):
        metric.update(np.ones(2), np.ones(2), np.ones(2))


def test_functions_of_sklearn_have_another_order(sk):
    with pytest.raises(ValueError, match=r"r2_score\(label, prediction\)"):
        select_metric(sk.r2_score)


def test_torchmetrics(rng):
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = torchmetrics.classification
    scores, true = rng.normal(size=(ROWS, 6, 3)), rng.integers(0, 3, (ROWS, 6))
    true[:, 0] = -100
    info = PredictionInfo(classes=3, axis=2, ignore_index=-100)
    witness = kinds.MulticlassF1Score(3, average="macro", ignore_index=-100)
    expected = batched_value(F1("macro"), info, scores, true)
    for label in (true, true[..., None].astype(np.float32)):
        metric = select_metric(witness)
        np.testing.assert_allclose(batched_value(metric, info, scores, label), expected, rtol=1e-6)
    assert (metric.name, metric.higher_is_better) == ("MulticlassF1Score", True)
    with pytest.raises(ValueError, match="with ignore_index=-100"):
        batched_value(select_metric(kinds.MulticlassAccuracy(3)), info, scores, true)
    matrix = batched_value(
        select_metric(kinds.MulticlassConfusionMatrix(3)), PredictionInfo(3, 2), scores, true % 3
    )
    assert (
        matrix == batched_value(ConfusionMatrix(), PredictionInfo(3, 2), scores, true % 3)
    ).all()
    score, label = rng.normal(size=ROWS), rng.integers(0, 2, (ROWS, 1)).astype(np.float32)
    one = PredictionInfo(threshold=0.5)
    expected = batched_value(Accuracy(), one, 1 / (1 + np.exp(-score)), label)
    actual = batched_value(
        select_metric(kinds.BinaryAccuracy()), one, 1 / (1 + np.exp(-score)), label
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    metric = select_metric(torchmetrics.MeanSquaredError())
    actual = batched_value(metric, PredictionInfo(), score[:, None], label)
    expected = batched_value(MSE(), PredictionInfo(), score, label)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=naming("sample weights")):
        metric.update(score, label, score)
    with pytest.raises(ValueError, match=naming("MetricCollection", "one by")):
        select_metric(torchmetrics.MetricCollection([kinds.BinaryAccuracy()]))
    with pytest.raises(ValueError, match=naming("MeanSquaredError", "compute")):
        batched_value(metric, PredictionInfo(), score[:0], label[:0])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_every_metric(name):
    """Each has a name of its own, refuses to compute nothing, and can be used again."""
    regression = isinstance(select_metric(name), MAE)
    info = PredictionInfo() if regression else PredictionInfo(classes=2, from_logits=True)
    if name.startswith("top"):
        info = PredictionInfo(classes=9)
    elif name == "perplexity" or name.endswith("matrix"):
        info = PredictionInfo(classes=2)
    metric = select_metric(name)
    assert metric.name == name
    assert select_metric(metric) is metric
    with pytest.raises(EvaluationError, match=naming(name, "begin")):
        metric.compute()
    with pytest.raises(EvaluationError, match=naming(name, "begin")):
        metric.update(np.ones((2, 2)), np.ones(2))
    shape = (60,) if regression else (60, info.classes)
    rng = np.random.default_rng(0)
    prediction, label = class_shares(rng.normal(size=shape)), rng.integers(0, 2, 60)
    for empty in ((prediction[:0], label[:0]), (prediction, label, np.zeros(60))):
        with pytest.raises(ValueError, match=name):
            batched_value(metric, info, *empty)
    value = batched_value(metric, info, prediction, label)
    assert np.all(value == batched_value(metric, info, prediction, label))
    assert np.all(pickle.loads(pickle.dumps(metric)).compute() == value)
    ones = np.ones(60)
    for arrays, parts in (
        ((np.full(shape, np.nan), label), ("prediction", "NaN")),
        ((prediction, np.full(60, "a")), ("label", "numbers")),
        ((prediction, label, ones[:, None]), ("weights", "60 rows", "(60,)")),
        ((prediction, label, -ones), ("weights", "finite")),
        ((prediction, label[:7]), ("labels", "shape")),
    ):
        with pytest.raises(ValueError, match=naming(name, *parts)):
            metric.update(*arrays)
    if not regression:
        with pytest.raises(ValueError, match=naming(name, "classes")):
            metric.begin(PredictionInfo())


def test_wrong_classes():
    three, two = PredictionInfo(classes=3), PredictionInfo(threshold=0.0)
    scores, column = np.zeros((2, 3)), np.zeros(2)
    for info, prediction, label, message in (
        (three, scores, scores - 1, r"soft labels.*from 0 to 1"),
        *((three, scores, label, r"indices.*from 0 to 2") for label in ([0, 3], [0, -1], [0, 0.5])),
        *((three, wrong, column, r"3 classes.*axis 1") for wrong in (np.zeros((2, 4)), column)),
        *((two, column, label, "two classes") for label in ([1, 2], [0, -1], [1, 1.5])),
    ):
        metric = Accuracy()
        metric.begin(info)
        with pytest.raises(ValueError, match=message):
            metric.update(prediction, np.array(label))
    for metric, info, parts in (
        (F1(), three, ("'f1_macro'",)),
        (TopK(5), PredictionInfo(classes=5), ("top_5", "5 classes")),
        (Perplexity(), two, ("'log_loss'",)),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            metric.begin(info)


def test_wrong_probabilities():
    metric = LogLoss()
    for info, scores in ((PredictionInfo(threshold=0.5), [2.0]), (PredictionInfo(2), [[-1, 2.0]])):
        metric.begin(info)
        with pytest.raises(ValueError, match=naming("'log_loss'", "from 0 to 1", "from_logits")):
            metric.update(np.array(scores), np.array([1]))
    with pytest.warns(UserWarning, match=r"add up.* 1"):
        metric.update(np.array([[0.2, 0.2]]), np.array([1]))


def test_rows_of_another_size():
    metric = MAE()
    metric.begin(PredictionInfo())
    metric.update(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match=naming("'mae'", "4 numbers", "had 3", "one width")):
        metric.update(np.ones((2, 4)), np.ones((2, 4)))
    metric = R2()
    metric.begin(PredictionInfo())
    metric.update(np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match=naming("'r2'", "two rows", "more rows")):
        metric.compute()


def test_select():
    for wrong, message in (
        ("acuracy", r"acuracy.*'accuracy'"),
        (Accuracy, r"Accuracy is a class: pass an object, Accuracy\(\)"),
        (3, r"metric.*name.*3"),
    ):
        with pytest.raises(ValueError, match=message):
            select_metric(wrong)
    with pytest.raises(ValueError, match="Unknown average"):
        Precision("samples")
    for k in (0, 2.5, True):
        with pytest.raises(ValueError, match="k of TopK"):
            TopK(k)
    assert select_metric("recall_micro") == Recall("micro")


@pytest.mark.parametrize(
    "name", ["base", "classification", "foreign", "probabilities", "regression", "select"]
)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"onnxgrad.metrics.{name}"))
    assert result.attempted
    assert not result.failed
