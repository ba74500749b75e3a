"""Batches of any shape as rows of predictions and labels, and base classes of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnxgrad.data.class_numbers import mask_labels_outside
from onnxgrad.metrics.base import Metric, PredictionInfo, RunningMean


class Rows(NamedTuple):
    """Class scores, labels and sample weights of rows, without the rows whose label is ignored.

    Attributes:
        scores: (rows, classes), or (rows,) for scores of one of two classes.
        label: class indices (rows,), or shares of the classes: (rows, classes), or (rows,) with the
            share of the second of two classes.
        weight: sample weights (rows,) in float64, or None.
    """

    scores: np.ndarray
    label: np.ndarray
    weight: np.ndarray | None

    @property
    def true_classes(self) -> np.ndarray:
        """Class indices of the labels; for soft labels, the class of the largest share."""
        if self.scores.ndim == 1:
            return (self.label > 0.5).astype(np.int64)
        return self.label.argmax(axis=1) if self.label.ndim == 2 else self.label

    def predicted_classes(self, info: PredictionInfo) -> np.ndarray:
        """Class indices of the predictions: the class of the largest score, or 1 for a score above
        the threshold.
        """
        if self.scores.ndim == 1:
            return (self.scores > info.threshold).astype(np.int64)
        return self.scores.argmax(axis=1)


@dataclass
class MetricBatch:
    """A batch of predictions, labels and sample weights, checked for the metric `name`, which error
    messages state.

    Raises:
        ValueError: arrays that are not numbers or do not fit, and NaN.
    """

    name: str
    info: PredictionInfo
    prediction: np.ndarray
    label: np.ndarray
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.prediction = self._check_numbers("prediction", self.prediction)
        self.label = self._check_numbers("label", self.label, self.info.ignore_nan)

    def class_rows(self) -> Rows:
        """Return the batch as rows of class scores and labels."""
        info = self.info
        if info.classes is None:
            self._require_equal_shapes()
            scores, label = self.prediction.reshape(-1), self.label.reshape(-1)
        else:
            scores, label = self._flat_scores_and_labels()
        weight = self._weights_of_predictions(len(scores))
        if label.ndim == 1 and (info.ignore_index is not None or info.ignore_nan):
            keep = ~np.isnan(label) if info.ignore_nan else label != info.ignore_index
            if not keep.all():
                scores, label = scores[keep], label[keep]
                weight = None if weight is None else weight[keep]
        return Rows(scores, self._check_class_labels(label), weight)

    def float_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return (predictions, labels, sample weights): predictions and labels in float64 (rows,
        outputs).

        Weights are (rows,), or (rows, outputs) if each label has its weight, or NaN is left out.
        """
        self._require_equal_shapes()
        weight, rows = self.weight, len(self.label)
        shape = (len(self.prediction), int(np.prod(self.prediction.shape[1:])))
        if weight is not None:
            items = rows if np.ndim(weight) == 1 else self.label.size
            weight = self._weights_of_predictions(items)
            weight = weight if weight is None or items == rows else weight.reshape(shape)
        arrays = self.prediction, self.label
        f, y = (array.reshape(shape).astype(np.float64, copy=False) for array in arrays)
        if self.info.ignore_nan and (nan := np.isnan(y)).any():
            given = np.ones(len(y)) if weight is None else weight
            weight, y = given.reshape(len(y), -1) * ~nan, np.where(nan, 0.0, y)
        return f, y, weight

    def _flat_scores_and_labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return scores (rows, classes), and labels: class indices (rows,), or soft labels."""
        shape, label, classes = self.prediction.shape, self.label, self.info.classes
        assert classes is not None
        axis = self.info.axis + len(shape) if self.info.axis < 0 else self.info.axis
        if not 0 < axis < len(shape) or shape[axis] != classes:
            raise ValueError(
                f"metric {self.name!r}: a prediction of shape {shape} has no {classes} classes "
                f"along axis {self.info.axis}: pass the output that the loss is computed from"
            )
        scores = np.moveaxis(self.prediction, axis, -1).reshape(-1, classes)
        if label.shape == shape:
            return scores, np.moveaxis(label, axis, -1).reshape(-1, classes)
        items = (*shape[:axis], *shape[axis + 1 :])
        if label.shape not in (items, (*items, 1), (*shape[:axis], 1, *shape[axis + 1 :])):
            raise self._label_shape_error(f"{items} of class indices, or {shape}")
        return scores, label.reshape(-1)

    def _check_class_labels(self, label: np.ndarray) -> np.ndarray:
        """Return the labels, checked: class indices as int64, soft labels and labels of two classes
        unchanged.
        """
        classes = self.info.classes
        found = f"from {label.min()} to {label.max()}" if label.size else "none"
        is_share = bool(((label >= 0) & (label <= 1)).all())
        if classes is None:
            if not is_share and not (abs(label) == 1).all():
                raise ValueError(
                    f"metric {self.name!r}: labels of two classes are 0 and 1, -1 and 1, or "
                    f"between 0 and 1, not {found}; ignore_index names a label to leave out"
                )
            return label
        if label.ndim == 2:
            if not is_share:
                raise ValueError(
                    f"metric {self.name!r}: soft labels must be numbers from 0 to 1, not {found}"
                )
            return label
        if mask_labels_outside(label, classes).any():
            raise ValueError(
                f"metric {self.name!r}: class indices must be integers from 0 to {classes - 1}, "
                f"not {found}; ignore_index names a label to leave out"
            )
        return label.astype(np.int64, copy=False)

    def _check_numbers(self, what: str, array: np.ndarray, nan: bool = False) -> np.ndarray:
        """Return `array` as an array of numbers with rows; raise `ValueError` for NaN unless `nan`
        is true.
        """
        array = np.asarray(array)
        if array.dtype.kind == "V":  # dtypes of ml_dtypes, such as bfloat16
            array = array.astype(np.float32)
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise ValueError(
                f"metric {self.name!r}: the {what} must be an array of numbers with rows, not of "
                f"dtype {array.dtype} and shape {array.shape}"
            )
        if array.dtype.kind == "f" and not nan and np.isnan(array).any():
            raise ValueError(f"metric {self.name!r}: the {what} has NaN: evaluate rows without NaN")
        return array

    def _weights_of_predictions(self, items: int) -> np.ndarray | None:
        """Return one weight for each class prediction, from weights of rows or of single labels;
        None without weights.
        """
        if self.weight is None:
            return None
        weight, label = np.asarray(self.weight, np.float64), self.label.shape
        if weight.shape != label[:1] and (weight.shape != label or weight.size != items):
            raise ValueError(
                f"metric {self.name!r}: sample weights of {label[0]} rows must have the shape "
                f"{label[:1]}, not "
                f"{weight.shape}"
            )
        if not ((weight >= 0) & (weight < np.inf)).all():
            raise ValueError(f"metric {self.name!r}: sample weights must be finite and 0 or more")
        return weight.ravel().repeat(items // weight.size) if weight.size else weight

    def _require_equal_shapes(self) -> None:
        """Raise `ValueError` unless label and prediction have one shape, up to axes of length 1."""
        if _shape_without_trailing_ones(self.prediction.shape) != _shape_without_trailing_ones(
            self.label.shape
        ):
            raise self._label_shape_error(f"{self.prediction.shape}")

    def _label_shape_error(self, needs: str) -> ValueError:
        """Return the error for labels of a wrong shape; `needs` is the right shape."""
        return ValueError(
            f"metric {self.name!r}: labels of a prediction of shape {self.prediction.shape} must "
            f"have the shape {needs}, not {self.label.shape}"
        )


def _shape_without_trailing_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without trailing axes of length 1; the first axis is kept."""
    end = len(shape)
    while end > 1 and shape[end - 1] == 1:
        end -= 1
    return shape[:end]


