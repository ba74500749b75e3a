"""Metrics batch by batch, against scikit-learn's, PyTorch's and torchmetrics' on all the data."""

from __future__ import annotations

import doctest
import importlib
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest

from onnxgrad.errors import EvaluationError
from onnxgrad.metrics.base import Metric, PredictionInfo
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
from onnxgrad.metrics.select import METRICS, select

ROWS = 203


def fed(metric: Metric, info: PredictionInfo, *arrays: np.ndarray | None):
    """Return the value after batches of uneven sizes, one empty, whose memory is used again."""
    metric.begin(info)
    cuts = [0, 3, 3, 50, 51, len(arrays[0])]
    for start, end in pairwise(cuts):
        batch = [None if a is None else a[start:end].copy() for a in arrays]
        metric.update(*batch)
        for array in batch:
            if array is not None:
                array[...] = 0
    return metric.compute()


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.fixture(params=["equal", "weighted"])
def weight(request) -> np.ndarray | None:
    return None if request.param == "equal" else np.random.default_rng(5).uniform(0, 3, ROWS)


@pytest.fixture
def sk():
    return pytest.importorskip("sklearn.metrics")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


# -- classes, against scikit-learn -----------------------------------------------------------------


def check_hard_labels(sk, info, true, predicted, average, arrays) -> None:
    """Compare all metrics of predicted classes with scikit-learn's."""
    w = {"sample_weight": arrays[2]}
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
            close(fed(metric, info, *arrays), expected)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("form", ["logits", "column", "one-hot", "soft", "float labels"])
def test_classes(average, form, weight, sk, rng):
    """Class 4 is never predicted, and class 5 occurs nowhere."""
    scores, true = rng.normal(size=(ROWS, 6)), rng.integers(0, 5, ROWS)
    scores[:, 4:] -= 100
    labels = {
        "column": true[:, None],
        "one-hot": np.eye(6, dtype=np.float32)[true],
        "soft": 0.9 * np.eye(6)[true] + 0.1 / 6,
        "float labels": true.astype(np.float64),
    }
    arrays = (scores.astype(np.float32), labels.get(form, true), weight)
    info = PredictionInfo(classes=6, from_logits=True)
    check_hard_labels(sk, info, true, scores.argmax(1), average, arrays)


@pytest.mark.parametrize("kind", [Precision, Recall, F1, IoU])
def test_each_class(kind, weight, sk, rng):
    """A class that is neither label nor prediction has no value; one that is only one has 0."""
    true, predicted = rng.choice([0, 1, 4], ROWS), rng.choice([0, 2, 4], ROWS)
    info = PredictionInfo(classes=6, from_logits=True)
    metric = kind("per_class")
    values = fed(metric, info, np.eye(6)[predicted], true, weight)
    names = {Precision: "precision", Recall: "recall", F1: "f1", IoU: "jaccard"}
    of_sklearn = getattr(sk, f"{names[kind]}_score")
    options = {"labels": range(6), "average": None, "sample_weight": weight, "zero_division": 0}
    expected = of_sklearn(true, predicted, **options)
    expected[[3, 5]] = np.nan
    close(values, expected)
    assert metric.name == f"{kind.name}_per_class"
    assert metric.higher_is_better is None
    assert isinstance(select(metric.name), kind)


@pytest.mark.parametrize("average", ["binary", "macro", "micro", "weighted"])
@pytest.mark.parametrize("form", ["logits", "probabilities", "column", "two columns", "signs"])
def test_two_classes(average, form, weight, sk, rng):
    score, true = rng.normal(size=ROWS), rng.integers(0, 2, ROWS)
    info, prediction, label = PredictionInfo(threshold=0.0, from_logits=True), score, true
    if form == "probabilities":
        info, prediction = PredictionInfo(threshold=0.5), 1 / (1 + np.exp(-score))
    elif form == "column":
        prediction = score[:, None]
    elif form == "two columns":
        info, prediction = PredictionInfo(classes=2), np.stack([-score, score], axis=1)
    elif form == "signs":
        label = 2 * true - 1
    check_hard_labels(sk, info, true, score > 0, average, (prediction, label, weight))


