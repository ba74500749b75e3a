"""Metrics that compare the predicted class with the class of the label.

Examples:
    >>> import numpy as np
    >>> from onnxgrad.metrics.base import PredictionInfo
    >>> from onnxgrad.metrics.select import select_metric
    >>> for name in ("accuracy", "balanced_accuracy", "precision", "recall_macro", "f1", "iou"):
    ...     metric = select_metric(name)
    ...     metric.begin(PredictionInfo(threshold=0.5))
    ...     metric.update(np.array([0.9, 0.9, 0.9, 0.1]), np.array([1, 1, 0, 0]))
    ...     print(name, round(metric.compute(), 4))
    accuracy 0.75
    balanced_accuracy 0.75
    precision 0.6667
    recall_macro 0.75
    f1 0.8
    iou 0.5833
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.errors import unknown
from onnxgrad.metrics.base import PredictionInfo, no_rows_error
from onnxgrad.metrics.metric_batch import ClassMetric, MeanMetric, Rows

AVERAGES = ("binary", "macro", "micro", "weighted", "per_class")


@dataclass
class Accuracy(MeanMetric):
    """Accuracy: share of the labels that are equal to the predicted class.

    If the prediction is a score of one of two classes, each of its elements counts as one.
    """

    name = "accuracy"

    def values(self, rows: Rows) -> np.ndarray:
        """Return for each row whether the predicted class is the label."""
        return rows.predicted_classes(self.info) == rows.true_classes


@dataclass
class TopK(Accuracy):
    """Share of the labels whose class is among the `k` classes of the highest scores.

    Of equal scores, the score of the lower class index counts as higher, as in `Accuracy`.

    Args:
        k: number of classes, as in the `name` "top_5_accuracy".

    Raises:
        ValueError: `k` is below 1 or, in `begin`, not below the number of classes.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.classification import TopK
        >>> metric = TopK(2)
        >>> metric.begin(PredictionInfo(classes=3))
        >>> metric.update(np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.array([1, 2]))
        >>> metric.name, metric.compute()
        ('top_2_accuracy', 0.5)
    """

    k: int = 5

    def __post_init__(self) -> None:
        check_count("k of TopK", self.k)
        self.name = f"top_{self.k}_accuracy"

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        if self.k >= self.n_classes:
            raise ValueError(
                f"metric {self.name!r} of {self.n_classes} classes is always 1: choose a lower k"
            )

    def values(self, rows: Rows) -> np.ndarray:
        """Return for each row whether its label is among the k classes with the highest scores."""
        if rows.scores.ndim == 1:  # one score for two classes, so that k is 1
            return super().values(rows)
        true = rows.true_classes[:, None]
        score = np.take_along_axis(rows.scores, true, axis=1)
        before = (rows.scores == score) & (np.arange(rows.scores.shape[1]) < true)
        return ((rows.scores > score) | before).sum(axis=1) < self.k


class CountMetric(ClassMetric):
    """Base of metrics from weighted counts of labels, predictions and hits of each class."""

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._hit, self._predicted, self._true = np.zeros((3, self.n_classes))
        # mask of the classes that occur as prediction or label, even with weight 0
        self._present = np.zeros(self.n_classes, bool)

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch to the counts."""
        predicted, true, weight = rows.predicted_classes(self.info), rows.true_classes, rows.weight
        hit, n = predicted == true, self.n_classes
        self._hit += np.bincount(true[hit], None if weight is None else weight[hit], n)
        self._predicted += np.bincount(predicted, weight, n)
        self._true += np.bincount(true, weight, n)
        self._present[predicted] = self._present[true] = True

    def _raise_if_no_labels(self) -> None:
        """Raise `ValueError` if the weights of all labels are 0, or there are no labels."""
        self.check_begun()
        if not self._true.any():
            raise no_rows_error(self.name)


@dataclass
class BalancedAccuracy(CountMetric):
    """Mean recall of the classes that occur as labels."""

    name = "balanced_accuracy"

    def compute(self) -> float:
        """Return the mean recall over all batches."""
        self._raise_if_no_labels()
        labels = self._true > 0
        return float((self._hit[labels] / self._true[labels]).mean())


