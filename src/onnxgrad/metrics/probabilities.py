"""Metrics of scores and probabilities of classes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from onnxgrad.metrics.base import PredictionInfo
from onnxgrad.metrics.metric_batch import ClassMetric, MeanMetric, Rows


@dataclass
class LogLoss(MeanMetric):
    """Mean of -log p, p the probability of the label; cross-entropy for soft labels.

    Logits go through log-softmax or log-sigmoid, and probabilities are clipped as by scikit-learn's
    `log_loss`, to [eps, 1 - eps] of their dtype.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.probabilities import LogLoss
        >>> metric = LogLoss()
        >>> metric.begin(PredictionInfo(threshold=0.5))
        >>> metric.update(np.array([0.5, 0.25]), np.array([1, 0]))
        >>> round(metric.compute(), 4)
        0.4904
    """

    name = "log_loss"
    higher_is_better = False

    def values(self, rows: Rows) -> np.ndarray:
        """Return -log p of each row's label; raise ValueError for probabilities not in [0, 1]."""
        if rows.scores.ndim == 1:
            rows = rows._replace(label=np.maximum(rows.label, 0))  # labels may be -1 and 1
        return _log_losses(self.name, self.info, rows)


@dataclass
class Perplexity(LogLoss):
    """exp of the mean of -log p over all tokens, p the probability of the token.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.probabilities import Perplexity
        >>> metric = Perplexity()
        >>> metric.begin(PredictionInfo(classes=50, axis=2, from_logits=True, ignore_index=-100))
        >>> metric.update(np.zeros((2, 3, 50)), np.array([[7, 8, 9], [3, 4, -100]]))
        >>> round(metric.compute(), 4)
        50.0
    """

    name = "perplexity"

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        if prediction.classes is None:
            raise ValueError(
                f"metric {self.name!r} needs scores of tokens, but the prediction is the score of "
                "one of two classes: use 'log_loss'"
            )

    def compute(self) -> float:
        """Return the perplexity, infinity if it is too large for float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(super().compute()))


@dataclass
class AUC(ClassMetric):
    """Area under the ROC curve; for more than two classes, the mean of each class against the rest.

    As scikit-learn's `roc_auc_score` with `multi_class="ovr"`: for more than two classes, logits
    become probabilities first, because the ranks across rows differ. It keeps the scores, weights
    and labels of all rows in memory, 8 bytes or fewer for each number.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.probabilities import AUC
        >>> auc = AUC()
        >>> auc.begin(PredictionInfo(threshold=0.5))
        >>> auc.update(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
        >>> auc.compute()
        0.75
    """

    name = "auc"

    def add(self, rows: Rows) -> None:
        """Keep the scores, classes and weights of a batch."""
        scores, weight = rows.scores, rows.weight
        if self.n_classes > 2:
            logits = self.info.from_logits
            scores = (
                np.exp(_log_softmax(scores))
                if logits
                else _check_probability_sums(self.name, scores)
            )
        elif scores.ndim == 2:  # rows are ranked by the difference of their two logits
            second = scores[:, 1]
            scores = second - scores[:, 0] if self.info.from_logits else second
        weight = np.ones(len(scores)) if weight is None else weight
        self._batches.append((scores.copy(), rows.true_classes.copy(), weight))

    def compute(self) -> float:
        """Return the area under the ROC curve.

        Raises:
            ValueError: there is no row, or one of the classes is no label.
        """
        scores, true, weight = self._join_batches()
        if scores.ndim == 1:
            return self._class_roc_area(scores, true, weight, 1)
        areas = [self._class_roc_area(s, true, weight, k) for k, s in enumerate(scores.T)]
        return float(np.mean(areas))

    def _class_roc_area(
        self, scores: np.ndarray, true: np.ndarray, weight: np.ndarray, k: int
    ) -> float:
        """Return the area under the ROC curve of class `k` against the other classes."""
        order = np.argsort(scores, kind="stable")[::-1]
        scores, hit, weight = scores[order], (true == k)[order], weight[order]
        # the last of equal scores
        ends = np.r_[np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1]
        right = np.r_[0.0, np.cumsum(weight * hit)[ends]]
        wrong = np.r_[0.0, np.cumsum(weight * ~hit)[ends]]
        if not (right[-1] and wrong[-1]):
            raise ValueError(
                f"metric {self.name!r} is undefined: {'all' if right[-1] else 'no'} labels with a "
                f"weight above 0 are of class {k}: evaluate rows of this class and of others"
            )
        area = (np.diff(wrong) * (right[1:] + right[:-1])).sum() / 2
        return float(area / (right[-1] * wrong[-1]))


def _log_losses(name: str, info: PredictionInfo, rows: Rows) -> np.ndarray:
    """Return the log loss -log p of the label of each row."""
    scores, label = rows.scores, rows.label
    if scores.ndim == 1:
        if info.from_logits:
            scores = scores.astype(np.float64, copy=False)
            losses = [np.logaddexp(0, scores), np.logaddexp(0, -scores)]
        else:
            losses = [
                -_clipped_log(1 - scores),
                -_clipped_log(_check_probability_bounds(name, scores)),
            ]
        return (1 - label) * losses[0] + label * losses[1]
    logs = (
        _log_softmax(scores)
        if info.from_logits
        else _clipped_log(_check_probability_sums(name, scores))
    )
    if label.ndim == 1:
        return -np.take_along_axis(logs, label[:, None], axis=1)[:, 0]
    return -np.multiply(label, logs, out=np.zeros(logs.shape), where=label != 0).sum(axis=1)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the log-softmax of each row, in float64."""
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _dtype_eps(array: np.ndarray) -> np.floating:
    """Return the machine epsilon of an array's dtype; for integers, the epsilon of float64."""
    return np.finfo(array.dtype if array.dtype.kind == "f" else np.float64).eps


def _clipped_log(probabilities: np.ndarray) -> np.ndarray:
    """Return log p in float64, for probabilities p clipped to [eps, 1 - eps]."""
    eps = _dtype_eps(probabilities)
    return np.log(np.clip(probabilities.astype(np.float64), eps, 1 - eps))


def _check_probability_bounds(name: str, probabilities: np.ndarray) -> np.ndarray:
    """Return the probabilities unchanged; raise `ValueError` if any is not between 0 and 1."""
    if len(probabilities) and not (probabilities.min() >= 0 and probabilities.max() <= 1):
        raise ValueError(
            f"metric {name!r}: probabilities are from 0 to 1, not from {probabilities.min()} to "
            f"{probabilities.max()}; are these scores logits (from_logits)?"
        )
    return probabilities


def _check_probability_sums(name: str, probabilities: np.ndarray) -> np.ndarray:
    """Return the probabilities unchanged; warn if the probabilities of a row do not sum to 1."""
    sums = _check_probability_bounds(name, probabilities).sum(axis=1, dtype=np.float64)
    if not (abs(sums - 1) <= np.sqrt(_dtype_eps(probabilities))).all():
        warnings.warn(
            f"metric {name!r}: the probabilities of a row do not add up to 1", stacklevel=2
        )
    return probabilities