class ClassMetric(Metric):
    """Base of metrics that compare classes; a subclass overrides `add` and `compute`."""

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches; raise `ValueError` for a regression."""
        if prediction.classes is None and prediction.threshold is None:
            raise ValueError(
                f"metric {self.name!r} compares class indices, and the loss compares a number with "
                "each output: for classes, use a loss such as 'cross_entropy', and class indices "
                "as labels, y.argmax(axis=1) if they are one-hot; for a regression, use metrics "
                "such as 'mae' or 'r2'"
            )
        super().begin(prediction)

    @property
    def n_classes(self) -> int:
        """Number of classes; 2 if the prediction is one score for two classes."""
        return self.info.classes or 2

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch of predictions and labels."""
        self.add(MetricBatch(self.name, self.info, prediction, label, weight).class_rows())

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch to the metric."""
        raise NotImplementedError


class MeanMetric(ClassMetric):
    """Base of metrics that are a mean over rows; a subclass overrides `values`."""

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._mean = RunningMean()

    def add(self, rows: Rows) -> None:
        """Add the values of a batch to the mean."""
        self._mean.add(self.values(rows), rows.weight)

    def values(self, rows: Rows) -> np.ndarray:
        """Return the value of each row, whose mean is the metric."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the mean over the rows of all batches."""
        self.check_begun()
        return float(self._mean.compute(self.name))