def test_classes_of_weight_zero(sk, rng):
    """Classes that occur with weight zero alone count as scikit-learn counts them."""
    scores, true = rng.normal(size=(ROWS, 4)), rng.integers(0, 4, ROWS)
    weight = np.where((true == 3) | (scores.argmax(1) == 3), 0.0, 1.0)
    info, arrays = PredictionInfo(classes=4), (scores, true, weight)
    check_hard_labels(sk, info, true, scores.argmax(1), "macro", arrays)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
@pytest.mark.parametrize("zero", [0.0, 1.0])
def test_zero_division(kind, zero, sk):
    """No row is of class 1, and none is predicted so."""
    true, score = np.zeros(ROWS, int), -np.ones(ROWS)
    function = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    expected = function[kind.name](true, score > 0, zero_division=zero)
    close(fed(kind(zero_division=zero), PredictionInfo(threshold=0.0), score, true), expected)


def test_confusion_matrix(weight, sk, rng):
    scores, true = rng.normal(size=(ROWS, 4)), rng.integers(0, 3, ROWS)
    actual = fed(ConfusionMatrix(), PredictionInfo(classes=4), scores, true, weight)
    options = {"labels": range(4), "sample_weight": weight}
    close(actual, sk.confusion_matrix(true, scores.argmax(1), **options))
    assert actual.dtype == (np.int64 if weight is None else np.float64)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k(k, weight, sk, rng):
    scores, true = rng.normal(size=(ROWS, 7)), rng.integers(0, 7, ROWS)
    options = {"k": k, "labels": range(7), "sample_weight": weight}
    expected = sk.top_k_accuracy_score(true, scores, **options)
    metric = select(f"top_{k}_accuracy")
    assert metric.name == f"top_{k}_accuracy"
    close(fed(metric, PredictionInfo(classes=7), scores, true, weight), expected)


def test_top_1_is_accuracy_also_of_equal_scores(rng):
    scores, true = rng.integers(0, 3, (ROWS, 4)), rng.integers(0, 4, ROWS)
    for info, prediction, label in (
        (PredictionInfo(classes=4), scores, true),
        (PredictionInfo(threshold=1.0), scores[:, 0], true > 1),
    ):
        expected = fed(Accuracy(), info, prediction, label)
        assert fed(TopK(1), info, prediction, label) == expected
    orders = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    expected = (orders == true[:, None]).any(axis=1).mean()
    close(fed(TopK(2), PredictionInfo(classes=4), scores, true), expected)


@pytest.mark.parametrize("form", ["probabilities", "logits", "column", "two columns", "two logits"])
@pytest.mark.parametrize("ties", [False, True])
def test_auc_of_two_classes(form, ties, weight, sk, rng):
    score = rng.normal(size=ROWS)
    score = score.round() / 2 if ties else score
    true = (rng.normal(size=ROWS) + score > 0).astype(np.int64)
    logits = "logits" in form
    info = PredictionInfo(threshold=0.0 if logits else 0.5, from_logits=logits)
    if form.startswith("two"):
        info = PredictionInfo(classes=2, from_logits=logits)
    prediction = score if logits else score / 8 + 0.5
    if form == "column":
        prediction = prediction[:, None]
    elif form == "two columns":
        prediction = np.stack([1 - prediction, prediction], axis=1)
    elif form == "two logits":
        prediction = np.stack([1 - score, 1 + score], axis=1)
    expected = sk.roc_auc_score(true, score, sample_weight=weight)
    close(fed(AUC(), info, prediction, true, weight), expected)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_auc_of_more_classes(logits, ties, weight, sk, rng):
    scores = rng.normal(size=(ROWS, 4))
    if ties:
        scores = np.sort(scores.round(), axis=1)  # equal rows have equal probabilities
    true = (scores + rng.normal(size=(ROWS, 4))).argmax(axis=1)
    expected = sk.roc_auc_score(true, softmax(scores), multi_class="ovr", sample_weight=weight)
    prediction = scores if logits else softmax(scores)
    info = PredictionInfo(classes=4, from_logits=logits)
    close(fed(AUC(), info, prediction, true, weight), expected)


