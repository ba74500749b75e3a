"""`Job`: the task and the trainer that `onnxgrad train` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto

from onnxgrad.cli.arguments import learning_rate, trainer_arguments
from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.options import set_options
from onnxgrad.cli.tasks import open_task
from onnxgrad.data.class_numbers import class_weights_by_index
from onnxgrad.errors import unknown
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import select
from onnxgrad.tasks import Task
from onnxgrad.tasks.base import row_count
from onnxgrad.tasks.rows_task import RowsTask
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.precision import training_precision
from onnxgrad.training.trainer import Trainer

# {`Trainer` argument: the options that set it}, where the names differ
_OPTIMIZER = {"optimizer", "optimizer_option", "weight_decay"}
_RATE = {"learning_rate", "schedule", "schedule_option", "warmup"}
_SET_BY = {"optimizer": _OPTIMIZER, "learning_rate": _OPTIMIZER | _RATE}


@dataclass
class Job:
    """A task with data, and the trainer of the task's model."""

    trainer: Trainer
    task: Task

    @property
    def rows(self) -> int | None:
        """The count of rows to train on; None if unknown."""
        return row_count(self.task.data)

    @property
    def validation_rows(self) -> int | None:
        """The count of rows to validate on; None if it is unknown, or there are no such rows."""
        return None if self.task.validation is None else row_count(self.task.validation)

    @property
    def messages(self) -> list[str]:
        """The task's messages about data and columns."""
        return [*self.task.notes, *self.task.remarks]

    def fit(self, options: TrainOptions, epochs: int, resume: str | None = None) -> None:
        """Train the model; `resume` is the folder of a checkpoint to continue from."""
        self.trainer.fit(
            self.task.data,
            validation=self.task.validation,
            epochs=epochs,
            batch_size=options.batch_size,
            shuffle=options.shuffle,
            resume=resume,
            cache=options.cache,
        )


def prepare_job(options: TrainOptions, proto: ModelProto, callbacks: Sequence[Callback]) -> Job:
    """Return the `Job`: the task named by options or implied by the data, and its trainer.

    Raises:
        ValueError: options that do not fit the model or the data.
    """
    arguments = trainer_arguments(options)
    task = open_task(options, proto)
    arguments["class_weight"] = _class_weights(arguments["class_weight"], task)
    for name in _arguments_decided_by_task(options, task):
        arguments.pop(name, None)
    arguments |= _schedule_with_task_rate(
        options, task.usual_arguments(arguments).get("learning_rate")
    )
    trainer = task.trainer(callbacks=callbacks, **arguments)
    job = Job(trainer, task)
    _check_monitor(options, trainer, task.validation is not None)
    _check_options_have_effect(options, task.model, task.validation is not None)
    size, rows = options.batch_size, job.rows
    if size is not None and rows is not None and size > rows and isinstance(task, RowsTask):
        raise ValueError(
            f"--batch-size {size} is more than the {rows} rows to train on: pass fewer"
        )
    return job


def _arguments_decided_by_task(options: TrainOptions, task: Task) -> list[str]:
    """Return the names of `Trainer` arguments that the task sets, as the user sets no option."""
    given, names = set_options(options), [*task.arguments, "optimizer"]
    return [name for name in names if not given & _SET_BY.get(name, {name})]


def _schedule_with_task_rate(options: TrainOptions, usual: Any) -> dict[str, Any]:
    """Return `--schedule` with the task's learning rate if the user gives no rate; else {}."""
    if usual is None or options.learning_rate is not None or not set_options(options) & _RATE:
        return {}
    # the rate behind a warm-up
    highest = float(getattr(select(usual), "schedule", select(usual))(0))
    return {"learning_rate": learning_rate(replace(options, learning_rate=highest))}


def _class_weights(weights: Any, task: Task) -> Any:
    """Return class weights by class index, as a `Trainer` takes them."""
    classes = list(task.classes)
    count = task.class_count if isinstance(task, RowsTask) else len(classes)
    by_number = class_weights_by_index(weights, classes, count)
    if isinstance(by_number, dict) and isinstance(task, RowsTask) and isinstance(task.loss, dict):
        return dict.fromkeys(task.loss, by_number)
    return by_number


def _check_options_have_effect(options: TrainOptions, proto: ModelProto, validated: bool) -> None:
    """Raise `ValueError` for options that have no effect on this model or without validation."""
    if options.metrics and not validated:
        raise ValueError(
            "--metrics are computed on validation data, and there are none: pass --validation "
            "SHARE or a file, or leave out --metrics"
        )
    if (
        options.precision != "auto"
        and training_precision("auto", proto, Device.of("cpu")) == "file"
    ):
        raise ValueError(
            f"--precision {options.precision} has no effect: the model has no floats of 16 bits, "
            "so leave it out"
        )


def _check_monitor(options: TrainOptions, trainer: Trainer, validated: bool) -> None:
    """Raise `ValueError` if the history has no number of the name in `--monitor`."""
    if options.early_stopping is None and options.monitor is None:
        return
    names, monitor = ["loss", "learning_rate"], options.monitor or "validation_loss"
    if validated:
        names.append("validation_loss")
        for output, metrics in trainer._job.metrics.items():
            prefix = "validation_" if output is None else f"validation_{output}_"
            names += [f"{prefix}{metric.name}" for metric in metrics]
    if monitor in names:
        return
    if not validated and monitor.startswith("validation_"):
        raise ValueError(
            f"{monitor} is monitored, and there are no validation data: pass --validation SHARE or "
            "a file, or --monitor loss"
        )
    raise unknown("number to watch (--monitor)", monitor, names)
