"""Pruning of trials of Optuna."""

from __future__ import annotations

from typing import Any

from onnxgrad.checks import check_choice
from onnxgrad.errors import unknown
from onnxgrad.training.callbacks.base import UNFINISHED, Callback, Control
from onnxgrad.training.callbacks.early_stopping import better_if
from onnxgrad.training.callbacks.tracker import optional


class OptunaPruning(Callback):
    """Reports a value of the history to a trial of Optuna, and ends what its study prunes.

    `fit` then raises `optuna.TrialPruned`, after the events that end a training: the objective of
    the study lets it pass. A training that resumes reports to its trial what was not reported yet,
    and to another trial, as `RetryFailedTrialCallback` creates, all of its history. A loss that is
    not finite raises `ConvergenceError`: `study.optimize(..., catch=ConvergenceError)` counts such
    a trial as failed. Of several processes that train one model, the first reports and raises.

    Args:
        trial: the `optuna.Trial` that the objective gets.
        monitor: name of the value in the records of `trainer.history`.
        every: "epoch": the step of the report is the number of the epoch; so trials compare whose
            batches have other sizes. "evaluation": also evaluations within epochs are reported, and
            the step is that of the training.

    Raises:
        ImportError: optuna is not installed.
        ValueError: an unknown `every`. When training begins: a study with several objectives, or
            one that maximizes what is better if it is lower, or the other way round. In training, a
            `monitor` that the history does not have.

    Examples:
        >>> import onnxgrad as og
        >>> def objective(trial, model, X, y):
        ...     rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        ...     trainer = og.Trainer(model, "cross_entropy", learning_rate=rate,
        ...         callbacks=[og.OptunaPruning(trial, "validation_loss")])
        ...     trainer.fit(X, y, validation=0.2, epochs=20)
        ...     return trainer.history[-1]["validation_loss"]
    """

    of_members = False
    writes = True

    def __init__(self, trial: Any, monitor: str = "validation_loss", every: str = "epoch") -> None:
        check_choice("every", every, ("epoch", "evaluation"))
        self.trial, self.monitor, self.every = trial, monitor, every
        optional("OptunaPruning", "optuna", "optuna")

    def on_train_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Check the direction of the study, and report what the trial has not got yet."""
        self._check_direction(trainer)
        self._pruned = False
        entry, number = self.entry(state), getattr(self.trial, "number", None)
        if entry.get("trial") != number or state.further:
            entry.clear()
        entry["trial"] = number
        entry.setdefault("reported", -1)
        for record in state.history:
            self._report(record, state, control)

    def on_evaluate(self, trainer: Any, state: Any, control: Control) -> None:
        """Report an evaluation, if those within epochs count."""
        if self.every == "evaluation":
            self._report(state.history[-1], state, control)

    def on_epoch_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Report the epoch."""
        record = state.history[-1]
        if self.monitor not in record and not any(self.monitor in r for r in state.history):
            raise unknown(
                "monitor", self.monitor, [n for n in record if n not in ("step", "epoch")]
            )
        self._report(record, state, control)

    def on_train_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Raise `optuna.TrialPruned` if the study prunes the trial."""
        if self._pruned and state.stop_reason not in (*UNFINISHED, "not finite"):
            optuna = optional("OptunaPruning", "optuna", "optuna")
            reported = self.entry(state)["reported"]
            raise optuna.TrialPruned(f"pruned at {self.every} step {reported}")

    def _report(self, record: dict[str, Any], state: Any, control: Control) -> None:
        """Report the value of a record, unless it was; ask for the end if the study prunes it."""
        of_epoch = self.every == "epoch"
        if self.monitor not in record or (of_epoch and "loss" not in record):
            return
        entry, step = self.entry(state), int(record["epoch" if of_epoch else "step"])
        if step <= entry["reported"]:
            return
        self.trial.report(float(record[self.monitor]), step)
        entry["reported"] = step
        if self.trial.should_prune():
            self._pruned = control.stop = True

    def _check_direction(self, trainer: Any) -> None:
        """Raise `ValueError` for a study that optimizes something else than the value."""
        directions = getattr(getattr(self.trial, "study", None), "directions", None)
        if directions is None:
            return
        if len(directions) > 1:
            raise ValueError(
                f"the study has {len(directions)} objectives, and Optuna prunes for one: leave "
                "OptunaPruning out"
            )
        try:
            better = better_if(self.monitor, getattr(trainer, "metrics", ()))
        except ValueError:  # nothing is known of the value
            return
        wanted = {"MINIMIZE": "min", "MAXIMIZE": "max"}.get(directions[0].name)
        if wanted is not None and wanted != better:
            verb = "maximize" if better == "max" else "minimize"
            raise ValueError(
                f"{self.monitor!r} is better if it is {'higher' if better == 'max' else 'lower'}, "
                f"and the study has the other direction: create_study(direction={verb!r}), or "
                "monitor what it optimizes"
            )