def test_auc_without_a_class():
    with pytest.raises(ValueError, match="no labels with a weight above 0 are of class 1"):
        fed(AUC(), PredictionInfo(threshold=0.5), np.ones(60), np.zeros(60, int))
    with pytest.raises(ValueError, match=r"no labels .* of class 2"):
        fed(AUC(), PredictionInfo(classes=3), np.full((60, 3), 1 / 3), np.arange(60) % 2)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", ["probabilities", "logits", "one-hot"])
def test_log_loss(classes, dtype, form, weight, sk, rng):
    """Some probabilities are zero, which is clipped."""
    scores, true = rng.normal(size=(ROWS, classes)), rng.integers(0, classes, ROWS)
    probabilities = softmax(scores)
    if form != "logits":
        probabilities[:5] = np.eye(classes)[0]
        probabilities = probabilities.astype(dtype)
    options = {"labels": range(classes), "sample_weight": weight}
    expected = sk.log_loss(true, probabilities, **options)
    info = PredictionInfo(classes=classes, from_logits=form == "logits")
    label = np.eye(classes)[true] if form == "one-hot" else true
    actual = fed(LogLoss(), info, scores if form == "logits" else probabilities, label, weight)
    np.testing.assert_allclose(actual, expected, rtol=1e-12 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("signs", [False, True])
def test_log_loss_of_one_score(logits, signs, weight, sk, rng):
    score, true = rng.normal(size=ROWS) * 9, rng.integers(0, 2, ROWS)
    probability = 1 / (1 + np.exp(-score))
    if not logits:
        probability[:2] = 0, 1
    info = PredictionInfo(threshold=0.0 if logits else 0.5, from_logits=logits)
    label = 2 * true - 1 if signs else true
    actual = fed(LogLoss(), info, score if logits else probability, label, weight)
    expected = sk.log_loss(true, probability, sample_weight=weight)
    np.testing.assert_allclose(actual, expected, rtol=1e-12 if not logits else 1e-9)


def test_log_loss_of_large_logits():
    """As probabilities they would be zero."""
    one, two = PredictionInfo(threshold=0.0, from_logits=True), PredictionInfo(2, from_logits=True)
    assert fed(LogLoss(), one, np.full(60, -1e4), np.ones(60)) == 1e4
    close(fed(LogLoss(), two, np.tile([0.0, 1e4], (60, 1)), np.zeros(60, int)), 1e4)
    close(fed(LogLoss(), two, np.tile([0.0, -np.inf], (60, 1)), np.eye(2)[np.zeros(60, int)]), 0)


def test_log_loss_of_soft_labels(weight, rng):
    torch = pytest.importorskip("torch")
    scores, label = rng.normal(size=(ROWS, 4)), softmax(rng.normal(size=(ROWS, 4)))
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(scores), torch.tensor(label), reduction="none"
    )
    info = PredictionInfo(classes=4, from_logits=True)
    close(fed(LogLoss(), info, scores, label, weight), np.average(losses, weights=weight))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(scores), torch.tensor(label), reduction="none"
    )
    info = PredictionInfo(threshold=0.0, from_logits=True)
    expected = np.average(losses.mean(axis=1), weights=weight)
    close(fed(LogLoss(), info, scores, label, weight), expected)


