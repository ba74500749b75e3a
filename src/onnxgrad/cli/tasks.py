"""The task of a command: the job that its options, its model and its data are of."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Any

from onnx import ModelProto

from onnxgrad.cli.arguments import loss_arguments, read_value
from onnxgrad.cli.data_options import DataOptions, InputOptions
from onnxgrad.cli.fine_tuning import fine_tune, split_names
from onnxgrad.cli.model_files import STDIN, standard_input
from onnxgrad.cli.options import Described
from onnxgrad.cli.sources import NO_PROMPTS, check_data_options, data_kind
from onnxgrad.cli.train_options import LossOptions
from onnxgrad.errors import check_options, unknown
from onnxgrad.model.feeds import names_without_default
from onnxgrad.tasks import Task
from onnxgrad.tasks.base import OPTIONS, notes_of
from onnxgrad.tasks.image_values import as_image_size, normalization_from_one
from onnxgrad.tasks.rows_task import RowsTask
from onnxgrad.tasks.texts import language_folder

TASKS = {  # the class of each task, in its module
    "ctc": "ctc:TextRecognition",
    "detection": "detection:Detection",
    "embeddings": "embeddings:Embeddings",
    "images": "images:Images",
    "segmentation": "segmentation:Segmentation",
    "sound": "sound:Sound",
    "table": "tables:Table",
    "text-labels": "text_labels:TextLabels",
    "texts": "texts:Texts",
    "tokens": "tokens:Tokens",
}
_BY_KIND = {"tables": "table", "images": "images", "texts": "texts"}  # of what data hold
_DATA_AND_LOSS = {*Described.fields_of(DataOptions), *Described.fields_of(LossOptions)}
_OF_ALL = {"data", "task", "task_option", "validation", "metrics"}  # whatever the task is
# options that a task decides, reads from its own files, or has by the names of its arguments
_OF_TASK = (_DATA_AND_LOSS - _OF_ALL) | {
    *("head", "head_at", "head_pool", "head_mask", "adapter", "outputs")
}
_WITHOUT_FLAG = {"augment"}  # arguments of tasks of rows that are no options of the command
_VALUES = ("normalize", "pixels", "images")  # arguments that say how values of images are scaled


def open_task(options: Any, proto: ModelProto, training: bool = True) -> Task:
    """Return the task of a command: named, noted in the model, or by the kind of its data.

    Args:
        options: of `train`, `eval` or `predict`.
        proto: the model.
        training: whether the task has the data of the command to train on.

    Raises:
        ValueError: an unknown task, or options that it does not take.
    """
    noted = [] if options.task else _noted_tasks(proto)
    kind = "" if options.task or noted else data_kind(options.data, options)
    name = options.task or next(iter(noted), None) or _BY_KIND[kind]
    if name not in TASKS:
        raise unknown("task (--task)", name, TASKS)
    task_class: Any = resolve_name(f"onnxgrad.tasks.{TASKS[name]}")
    if issubclass(task_class, RowsTask):
        check_data_options(options, kind or next(k for k, n in _BY_KIND.items() if n == name))
        model = fine_tune(proto, options) if training else proto
        chosen = _arguments_of_rows(options, proto, signature(task_class).parameters)
        own = dict(read_value("task-option", text) for text in options.task_option)
        if {*own} - (_WITHOUT_FLAG & {*signature(task_class).parameters}):
            raise ValueError(
                f"--task-option is of a task, and {name} has the options of the command: leave it "
                "out, or name another with --task"
            )
        chosen |= own
        if name == "texts" and not hasattr(options, "max_length"):
            raise ValueError(NO_PROMPTS)
        if not training:
            return _checked_task(task_class(model, None, **chosen))
        validation = _stated_validation(options.validation)
        data = standard_input("CSV file") if options.data == STDIN else options.data
        return _checked_task(task_class(model, data, validation=validation, **chosen))
    chosen = _task_arguments(options, name, task_class)
    data = options.data if training else None
    task = _checked_task(task_class(_model_of(options, proto), data, **chosen))
    if noted:
        task.notes = [*task.notes, f"task {name}, as in its training"]
    if training:
        task.model = fine_tune(task.model, options)
        task.divide_rows(_stated_validation(options.validation), options.seed)
        count = getattr(task.data, "rows", None)
        task.notes = [*task.notes, f"{count} rows to train on" if count else "rows to train on"]
    return task


def _checked_task(task: Any) -> Task:
    assert isinstance(task, Task)
    return task


def _model_of(options: Any, proto: ModelProto) -> Any:
    """Return the path of a model, beside which a task finds its files; the model without one."""
    return proto if options.model == STDIN or os.path.isdir(options.model) else options.model


def _noted_tasks(proto: ModelProto) -> list[str]:
    """Return the names of the tasks on which a model was trained, without tasks of rows."""
    noted = json.loads(notes_of(proto).get(OPTIONS, "{}"))
    return [name for name, place in TASKS.items() if place.partition(":")[2] in noted]


def _stated_validation(text: str | None) -> Any:
    """Return the share of rows of `--validation`, or the path that it names."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _arguments_of_rows(
    options: Any, proto: ModelProto, parameters: Collection[str]
) -> dict[str, Any]:
    """Return the options of a command as arguments of a task of rows."""
    own = {name: value for name, value in vars(options).items() if name in parameters}
    if hasattr(options, "loss"):
        own |= loss_arguments(options)
        own["metrics"] = own["metrics"] or None
        own["target"] = _by_name(options.target, [y.name for y in proto.graph.output])
        own["classes"] = None if options.classes is None else split_names(options.classes)
    by_input = _by_name(options.columns, names_without_default(proto))
    if isinstance(by_input, Mapping):
        own["columns"] = {name: _split_each(group) for name, group in by_input.items()}
    else:
        own["columns"] = _split_each(by_input)
    if "tokenizer" in parameters and own.get("tokenizer") is None and options.model != STDIN:
        own["tokenizer"] = language_folder(options.model)
    known = {name: value for name, value in own.items() if name in parameters}
    return {n: v for n, v in known.items() if n not in ("data", "model", "validation")}


