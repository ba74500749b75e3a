"""What the loop of training says of itself: its progress, and where numbers are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.errors import ConvergenceError
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.callbacks.base import Control
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.progress import FitProgress, Totals, over_members, shown
from onnxgrad.training.state import TrainState


class Reported:
    """The reports of a `Loop`."""

    trainer: Any
    state: TrainState
    source: BatchSource
    callbacks: Callbacks
    last_epoch: int
    explain: Any
    control: Control
    _first_epoch: int
    _totals: Totals
    _seconds: list[float]
    _validated: Any

    @property
    def _learning_rate(self) -> Any:
        """The rate of the last step; of a stack (members,)."""
        rate = self.state.learning_rate
        return rate if self.state.members is None else np.array(rate)

    @property
    def _number(self) -> int:
        """The number of finished epochs of this `fit`."""
        return self.state.epoch - self._first_epoch

    @property
    def _epochs(self) -> int:
        return self.last_epoch - self._first_epoch

    def _progress(self, seconds: float) -> FitProgress:
        state, totals, source = self.state, self._totals, self.source
        steps = None
        if isinstance(source.batches, int):
            steps = state.step - state.position + (self.last_epoch - state.epoch) * source.batches
        return FitProgress(
            self._number,
            self._epochs,
            totals.rows,
            source.rows,
            over_members(totals.mean),
            self._validated,
            totals.rows / max(seconds, 1e-9),
            state.step,
            steps,
            *self._seconds,
        )

    def _diverged(self, what: str, kept: str) -> ConvergenceError:
        recent = ", ".join(shown(v, ".6g") for v in self.state.losses[-5:]) or "none"
        reason = self.callbacks.on_not_finite(self.trainer, self.state, self.control)
        number = self._number + (what != "the validation loss")
        restoring = (c.key for c in self.callbacks.all if getattr(c, "restore", False))
        if any(self.state.kept.get(key) for key in restoring):
            kept = "the best weights so far are kept"
        rate = shown(self.state.learning_rate, "g")
        if self.state.members is not None:
            what += " of all members"
        return ConvergenceError(
            f"{what} became NaN or infinite in epoch {number} at learning rate "
            f"{rate} (losses of the epochs before: {recent}); {kept}. "
            f"{self.explain(self)}{'. ' if reason else ''}{reason}"
        )
