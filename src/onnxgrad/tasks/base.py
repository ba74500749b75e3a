"""What all tasks have."""

from __future__ import annotations

import ast
import filecmp
import functools
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.data.readers import Reader
from onnxgrad.errors import argument
from onnxgrad.language.tokenizer import FILE, VOCABULARY
from onnxgrad.tasks.options import lost_loss, named_loss, read_options, write_options


class Task:
    """A job on a model: its files, its loss, its metrics and its predictions.

    A subclass is created with `(model, data=None, **options)`: `data` are the rows to train on, in
    the files that are usual for the task. They name the classes; where the model has others, it
    gets a new last layer. Without data, `model` is one that was trained: it has the options
    `remembered` in its metadata, so that they need not be passed again.

    Attributes:
        model: the model to train.
        data: the rows of `data`, as `Trainer.fit` takes them; None without.
        validation: the rows that `data` holds out, None if it names none.
        loss: what a `Trainer` minimizes.
        metrics: metrics of a `Trainer`: a list, or one by output.
        arguments: further arguments of a `Trainer` that the task needs, such as `carry`, or by
            which it trains well, such as `learning_rate`.
        batch_size: rows of a step of `trainer().fit`, where neither it nor the model says another
            number; None: as of `Trainer.fit`.
        classes: names of the classes, in the order of their numbers; empty where there are none.
        remembered: names of the options that predictions and evaluations need, too.
        notes, remarks: messages about the data and about what was decided, before and after a
            training.
        rows: number of rows that were evaluated or predicted last; None if it is unknown.
        held_out: the numbers of the rows of `data` that `divide_rows` put into `validation`.

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
    data: Any = None
    validation: Any = None
    loss: Any
    metrics: Any = ()
    arguments: dict[str, Any]
    batch_size: int | None = None
    classes: Sequence[str] = ()
    remembered: ClassVar[tuple[str, ...]] = ()
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    held_out: np.ndarray | None = None
    rows: int | None = None
    _tokenizer: Any = None  # of tasks on texts: an argument of `as_tokenizer`
    _also_try: ClassVar[str] = ""  # the end of the sentence of `advise`
    _lost_loss: str | None = None  # the name of an object, which the file of a trained model lacks

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls) and cls.remembered:
            cls.__init__ = remembering(cls.__init__)  # type: ignore[method-assign]

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given as a trained model needs them."""
        return options

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments`, named as for `Trainer`, win.

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
        own = {"loss": self.loss, "metrics": self.metrics, **self.usual_arguments(arguments)}
        return self._new_trainer(self.model, {**own, **arguments})

    def usual_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `arguments` of the task that apply beside given ones of a `Trainer`.

        The task's learning rate is one for its optimizer: another optimizer has its own. A rate of
        `fine_tuning_rate` is for all weights: chosen ones and adapters take the usual rate.
        """
        own = dict(self.arguments)
        adapted = any(".lora_A." in tensor.name for tensor in self.model.graph.initializer)
        of_some = given.get("train") or given.get("batch_norm") == "train" or adapted
        if "optimizer" in given or (of_some and own.get("learning_rate") == GENTLE_RATE):
            own.pop("learning_rate", None)
        return own

    def _new_trainer(self, model: ModelProto, arguments: Mapping[str, Any]) -> og.Trainer:
        """Return a trainer whose steps have the rows of the task."""
        trainer = og.Trainer(model, **arguments)
        if self.batch_size is not None:
            trainer._change_job(usual_batch_size=self.batch_size)
        return trainer

    def advise(self, history: Sequence[Mapping[str, Any]]) -> str:
        """Return what to try after a training that learned nothing, as a sentence; else "".

        Args:
            history: `history` of the trainer.
        """
        epochs = [entry for entry in history if "loss" in entry]
        reason = self._describe_failure(epochs) if epochs else ""
        rate = float(f"{epochs[-1].get('learning_rate', 0) / 10:.1g}") if reason else 0.0
        lower = argument("learning_rate", rate)
        return f"{reason}: try {lower} or more epochs{self._also_try}" if reason else ""

    def _describe_failure(self, epochs: Sequence[Mapping[str, Any]]) -> str:
        """Return a clause if the epochs of a history say that nothing was learned; else ""."""
        first, last = epochs[0]["loss"], epochs[-1]["loss"]
        if len(epochs) > 1 and not last < first:
            return f"the loss did not fall, from {first:.4g} in epoch 1 to {last:.4g} in the last"
        accuracy = epochs[-1].get("validation_accuracy", 1.0)
        if len(self.classes) > 1 and accuracy <= 1.1 / len(self.classes):
            return f"validation_accuracy is {accuracy:.3g}, as by chance"
        return ""

    def divide_rows(self, validation: Any = None, seed: int = 0) -> None:
        """Decide which rows `validation` holds; the rows of a share are drawn, and leave `data`.

        Args:
            validation: a share of the rows; or other data, as `read` takes them. None: what `data`
                holds out already, or else a fifth of rows that can be drawn. 0: none.
            seed: of the rows that are drawn: a share of each class where the rows have classes.

        Raises:
            ValueError: a share that leaves a part empty, or of rows that cannot be drawn.
        """
        if validation is None and self.validation is not None:
            return
        if validation is not None and not isinstance(validation, (int, float)):
            self.validation = self.read(validation)
            return
        count, share = row_count(self.data), USUAL_SHARE if validation is None else validation
        if not 0 <= share <= LARGEST_SHARE:
            given = argument("validation", validation)
            raise ValueError(f"{given} must be from 0 to {LARGEST_SHARE}, or data")
        can_draw = count is not None and _take_rows(self.data, np.arange(1)) is not None
        if not share or (validation is None and not can_draw):
            self.validation = None
            return
        if count is None or not can_draw:
            raise ValueError(
                f"{argument('validation', share)} of data that are read while training: name "
                "validation data instead, or 0"
            )
        if validation is None and not round(count * share):
            self.notes = [*self.notes, f"no row is held out: {share:g} of {count} rows is none"]
            return
        kept, drawn = _draw_rows(count, share, seed, self._class_strata())
        if not len(kept) or not len(drawn):
            given = argument("validation", share)
            raise ValueError(f"{given} of {count} rows leaves a part empty: use 0")
        self.held_out = drawn
        self.data, self.validation = _take_rows(self.data, kept), _take_rows(self.data, drawn)

    def _class_strata(self) -> np.ndarray | None:
        """Return the numbers of the classes of the rows, of each of which a share is held out."""
        return None

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model for rows, as `read` takes them.

        Args:
            data: files that are usual for the task.
            batch_size: rows of one call of the runtime.
            device: "cpu", "cuda" or "cuda:1".
        """
        trainer, rows = self.trainer(device=device), self.read(data)
        self.rows = row_count(rows)
        return trainer.evaluate(rows, batch_size=batch_size)

    def finished(self, model: ModelProto) -> ModelProto:
        """Return the trained model as users deploy it, without parts for its training only."""
        return model

    def read(self, path: Any) -> Any:
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

    def describe_results(self, results: Sequence[Any]) -> str:
        """Return how many results there are, and of what, as text."""
        return f"{len(results)} predictions"

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write results into a folder as people look at them, and return the files.

        Args:
            inputs: as of `predict`.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.
        """
        raise NotImplementedError

    def write_beside(self, folder: str | os.PathLike) -> str:
        """Copy the tokenizer into the folder of a trained model, where tasks look for it.

        A file that is there stays.

        Returns:
            A sentence about the file, "" if nothing was to be done.
        """
        return _copy_tokenizer(self._tokenizer, Path(folder))


def row_count(data: Any) -> int | None:
    """Return the number of rows of data, as `Trainer.fit` takes them; None if it is unknown."""
    if isinstance(data, Reader):
        return data.rows
    parts = data if isinstance(data, tuple) else (data,)
    arrays = parts[0].values() if isinstance(parts[0], dict) else parts[:1]
    return next((len(array) for array in arrays), 0)


def _take_rows(data: Any, rows: np.ndarray) -> Any:
    """Return some rows of data; None if rows of a reader cannot be drawn."""
    if isinstance(data, tuple):
        return tuple(_take_rows(part, rows) for part in data)
    if isinstance(data, dict):
        return {name: array[rows] for name, array in data.items()}
    if isinstance(data, Reader):
        return data.subset(rows)
    return None if data is None else data[rows]


def _draw_rows(
    count: int, share: float, seed: int, strata: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and the `share` of them to validate on, drawn by `seed`.

    With `strata`, (rows,), each number in it keeps its share, up to rounding.
    """
    order = np.random.default_rng(seed).permutation(count)
    drawn = order[: round(count * share)]
    if strata is not None:
        parts = [order[strata[order] == number] for number in np.unique(strata)]
        drawn = np.concatenate([part[: round(len(part) * share)] for part in parts])
    kept = np.ones(count, bool)
    kept[drawn] = False
    return np.flatnonzero(kept), np.flatnonzero(~kept)


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
            note = json.dumps({type(self).__name__: write_options(stated)})
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


def fine_tuning_rate(model: ModelProto) -> dict[str, float]:
    """Return the argument `learning_rate` of a `Trainer` of all weights; {}: the usual one.

    Deep models lose at 0.001 what they learned: many layers change together, and statistics of
    BatchNormalization, stored or fused into its convolution, no longer fit what they normalize.
    """
    kinds = [node.op_type for node in model.graph.node]
    layers = sum(kind.endswith(("Conv", "MatMul", "Gemm", "Attention")) for kind in kinds)
    deep = layers >= _DEEP or "BatchNormalization" in kinds
    return {"learning_rate": GENTLE_RATE} if deep else {}


GENTLE_RATE, _DEEP = 1e-4, 10  # of all weights of a model with so many layers, or with statistics


def gentle_start(rows: int | None, batch_size: int, rate: float = 1e-3) -> dict[str, Any]:
    """Return arguments of a `Trainer` by which weights of a trained model change slowly at first.

    The learning rate rises in the first quarter of an epoch, and in 100 steps at most; gradients
    are clipped to a norm of 10.
    """
    steps = min((rows or 0) // (4 * batch_size), 100)
    return {"learning_rate": og.schedules.warmup(rate, steps) if steps else rate, "clip_norm": 10.0}


USUAL_SHARE = 0.2  # of the rows that are held out
LARGEST_SHARE = 0.9
_FORMULAS = (*"=+-@\t\r\n", *"＝＋－＠")  # first characters of what spreadsheets compute
OPTIONS = "onnxgrad.task"  # the options of a class by its name, in JSON
CLASSES = "onnxgrad.classes"  # where `replace_head` and `add_head` store them, too


def model_of(model: Any) -> ModelProto:
    """Return a model: given, in a file, serialized, or of a trainer."""
    if isinstance(model, og.Trainer):
        return model.model
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return model if isinstance(model, ModelProto) else onnx.load(model)


def notes_of(model: ModelProto) -> dict[str, str]:
    """Return the metadata of a model."""
    return {entry.key: entry.value for entry in model.metadata_props}


def with_notes(model: ModelProto, notes: Mapping[str, str | None]) -> ModelProto:
    """Return a model with other metadata of these keys; a value of None removes its key."""
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
    return {
        n: shape for n, shape in _declared_shapes(model.graph.input).items() if n not in weights
    }


def outputs_of(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return the lengths of each output by name, None where unknown."""
    return _declared_shapes(model.graph.output)


def _declared_shapes(values: Any) -> dict[str, tuple[int | None, ...]]:
    dims = {v.name: v.type.tensor_type.shape.dim for v in values}
    # old exporters write -1 for any length
    return {name: tuple(max(d.dim_value, 0) or None for d in each) for name, each in dims.items()}


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


def configured_classes(model: ModelProto, home: Path | None) -> list[str]:
    """Return the classes in the `config.json` of transformers beside a model with logits."""
    path = None if home is None else home / "config.json"
    if path is None or not path.is_file() or "logits" not in outputs_of(model):
        return []
    named = json.loads(path.read_text(encoding="utf-8")).get("id2label", {})
    return [str(named[key]) for key in sorted(named, key=int)]


def class_probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of classes on the last axis, of scores or of probabilities."""
    if scores.min() < 0 or not np.allclose(scores.sum(-1), 1, atol=1e-3):  # no softmax yet
        scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


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
        places = (home / FILE, home / VOCABULARY, home.parent / FILE)
        source = next((path for path in places if path.is_file()), None)
    if source is None:
        raise ValueError("tokenizer=None, and no tokenizer.json or vocab.txt beside the model")
    return source


def _copy_tokenizer(source: Any, folder: Path) -> str:
    """Copy the file of a tokenizer into a folder without one, and return a sentence about it."""
    if not isinstance(source, (str, os.PathLike)):
        return ""
    path = Path(source)
    if path.is_dir():
        path = next((path / n for n in (FILE, VOCABULARY) if (path / n).is_file()), path)
    target = folder / (VOCABULARY if path.suffix == ".txt" else FILE)
    if not path.is_file() or (target.is_file() and filecmp.cmp(path, target, shallow=False)):
        return ""
    if target.exists():
        return f"{target} stays, of another tokenizer: to move the model, take {path} along"
    try:
        shutil.copyfile(path, target)
    except OSError as e:  # the model is written already
        return f"{target} is not written: {e.strerror or e}"
    return f"wrote {target}"
