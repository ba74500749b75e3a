"""False alarms per hour against missed events, of detectors that listen all the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.metrics.base import Metric, PredictionInfo


class AlarmCurve(NamedTuple):
    """What each threshold gives, arrays of one length: `plt.plot(curve.per_hour, curve.missed)`.

    Attributes:
        thresholds: ascending; windows of at least this score are over it.
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
        """Return the threshold with fewest false alarms, and these, where at most `missed` are.

        Raises:
            ValueError: more are missed at all thresholds.
        """
        allowed = np.flatnonzero(self.missed <= missed)
        if not len(allowed):
            raise ValueError(f"missed={missed}: at least {self.missed.min():.3g} are, pass more")
        best = allowed[np.argmin(self.per_hour[allowed])]
        return float(self.thresholds[best]), float(self.per_hour[best])


def false_alarms(
    scores: Any, labels: Any, seconds: float, thresholds: Any = None, hold: float = 0.0
) -> AlarmCurve:
    """Count alarms without an event, per hour, and events without an alarm, for thresholds.

    A window over the threshold gives an alarm, unless another did less than `hold` seconds before.
    It is false if the label of the window is 0. An event is a run of windows with the label 1, and
    missed if none of them is over the threshold.

    Args:
        scores: those of one file (windows,), in the order of time; or a list of these, a file each.
        labels: 0 or 1 for each, in the same form.
        seconds: from the beginning of a window to that of the next.
        thresholds: None for the scores that occur, 200 of them if there are more.
        hold: seconds for which a detector is silent after an alarm.

    Raises:
        ValueError: forms that differ, labels other than 0 and 1, no event, or nothing but events.

    Examples:
        >>> import onnxgrad as og
        >>> scores, labels = [0.1, 0.7, 0.6, 0.1, 0.9, 0.2], [0, 0, 0, 0, 1, 1]
        >>> og.metrics.false_alarms(scores, labels, seconds=1).at(missed=0)
        (0.9, 0.0)
        >>> og.metrics.false_alarms(scores, labels, seconds=1, thresholds=[0.5]).per_hour.tolist()
        [1800.0]
    """
    listed = [_as_files(part) for part in (scores, labels)]
    if [len(s) for s in listed[0]] != [len(y) for y in listed[1]]:
        raise ValueError("scores and labels have different numbers of windows")
    all_scores, y = (np.concatenate(part) for part in listed)
    if not np.isin(y, (0, 1)).all() or y.min(initial=1) == y.max(initial=0):
        raise ValueError("labels are 0 and 1, and both must occur: of windows, and of events")
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
        counts.append(np.sum(y[over[_given(at[over], gap)]] == 0))
    hours = np.sum(y == 0) * seconds / 3600
    missed = np.searchsorted(best, thresholds) / len(best)
    return AlarmCurve(thresholds, np.array(counts) / hours, missed)


def _given(times: np.ndarray, gap: int) -> np.ndarray:
    """Return the numbers of ascending times that are at least `gap` after the last such one."""
    if gap == 1:
        return np.arange(len(times))
    kept, i = [], 0
    while i < len(times):
        kept.append(i)
        i = int(np.searchsorted(times, times[i] + gap))
    return np.array(kept, np.int64)


def _as_files(values: Any) -> list[np.ndarray]:
    several = isinstance(values, Sequence) and len(values) and np.ndim(values[0]) > 0
    return [np.asarray(v, np.float64).ravel() for v in (values if several else [values])]


class FalseAlarms(Metric):
    """False alarms per hour at the threshold by which at most a share of the events is missed.

    Each row is a window of its own, as of clips. For windows of a file in their order, pass what
    `Sound.predict` returns to `false_alarms`.

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
        """Forget all batches.

        Raises:
            ValueError: the predictions are not scores of one of two classes.
        """
        if prediction.threshold is None:
            raise ValueError(f"metric {self.name!r} is of one score for each row")
        super().begin(prediction)
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, prediction: Any, label: Any, weight: Any = None) -> None:
        """Add a batch; rows of weight 0 do not count, and others are equal."""
        scores, y = np.ravel(prediction), np.ravel(label)
        counts = slice(None) if weight is None else np.ravel(weight) > 0
        self._rows.append((scores[counts], y[counts]))

    def compute(self) -> float:
        """Return the number over all batches.

        Raises:
            ValueError: there are no events, or nothing but events.
        """
        scores, labels = (np.concatenate(part)[:, None] for part in zip(*self._rows, strict=True))
        return false_alarms(list(scores), list(labels), self.seconds).at(self.missed)[1]
