"""Callbacks that log numbers to TensorBoard, MLflow or Weights & Biases, or report to Optuna."""

from __future__ import annotations

import math
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from numbers import Real
from pathlib import Path
from reprlib import Repr
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice
from onnxgrad.errors import not_installed, printable, unknown
from onnxgrad.training.callbacks.base import Callback, TrainingControl
from onnxgrad.training.callbacks.early_stopping import better_direction
from onnxgrad.training.state import split_by_member

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 120  # characters
_LEFT_OUT = {"model", "callbacks"}  # arguments of a trainer that are not logged
_COUNTS = ("step", "epoch")  # names in records of the history that are no results
_STATUS = {"interrupted": "KILLED", "error": "FAILED", "not finite": "FAILED"}  # of MLflow


class Tracker(Callback):
    """Logs the history, and the numbers that other callbacks publish, by step.

    Each number of the history is logged under its own name; of a stack, the numbers of members are
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
        """Open a run of the tracker; `parameters` are the arguments of the trainer, by name."""

    @abstractmethod
    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers `scalars` of a step, by name."""

    @abstractmethod
    def end(self, state: Any) -> None:
        """Close the run of the tracker."""

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Open the run, and log the records of the history that were not logged before."""
        entry = self.entry(state)
        entry["records"] = records = min(entry.get("records", 0), len(state.history))
        self._steps: dict[str, int] = {}  # the step of the value that was logged last, by name
        for record in state.history[:records]:
            self._steps |= dict.fromkeys(split_by_member(record, state), record["step"])
        if records:
            for scalars in _published_scalars(state):
                self._steps |= dict.fromkeys(scalars["values"], scalars["step"])
        self._last = -math.inf  # the time when `step_loss` was logged last
        self._sum = self._rows = 0.0  # the sum of losses and the count of rows at that time
        self.begin(state, logged_arguments(trainer))
        self._log_history(state)

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Set the sum of the losses of the epoch to zero."""
        self._sum = self._rows = 0.0

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Log the mean loss since the last time, and numbers that other callbacks published."""
        now, every, progress = time.monotonic(), self.every_steps, trainer.progress
        due = now - self._last >= 1 if every is None else state.step % every == 0
        if due and progress.rows > self._rows and math.isfinite(progress.loss):
            total = progress.loss * progress.rows
            loss = (total - self._sum) / (progress.rows - self._rows)
            self._sum, self._rows, self._last = total, progress.rows, now
            scalars, rate = {"step_loss": loss}, state.learning_rate
            if rate is not None:
                rate = np.array(rate) if isinstance(rate, list) else rate
                scalars |= split_by_member({"learning_rate": rate}, state)
            self._log_new_numbers(state.step, scalars)
        self._log_published_scalars(state)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Log the new records of the history: an evaluation, or an epoch."""
        self._log_history(state)

    on_epoch_end = on_evaluate

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Log the values that were added to the last record, and close the run."""
        try:
            self._log_history(state)
        finally:
            self.end(state)

    def _log_history(self, state: Any) -> None:
        """Log the new records of the history, and values that were added to its last record."""
        entry = self.entry(state)
        for record in state.history[max(0, entry["records"] - 1) :]:
            numbers = {
                n: v for n, v in split_by_member(record, state).items() if isinstance(v, Real)
            }
            self._log_new_numbers(
                record["step"], {n: numbers[n] for n in numbers if n not in _COUNTS}
            )
        entry["records"] = len(state.history)
        self._log_published_scalars(state)

    def _log_published_scalars(self, state: Any) -> None:
        """Log the numbers that callbacks passed to `publish`."""
        for scalars in _published_scalars(state):
            self._log_new_numbers(scalars["step"], scalars["values"])

    def _log_new_numbers(self, step: int, scalars: dict[str, Any]) -> None:
        """Log the numbers `scalars`, except those already logged for this step or a later one."""
        new = {n: float(v) for n, v in scalars.items() if self._steps.get(n, -1) < step}
        if new:
            self.log(step, new)
            self._steps |= dict.fromkeys(new, step)


def _published_scalars(state: Any) -> list[dict[str, Any]]:
    """Return what callbacks published last: dicts `{"step": step, "values": {name: number}}`."""
    return [entry["scalars"] for entry in state.callbacks.values() if "scalars" in entry]


def logged_arguments(trainer: Any) -> dict[str, Any]:
    """Return the arguments of a trainer or estimator by name, objects and lists as short texts."""
    of_estimator = hasattr(trainer, "get_params")
    values = trainer.get_params(deep=False) if of_estimator else trainer._job.arguments
    return {
        name: v if isinstance(v, float | int | str | None) else printable(_SHORT.repr(v))
        for name, v in values.items()
        if name not in _LEFT_OUT
    }


def module_importer(callback: str, extra: str, *modules: str) -> Callable[[], Any]:
    """Return a function that imports the first of `modules` that is installed.

    If no module is installed, the function raises `ImportError`, which says that `callback` needs
    the extra `extra` of onnxgrad, which installs the first module.
    """

    def import_first_installed() -> Any:
        error: ImportError | None = None
        for name in modules:
            try:
                return import_module(name)
            except ImportError as e:
                error = error or e
        raise not_installed(callback, modules[0], extra) from error

    return import_first_installed


class TensorBoard(Tracker):
    """Writes the numbers of training into event files for TensorBoard.

    It logs the numbers of the history by step, `step_loss`, the mean loss of a row since it was
    logged last, and the numbers that other callbacks publish, such as `Norms`. The arguments of the
    trainer are a table on the page "Text". Points of an earlier run in the folder are hidden from
    the step on where this one begins.

    Args:
        folder: where to write: a folder for each run, `tensorboard --logdir` shows all runs below
            one.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.

    Raises:
        ImportError: neither tensorboardX nor tensorboard with PyTorch is installed.

    Examples:
        >>> from onnxgrad.training.callbacks.trackers import TensorBoard
        >>> try:
        ...     callbacks = [TensorBoard("runs/a")]
        ... except ImportError:  # pip install 'onnxgrad[tensorboard]'
        ...     callbacks = []
    """

    _open = ("_writer",)
    _package = staticmethod(  # tensorboardX first, as it does not import PyTorch
        module_importer("TensorBoard", "tensorboard", "tensorboardX", "torch.utils.tensorboard")
    )

    def __init__(self, folder: str | os.PathLike, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        self.folder = Path(folder)
        self._package()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Open a new event file of TensorBoard in the folder."""
        writer, first = self._package().SummaryWriter, state.step + 1
        # tensorboardX names files by the second: another run must not replace this one's
        suffix = f".{first:010d}.{os.urandom(4).hex()}"
        self._writer = writer(str(self.folder), purge_step=first, filename_suffix=suffix)
        cells = [
            [str(x).replace("|", r"\|").replace("\n", " ") for x in p] for p in parameters.items()
        ]
        rows = "".join(f"| {name} | {value} |\n" for name, value in cells)
        self._writer.add_text("parameters", f"| argument | value |\n|---|---|\n{rows}", first)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log each number as a point of one curve."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self, state: Any) -> None:
        """Close the event file."""
        self._writer.close()


