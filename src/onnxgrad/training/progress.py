"""How far a training is: what callbacks are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class FitProgress:
    """The progress of training, as callbacks see it.

    Attributes:
        epoch: number of this epoch, from 0.
        epochs: number of all epochs.
        rows: rows trained on so far in this epoch.
        total_rows: rows of an epoch; None in the first epoch of an iterable of batches.
        loss: mean loss so far in this epoch: of a row, or of a term of the loss.
        validation_loss: that of the last validation; None before the first.
        rows_per_second: speed of this epoch so far.
        step: number of finished steps.
        steps: number of all steps; None if it is unknown.
        seconds_waiting: time of this epoch spent waiting for data.
        seconds_computing: time of this epoch spent in the runtime.

    Examples:
        >>> import onnxgrad as og
        >>> def stop_at_small_loss(progress: og.FitProgress) -> bool:
        ...     return progress.loss > 1e-3  # False ends `fit(X, y, callback=stop_at_small_loss)`
        >>> stop_at_small_loss(og.FitProgress(0, 10, 32, 100, 0.25, None, 1e5))
        True
    """

    epoch: int
    epochs: int
    rows: int
    total_rows: int | None
    loss: float
    validation_loss: float | None
    rows_per_second: float
    step: int = 0
    steps: int | None = None
    seconds_waiting: float = 0.0
    seconds_computing: float = 0.0


@dataclass
class Totals:
    """Sums over the batches of an epoch, from which its mean loss is computed.

    `factors` are those of the parts of the loss.
    """

    factors: tuple[float, ...] = (1.0,)
    sums: np.ndarray = field(default_factory=lambda: np.zeros(1))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(1))
    rows: int = 0

    @classmethod
    def of(cls, factors: tuple[float, ...], saved: dict[str, Any]) -> Totals:
        """Return those that `to_json` saved, or zeros."""
        zeros = [0.0] * len(factors)
        sums, counts = (np.array(saved.get(key, zeros)) for key in ("sums", "counts"))
        return cls(factors, sums, counts, saved.get("rows", 0))

    def add(self, sums: np.ndarray, counts: np.ndarray, rows: int) -> None:
        """Add batches, [batches, parts]; the sum is the same however they are cut into calls."""
        self.sums = np.add.accumulate(np.vstack((self.sums, sums)))[-1]
        self.counts = np.add.accumulate(np.vstack((self.counts, counts)))[-1]
        self.rows += rows

    @property
    def mean(self) -> float:
        """The mean loss so far; NaN without any term."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((self.sums / self.counts) @ np.array(self.factors))

    def to_json(self) -> dict[str, Any]:
        """Return the totals as numbers and lists."""
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist(), "rows": self.rows}
