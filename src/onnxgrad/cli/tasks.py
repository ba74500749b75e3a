"""The task of a command, by its options, its model and its data; and new layers for its model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from onnx import ModelProto

from onnxgrad.cli.arguments import loss_arguments, read_options
from onnxgrad.cli.command_options import DataOptions, LossOptions, TrainOptions
from onnxgrad.cli.model_files import STDIN, folder_of, standard_input
from onnxgrad.cli.options import Described, set_options
from onnxgrad.data.arrays import DataError
from onnxgrad.errors import check_options, unknown
from onnxgrad.language.records import LINES, TEXTS
from onnxgrad.model.feeds import names_without_default
from onnxgrad.tasks import Task
from onnxgrad.tasks.base import OPTIONS, notes_of
from onnxgrad.tasks.image_values import as_image_size, normalization_from_one
from onnxgrad.tasks.images import holds_images
from onnxgrad.tasks.rows_task import RowsTask
from onnxgrad.tasks.tables import PARQUET
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
# options on data, which a task has if they are arguments of its class
_DATA = {*Described.fields_of(DataOptions)} - {"data", "task", "task_option", "validation"}
# options that tasks with their own format of data decide, or read from the data
_DECIDED = {*Described.fields_of(LossOptions)} - {"metrics"} | {
    *("head", "head_at", "head_pool", "head_mask", "adapter", "outputs")
}
_WITHOUT_FLAG = {"augment"}  # arguments of tasks of rows that are no options of the command
_VALUES = ("normalize", "pixels", "images")  # arguments that say how values of images are scaled


def open_task(options: Any, proto: ModelProto, training: bool = True) -> Task:
    """Return the task of a command: of `--task`, of the model's metadata, or of the data's kind.

    Args:
        options: of `train`, `eval` or `predict`.
        proto: the model.
        training: whether the task has the data of the command to train on.

    Raises:
        ValueError: an unknown task, or options that it does not take.
    """
    noted = [] if options.task else _tasks_in_metadata(proto)
    name = options.task or next(iter(noted), None) or _task_for_data(options)
    if name not in TASKS:
        raise unknown("task (--task)", name, TASKS)
    if name == "texts" and not hasattr(options, "max_length"):
        raise DataError(f"{options.data!r} holds texts: `onnxgrad generate` continues prompts")
    task_class: Any = resolve_name(f"onnxgrad.tasks.{TASKS[name]}")
    if issubclass(task_class, RowsTask):
        return _open_rows_task(options, proto, training, name, task_class)
    chosen = _file_task_arguments(options, name, task_class)
    # beside the path of a model, a task finds its files
    source = proto if options.model == STDIN or os.path.isdir(options.model) else options.model
    task: Task = task_class(source, options.data if training else None, **chosen)
    if noted:
        task.notes = [*task.notes, f"task {name}, as in its training"]
    if training:
        task.model = fine_tune(task.model, options)
        task.divide_rows(_parse_validation(options.validation), options.seed)
        count = getattr(task.data, "rows", None)
        task.notes = [*task.notes, f"{count} rows to train on" if count else "rows to train on"]
    return task


def _open_rows_task(
    options: Any, proto: ModelProto, training: bool, name: str, task_class: Any
) -> Task:
    """Return a task of rows with options of the command as its arguments."""
    parameters = signature(task_class).parameters
    _refuse_flags(set_options(options) & _DATA - {"prompt"} - {*parameters}, options, name)
    model = fine_tune(proto, options) if training else proto
    chosen = _rows_task_arguments(options, proto, parameters)
    own = read_options(options, "task_option")
    if {*own} - (_WITHOUT_FLAG & {*parameters}):
        raise ValueError(
            f"--task {name} takes the options of the command and no --task-option: leave out "
            "--task-option, or name another task with --task"
        )
    if training:
        chosen["validation"] = _parse_validation(options.validation)
    data = standard_data(options.data) if training else None
    return task_class(model, data, **chosen, **own)


def standard_data(data: str) -> Any:
    """Return the path of the data, or standard input for "-"."""
    return standard_input("CSV file") if data == STDIN else data


def _tasks_in_metadata(proto: ModelProto) -> list[str]:
    """Return the names of the tasks in the model's metadata, except tasks of rows."""
    noted = json.loads(notes_of(proto).get(OPTIONS, "{}"))
    return [name for name, place in TASKS.items() if place.partition(":")[2] in noted]


def _task_for_data(options: Any) -> str:
    """Return the task of rows for the kind of data: images, texts or a table."""
    path = Path(options.data)
    suffix = path.suffix.lower()
    holds_texts = suffix in (*LINES, *TEXTS)
    if suffix in PARQUET and folder_of(options.model) is not None and path.is_file():
        from pyarrow import parquet

        holds_texts = bool({"text", "prompt", "messages"} & {*parquet.read_schema(path).names})
    if options.data == STDIN:
        return "table"
    return "texts" if holds_texts else "images" if holds_images(path) else "table"


def _refuse_flags(wrong: Collection[str], options: Any, task: str) -> None:
    """Raise `ValueError` for options that the task does not take."""
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise ValueError(
            f"--task {task}, which reads {options.data!r}, does not take {flags}: leave out "
            f"{flags}; `onnxgrad.tasks` documents the options of the task"
        )