def _by_name(texts: list[str], names: Collection[str]) -> Any:
    """Return texts, or a dict of them by name where they are NAME=TEXT with one of these names."""
    pairs = [text.partition("=") for text in texts]
    if not texts or not all(equals and name in names for name, equals, _ in pairs):
        return texts
    found: dict[str, list[str]] = {}
    for name, _, text in pairs:
        found.setdefault(name, []).append(text)
    return found


def _split_each(texts: list[str]) -> list[str]:
    return [name for text in texts for name in split_names(text)]


def _task_arguments(options: Any, name: str, task_class: Any) -> dict[str, Any]:
    """Return the options of a command as arguments of a task that has its own.

    Raises:
        ValueError: an unknown option of the task, or one of the command that the task decides.
    """
    chosen = dict(read_value("task-option", text) for text in options.task_option)
    if not hasattr(options, "loss"):
        chosen = {n: v for n, v in chosen.items() if n not in _predict_parameters(task_class)}
    parameters = signature(task_class).parameters
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        check_options(f"option of task {name!r} (--task-option)", chosen, task_class, skip=2)
    return {**_given_on(options, name, parameters), **chosen}


def predict_arguments(options: Any, task: Task) -> dict[str, Any]:
    """Return the options of a task that are arguments of its `predict`, such as score=0.4."""
    chosen = dict(read_value("task-option", text) for text in options.task_option)
    known = _predict_parameters(type(task))
    return {name: value for name, value in chosen.items() if name in known}


def _predict_parameters(task_class: type[Task]) -> list[str]:
    """Return the parameters of `predict` beyond the model and the inputs."""
    return [*signature(task_class.predict).parameters][3:]


def _given_on(options: Any, task: str, parameters: Collection[str]) -> dict[str, Any]:
    """Return the options of the command that are arguments of the task.

    Raises:
        ValueError: the task has no argument for an option that is set.
    """
    of_values = next((each for each in _VALUES if each in parameters), "normalize")
    size = as_image_size(options.image_size)
    normalize = normalization_from_one(options.normalize, options.scale)
    chosen: dict[str, Any] = {"image_size": size, of_values: normalize}
    known = {"image_size": "image_size", "scale": of_values, "normalize": of_values}
    if of_values == "images":  # arguments of a reader
        both = {"size": size, "transforms": None if normalize is None else [normalize]}
        chosen = {"images": {name: value for name, value in both.items() if value is not None}}
        known["image_size"] = "images"
    for each in ("max_length", "tokenizer", "seed"):
        known[each], chosen[each] = each, getattr(options, each, None)
    given = set_options(options) & _OF_TASK
    if wrong := sorted(each for each in given if known.get(each) not in parameters):
        flags = ", ".join(f"--{each.replace('_', '-')}" for each in wrong)
        raise ValueError(
            f"--task {task} decides {flags}, or has no such option: leave it out, or see "
            "--task-option"
        )
    given |= {"seed"} & {*vars(options)}  # whether it is set or not
    names = {known[each] for each in given} & {*parameters}
    return {name: chosen[name] for name in names}


def set_options(options: InputOptions) -> set[str]:
    """Return the names of the options that the user set to other values than their defaults."""
    described = Described.fields_of(type(options))
    return {name for name, each in described.items() if each.is_set(options, name)}