def test_perplexity(weight, rng):
    torch = pytest.importorskip("torch")
    scores, true = rng.normal(size=(ROWS, 6, 11)), rng.integers(0, 11, (ROWS, 6))
    true[rng.uniform(size=true.shape) < 0.3] = -100
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(scores).mT, torch.tensor(true), ignore_index=-100, reduction="none"
    ).numpy()
    tokens = (true != -100) * (1 if weight is None else weight[:, None])
    expected = np.exp(np.average(losses, weights=tokens))
    options = {"classes": 11, "ignore_index": -100}
    logits = PredictionInfo(axis=2, from_logits=True, **options)
    close(fed(Perplexity(), logits, scores, true, weight), expected)
    second = PredictionInfo(axis=1, from_logits=True, **options)
    close(fed(Perplexity(), second, scores.swapaxes(1, 2), true, weight), expected)
    last = PredictionInfo(axis=-1, **options)
    close(fed(Perplexity(), last, softmax(scores), true[..., None], weight), expected)


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
        close(fed(metric, info, prediction, true, weight), expected)
        kept = np.expand_dims(true, axis)  # with the axis of classes
        close(fed(metric, info, prediction, kept, weight), expected)


def test_ignored_labels_of_two_classes(sk, rng):
    score, true = rng.normal(size=ROWS), rng.integers(-1, 2, ROWS)
    info = PredictionInfo(threshold=0.0, ignore_index=-1)
    keep = true >= 0
    close(fed(F1(), info, score, true), sk.f1_score(true[keep], score[keep] > 0))


def test_elements_of_several_scores_count_one_by_one(weight, sk, rng):
    score, true = rng.normal(size=(ROWS, 3)), rng.integers(0, 2, (ROWS, 3))
    w = None if weight is None else weight.repeat(3)
    expected = sk.f1_score(true.ravel(), score.ravel() > 0, sample_weight=w)
    close(fed(F1(), PredictionInfo(threshold=0.0), score, true, weight), expected)


# -- regression ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("kind", [MAE, MSE, RMSE, MAPE, R2])
def test_regression(kind, shape, weight, sk, rng):
    label = rng.normal(size=(ROWS, *shape)) + 20
    label[3] = 0  # for MAPE
    prediction = label + rng.normal(size=label.shape)
    function = {
        "mae": sk.mean_absolute_error,
        "mse": sk.mean_squared_error,
        "rmse": sk.root_mean_squared_error,
        "mape": sk.mean_absolute_percentage_error,
        "r2": sk.r2_score,
    }[kind.name]
    expected = function(label, prediction, sample_weight=weight)
    close(fed(kind(), PredictionInfo(), prediction, label, weight), expected)
    if shape == (1,):
        close(fed(kind(), PredictionInfo(), prediction, label[:, 0], weight), expected)


def test_r2_of_labels_far_from_zero(rng):
    """A sum of squares minus the square of the sum would have no digit left."""
    label = rng.integers(-8, 8, ROWS) / 8
    prediction = label + rng.integers(-8, 8, ROWS) / 32
    expected = fed(R2(), PredictionInfo(), prediction, label)
    close(fed(R2(), PredictionInfo(), prediction + 2.0**40, label + 2.0**40), expected)


def test_r2_of_constant_labels(sk):
    """Their mean may round; then scikit-learn divides by the square of the rounding error."""
    label = np.full(60, 0.1)
    assert fed(R2(), PredictionInfo(), label, label) == 1
    assert fed(R2(), PredictionInfo(), label + 1, label) == 0
    label = np.stack([np.full(60, 0.5), np.arange(60.0)], axis=1)
    close(fed(R2(), PredictionInfo(), label + 1, label), sk.r2_score(label, label + 1))


# -- other metrics ---------------------------------------------------------------------------------


def test_functions(weight, rng):
    prediction, label = rng.normal(size=(ROWS, 2)), rng.normal(size=ROWS)
    calls = []

    def first_column_error(prediction, label, sample_weight=None):
        calls.append(prediction.shape)
        return np.average(abs(prediction[:, 0] - label), weights=sample_weight)

    metric = select(first_column_error)
    actual = fed(metric, PredictionInfo(), prediction, label, weight)
    close(actual, np.average(abs(prediction[:, 0] - label), weights=weight))
    assert calls == [(ROWS, 2)]
    assert (metric.name, metric.higher_is_better) == ("first_column_error", False)
    assert FunctionMetric(np.max).higher_is_better is None
    assert FunctionMetric(np.max, "score", True).higher_is_better