class MLflow(Tracker):
    """Logs the numbers of training as metrics of an MLflow run, and the trainer's arguments.

    It logs the numbers of the history by step, `step_loss`, the mean loss of a row since it was
    logged last, and the numbers that other callbacks publish, such as `Norms`. If a run of MLflow
    is active, that one is used and stays open. Otherwise a run is started and ended; where training
    resumes, it is the run of before. Characters that MLflow does not allow in names become "_".

    Args:
        experiment: name of the experiment; None is MLflow's.
        run_name: name of a new run; None lets MLflow choose.
        tracking_uri: server or folder; None is MLflow's, such as of `MLFLOW_TRACKING_URI`.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.

    Raises:
        ImportError: mlflow is not installed.

    Examples:
        >>> from onnxgrad.training.callbacks.trackers import MLflow
        >>> try:
        ...     callbacks = [MLflow(experiment="vision", run_name="a")]
        ... except ImportError:  # pip install 'onnxgrad[mlflow]'
        ...     callbacks = []
    """

    _package = staticmethod(module_importer("MLflow", "mlflow", "mlflow"))

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        every_steps: int | None = None,
    ) -> None:
        super().__init__(every_steps)
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self._package()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Use the active run of MLflow, the run before a resume, or a new run."""
        mlflow, entry = self._package(), self.entry(state)
        run, before = mlflow.active_run(), entry.get("run_id")
        self._own = run is None
        if self._own:
            if self.tracking_uri is not None:
                mlflow.set_tracking_uri(self.tracking_uri)
            if self.experiment is not None:
                mlflow.set_experiment(self.experiment)
            run = mlflow.start_run(run_id=before, run_name=None if before else self.run_name)
        if before != run.info.run_id:  # MLflow refuses parameters that change
            mlflow.log_params({name: str(value)[:250] for name, value in parameters.items()})
        entry["run_id"] = run.info.run_id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers `scalars` of a step as metrics of the run."""
        allowed = {re.sub(r"[^\w\-. /]", "_", n, flags=re.ASCII): v for n, v in scalars.items()}
        self._package().log_metrics(allowed, step=step)

    def end(self, state: Any) -> None:
        """End the run of MLflow, if this callback started it."""
        if self._own:
            self._package().end_run(_STATUS.get(state.stop_reason, "FINISHED"))


