"""The progress of a training, the sums of its losses, and their texts."""

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
        loss: mean loss so far in this epoch: of a row, or of a term of the loss. Of a stack, the
            mean over the members that train.
        validation_loss: mean loss of the last validation, as `loss`; None before the first.
        rows_per_second: speed of this epoch so far.
        step: number of finished steps.
        steps: number of all steps; None if it is unknown.
        seconds_waiting: time of this epoch spent waiting for data.
        seconds_computing: time of this epoch spent in the runtime.

    Examples:
        >>> import onnxgrad as og
        >>> def stop_at_small_loss(progress: og.callbacks.FitProgress) -> bool:
        ...     return progress.loss > 1e-3  # False ends `fit(X, y, callback=stop_at_small_loss)`
        >>> stop_at_small_loss(og.callbacks.FitProgress(0, 10, 32, 100, 0.25, None, 1e5))
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

    `factors` multiply the means of the parts of the loss, a part for each output. Sums and counts
    are float64 (parts,), and in a stack (parts, members).
    """

    factors: tuple[float, ...] = (1.0,)
    sums: np.ndarray = field(default_factory=lambda: np.zeros(1))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(1))
    rows: int = 0

    @classmethod
    def of(
        cls, factors: tuple[float, ...], saved: dict[str, Any], members: int | None = None
    ) -> Totals:
        """Return the totals that `to_json` saved; zeros where `saved` is empty."""
        zeros = np.zeros((len(factors), *([] if members is None else [members])))
        sums, counts = (np.array(saved.get(key, zeros)) for key in ("sums", "counts"))
        return cls(factors, sums, counts, saved.get("rows", 0))

    def add(self, sums: np.ndarray, counts: np.ndarray, rows: int) -> None:
        """Add the sums and counts of batches, each [batches, parts, ...].

        The result does not depend on how many batches a call adds.
        """
        self.sums = np.add.accumulate(np.concatenate((self.sums[None], sums)))[-1]
        self.counts = np.add.accumulate(np.concatenate((self.counts[None], counts)))[-1]
        self.rows += rows

    @property
    def mean(self) -> Any:
        """The mean loss so far, a float, in a stack an array (members,); NaN without any term."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = (self.sums / self.counts).T @ np.array(self.factors)
        return mean if mean.ndim else float(mean)

    def to_json(self) -> dict[str, Any]:
        """Return the totals as numbers and lists."""
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist(), "rows": self.rows}


def mean_over_members(value: Any) -> Any:
    """Return the mean of an array (members,) without NaN; a number is returned unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    known = value[~np.isnan(value)]
    return float(known.mean()) if known.size else float("nan")


def number_text(value: Any, digits: str = ".4g") -> str:
    """Return a number as text, of an array (members,) its lowest and highest number."""
    known = np.ravel(value)
    known = known[~np.isnan(known)] if np.isfinite(known).any() else known[:1]
    ends = dict.fromkeys(format(v, digits) for v in (known.min(), known.max()))
    return " to ".join(ends)


def split_by_member(record: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return an entry of the history in which arrays (members, ...) become an item a member.

    The loss of member 0 is "loss/0".
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, np.ndarray) and state.members is not None:
            flat |= {f"{name}/{k}": own for k, own in enumerate(value.tolist())}
        else:
            flat[name] = value
    return flat
