"""A callback that lets signals stop a training between two steps."""

from __future__ import annotations

from typing import Any

from onnxgrad.cli.signals import StopRequests
from onnxgrad.training.callbacks.base import Callback, TrainingControl


class Watch(Callback):
    """Raises `Stopped` after a signal, where nothing is lost, and counts rows.

    `rows` is the number of rows that this training went through, counted once an epoch.
    """

    def __init__(self, stop: StopRequests) -> None:
        self.stop = stop
        self.rows = 0
        self._first = 0, 0  # epochs and rows that a resumed training has behind it

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Remember where a resumed training starts."""
        self._first = trainer.progress.epoch, trainer.progress.rows

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Stop after a signal; from the first step on, signals wait for this event."""
        self.stop.hold()
        progress, (epoch, rows) = trainer.progress, self._first
        self.rows = (progress.epoch - epoch) * (progress.total_rows or 0) + progress.rows - rows
        self.stop.check()

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Stop after a signal."""
        self.stop.check()