class WeightsAndBiases(Tracker):
    """Logs the numbers of training to a run of Weights & Biases, and the trainer's arguments.

    It logs the numbers of the history, `step_loss`, the mean loss of a row since it was logged
    last, and the numbers that other callbacks publish, such as `Norms`, against `step`. If a run is
    active, that one is used and stays open. Otherwise a run is started and finished; where training
    resumes, it is the run of before.

    Args:
        project: name of the project; None lets wandb choose.
        name: name of a new run; None lets wandb choose.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.
        **options: other arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        ImportError: wandb is not installed.

    Examples:
        >>> from onnxgrad.training.callbacks.trackers import WeightsAndBiases
        >>> try:
        ...     callbacks = [WeightsAndBiases(project="vision", mode="offline")]
        ... except ImportError:  # pip install 'onnxgrad[wandb]'
        ...     callbacks = []
    """

    _open = ("_run",)
    _package = staticmethod(module_importer("WeightsAndBiases", "wandb", "wandb"))

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        every_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every_steps)
        self.project, self.name, self.options = project, name, options
        self._package()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Use the active run of wandb, the run before a resume, or a new run."""
        wandb, entry = self._package(), self.entry(state)
        self._run, self._own = wandb.run, wandb.run is None
        if self._own:
            before = {"id": entry["run_id"], "resume": "allow"} if "run_id" in entry else {}
            options = {"project": self.project, "name": self.name, **before, **self.options}
            self._run = wandb.init(**{n: v for n, v in options.items() if v is not None})
        self._axes: set[str] = set()  # names of the numbers whose curves are drawn over "step"
        self._run.config.update(parameters, allow_val_change=True)
        entry["run_id"] = self._run.id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers `scalars` and the step, as wandb's own step must not go back."""
        for name in scalars:
            if name not in self._axes:
                self._run.define_metric(name, step_metric="step")
                self._axes.add(name)
        self._run.log({**scalars, "step": step})

    def end(self, state: Any) -> None:
        """Finish the run of wandb, if this callback started it."""
        if self._own:
            self._run.finish(exit_code=int(state.stop_reason in _STATUS))


