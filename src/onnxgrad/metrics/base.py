"""The interface of metrics, and the record of a prediction (classes, axis) that metrics need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrad.errors import EvaluationError


@dataclass(frozen=True)
class PredictionInfo:
    """What a prediction holds: scores of several classes, one score for two classes, or numbers of
    a regression.

    Attributes:
        classes: number of classes, if the prediction has a score for each; otherwise None.
        axis: axis of these scores, not the first axis.
        threshold: the prediction between two classes, if each element is a score of one of two
            classes: 0.0 for logits, 0.5 for probabilities. None in other cases; if `classes` is
            None, too, the prediction holds numbers (regression).
        from_logits: whether scores are logits, which softmax or sigmoid turns into probabilities.
        ignore_index: the class index that stands for no label.
        ignore_nan: whether NaN stands for no label.

    Examples:
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> PredictionInfo(classes=10, from_logits=True)
        PredictionInfo(classes=10, axis=1, threshold=None, from_logits=True, ignore_index=None, \
ignore_nan=False)
    """

    classes: int | None = None
    axis: int = 1
    threshold: float | None = None
    from_logits: bool = False
    ignore_index: int | None = None
    ignore_nan: bool = False


class Metric:
    """Base of the metrics; a metric of your own overrides `begin`, `update` and `compute`.

    A metric sees the data batch by batch: `begin` once, `update` for each batch, then `compute`.
    Each evaluation has a copy of it, by `copy.deepcopy`, as several may run at the same time.

    Attributes:
        name: the key in the history.
        higher_is_better: None if unknown, or if the values are not ordered.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import Metric, PredictionInfo
        >>> class Bias(Metric):
        ...     name, higher_is_better = "bias", None
        ...     def begin(self, prediction):
        ...         self.sum, self.count = 0.0, 0
        ...     def update(self, prediction, label, weight=None):
        ...         self.sum += (prediction - label).sum()
        ...         self.count += label.size
        ...     def compute(self):
        ...         return self.sum / self.count
        >>> bias = Bias()
        >>> bias.begin(PredictionInfo())
        >>> bias.update(np.array([1.0, 2.0]), np.array([0.5, 1.5]))
        >>> float(bias.compute())
        0.5
    """

    name: str = ""
    higher_is_better: bool | None = True
    _info: PredictionInfo | None = None

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations.

        Args:
            prediction: the kind of the predictions of all batches.

        Raises:
            ValueError: the metric does not apply to such predictions.
        """
        self._info = prediction
        self._batches: list[tuple[np.ndarray, ...]] = []

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch of predictions and labels.

        Args:
            prediction: array (rows, ...).
            label: array of the prediction's shape or, of class indices, without its axis of
                classes; a last axis of length 1 may be missing or added.
            weight: sample weights (rows,), or one for each label, of 0 or more; None: all are
                equal.

        Raises:
            ValueError: arrays that do not fit.
        """
        raise NotImplementedError

    def compute(self) -> float | np.ndarray:
        """Return the value over all batches since `begin`.

        Raises:
            ValueError: it is undefined, such as without any row.
        """
        raise NotImplementedError

    @property
    def info(self) -> PredictionInfo:
        """The `PredictionInfo` passed to `begin`; raises EvaluationError before `begin`."""
        if self._info is None:
            raise EvaluationError(
                f"metric {self.name!r}: call begin(prediction) before update and compute"
            )
        return self._info

    def check_begun(self) -> None:
        """Raise EvaluationError before `begin` is called."""
        _ = self.info

    def _join_batches(self) -> list[np.ndarray]:
        """Return the arrays of all kept batches, joined along the rows."""
        self.check_begun()
        if not sum(len(batch[0]) for batch in self._batches):
            raise no_rows_error(self.name)
        return [np.concatenate(parts) for parts in zip(*self._batches, strict=True)]


@dataclass
class RunningMean:
    """A weighted mean of values that are added batch by batch."""

    total: float | np.ndarray = 0.0
    weight: float | np.ndarray = 0.0  # (outputs,) if each value has a weight
    rows: int = 0

    def add(self, values: np.ndarray, weight: np.ndarray | None) -> None:
        """Add values (rows,) or (rows, outputs), with weights (rows,) or one for each value."""
        self.rows += len(values)
        if weight is None:
            self.total = self.total + values.sum(axis=0, dtype=np.float64)
            self.weight = self.weight + len(values)
        elif weight.ndim == 1:
            self.total = self.total + weight @ values
            self.weight = self.weight + float(weight.sum())
        else:
            self.total = self.total + (weight * values).sum(axis=0)
            self.weight = self.weight + weight.sum(axis=0)

    def compute(self, name: str) -> float | np.ndarray:
        """Return the mean; it is zero for an output whose weights are all zero.

        Raises:
            ValueError: all weights are zero; the message has the `name` of the metric.
        """
        if not np.any(self.weight):
            raise no_rows_error(name)
        return self.total / np.where(self.weight, self.weight, 1.0)


def no_rows_error(name: str) -> ValueError:
    """Return the error for a metric that has no rows to evaluate; `name` is the metric's name."""
    return ValueError(
        f"metric {name!r} has nothing to compute: there are no rows, or all of them have weight 0 "
        "or the ignored label"
    )


def refuse_weights(name: str, weight: np.ndarray | None) -> None:
    """Raise `ValueError` if there are sample weights, for a metric that takes none; `name` is the
    metric's name.
    """
    if weight is not None:
        raise ValueError(f"metric {name!r} takes no sample weights: do not pass any")
