"""A trainer without a model, whose loop does what that of `Trainer` promises to callbacks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from onnxgrad.training.callbacks.base import Callbacks, TrainingControl

STEPS = 4  # an epoch, of ten rows each


@dataclass
class State:
    """What callbacks see of `TrainState`."""

    weights: dict = field(default_factory=lambda: {"w": np.zeros(2, np.float32)})
    buffers: dict = field(default_factory=lambda: {"mean": np.zeros(1, np.float32)})
    step: int = 0
    epoch: int = 0
    history: list = field(default_factory=list)
    learning_rate: float | None = None
    stop_reason: str | None = None
    further: bool = False
    callbacks: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    members: int | None = None
    frozen: dict = field(default_factory=dict)

    def through_a_file(self) -> State:
        """Return the state as a checkpoint restores it."""
        numbers = {n: getattr(self, n) for n in ("step", "epoch", "history", "callbacks")}
        copied = {n: {k: v.copy() for k, v in a.items()} for n, a in self.kept.items()}
        return State(
            dict(self.weights), dict(self.buffers), kept=copied, **json.loads(json.dumps(numbers))
        )


class Sgd(str):
    """An optimizer that averages no weights."""

    averages = False


SGD = Sgd("sgd")


class Trainer:
    """Trains on nothing: the weights are the number of the step, the losses are given."""

    def __init__(self, validation=None, losses=None, alpha=0.5, optimizer=SGD, callbacks=()):
        self.validation, self.losses = validation, losses
        self.alpha, self.optimizer, self.callbacks = alpha, optimizer, callbacks
        arguments = {"validation": validation, "losses": losses, "alpha": alpha}
        arguments |= {"optimizer": optimizer, "callbacks": callbacks}
        self._job = SimpleNamespace(arguments=arguments, averages_weights=optimizer.averages)
        self.gradient_norms = {}
        self.state = State()
        self.calls = []

    @property
    def model(self):
        raise AssertionError("building the model is costly")

    def fit(self, *callbacks, epochs=3, resume=None, fail=None):
        self.state = state = resume or State()
        control, run = TrainingControl(), Callbacks(callbacks)
        first, rows = state.epoch, 0
        self.progress = progress = SimpleNamespace(
            epoch=0, epochs=epochs, rows=0, total_rows=10 * STEPS, step=state.step,
            steps=epochs * STEPS, loss=0.0, validation_loss=None, rows_per_second=1e5,
            seconds_waiting=0.0, seconds_computing=0.0,
        )  # fmt: skip
        with run.training(self, state, control):
            try:
                while state.epoch < epochs and not control.stop:
                    progress.epoch, rows = state.epoch - first, 0
                    run.call("on_epoch_begin", self, state, control)
                    while rows < 10 * STEPS and not control.stop:
                        if fail is not None and state.step == fail[0]:
                            raise fail[1]
                        count = min(run.steps_until_stop(state.step) or 2, STEPS - rows // 10)
                        self.calls.append(count)
                        state.step += count
                        rows += 10 * count
                        self.step(rows)
                        run.call("on_step_end", self, state, control)
                    state.epoch += 1
                    self.record()
                    if self.validation is not None:
                        run.call("on_evaluate", self, state, control)
                    run.call("on_epoch_end", self, state, control)
                state.stop_reason = "callback" if control.stop else "max_iter"
            except KeyboardInterrupt:
                state.stop_reason = "interrupted"
                raise
            except Exception:
                state.stop_reason = "error"
                raise
        return self

    def step(self, rows):
        state, progress = self.state, self.progress
        state.weights = {"w": np.full(2, state.step, np.float32)}
        state.buffers = {"mean": np.full(1, -state.step, np.float32)}
        self.gradient_norms = {"w": 1.0 / state.step}
        state.learning_rate = 0.1
        progress.rows, progress.step = rows, state.step
        progress.loss = rows / 10  # so that each ten rows cost two more than those before
        progress.seconds_waiting, progress.seconds_computing = rows / 100, rows / 200

    def record(self):
        state, epoch = self.state, self.state.epoch
        loss = self.losses[epoch - 1] if self.losses else 1.0 / epoch
        entry = {"step": state.step, "epoch": epoch, "loss": loss, "learning_rate": 0.1}
        if self.validation is not None:
            entry["validation_loss"] = self.progress.validation_loss = self.validation[epoch - 1]
            entry["validation_accuracy"] = 1 - self.validation[epoch - 1]
        state.history.append(entry)