def test_functions_without_weights():
    metric = select(lambda prediction, label: 0.0)
    metric.begin(PredictionInfo())
    with pytest.raises(ValueError, match="no parameter sample_weight"):
        metric.update(np.ones(2), np.ones(2), np.ones(2))


def test_functions_of_sklearn_have_another_order(sk):
    with pytest.raises(ValueError, match=r"r2_score\(label, prediction\)"):
        select(sk.r2_score)


def test_torchmetrics(rng):
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = torchmetrics.classification
    scores, true = rng.normal(size=(ROWS, 6, 3)), rng.integers(0, 3, (ROWS, 6))
    true[:, 0] = -100
    info = PredictionInfo(classes=3, axis=2, ignore_index=-100)
    witness = kinds.MulticlassF1Score(3, average="macro", ignore_index=-100)
    expected = fed(F1("macro"), info, scores, true)
    for label in (true, true[..., None].astype(np.float32)):
        metric = select(witness)
        np.testing.assert_allclose(fed(metric, info, scores, label), expected, rtol=1e-6)
    assert (metric.name, metric.higher_is_better) == ("MulticlassF1Score", True)
    with pytest.raises(ValueError, match="with ignore_index=-100"):
        fed(select(kinds.MulticlassAccuracy(3)), info, scores, true)
    matrix = fed(select(kinds.MulticlassConfusionMatrix(3)), PredictionInfo(3, 2), scores, true % 3)
    assert (matrix == fed(ConfusionMatrix(), PredictionInfo(3, 2), scores, true % 3)).all()
    score, label = rng.normal(size=ROWS), rng.integers(0, 2, (ROWS, 1)).astype(np.float32)
    one = PredictionInfo(threshold=0.5)
    expected = fed(Accuracy(), one, 1 / (1 + np.exp(-score)), label)
    actual = fed(select(kinds.BinaryAccuracy()), one, 1 / (1 + np.exp(-score)), label)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    metric = select(torchmetrics.MeanSquaredError())
    actual = fed(metric, PredictionInfo(), score[:, None], label)
    np.testing.assert_allclose(actual, fed(MSE(), PredictionInfo(), score, label), rtol=1e-6)
    with pytest.raises(ValueError, match="no sample weights"):
        metric.update(score, label, score)
    with pytest.raises(ValueError, match="one by one"):
        select(torchmetrics.MetricCollection([kinds.BinaryAccuracy()]))
    with pytest.raises(ValueError, match="nothing to compute"):
        fed(metric, PredictionInfo(), score[:0], label[:0])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_every_metric(name):
    """Each has a name of its own, refuses to compute nothing, and can be used again."""
    regression = isinstance(select(name), MAE)
    info = PredictionInfo() if regression else PredictionInfo(classes=2, from_logits=True)
    if name.startswith("top"):
        info = PredictionInfo(classes=9)
    elif name == "perplexity" or name.endswith("matrix"):
        info = PredictionInfo(classes=2)
    metric = select(name)
    assert metric.name == name
    assert select(metric) is metric
    with pytest.raises(EvaluationError, match="call begin first"):
        metric.compute()
    with pytest.raises(EvaluationError, match="call begin first"):
        metric.update(np.ones((2, 2)), np.ones(2))
    shape = (60,) if regression else (60, info.classes)
    rng = np.random.default_rng(0)
    prediction, label = softmax(rng.normal(size=shape)), rng.integers(0, 2, 60)
    for empty in ((prediction[:0], label[:0]), (prediction, label, np.zeros(60))):
        with pytest.raises(ValueError, match=name if name == "auc" else "nothing to compute"):
            fed(metric, info, *empty)
    value = fed(metric, info, prediction, label)
    assert np.all(value == fed(metric, info, prediction, label))
    assert np.all(pickle.loads(pickle.dumps(metric)).compute() == value)
    with pytest.raises(ValueError, match=f"'{name}': the prediction has NaN"):
        metric.update(np.full(shape, np.nan), label)
    with pytest.raises(ValueError, match="the label must be an array of numbers"):
        metric.update(prediction, np.full(60, "a"))
    with pytest.raises(ValueError, match=r"weights of 60 rows have shape \(60,\)"):
        metric.update(prediction, label, np.ones((60, 1)))
    with pytest.raises(ValueError, match="weights must be finite and 0 or more"):
        metric.update(prediction, label, np.full(60, -1))
    with pytest.raises(ValueError, match="labels of a prediction of shape"):
        metric.update(prediction, label[:7])
    if not regression:
        with pytest.raises(ValueError, match=f"'{name}' compares numbers of classes"):
            metric.begin(PredictionInfo())


