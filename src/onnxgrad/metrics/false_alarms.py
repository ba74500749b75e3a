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
        >>> curve = og.AlarmCurve(np.array([0.2, 0.8]), np.array([9, 1]), np.array([0, 0.5]))
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

    Windows over a threshold are one alarm if they follow each other, or are at most `hold` seconds
    apart. It is false if none of its windows has the label 1. An event is a run of windows with the
    label 1, and missed if none of them is over the threshold.

    Args:
        scores: those of one file (windows,), in the order of time; or a list of these, a file each.
        labels: 0 or 1 for each, in the same form.
        seconds: from the beginning of a window to that of the next.
        thresholds: None for the scores that occur, 200 of them if there are more.
        hold: seconds within which an alarm is not given again.

    Raises:
        ValueError: forms that differ, labels other than 0 and 1, no event, or nothing but events.

    Examples:
        >>> import onnxgrad as og
        >>> scores, labels = [0.1, 0.7, 0.6, 0.1, 0.9, 0.2], [0, 0, 0, 0, 1, 1]
        >>> og.false_alarms(scores, labels, seconds=1).at(missed=0)
        (0.9, 0.0)
        >>> og.false_alarms(scores, labels, seconds=1, thresholds=[0.5]).per_hour.tolist()
        [900.0]
    """
    listed = [_as_files(part) for part in (scores, labels)]
    if [len(s) for s in listed[0]] != [len(y) for y in listed[1]]:
        raise ValueError("scores and labels have different numbers of windows")
    over, y = (np.concatenate(part) if part else np.zeros(0) for part in listed)
    if not np.isin(y, (0, 1)).all() or y.min(initial=1) == y.max(initial=0):
        raise ValueError("labels are 0 and 1, and both must occur: of windows, and of events")
    file = np.repeat(np.arange(len(listed[0])), [len(s) for s in listed[0]])
    events = _runs(np.flatnonzero(y), file, 1)
    event_of = np.full(len(y), -1)
    event_of[y == 1] = events
    if thresholds is None:
        thresholds = np.unique(over)
        if len(thresholds) > 200:
            thresholds = thresholds[np.linspace(0, len(thresholds) - 1, 200).astype(int)]
    counted, gap = [], 1 + int(hold / seconds + 1e-9)
    for threshold in (at := np.sort(np.asarray(thresholds, np.float64))):
        heard = np.flatnonzero(over >= threshold)
        found = np.bincount(_runs(heard, file, gap), y[heard]) if len(heard) else np.zeros(0)
        hit = np.unique(event_of[heard[y[heard] == 1]])
        counted.append((np.sum(found == 0), 1 - len(hit) / (events.max() + 1)))
    alarms, missed = np.array(counted, np.float64).T
    return AlarmCurve(at, alarms / (np.sum(y == 0) * seconds / 3600), missed)


def _as_files(values: Any) -> list[np.ndarray]:
    several = isinstance(values, Sequence) and len(values) and np.ndim(values[0]) > 0
    return [np.asarray(v, np.float64).ravel() for v in (values if several else [values])]


def _runs(windows: np.ndarray, file: np.ndarray, gap: int) -> np.ndarray:
    """Return the number of the run of each window: a run has no step of more than `gap`."""
    new = (np.diff(windows) > gap) | (np.diff(file[windows]) > 0)
    return np.concatenate([[0], np.cumsum(new)])[: len(windows)]


class FalseAlarms(Metric):
    """False alarms per hour at the threshold by which at most a share of the events is missed.

    Each row is a window of its own, as of clips. For windows of a file in their order, pass what
    `Sound.predict` returns to `false_alarms`.

    Args:
        seconds: length of a window.
        missed: the share of the rows with label 1 that may be missed.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> metric = og.FalseAlarms(seconds=1.0, missed=0.5)
        >>> metric.begin(og.PredictionInfo(threshold=0.5))
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
