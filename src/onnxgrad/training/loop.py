"""The loop of `fit`: epochs of slices of batches, with reports and validations between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrad.errors import ConvergenceError
from onnxgrad.reporting import logger
from onnxgrad.schedules import BaseLearningRate
from onnxgrad.training.data import ArraySource, IterableSource
from onnxgrad.training.runner import Evaluation, Runner
from onnxgrad.training.state import TrainState

# why `fit` ended
MAX_ITER, CALLBACK, NOT_FINITE = "max_iter", "callback", "not finite"
INTERRUPTED, ERROR = "interrupted", "error"


@dataclass
class Progress:
    """The progress of training, passed to a callback after slices of batches and validations.

    Attributes:
        epoch: number of this epoch, from 0.
        epochs: number of all epochs.
        rows: rows trained on so far in this epoch.
        total_rows: rows of an epoch; None in the first epoch of an iterable of batches.
        loss: mean loss of a row so far in this epoch.
        validation_loss: that of the last validation; None before the first.
        rows_per_second: speed of this epoch so far.

    Examples:
        >>> from onnxgrad.training.loop import Progress
        >>> def stop_at_small_loss(progress: Progress) -> bool:
        ...     return progress.loss > 1e-3  # False ends `fit(X, y, callback=stop_at_small_loss)`
        >>> stop_at_small_loss(Progress(0, 10, 32, 100, 0.25, None, 1e5))
        True
    """

    epoch: int
    epochs: int
    rows: int
    total_rows: int | None
    loss: float
    validation_loss: float | None
    rows_per_second: float


@dataclass
class Loop:
    """The epochs of one call of `fit`, whose arguments are checked already."""

    state: TrainState
    runner: Runner
    rate: BaseLearningRate
    source: ArraySource | IterableSource
    validation: Evaluation | None
    epochs: int
    validation_every: int  # epochs
    log_steps: bool
    log_epochs: bool

    def __post_init__(self) -> None:
        self._began = self.runner.now

    @property
    def moved(self) -> bool:
        """Return whether a slice of batches was finished."""
        return self.runner.now is not self._began

    def run(self, callback: Callable[[Progress], Any]) -> str:
        """Run until the last epoch or until a callback ends it; return `MAX_ITER` or `CALLBACK`.

        Raises:
            ConvergenceError: the loss, a weight or the validation loss is not finite.
            ValueError: the callback returned an invalid value.
        """
        if self.log_steps:
            logger.info("fit: %s on %s", self.state.optimizer, self.runner.device)
        for epoch in range(self.epochs):
            progress, stopped = self._epoch(epoch, callback)
            if stopped and progress.rows != self.source.rows:
                return CALLBACK
            self._record(epoch, progress.loss)
            if stopped:
                return CALLBACK
            if self.validation is not None and (epoch + 1) % self.validation_every == 0:
                value = self._validate(epoch, self.validation)
                if _stops(callback(replace(progress, validation_loss=value))):
                    return CALLBACK
        return MAX_ITER

    def _epoch(self, epoch: int, callback: Callable[[Progress], Any]) -> tuple[Progress, bool]:
        """Run one epoch; return its last progress, and whether the callback ended it."""
        rate, state = self.rate.value, self.state
        assert rate is not None
        state.learning_rate = rate
        total, rows, start = 0.0, 0, time.perf_counter()
        for piece in self.source.epoch(self.runner.budget):
            losses = self.runner.run(piece, rate)
            if losses is None:
                raise self._diverged("the loss or a weight", epoch, "the state before it is kept")
            rows += piece.batches * piece.rows
            total = float(np.cumsum([total, *losses])[-1])  # the same for any slices
            speed = rows / max(time.perf_counter() - start, 1e-9)
            validated = state.validation_losses[-1] if state.validation_losses else None
            loss, every = total / rows, self.source.rows
            progress = Progress(epoch, self.epochs, rows, every, loss, validated, speed)
            if self.log_steps:
                logger.debug("step %d loss %g", self.runner.now[1], loss)
            if _stops(callback(progress)):
                return progress, True
        return progress, False

    def _record(self, epoch: int, loss: float) -> None:
        losses = self.state.losses
        losses.append(loss)
        self.rate.update_learning_rate(len(losses), loss)
        if self.log_epochs:
            logger.info("epoch %d/%d loss %g", epoch + 1, self.epochs, loss)

    def _validate(self, epoch: int, validation: Evaluation) -> float:
        weights = self.state.values.weights
        value = validation.loss({name: weights[name] for name in self.state.trained})
        if not np.isfinite(value):
            kept = "the state after that epoch, whose training loss is finite, is kept"
            raise self._diverged("the validation loss", epoch, kept)
        self.state.validation_losses.append(value)
        return value

    def _diverged(self, what: str, epoch: int, kept: str) -> ConvergenceError:
        recent = ", ".join(f"{v:.6g}" for v in self.state.losses[-5:]) or "none"
        return ConvergenceError(
            f"{what} became NaN or infinite in epoch {epoch + 1} at learning rate "
            f"{self.state.learning_rate:g} (losses of the epochs before: {recent}); {kept}. "
            "Lower the learning rate, or scale the data"
        )


def _stops(answer: Any) -> bool:
    """Return whether `answer`, which a callback returned, ends training."""
    if answer is None or (isinstance(answer, (bool, np.bool_)) and answer):
        return False
    if isinstance(answer, (bool, np.bool_)) or (isinstance(answer, str) and answer == "stop"):
        return True
    raise ValueError(
        f"the callback returned {answer!r}: return None or True to continue, "
        "False or 'stop' to end training"
    )