@dataclass
class Precision(CountMetric):
    """Precision: share of the predictions of a class that are right, hits / predictions.

    As scikit-learn's `precision_score`, averages are over the classes that occur as label or
    prediction.

    Args:
        average: "binary": the value of class 1 of two; "macro": the mean over the classes;
            "weighted": the mean weighted by the labels of each class; "micro": hits and predictions
            of all classes added up; "per_class": an array (classes,) of the value of each class,
            NaN where a class is neither label nor prediction. The name ends with the average, as
            "precision_macro", unless it is the default.
        zero_division: the value of a class that is never predicted.

    Raises:
        ValueError: an unknown average or, in `begin`, "binary" for more than two classes.
    """

    average: str = "binary"
    zero_division: float = 0.0
    name = "precision"

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise unknown(f"average of metric {self.name!r}", self.average, AVERAGES)
        if self.average != type(self).average:
            self.name = f"{type(self).name}_{self.average}"
        if self.average == "per_class":
            self.higher_is_better = None

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        if self.average == "binary" and self.n_classes != 2:
            kind = type(self).name
            raise ValueError(
                f"metric {self.name!r} is the value of class 1 of two classes, and the prediction "
                "has "
                f"{self.n_classes} classes: use '{kind}_macro', '{kind}_micro' or '{kind}_weighted'"
            )

    def compute(self) -> float | np.ndarray:
        """Return the average of the metric over classes, or its value for each class."""
        self._raise_if_no_labels()
        parts = np.stack(self._numerator_and_denominator())
        if self.average == "binary":
            return float(self._divide_counts(parts[:, 1:])[0])
        if self.average == "micro":
            return float(self._divide_counts(parts.sum(axis=1, keepdims=True))[0])
        if self.average == "per_class":
            return np.where(self._present, self._divide_counts(parts), np.nan)
        weights = self._true if self.average == "weighted" else self._present
        return float(np.average(self._divide_counts(parts), weights=weights))

    def _divide_counts(self, parts: np.ndarray) -> np.ndarray:
        """Return `parts[0] / parts[1]` for each class, and `zero_division` for classes where
        `parts[1]` is 0.
        """
        empty = np.full(parts.shape[1], float(self.zero_division))
        return np.divide(parts[0], parts[1], out=empty, where=parts[1] != 0)

    def _numerator_and_denominator(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two counts of each class, whose quotient is the metric of the class."""
        return self._hit, self._predicted


@dataclass
class Recall(Precision):
    """Recall: share of the labels of a class that are predicted, hits / labels.

    As scikit-learn's `recall_score`; arguments and errors as in `Precision`.
    """

    name = "recall"

    def _numerator_and_denominator(self) -> tuple[np.ndarray, np.ndarray]:
        return self._hit, self._true


@dataclass
class F1(Precision):
    """Harmonic mean of precision and recall: 2 hits / (predictions + labels).

    As scikit-learn's `f1_score`; arguments and errors as in `Precision`.
    """

    name = "f1"

    def _numerator_and_denominator(self) -> tuple[np.ndarray, np.ndarray]:
        return 2 * self._hit, self._predicted + self._true


@dataclass
class IoU(Precision):
    """Intersection over union (Jaccard): hits / (predictions + labels - hits).

    As scikit-learn's `jaccard_score`, by default its mean over the classes that occur; the other
    arguments and the errors as in `Precision`.
    """

    average: str = "macro"
    name = "iou"

    def _numerator_and_denominator(self) -> tuple[np.ndarray, np.ndarray]:
        return self._hit, self._predicted + self._true - self._hit


@dataclass
class ConfusionMatrix(ClassMetric):
    """Number of rows of class i that are predicted as class j, (classes, classes).

    The weight of these rows, if any batch has weights.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.classification import ConfusionMatrix
        >>> matrix = ConfusionMatrix()
        >>> matrix.begin(PredictionInfo(threshold=0.5))
        >>> matrix.update(np.array([0.9, 0.9, 0.9, 0.1]), np.array([1, 1, 0, 0]))
        >>> matrix.compute()
        array([[1, 1],
               [0, 2]])
    """

    name = "confusion_matrix"
    higher_is_better = None

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._matrix = np.zeros((self.n_classes, self.n_classes), np.int64)

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch to the counts."""
        n = self.n_classes
        cells = rows.true_classes * n + rows.predicted_classes(self.info)
        self._matrix = self._matrix + np.bincount(cells, rows.weight, n * n).reshape(n, n)

    def compute(self) -> np.ndarray:
        """Return the confusion matrix of all batches."""
        self.check_begun()
        if not self._matrix.any():
            raise no_rows_error(self.name)
        return self._matrix.copy()
