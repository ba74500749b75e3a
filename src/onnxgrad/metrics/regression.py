"""Metrics of regression; the values of several outputs are averaged, as in scikit-learn.

Examples:
    >>> import numpy as np
    >>> from onnxgrad.metrics.base import PredictionInfo
    >>> from onnxgrad.metrics.select import select_metric
    >>> for name in ("mae", "mse", "rmse", "mape", "r2"):
    ...     metric = select_metric(name)
    ...     metric.begin(PredictionInfo())
    ...     metric.update(np.array([1.0, 2.0, 3.0]), np.array([[1.0], [2.0], [5.0]]))
    ...     print(name, round(metric.compute(), 4))
    mae 0.6667
    mse 1.3333
    rmse 1.1547
    mape 0.1333
    r2 0.5385
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrad.metrics.base import Metric, PredictionInfo, RunningMean
from onnxgrad.metrics.metric_batch import MetricBatch


@dataclass
class MAE(Metric):
    """Mean absolute error: mean of |f - y|."""

    name = "mae"
    higher_is_better = False
    # whether the mean is over outputs, each with one value, and not over labels
    _by_output: ClassVar[bool] = False

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._mean, self._outputs = RunningMean(), None

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch of predictions and labels."""
        f, y, weight = MetricBatch(self.name, self.info, prediction, label, weight).float_rows()
        if self._outputs not in (None, f.shape[1]):
            raise ValueError(
                f"metric {self.name!r}: rows have {f.shape[1]} numbers, and rows of earlier "
                f"batches had {self._outputs}: use one width in all batches"
            )
        self._outputs = f.shape[1]
        self._add_row_errors(f, y, weight)

    def compute(self) -> float:
        """Return the mean error over all outputs, or over all labels if each label has a weight."""
        self.check_begun()
        values, weight = self._metric_by_output(self._mean.compute(self.name)), self._mean.weight
        shares = None if np.ndim(weight) == 0 else weight > 0 if self._by_output else weight
        return float(np.average(values, weights=shares))

    def _add_row_errors(self, f: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """Add the errors of predictions `f` and labels `y`, both (rows, outputs)."""
        self._mean.add(self._label_errors(f, y), weight)

    def _label_errors(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the error of prediction `f` for each label `y`."""
        return abs(f - y)

    def _metric_by_output(self, means: float | np.ndarray) -> float | np.ndarray:
        """Return the metric of each output, computed from the mean error of each output."""
        return means


@dataclass
class MSE(MAE):
    """Mean squared error: mean of (f - y)^2."""

    name = "mse"

    def _label_errors(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (f - y) ** 2


@dataclass
class RMSE(MSE):
    """Root mean squared error: sqrt of the mean of (f - y)^2.

    For several outputs, the mean of their roots, as scikit-learn's `root_mean_squared_error`.
    """

    name = "rmse"
    _by_output = True

    def _metric_by_output(self, means: float | np.ndarray) -> float | np.ndarray:
        return np.sqrt(means)


@dataclass
class MAPE(MAE):
    """Mean absolute percentage error: mean of |f - y| / max(|y|, eps), eps of float64.

    A share, not a percentage, as scikit-learn's `mean_absolute_percentage_error`.
    """

    name = "mape"

    def _label_errors(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        return abs(f - y) / np.maximum(abs(y), np.finfo(np.float64).eps)


@dataclass
class R2(MSE):
    """Coefficient of determination: 1 - sum (f - y)^2 / sum (y - mean y)^2.

    For constant labels, 1 if predictions are exact and otherwise 0, as scikit-learn's `r2_score`.
    """

    name = "r2"
    _by_output = True
    higher_is_better = True

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._first: np.ndarray | None = None

    def compute(self) -> float:
        """Return the coefficient of determination.

        Raises:
            ValueError: there are fewer than two rows.
        """
        self.check_begun()
        if 0 < self._mean.rows < 2:
            raise ValueError(f"metric {self.name!r} needs two rows or more: evaluate more rows")
        return super().compute()

    def _add_row_errors(self, f: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        super()._add_row_errors(f, y, weight)
        if not len(y):
            return
        if self._first is None:  # constant labels minus the first are exactly zero
            self._first = y[0].copy()
            self._weight, self._center, self._spread = np.zeros((3, len(y[0])))
        y = y - self._first
        w = np.ones(len(y)) if weight is None else weight
        w = np.broadcast_to(w.reshape(len(y), -1), y.shape)
        batch = w.sum(axis=0)
        # sums of squares around the means, merged as by Chan, Golub and LeVeque 1983
        center = (w * y).sum(axis=0) / np.where(batch, batch, 1.0)
        spread = (w * (y - center) ** 2).sum(axis=0)
        total, shift = self._weight + batch, center - self._center
        share = batch / np.where(total, total, 1.0)
        self._spread += spread + shift**2 * self._weight * share
        self._center += shift * share
        self._weight = total

    def _metric_by_output(self, means: float | np.ndarray) -> float | np.ndarray:
        errors = means * self._weight
        with np.errstate(divide="ignore", invalid="ignore"):
            values = 1 - errors / self._spread
        return np.where(self._spread > 0, values, np.where(errors == 0, 1.0, 0.0))
