"""What all tasks have."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import onnx
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.tasks.options import lost_loss, named_loss, read_options, write_options


class Task:
    """A job on a model: how its files are read, what is minimized, measured and predicted.

    A subclass is created with `(model, data=None, **options)`: `data` are the rows to train on, in
    the files that are usual for the task. They say what the classes are; where these are not those
    of the model, it gets a new last layer. Without data, `model` is one that was trained: it has
    the options `remembered` in its metadata, so that they need not be passed again.

    Attributes:
        model: the model to train.
        data: the rows of `data`, as `Trainer.fit` takes them; None without.
        validation: the rows that `data` holds out, None if it names none.
        loss: what a `Trainer` minimizes.
        metrics: what it measures: a list, or one by output.
        arguments: further arguments of a `Trainer` that the task needs, such as `carry`.
        classes: names of the classes, in the order of their numbers; empty where there are none.
        remembered: names of the options that predictions and evaluations need, too.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> class Pixels(og.tasks.Task):
        ...     loss, metrics, arguments = "squared_error", ["mae"], {}
        ...     def __init__(self, model):
        ...         self.model = model
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> trainer = Pixels(model).trainer(train="w", seed=1)
        >>> [metric.name for metric in trainer.metrics]
        ['mae']
    """

    model: ModelProto
    data: og.data.Reader | None = None
    validation: og.data.Reader | None = None
    loss: Any
    metrics: Any = ()
    arguments: dict[str, Any]
    classes: Sequence[str] = ()
    remembered: ClassVar[tuple[str, ...]] = ()
    _lost_loss: str | None = None  # the name of an object, which the file of a trained model lacks

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls) and cls.remembered:
            cls.__init__ = remembering(cls.__init__)  # type: ignore[method-assign]

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given as a trained model needs them."""
        return options

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments` are those of `Trainer`, and win.

        Raises:
            ValueError: the model was trained with a loss that its file cannot hold, and no loss is
                passed, here or to the task.
        """
        if "loss" in arguments:
            name = type(self).__name__
            stored = _stored_options(self.model, name) | {"loss": named_loss(arguments["loss"])}
            self.model = with_notes(self.model, {OPTIONS: json.dumps({name: stored})})
        elif self._lost_loss is not None:
            raise ValueError(
                f"loss=: the model was trained with the loss {self._lost_loss!r}, which its file "
                f"cannot hold: pass it to {type(self).__name__}() or to trainer(), or name another"
            )
        own = {"loss": self.loss, "metrics": self.metrics, **self.arguments}
        return og.Trainer(self.model, **{**own, **arguments})

    def finished(self, model: ModelProto) -> ModelProto:
        """Return a trained model without what only its training needs, as it is deployed."""
        return model

    def read(self, path: str | os.PathLike) -> og.data.Reader:
        """Return other rows for the same model and classes, such as those to validate on.

        Raises:
            ValueError: files that cannot be read, or other classes.
        """
        raise NotImplementedError

    def predict(self, model: Any, inputs: Any) -> list[Any]:
        """Return the decoded result of each input.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, files or arrays, one for each result.
        """
        raise NotImplementedError

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write results into a folder as people look at them, and return the files.

        Args:
            inputs: as those of `predict`.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.
        """
        raise NotImplementedError


def remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a task that takes options from the metadata of a trained model."""
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def begin(self: Task, model: Any, *values: Any, **named_values: Any) -> None:
        given = dict(zip([*parameters][2:], values, strict=False)) | named_values
        given = {name: value for name, value in given.items() if value is not None}
        own = _stored_options(model, type(self).__name__)
        own = {name: value for name, value in own.items() if name not in given}
        self._lost_loss = lost_loss(own)
        if self._lost_loss is not None:
            del own["loss"]
        kept = read_options(own)
        init(self, model, *values, **{**named_values, **kept})
        if given.get("data") is not None:
            stated = self.stated({n: v for n, v in (kept | given).items() if n in self.remembered})
            note = json.dumps({type(self).__name__: write_options(stated)}) if stated else None
            self.model = with_notes(self.model, {OPTIONS: note})

    return begin


def _stored_options(model: Any, task: str) -> dict[str, Any]:
    """Return the options in JSON that a model stores for the task of this class name."""
    return dict(json.loads(_notes_at(model).get(OPTIONS, "{}")).get(task, {}))


def _notes_at(model: Any) -> dict[str, str]:
    """Return the metadata of a model, without reading the data of one in a file."""
    if isinstance(model, (str, os.PathLike)):
        return notes_of(onnx.load(model, load_external_data=False))
    return notes_of(model_of(model))


_FORMULAS = (*"=+-@\t\r\n", *"＝＋－＠")  # first characters of what spreadsheets compute
OPTIONS = "onnxgrad.task"  # the options of a class by its name, in JSON
CLASSES = "onnxgrad.classes"  # where `replace_head` and `add_head` store them, too


def model_of(model: Any) -> ModelProto:
    """Return a model, one in a file or serialized, or that of a trainer."""
    if isinstance(model, og.Trainer):
        return model.model
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return model if isinstance(model, ModelProto) else onnx.load(model)


def notes_of(model: ModelProto) -> dict[str, str]:
    """Return the metadata of a model."""
    return {entry.key: entry.value for entry in model.metadata_props}


def with_notes(model: ModelProto, notes: Mapping[str, str | None]) -> ModelProto:
    """Return a model with other metadata of these keys, without those that are None."""
    old = notes_of(model)
    if (new := {k: v for k, v in {**old, **notes}.items() if v is not None}) == old:
        return model
    noted = ModelProto()
    noted.CopyFrom(model)
    del noted.metadata_props[:]
    for key, value in new.items():
        noted.metadata_props.add(key=key, value=value)
    return noted


def inputs_of(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return the lengths of each input by name, None where unknown."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {n: shape for n, shape in _shapes(model.graph.input).items() if n not in weights}


def outputs_of(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return the lengths of each output by name, None where unknown."""
    return _shapes(model.graph.output)


def _shapes(values: Any) -> dict[str, tuple[int | None, ...]]:
    dims = {v.name: v.type.tensor_type.shape.dim for v in values}
    return {name: tuple(d.dim_value or None for d in each) for name, each in dims.items()}


def stored_classes(model: ModelProto) -> list[str]:
    """Return the classes in the metadata, as this package or ultralytics write them, or none."""
    notes = notes_of(model)
    try:
        own = CLASSES in notes
        found = json.loads(notes[CLASSES]) if own else ast.literal_eval(notes.get("names", ""))
    except (SyntaxError, ValueError):
        return []
    found = [found[i] for i in sorted(found)] if isinstance(found, dict) else found
    return [str(name) for name in found] if isinstance(found, list) else []


def with_classes(model: ModelProto, classes: Sequence[str]) -> ModelProto:
    """Return a model that stores its classes, so that it needs no data to name them."""
    same = stored_classes(model) == [*classes]
    return model if same else with_notes(model, {CLASSES: json.dumps([*classes])})


def safe_cell(value: Any) -> Any:
    """Return a cell of a CSV file: a text that spreadsheets would run gets an apostrophe."""
    if not isinstance(value, str) or value[:1] not in _FORMULAS:
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def home_of(model: Any) -> Path | None:
    """Return the folder of a model that is given by its path."""
    return Path(model).parent if isinstance(model, (str, os.PathLike)) else None


def tokenizer_for(source: Any, home: Path | None) -> Any:
    """Return a tokenizer that is given, or the path of one beside a model or above its folder."""
    if source is None and home is not None:
        places = (home / "tokenizer.json", home / "vocab.txt", home.parent / "tokenizer.json")
        source = next((path for path in places if path.is_file()), None)
    if source is None:
        raise ValueError("tokenizer=None, and no tokenizer.json or vocab.txt beside the model")
    return source
