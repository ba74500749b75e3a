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
from onnxgrad.cli.model_files import STDIN, language_model_folder, open_standard_input
from onnxgrad.cli.options import OptionField, set_options
from onnxgrad.data.arrays import DataError
from onnxgrad.errors import check_options, unknown
from onnxgrad.language.records import LINES, TEXTS
from onnxgrad.model.feeds import names_without_default
from onnxgrad.tasks import Task
from onnxgrad.tasks.base import OPTIONS, model_metadata
from onnxgrad.tasks.image_values import as_image_size, normalization_from_one
from onnxgrad.tasks.images import holds_images
from onnxgrad.tasks.rows_task import RowsTask
from onnxgrad.tasks.tables import PARQUET
from onnxgrad.tasks.texts import language_folder

TASKS = {  # {value of --task: "module:class" in onnxgrad.tasks}
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
# options of rows that a task takes if its class has an argument of the name
_DATA = {*OptionField.fields_of(DataOptions)} - {"data", "task", "task_option", "validation"}
# options that tasks other than Table, Images and Texts decide or read from the data
_DECIDED = {*OptionField.fields_of(LossOptions)} - {"metrics"} | {
    *("head", "head_at", "head_pool", "head_mask", "adapter", "outputs")
}
_WITHOUT_FLAG = {"augment"}  # arguments of RowsTask classes that --task-option sets
_VALUES = ("normalize", "pixels", "images")  # arguments that say how values of images are scaled


def open_task(options: Any, proto: ModelProto, training: bool = True) -> Task:
    """Return the task that `--task`, the model's metadata or the file type of DATA decides.

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
    # a task finds the tokenizer and other files beside the path of a model
    source = proto if options.model == STDIN or os.path.isdir(options.model) else options.model
    task: Task = task_class(source, options.data if training else None, **chosen)
    if noted:
        task.notes = [*task.notes, f"task {name}, as in its training"]
    if training:
        task.model = add_head_and_adapters(task.model, options)
        task.divide_rows(_parse_validation(options.validation), options.seed)
        count = getattr(task.data, "rows", None)
        task.notes = [*task.notes, f"{count} rows to train on" if count else "rows to train on"]
    return task


def _open_rows_task(
    options: Any, proto: ModelProto, training: bool, name: str, task_class: Any
) -> Task:
    """Return a task of class `task_class` (Table, Images or Texts) with arguments from options."""
    parameters = signature(task_class).parameters
    _refuse_flags(set_options(options) & _DATA - {"prompt"} - {*parameters}, options, name)
    model = add_head_and_adapters(proto, options) if training else proto
    chosen = _rows_task_arguments(options, proto, parameters)
    own = read_options(options, "task_option")
    if {*own} - (_WITHOUT_FLAG & {*parameters}):
        raise ValueError(
            f"--task {name} takes the options of the command and no --task-option: leave out "
            "--task-option, or name another task with --task"
        )
    if training:
        chosen["validation"] = _parse_validation(options.validation)
    data = path_or_standard_input(options.data) if training else None
    return task_class(model, data, **chosen, **own)


def path_or_standard_input(data: str) -> Any:
    """Return the path `data`, or the stream of standard input if it is "-"."""
    return open_standard_input("CSV file") if data == STDIN else data


def _tasks_in_metadata(proto: ModelProto) -> list[str]:
    """Return the names of the tasks whose options the model's metadata hold."""
    noted = json.loads(model_metadata(proto).get(OPTIONS, "{}"))
    return [name for name, place in TASKS.items() if place.partition(":")[2] in noted]


def _task_for_data(options: Any) -> str:
    """Return the name of the task for DATA: "images", "texts" or "table"."""
    path = Path(options.data)
    suffix = path.suffix.lower()
    holds_texts = suffix in (*LINES, *TEXTS)
    if suffix in PARQUET and language_model_folder(options.model) is not None and path.is_file():
        from pyarrow import parquet

        holds_texts = bool({"text", "prompt", "messages"} & {*parquet.read_schema(path).names})
    if options.data == STDIN:
        return "table"
    return "texts" if holds_texts else "images" if holds_images(path) else "table"


def _refuse_flags(wrong: Collection[str], options: Any, task: str) -> None:
    """Raise `ValueError` if `wrong`, the options that the task does not take, is not empty."""
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise ValueError(
            f"--task {task}, which reads {options.data!r}, does not take {flags}: leave out "
            f"{flags}; `onnxgrad.tasks` documents the options of the task"
        )


def _parse_validation(text: str | None) -> Any:
    """Return the value of `--validation`: a share of the rows as float, or a path."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _rows_task_arguments(
    options: Any, proto: ModelProto, parameters: Collection[str]
) -> dict[str, Any]:
    """Return the arguments of Table, Images or Texts that the options of a command give."""
    own = dict(vars(options))
    if hasattr(options, "loss"):
        own |= loss_arguments(options)
        own["metrics"] = own["metrics"] or None
        own["target"] = _texts_by_name(options.target, [y.name for y in proto.graph.output])
        own["classes"] = None if options.classes is None else split_names(options.classes)
    by_input = _texts_by_name(options.columns, names_without_default(proto))
    if isinstance(by_input, Mapping):
        own["columns"] = {name: _split_name_lists(group) for name, group in by_input.items()}
    else:
        own["columns"] = _split_name_lists(by_input)
    if own.get("tokenizer") is None and options.model != STDIN and "tokenizer" in parameters:
        own["tokenizer"] = language_folder(options.model)
    return {n: own[n] for n in own if n in parameters and n not in ("data", "model", "validation")}


def _texts_by_name(texts: list[str], names: Collection[str]) -> Any:
    """Return `{name: texts}` if all `texts` are NAME=TEXT with a name in `names`; else `texts`."""
    pairs = [text.partition("=") for text in texts]
    if not texts or not all(equals and name in names for name, equals, _ in pairs):
        return texts
    found: dict[str, list[str]] = {}
    for name, _, text in pairs:
        found.setdefault(name, []).append(text)
    return found


def split_names(text: str) -> list[str]:
    """Return the list of names in a text "A,B,..."; blanks around names are removed."""
    return [name.strip() for name in text.split(",")]


def _split_name_lists(texts: list[str]) -> list[str]:
    return [name for text in texts for name in split_names(text)]


# -- tasks with their own format of data -----------------------------------------------------------


def _file_task_arguments(options: Any, name: str, task_class: Any) -> dict[str, Any]:
    """Return the arguments of a task such as Detection that the options of a command give.

    Raises:
        ValueError: an unknown option of the task, or one of the command that the task decides.
    """
    chosen = read_options(options, "task_option")
    if not hasattr(options, "loss"):
        chosen = {n: v for n, v in chosen.items() if n not in _predict_arg_names(task_class)}
    parameters = signature(task_class).parameters
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        check_options(f"option of task {name!r} (--task-option)", chosen, task_class, skip=2)
    of_values = next((each for each in _VALUES if each in parameters), "normalize")
    size = as_image_size(options.image_size)
    normalize = normalization_from_one(options.normalize, options.scale)
    values: dict[str, Any] = {"image_size": size, of_values: normalize}
    known = {"image_size": "image_size", "scale": of_values, "normalize": of_values}
    if of_values == "images":  # a dict of arguments of the image reader
        both = {"size": size, "transforms": None if normalize is None else [normalize]}
        values = {"images": {n: value for n, value in both.items() if value is not None}}
        known["image_size"] = "images"
    for each in ("max_length", "tokenizer", "seed"):
        known[each], values[each] = each, getattr(options, each, None)
    given = set_options(options) & (_DATA | _DECIDED)
    _refuse_flags([each for each in given if known.get(each) not in parameters], options, name)
    given |= {"seed"} & {*vars(options)}  # passed also if it has the default
    names = {known[each] for each in given} & {*parameters}
    return {each: values[each] for each in names} | chosen


def predict_arguments(options: Any, task: Task) -> dict[str, Any]:
    """Return the values of `--task-option` that are arguments of the task's `predict`."""
    known = _predict_arg_names(type(task))
    return {n: v for n, v in read_options(options, "task_option").items() if n in known}


def _predict_arg_names(task_class: type[Task]) -> list[str]:
    """Return the names of the parameters of `predict`, except the model and the inputs."""
    return [*signature(task_class.predict).parameters][3:]


# -- new layers ------------------------------------------------------------------------------------


def add_head_and_adapters(proto: ModelProto, options: TrainOptions) -> ModelProto:
    """Return the model with the new layer of `--head` and the adapters of `--lora`."""
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
    """Return the value of `--head`: the count of units, or the list of class names."""
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
    """Return the model with the layer of `--head`, in place of a layer or on features."""
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