class OptunaPruning(Callback):
    """Reports a value of the history to a trial of Optuna; a pruned trial ends training.

    `fit` then raises `optuna.TrialPruned`, after the events that end a training: the objective of
    the study lets it pass. A training that resumes reports to its trial the values that were not
    reported yet, and to another trial, as `RetryFailedTrialCallback` creates, all values. A loss
    that is not finite raises `ConvergenceError`: `study.optimize(..., catch=ConvergenceError)`
    counts such a trial as failed. Of several processes that train one model, the first reports and
    raises.

    Args:
        trial: the `optuna.Trial` that the objective gets.
        monitor: name of the value in the records of `trainer.history`.
        every: "epoch": the step of the report is the number of the epoch; so trials compare whose
            batches have other sizes. "evaluation": also evaluations within epochs are reported, and
            the step is the number of training steps.

    Raises:
        ImportError: optuna is not installed.
        ValueError: an unknown `every`. When training begins: a study with several objectives, or
            one that maximizes a value that is better if it is lower, or the other way round. In
            training, a `monitor` that the history does not have.

    Examples:
        >>> import onnxgrad as og
        >>> def objective(trial, model, X, y):
        ...     rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        ...     trainer = og.Trainer(model, "cross_entropy", learning_rate=rate,
        ...         callbacks=[og.callbacks.OptunaPruning(trial, "validation_loss")])
        ...     trainer.fit(X, y, validation=0.2, epochs=20)
        ...     return trainer.history[-1]["validation_loss"]
    """

    of_members = False
    writes = True
    _package = staticmethod(module_importer("OptunaPruning", "optuna", "optuna"))

    def __init__(self, trial: Any, monitor: str = "validation_loss", every: str = "epoch") -> None:
        check_choice("every", every, ("epoch", "evaluation"))
        self.trial, self.monitor, self.every = trial, monitor, every
        self._package()

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Check the direction of the study, and report the values that the trial lacks."""
        self._check_study_direction(trainer)
        self._pruned = False
        entry, number = self.entry(state), getattr(self.trial, "number", None)
        if entry.get("trial") != number or state.further:
            entry.clear()
        entry["trial"] = number
        entry.setdefault("reported", -1)
        for record in state.history:
            self._report_value(record, state, control)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Report the last evaluation to the trial, if `every` is "evaluation"."""
        if self.every == "evaluation":
            self._report_value(state.history[-1], state, control)

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Report the monitored value of the epoch to the trial."""
        record = state.history[-1]
        if self.monitor not in record and not any(self.monitor in r for r in state.history):
            raise unknown("monitor", self.monitor, [n for n in record if n not in _COUNTS])
        self._report_value(record, state, control)

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Raise `optuna.TrialPruned` if the study prunes the trial."""
        if self._pruned and state.stop_reason not in _STATUS:
            reported = self.entry(state)["reported"]
            raise self._package().TrialPruned(f"pruned at {self.every} step {reported}")

    def _report_value(self, record: dict[str, Any], state: Any, control: TrainingControl) -> None:
        """Report the value of a record once, and end training if the study prunes the trial."""
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

    def _check_study_direction(self, trainer: Any) -> None:
        """Raise `ValueError` if the study has several objectives or prefers worse values."""
        directions = getattr(getattr(self.trial, "study", None), "directions", None) or ()
        if len(directions) > 1:
            raise ValueError(
                f"the study has {len(directions)} objectives, and Optuna prunes studies of one "
                "objective only: leave OptunaPruning out of callbacks"
            )
        try:
            better = better_direction(self.monitor, getattr(trainer, "metrics", ()))
        except ValueError:  # it is unknown whether lower or higher values are better
            return
        higher, verb = ("higher", "maximize") if better == "max" else ("lower", "minimize")
        if [d.name for d in directions] == ["MINIMIZE" if better == "max" else "MAXIMIZE"]:
            raise ValueError(
                f"{self.monitor!r} is better if it is {higher}, and the study has the other "
                f"direction: create_study(direction={verb!r}), or monitor the value that it "
                "optimizes"
            )
