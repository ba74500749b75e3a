"""The base class of callbacks that log numbers to a service or to files of another program."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from importlib import import_module
from inspect import signature
from numbers import Real
from reprlib import Repr
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed, printable
from onnxgrad.training.callbacks.base import Callback, Control
from onnxgrad.training.progress import by_member

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 120  # characters
_LEFT_OUT = {"model", "callbacks"}  # arguments; reading `trainer.model` builds a model


class Tracker(Callback):
    """Logs the history, and the numbers that other callbacks publish, by step.

    Each number of the history is logged under its own name; of a stack, those of the members as
    "loss/0", "loss/1" and so on. Within epochs, `step_loss` is the mean loss of a row since it was
    logged last. Where training resumes, it goes on behind the records that are in the history.

    Args:
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.
    """

    writes = True

    def __init__(self, every_steps: int | None = None) -> None:
        self.every_steps = every_steps

    @abstractmethod
    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Open the run; `parameters` are the arguments of the trainer."""

    @abstractmethod
    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log numbers of a step."""

    @abstractmethod
    def end(self, state: Any) -> None:
        """Close the run."""

    def on_train_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Open the run, and log the records of the history that were not logged before."""
        entry = self.entry(state)
        entry["records"] = records = min(entry.get("records", 0), len(state.history))
        self._steps: dict[str, int] = {}  # of the number that was logged last, by name
        for record in state.history[:records]:
            self._steps |= dict.fromkeys(by_member(record, state), record["step"])
        if records:
            for scalars in _published(state):
                self._steps |= dict.fromkeys(scalars["values"], scalars["step"])
        self._last = -math.inf  # time of the last step_loss
        self._sum = self._rows = 0.0  # of the losses and rows of the epoch, when it was logged
        self.begin(state, parameters_of(trainer))
        self._log_history(state)

    def on_epoch_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Begin the sum of the losses of an epoch."""
        self._sum = self._rows = 0.0

    def on_step_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Log the loss since the last time, and what other callbacks published."""
        now = time.monotonic()
        if self.every_steps is None:
            due = now - self._last >= 1
        else:
            due = state.step % self.every_steps == 0
        progress = trainer.progress
        if due and progress.rows > self._rows and math.isfinite(progress.loss):
            total = progress.loss * progress.rows
            loss = (total - self._sum) / (progress.rows - self._rows)
            self._sum, self._rows, self._last = total, progress.rows, now
            rate = {} if state.learning_rate is None else {"learning_rate": state.learning_rate}
            if isinstance(state.learning_rate, list):
                rate = by_member({"learning_rate": np.array(state.learning_rate)}, state)
            self._send(state.step, {"step_loss": loss} | rate)
        self._log_published(state)

    def on_evaluate(self, trainer: Any, state: Any, control: Control) -> None:
        """Log the evaluation."""
        self._log_history(state)

    def on_epoch_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Log the epoch."""
        self._log_history(state)

    def on_train_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Log what was added to the last record, and close the run."""
        try:
            self._log_history(state)
        finally:
            self.end(state)

    def _log_history(self, state: Any) -> None:
        """Log what is new in the history; other callbacks may have added to its last record."""
        entry = self.entry(state)
        for record in state.history[max(0, entry["records"] - 1) :]:
            numbers = {n: v for n, v in by_member(record, state).items() if isinstance(v, Real)}
            self._send(
                record["step"], {n: v for n, v in numbers.items() if n not in ("step", "epoch")}
            )
        entry["records"] = len(state.history)
        self._log_published(state)

    def _log_published(self, state: Any) -> None:
        for scalars in _published(state):
            self._send(scalars["step"], scalars["values"])

    def _send(self, step: int, scalars: dict[str, Any]) -> None:
        """Log the numbers that were not logged at this step already."""
        new = {n: float(v) for n, v in scalars.items() if self._steps.get(n, -1) < step}
        if new:
            self.log(step, new)
            self._steps |= dict.fromkeys(new, step)


def _published(state: Any) -> list[dict[str, Any]]:
    """Return what callbacks passed to `publish`."""
    return [entry["scalars"] for entry in state.callbacks.values() if "scalars" in entry]


def parameters_of(trainer: Any) -> dict[str, Any]:
    """Return the arguments of the trainer that are numbers and texts, and short texts of others."""
    if hasattr(trainer, "get_params"):
        values = trainer.get_params(deep=False)
    else:
        names = [name for name in signature(type(trainer)).parameters if name not in _LEFT_OUT]
        values = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
        if values.get("members") is not None:  # of a stack, where these are those of the first
            values |= {"optimizer": trainer.optimizers, "learning_rate": trainer.learning_rates}
    return {
        name: value
        if isinstance(value, (bool, int, float, str)) or value is None
        else printable(_SHORT.repr(value))
        for name, value in values.items()
        if name not in _LEFT_OUT
    }


def optional(callback: str, extra: str, *modules: str) -> Any:
    """Return the first of `modules` that is installed, for a callback that needs one.

    `extra` of onnxgrad installs the first.

    Raises:
        ImportError: none is; it says what to install.
    """
    error: ImportError | None = None
    for name in modules:
        try:
            return import_module(name)
        except ImportError as e:
            error = error or e
    raise not_installed(callback, modules[0], extra) from error