def test_wrong_classes():
    metric = Accuracy()
    metric.begin(PredictionInfo(classes=3))
    scores = np.zeros((2, 3))
    with pytest.raises(ValueError, match="shares of the classes are from 0 to 1"):
        metric.update(scores, scores - 1)
    for label in ([0, 3], [0, -1], [0, 0.5]):
        with pytest.raises(ValueError, match="class indices must be integers from 0 to 2"):
            metric.update(scores, np.array(label))
    for wrong in (np.zeros((2, 4)), np.zeros(2)):
        with pytest.raises(ValueError, match="has no 3 classes along axis 1"):
            metric.update(wrong, np.zeros(2))
    metric.begin(PredictionInfo(threshold=0.0))
    for label in ([1, 2], [0, -1], [1, 1.5]):
        with pytest.raises(ValueError, match="labels of two classes"):
            metric.update(np.zeros(2), np.array(label))
    with pytest.raises(ValueError, match="use 'f1_macro'"):
        F1().begin(PredictionInfo(classes=3))
    with pytest.raises(ValueError, match="of 5 classes is always 1"):
        TopK(5).begin(PredictionInfo(classes=5))
    with pytest.raises(ValueError, match="score of one of two classes: use 'log_loss'"):
        Perplexity().begin(PredictionInfo(threshold=0.0))


def test_wrong_probabilities():
    metric = LogLoss()
    for info, scores in ((PredictionInfo(threshold=0.5), [2.0]), (PredictionInfo(2), [[-1, 2.0]])):
        metric.begin(info)
        with pytest.raises(ValueError, match="are these scores logits"):
            metric.update(np.array(scores), np.array([1]))
    with pytest.warns(UserWarning, match="do not add up to 1"):
        metric.update(np.array([[0.2, 0.2]]), np.array([1]))


def test_rows_of_another_size():
    metric = MAE()
    metric.begin(PredictionInfo())
    metric.update(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="a row has 4 numbers, earlier ones had 3"):
        metric.update(np.ones((2, 4)), np.ones((2, 4)))
    metric = R2()
    metric.begin(PredictionInfo())
    metric.update(np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="two rows or more"):
        metric.compute()


def test_select():
    with pytest.raises(ValueError, match="Did you mean 'accuracy'"):
        select("acuracy")
    with pytest.raises(ValueError, match=r"pass Accuracy\(\)"):
        select(Accuracy)
    with pytest.raises(ValueError, match="a metric is a name"):
        select(3)
    with pytest.raises(ValueError, match="Unknown average"):
        Precision("samples")
    for k in (0, 2.5, True):
        with pytest.raises(ValueError, match="k of TopK"):
            TopK(k)
    assert select("recall_micro") == Recall("micro")


@pytest.mark.parametrize(
    "name", ["base", "classification", "foreign", "probabilities", "regression", "select"]
)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"onnxgrad.metrics.{name}"))
    assert result.attempted
    assert not result.failed
