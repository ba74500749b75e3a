"""Where the time of training goes."""

from __future__ import annotations

import time
from typing import Any

from onnxgrad.reporting import logger
from onnxgrad.training.callbacks.base import Callback, Control

_PARTS = ("seconds_waiting", "seconds_computing")


class Timing(Callback):
    """Records how long training waited for data, and how long it computed.

    The record of every epoch in the history gets `seconds_waiting` and `seconds_computing`. The
    entry in `state.callbacks` has their sums, and `seconds`, the time in `fit`, of which the rest
    went to evaluations, checkpoints and callbacks. At the end, the logger "onnxgrad" reports the
    shares in a line of level INFO.

    Examples:
        >>> from onnxgrad.training.callbacks.timing import Timing
        >>> Timing().key
        'Timing'
    """

    def on_train_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Start the clock; a resumed training adds to the times before."""
        entry = self.entry(state)
        for name in ("seconds", *_PARTS):
            entry.setdefault(name, 0.0)
        self._start, self._before = time.perf_counter(), entry["seconds"]
        self._epoch = dict.fromkeys(_PARTS, 0.0)  # of this epoch, in the sums already

    def on_epoch_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Begin the times of an epoch."""
        self._epoch = dict.fromkeys(_PARTS, 0.0)

    def on_step_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Add the times since the last call."""
        entry = self.entry(state)
        for name in _PARTS:
            now = float(getattr(trainer.progress, name))
            entry[name] += now - self._epoch[name]
            self._epoch[name] = now
        entry["seconds"] = self._before + time.perf_counter() - self._start

    def on_epoch_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Add the times to the record of the epoch."""
        self.on_step_end(trainer, state, control)
        if state.history:
            state.history[-1] |= {name: round(self._epoch[name], 6) for name in _PARTS}

    def on_train_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Log the shares of the whole training."""
        entry = self.entry(state)
        total = entry["seconds"] = self._before + time.perf_counter() - self._start
        waiting, computing = (entry[name] / max(total, 1e-9) for name in _PARTS)
        logger.info(
            "Timing: %.3g s, of them %.0f %% computing, %.0f %% waiting for data, %.0f %% other",
            *(total, 100 * computing, 100 * waiting, 100 * max(0.0, 1 - computing - waiting)),
        )