def _parse_validation(text: str | None) -> Any:
    """Return the share of rows, or the path, that `--validation` gives."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _rows_task_arguments(
    options: Any, proto: ModelProto, parameters: Collection[str]
) -> dict[str, Any]:
    """Return the options of a command as arguments of a task of rows."""
    own = dict(vars(options))
    if hasattr(options, "loss"):
        own |= loss_arguments(options)
        own["metrics"] = own["metrics"] or None
        own["target"] = _texts_by_name(options.target, [y.name for y in proto.graph.output])
        own["classes"] = None if options.classes is None else split_names(options.classes)
    by_input = _texts_by_name(options.columns, names_without_default(proto))
    if isinstance(by_input, Mapping):
        own["columns"] = {name: _split_each(group) for name, group in by_input.items()}
    else:
        own["columns"] = _split_each(by_input)
    if own.get("tokenizer") is None and options.model != STDIN and "tokenizer" in parameters:
        own["tokenizer"] = language_folder(options.model)
    return {n: own[n] for n in own if n in parameters and n not in ("data", "model", "validation")}


def _texts_by_name(texts: list[str], names: Collection[str]) -> Any:
    """Return `{name: texts}` of options NAME=TEXT with these names; else the texts unchanged."""
    pairs = [text.partition("=") for text in texts]
    if not texts or not all(equals and name in names for name, equals, _ in pairs):
        return texts
    found: dict[str, list[str]] = {}
    for name, _, text in pairs:
        found.setdefault(name, []).append(text)
    return found


def split_names(text: str) -> list[str]:
    """Return the names that commas separate, with or without blanks around them."""
    return [name.strip() for name in text.split(",")]


def _split_each(texts: list[str]) -> list[str]:
    return [name for text in texts for name in split_names(text)]


# -- tasks with their own format of data -----------------------------------------------------------


def _file_task_arguments(options: Any, name: str, task_class: Any) -> dict[str, Any]:
    """Return the options of a command as arguments of a task with a special data format.

    Raises:
        ValueError: an unknown option of the task, or one of the command that the task decides.
    """
    chosen = read_options(options, "task_option")
    if not hasattr(options, "loss"):
        chosen = {n: v for n, v in chosen.items() if n not in _predict_parameters(task_class)}
    parameters = signature(task_class).parameters
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        check_options(f"option of task {name!r} (--task-option)", chosen, task_class, skip=2)
    of_values = next((each for each in _VALUES if each in parameters), "normalize")
    size = as_image_size(options.image_size)
    normalize = normalization_from_one(options.normalize, options.scale)
    values: dict[str, Any] = {"image_size": size, of_values: normalize}
    known = {"image_size": "image_size", "scale": of_values, "normalize": of_values}
    if of_values == "images":  # arguments of a reader
        both = {"size": size, "transforms": None if normalize is None else [normalize]}
        values = {"images": {n: value for n, value in both.items() if value is not None}}
        known["image_size"] = "images"
    for each in ("max_length", "tokenizer", "seed"):
        known[each], values[each] = each, getattr(options, each, None)
    given = set_options(options) & (_DATA | _DECIDED)
    _refuse_flags([each for each in given if known.get(each) not in parameters], options, name)
    given |= {"seed"} & {*vars(options)}  # whether it is set or not
    names = {known[each] for each in given} & {*parameters}
    return {each: values[each] for each in names} | chosen


def predict_arguments(options: Any, task: Task) -> dict[str, Any]:
    """Return the options of a task that are arguments of its `predict`, such as score=0.4."""
    known = _predict_parameters(type(task))
    return {n: v for n, v in read_options(options, "task_option").items() if n in known}


def _predict_parameters(task_class: type[Task]) -> list[str]:
    """Return the parameters of `predict` beyond the model and the inputs."""
    return [*signature(task_class.predict).parameters][3:]


# -- new layers ------------------------------------------------------------------------------------


def fine_tune(proto: ModelProto, options: TrainOptions) -> ModelProto:
    """Return the model with the new head and the adapters that the options ask for."""
    if options.head is not None:
        proto = _add_head(proto, options, _head_units(options.head))
    if options.lora:
        from onnxgrad.adapters.lora import add_lora

        proto = add_lora(
            proto,
            options.lora,
            rank=options.lora_rank,
            alpha=options.lora_alpha,
            dropout=options.lora_dropout,
            seed=options.seed,
        )
    return proto


def _head_units(head: str) -> int | list[str]:
    """Return the count of units, or the names of classes, that `--head` gives."""
    names = split_names(head)
    if len(names) > 1 and all(names):
        return names
    if not head.isdigit() or not int(head):
        raise ValueError(
            f"--head {head!r} is neither a number of units nor several names of classes, separated "
            "by commas"
        )
    return int(head)


def _add_head(proto: ModelProto, options: TrainOptions, units: int | list[str]) -> ModelProto:
    """Return the model with a new layer, which replaces the last or reads features."""
    pool, at = options.head_pool, options.head_at
    one = at[0] if len(at) == 1 else None
    if pool is None:
        from onnxgrad.finetune.heads import replace_head

        return replace_head(proto, units, one or at or None, seed=options.seed)
    from onnxgrad.finetune.add_head import POOLS, add_head

    if pool not in (*POOLS, "none"):
        raise unknown("way to pool (--head-pool)", pool, [*POOLS, "none"])
    if len(at) > 1:
        raise ValueError(f"--head-pool puts the new layer on one value, not on {at}: name one")
    chosen = None if pool == "none" else pool
    return add_head(proto, units, one, pool=chosen, mask=options.head_mask, seed=options.seed)
