"""`--task`: jobs of `onnxgrad.tasks`, which read their own files and decide loss and metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxgrad.cli.arguments import loss_arguments, read_value, trainer_arguments
from onnxgrad.cli.command_options import EvalOptions, PredictOptions
from onnxgrad.cli.console import note, print_json
from onnxgrad.cli.data_options import DataOptions, InputOptions
from onnxgrad.cli.image_source import image_size, normalization_of
from onnxgrad.cli.job import Job, check_monitor, fine_tune, parts, prepare
from onnxgrad.cli.model_files import STDIN, read_model
from onnxgrad.cli.options import Described
from onnxgrad.cli.task import Task as Data
from onnxgrad.cli.train_options import LossOptions, TrainOptions
from onnxgrad.data.class_numbers import weights_by_number
from onnxgrad.data.columns import Names
from onnxgrad.errors import check_options, unknown
from onnxgrad.tasks import Task
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.data import Dataset
from onnxgrad.training.trainer import Trainer

TASKS = ("ctc", "detection", "embeddings", "segmentation", "sound", "tokens")
_FOLDER = "predictions"
_DATA_AND_LOSS = {*Described.fields_of(DataOptions), *Described.fields_of(LossOptions)}
_OF_ALL = {"data", "task", "task_option", "validation", "metrics"}  # whatever the task is
# options that a task decides, reads from its own files, or has by the names of its arguments
_OF_TASK = (_DATA_AND_LOSS - _OF_ALL) | {
    *("head", "head_at", "head_pool", "head_mask", "adapter", "outputs")
}
_VALUES = ("normalize", "pixels", "images")  # arguments that say how values of images are scaled


def task_of(options: Any, data: str | None) -> Task:
    """Return the task that the options name, for the data to train on, if any.

    Raises:
        ValueError: an unknown task or option, or one of the command that the task decides.
    """
    name = options.task
    if name not in TASKS:
        raise unknown("task (--task)", name, TASKS)
    module = import_module(f"onnxgrad.tasks.{name}")
    found = [getattr(module, each) for each in module.__all__]
    kind: Any = next(each for each in found if isinstance(each, type) and issubclass(each, Task))
    chosen = dict(read_value("task-option", text) for text in options.task_option)
    parameters = signature(kind).parameters
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        check_options(f"option of task {name!r} (--task-option)", chosen, kind, skip=2)
    chosen = {**_given_on(options, parameters), **chosen}
    model = read_model(STDIN, data) if options.model == STDIN else options.model
    task = kind(model, data, **chosen)
    assert isinstance(task, Task)
    return task


def _given_on(options: Any, parameters: Collection[str]) -> dict[str, Any]:
    """Return the options of the command that are arguments of the task.

    Raises:
        ValueError: the task has no argument for an option that is set.
    """
    of_values = next((each for each in _VALUES if each in parameters), "normalize")
    size, normalize = image_size(options.image_size), normalization_of(options)
    chosen: dict[str, Any] = {"image_size": size, of_values: normalize}
    known = {"image_size": "image_size", "scale": of_values, "normalize": of_values}
    if of_values == "images":  # those of a reader
        both = {"size": size, "transforms": None if normalize is None else [normalize]}
        chosen = {"images": {name: value for name, value in both.items() if value is not None}}
        known["image_size"] = "images"
    for each in ("max_length", "tokenizer", "seed"):
        known[each], chosen[each] = each, getattr(options, each, None)
    given = _set(options) & _OF_TASK
    if wrong := sorted(each for each in given if known.get(each) not in parameters):
        flags = ", ".join(f"--{each.replace('_', '-')}" for each in wrong)
        raise ValueError(
            f"--task {options.task} decides {flags}, or has no such option: leave it out, or see "
            "--task-option"
        )
    given |= {"seed"} & {*vars(options)}  # whether it is set or not
    names = {known[each] for each in given} & {*parameters}
    return {name: chosen[name] for name in names}


def has_task(options: InputOptions) -> bool:
    """Return whether the options name a task."""
    return options.task is not None


def _set(options: InputOptions) -> set[str]:
    """Return the names of the options that the user set to other values than their defaults."""
    described = Described.fields_of(type(options))
    return {name for name, each in described.items() if each.is_set(options, name)}


def _rows(reader: Any) -> Data:
    return Data(Dataset(reader), reader.rows, Names(), in_memory=False)


def prepared(options: TrainOptions, proto: ModelProto, callbacks: Sequence[Callback]) -> Job:
    """Return the trainer and its data, of a task if the options name one."""
    if not has_task(options):
        return prepare(options, proto, callbacks)
    arguments = trainer_arguments(options)
    task = task_of(options, options.data)
    for name in ("loss", "loss_options", "loss_weights", *["metrics"] * (not options.metrics)):
        arguments.pop(name)
    task.model = fine_tune(task.model, options)
    classes = list(task.classes)
    weight = weights_by_number(arguments["class_weight"], classes, len(classes))
    arguments["class_weight"] = weight
    if not options.train and "train" in task.arguments:
        arguments.pop("train")
    trainer = task.trainer(callbacks=callbacks, **arguments)
    data = _rows(task.data)
    data.notes.append(f"{data.rows} rows to train on" if data.rows else "rows to train on")
    own = None if task.validation is None else _rows(task.validation)
    training, validation = parts(options, data, own, lambda path: _rows(task.read(path)))
    check_monitor(options, trainer, validation is not None)
    job = Job(trainer, task.model, data, training, validation, classes=classes or None)
    job.finish = task.finished
    return job


def evaluate_task(options: EvalOptions) -> tuple[dict[str, Any], int | None]:
    """Return the loss and the metrics of a trained model for the files of a task, and its rows."""
    # of embeddings, only data say what the loss is; other tasks would adapt the model to them
    task = task_of(options, options.data if options.task == "embeddings" else None)
    metrics = loss_arguments(options)["metrics"]
    trainer: Trainer = task.trainer(
        device=options.device, **({"metrics": metrics} if metrics else {})
    )
    reader = task.read(options.data)
    return trainer.evaluate(reader, batch_size=options.batch_size), reader.rows


def predict_task(options: PredictOptions) -> None:
    """Write what a trained model predicts into a folder, as people of the task look at it."""
    for name in {"batch_size", "device"} & _set(options):
        flag = name.replace("_", "-")
        raise ValueError(f"--task predicts one input after another on the CPU: leave out --{flag}")
    task = task_of(options, None)
    folder = Path(_FOLDER if options.output == "-" else options.output)
    if folder.is_file():
        raise ValueError(f"--output {str(folder)!r} is a file: --task writes into a folder")
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise FileExistsError(
            f"the folder {str(folder)!r} is not empty: name another with --output, or pass "
            "--overwrite"
        )
    results = list(task.predict(task.model, options.data))
    files = task.write(options.data, results, folder)
    if options.json:
        print_json({"files": [str(file) for file in files], "rows": len(results)})
        return
    note(f"{len(results)} predictions")
    note(f"wrote {files[0]}" if len(files) == 1 else f"wrote {len(files)} files in {folder}")
