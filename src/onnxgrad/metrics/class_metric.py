"""The bases of metrics of classes."""

from __future__ import annotations

import numpy as np

from onnxgrad.metrics.base import Mean, Metric, PredictionInfo
from onnxgrad.metrics.metric_batch import Batch, Rows


class ClassMetric(Metric):
    """Base of the metrics that compare classes; they override `add` and `compute`."""

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches; refuse a regression."""
        if prediction.classes is None and prediction.threshold is None:
            raise ValueError(
                f"metric {self.name!r} compares numbers of classes, and the loss compares a number "
                "with each output: for classes, use a loss of theirs such as 'cross_entropy', and "
                "numbers as labels, y.argmax(axis=1) if they are one-hot; for a regression, "
                "use metrics such as 'mae' or 'r2'"
            )
        super().begin(prediction)

    @property
    def n_classes(self) -> int:
        """Number of classes; 2 if the prediction is the score of one of two."""
        return self.info.classes or 2

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch."""
        self.add(Batch(self.name, self.info, prediction, label, weight).class_rows())

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""
        raise NotImplementedError


class MeanMetric(ClassMetric):
    """Base of the metrics that are a mean over the rows; they override `values`."""

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches."""
        super().begin(prediction)
        self._mean = Mean()

    def add(self, rows: Rows) -> None:
        """Add the values of a batch."""
        self._mean.add(self.values(rows), rows.weight)

    def values(self, rows: Rows) -> np.ndarray:
        """Return the value of each row."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the mean."""
        self.check_begun()
        return float(self._mean.compute(self.name))
