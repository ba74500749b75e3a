"""False alarms per hour against missed events, for detectors that listen all the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.metrics.base import Metric, PredictionInfo


class AlarmCurve(NamedTuple):
    """False alarms per hour and the share of missed events at each threshold:
    `plt.plot(curve.per_hour, curve.missed)`.

    Attributes:
        thresholds: ascending; a window whose score is at least the threshold is over it.
        per_hour: false alarms per hour of windows without an event.
        missed: share of the events in which no window is over the threshold.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> thresholds, per_hour, missed = np.float64([[0.2, 0.8], [9, 1], [0, 0.5]])
        >>> curve = og.metrics.AlarmCurve(thresholds, per_hour, missed)
        >>> curve.at(missed=0.1)
        (0.2, 9.0)
    """

    thresholds: np.ndarray
    per_hour: np.ndarray
    missed: np.ndarray

    def at(self, missed: float) -> tuple[float, float]:
        """Return (threshold, false alarms per hour) where the share of missed events is at most
        `missed`.

        Of several thresholds, it is the one with the fewest false alarms per hour.

        Raises:
            ValueError: more events are missed at all thresholds.
        """
        allowed = np.flatnonzero(self.missed <= missed)
        if not len(allowed):
            raise ValueError(
                f"missed={missed}: at every threshold, a share of {self.missed.min():.3g} or more "
                "of the events is missed: give a larger missed="
            )
        best = allowed[np.argmin(self.per_hour[allowed])]
        return float(self.thresholds[best]), float(self.per_hour[best])


def false_alarms(
    scores: Any, labels: Any, seconds: float, thresholds: Any = None, hold: float = 0.0
) -> AlarmCurve:
    """Return the curve of false alarms per hour and of the share of missed events over thresholds.

    A window over the threshold gives an alarm, unless another window did less than `hold` seconds
    before. An alarm is false if the label of the window is 0. An event is a run of windows with the
    label 1, and is missed if none of them is over the threshold.

    Args:
        scores: the scores of the windows of a file (windows,), in the order of time; or a list of
            such arrays, one for each file.
        labels: 0 or 1 for each window, in the same form.
        seconds: time from the beginning of a window to the beginning of the next one.
        thresholds: None for the scores that occur, 200 of them if there are more.
        hold: seconds for which a detector is silent after an alarm.

    Raises:
        ValueError: numbers of windows that differ, labels other than 0 and 1, or labels that are
            all equal.

    Examples:
        >>> import onnxgrad as og
        >>> scores, labels = [0.1, 0.7, 0.6, 0.1, 0.9, 0.2], [0, 0, 0, 0, 1, 1]
        >>> og.metrics.false_alarms(scores, labels, seconds=1).at(missed=0)
        (0.9, 0.0)
        >>> og.metrics.false_alarms(scores, labels, seconds=1, thresholds=[0.5]).per_hour.tolist()
        [1800.0]
    """
    listed = [_arrays_by_file(part) for part in (scores, labels)]
    if [len(s) for s in listed[0]] != [len(y) for y in listed[1]]:
        raise ValueError("scores and labels have different lengths: pass one label for each score")
    all_scores, y = (np.concatenate(part) for part in listed)
    if not np.isin(y, (0, 1)).all() or y.min(initial=1) == y.max(initial=0):
        raise ValueError(
            "labels must be 1 for windows of events and 0 for all others, and both must occur"
        )
    gap = max(1, int(np.ceil(hold / seconds - 1e-9)))
    file = np.repeat(np.arange(len(listed[0])), [len(s) for s in listed[0]])
    at = np.arange(len(y)) + file * gap  # windows of other files are never within `hold`
    positive = np.flatnonzero(y)
    event = np.cumsum(np.diff(positive + file[positive], prepend=-2) > 1)
    best = np.full(event[-1] + 1, -np.inf)
    np.maximum.at(best, event, all_scores[positive])
    best = np.sort(best[1:])
    if thresholds is None:
        thresholds = np.unique(all_scores)
        if len(thresholds) > 200:
            thresholds = thresholds[np.linspace(0, len(thresholds) - 1, 200).astype(int)]
    thresholds = np.sort(np.asarray(thresholds, np.float64))
    counts = []
    for threshold in thresholds:
        over = np.flatnonzero(all_scores >= threshold)
        counts.append(np.sum(y[over[_alarm_indices(at[over], gap)]] == 0))
    hours = np.sum(y == 0) * seconds / 3600
    missed = np.searchsorted(best, thresholds) / len(best)
    return AlarmCurve(thresholds, np.array(counts) / hours, missed)


def _alarm_indices(times: np.ndarray, gap: int) -> np.ndarray:
    """Return the indices of the times at which a detector alarms, at least `gap` apart."""
    if gap == 1:
        return np.arange(len(times))
    kept, i = [], 0
    while i < len(times):
        kept.append(i)
        i = int(np.searchsorted(times, times[i] + gap))
    return np.array(kept, np.int64)


def _arrays_by_file(values: Any) -> list[np.ndarray]:
    """Return a list of arrays, one for each file, from such a list or from one array."""
    several = isinstance(values, Sequence) and len(values) and np.ndim(values[0]) > 0
    return [np.asarray(v, np.float64).ravel() for v in (values if several else [values])]


class FalseAlarms(Metric):
    """False alarms per hour at the threshold at which at most a given share of the events is
    missed.

    Each row is one window, as of a clip. For windows of a file in their order, pass the result of
    `Sound.predict` to `false_alarms`.

    Args:
        seconds: length of a window.
        missed: the share of the rows with label 1 that may be missed.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> metric = og.metrics.FalseAlarms(seconds=1.0, missed=0.5)
        >>> metric.begin(og.metrics.PredictionInfo(threshold=0.5))
        >>> metric.update(np.array([0.9, 0.4, 0.6, 0.1]), np.array([1, 1, 0, 0]))
        >>> metric.compute()
        0.0
    """

    higher_is_better = False
    name = "false_alarms_per_hour"

    def __init__(self, seconds: float, missed: float = 0.05) -> None:
        self.seconds, self.missed = seconds, missed

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations.

        Raises:
            ValueError: the predictions are not scores of one of two classes.
        """
        if prediction.threshold is None:
            raise ValueError(
                f"metric {self.name!r} needs one score for each row: choose an output with scores "
                "of one "
                "of two classes"
            )
        super().begin(prediction)

    def update(self, prediction: Any, label: Any, weight: Any = None) -> None:
        """Add a batch of scores and labels; rows of weight 0 are left out, and other weights do not
        matter.
        """
        scores, y = np.ravel(prediction), np.ravel(label)
        counts = slice(None) if weight is None else np.ravel(weight) > 0
        self._batches.append((scores[counts], y[counts]))

    def compute(self) -> float:
        """Return the false alarms per hour over all batches.

        Raises:
            ValueError: labels are all 0 or all 1.
        """
        # each row counts as a file with one window
        scores, labels = (list(part[:, None]) for part in self._join_batches())
        return false_alarms(scores, labels, self.seconds).at(self.missed)[1]
