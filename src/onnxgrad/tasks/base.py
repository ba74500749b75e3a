"""`Task`, the base class of tasks, and how tasks read models, classes and options."""

from __future__ import annotations

import ast
import csv
import dataclasses
import filecmp
import functools
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import onnx
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.data.readers import Reader
from onnxgrad.errors import argument
from onnxgrad.language.tokenizer import FILE, VOCABULARY

USUAL_SHARE = 0.2  # share of rows that are held out for validation by default
LARGEST_SHARE = 0.9
_FORMULAS = (*"=+-@\t\r\n", *"＝＋－＠")  # first characters of cells that spreadsheets compute
OPTIONS = "onnxgrad.task"  # metadata: {class name of a task: options}, as JSON
CLASSES = "onnxgrad.classes"  # metadata: names of classes, also by `replace_head`, `add_head`
# learning rate if all weights train; least layer count of a deep model
GENTLE_RATE, _DEEP = 1e-4, 10
# keys of JSON objects that stand for options which JSON cannot hold
_FUNCTION, _MAKER = "function", "onnxgrad"
# {public function that makes the value of an option: its submodule}
_MAKERS = {name: submodule for submodule in (og.data, og.losses) for name in submodule.__all__}
T = TypeVar("T")


class Task:
    """The base of tasks such as Detection, which read files, train a model on them, and predict.

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
    classes: Any = ()
    remembered: ClassVar[tuple[str, ...]] = ()
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    held_out: np.ndarray | None = None
    rows: int | None = None
    _tokenizer: Any = None  # in tasks on texts, what `as_tokenizer` takes
    _also_try: ClassVar[str] = ""  # the end of the sentence that `advise` returns
    _lost_loss: str | None = None  # name of a loss that the file of the model cannot hold

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls) and cls.remembered:
            cls.__init__ = with_stored_options(cls.__init__)  # type: ignore[method-assign]

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options to store in the trained model's metadata, for predictions with it.

        Args:
            options: the options in `remembered` that the user has passed, by name.
        """
        return options

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments` of a `Trainer` override the task's arguments.

        Raises:
            ValueError: the model was trained with a loss that its file cannot hold, and no loss is
                passed, here or to the task.
        """
        if "loss" in arguments:
            name = type(self).__name__
            stored = _stored_options(self.model, name) | {
                "loss": loss_name_as_json(arguments["loss"])
            }
            self.model = with_metadata(self.model, {OPTIONS: json.dumps({name: stored})})
        elif self._lost_loss is not None:
            raise ValueError(
                f"loss=: the model was trained with the loss {self._lost_loss!r}, which its file "
                f"cannot hold: pass it to {type(self).__name__}() or to trainer(), or pass the "
                "name of another loss"
            )
        own = {"loss": self.loss, "metrics": self.metrics, **self.usual_arguments(arguments)}
        return self._new_trainer(self.model, {**own, **arguments})

    def usual_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task's arguments of a `Trainer` that do not conflict with `given`.

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
        """Return a trainer of `model` whose batches have `batch_size` rows by default."""
        trainer = og.Trainer(model, **arguments)
        if self.batch_size is not None:
            trainer._change_job(usual_batch_size=self.batch_size)
        return trainer

    def advise(self, history: Sequence[Mapping[str, Any]]) -> str:
        """Return a sentence that says what to try if a training learned nothing; else "".

        Args:
            history: `history` of the trainer.
        """
        epochs = [entry for entry in history if "loss" in entry]
        reason = self._learning_failure_text(epochs) if epochs else ""
        rate = float(f"{epochs[-1].get('learning_rate', 0) / 10:.1g}") if reason else 0.0
        lower = argument("learning_rate", rate)
        return f"{reason}: try {lower} or more epochs{self._also_try}" if reason else ""

    def _learning_failure_text(self, epochs: Sequence[Mapping[str, Any]]) -> str:
        """Return a clause that says how the training failed to learn; "" if it learned."""
        first, last = epochs[0]["loss"], epochs[-1]["loss"]
        if len(epochs) > 1 and not last < first:
            return f"the loss did not fall, from {first:.4g} in epoch 1 to {last:.4g} in the last"
        accuracy = epochs[-1].get("validation_accuracy", 1.0)
        if len(self.classes) > 1 and accuracy <= 1.1 / len(self.classes):
            return f"validation_accuracy is {accuracy:.3g}, as by chance"
        return ""

    def divide_rows(self, validation: Any = None, seed: int = 0) -> None:
        """Set `validation`: a share of the rows, which is drawn and removed from `data`, or other
        data.

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
            raise ValueError(
                f"{given} must be a share of the rows, from 0 to {LARGEST_SHARE}, or data to "
                "validate on"
            )
        can_draw = count is not None and _take_rows(self.data, np.arange(1)) is not None
        if not share or (validation is None and not can_draw):
            self.validation = None
            return
        if count is None or not can_draw:
            raise ValueError(
                f"{argument('validation', share)} holds out a share of the rows, which is not "
                "possible for data that are read while training: name validation data, or 0"
            )
        if validation is None and not round(count * share):
            self.notes = [*self.notes, f"no row is held out: {share:g} of {count} rows is none"]
            return
        kept, drawn = _draw_validation_rows(count, share, seed, self._class_indices_to_stratify())
        if not len(kept) or not len(drawn):
            given = argument("validation", share)
            raise ValueError(
                f"{given} of {count} rows leaves no row to train on, or no row to validate on: "
                "pass another share, or 0 for no validation"
            )
        self.held_out = drawn
        self.data, self.validation = _take_rows(self.data, kept), _take_rows(self.data, drawn)

    def _class_indices_to_stratify(self) -> np.ndarray | None:
        """Return each row's class index, to stratify a split; None if the rows have no classes."""
        return None

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model for the rows of files.

        Args:
            data: files that are usual for the task.
            batch_size: rows of one call of the runtime.
            device: "cpu", "cuda" or "cuda:1".
        """
        trainer, rows = self.trainer(device=device), self.read(data)
        self.rows = row_count(rows)
        return trainer.evaluate(rows, batch_size=batch_size)

    def finished(self, model: ModelProto) -> ModelProto:
        """Return the trained model as users deploy it, without parts that only training needs."""
        return model

    def read(self, path: Any) -> Any:
        """Return the rows of further files, such as validation data, for the model and its classes.

        Raises:
            ValueError: files that cannot be read, or other classes.
        """
        raise NotImplementedError

    def predict(self, model: Any, inputs: Any) -> list[Any]:
        """Return the decoded prediction for each input, such as a label, boxes or a text.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, files or arrays, one for each result.
        """
        raise NotImplementedError

    def describe_results(self, results: Sequence[Any]) -> str:
        """Return the count of results with a word for them, such as "5 predictions"."""
        return f"{len(results)} predictions"

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write results into a folder, in files that people can open, and return the paths.

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


@dataclass_transform(eq_default=False)
def with_fields(task: type[T]) -> type[T]:
    """Return a task class whose constructor takes its fields as arguments, like a dataclass."""
    made: Any = dataclass(eq=False, repr=False)(task)
    hints = made.__init__.__annotations__  # `help` shows these annotations
    hints |= {n: re.sub(r"^InitVar\[(.*)\]$", r"\1", hint) for n, hint in hints.items() if hint}
    if made.remembered:
        made.__init__ = with_stored_options(made.__init__)
    return made


def row_count(data: Any) -> int | None:
    """Return the count of rows of data, given as for `Trainer.fit`; None if unknown."""
    if isinstance(data, Reader):
        return data.rows
    parts = data if isinstance(data, tuple) else (data,)
    arrays = parts[0].values() if isinstance(parts[0], dict) else parts[:1]
    return next((len(array) for array in arrays), 0)


def _take_rows(data: Any, rows: np.ndarray) -> Any:
    """Return the rows of `data` with the indices `rows`; None if a reader cannot select rows."""
    if isinstance(data, tuple):
        return tuple(_take_rows(part, rows) for part in data)
    if isinstance(data, dict):
        return {name: array[rows] for name, array in data.items()}
    if isinstance(data, Reader):
        return data.subset(rows)
    return None if data is None else data[rows]


def _draw_validation_rows(
    count: int, share: float, seed: int, strata: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw rows to validate on by `seed`; return the rows to train on and the drawn rows.

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


def with_stored_options(init: Callable[..., None]) -> Callable[..., None]:
    """Return a task's `__init__` that finds omitted options in the metadata of the model."""
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def begin(self: Task, model: Any, *values: Any, **named_values: Any) -> None:
        given = dict(zip([*parameters][2:], values, strict=False)) | named_values
        given = {name: value for name, value in given.items() if value is not None}
        own = _stored_options(model, type(self).__name__)
        own = {name: value for name, value in own.items() if name not in given}
        if isinstance(own.get("loss"), dict) and _FUNCTION in own["loss"]:
            self._lost_loss = own.pop("loss")[_FUNCTION]
        read = {name: _option_from_json(name, value) for name, value in own.items()}
        kept = {name: value for name, value in read.items() if value is not None}
        init(self, model, *values, **{**named_values, **kept})
        if given.get("data") is not None:
            stated = self.stated({n: v for n, v in (kept | given).items() if n in self.remembered})
            if isinstance(stated.get("tokenizer"), str):
                stated["tokenizer"] = Path(stated["tokenizer"])
            note = json.dumps({type(self).__name__: stated}, default=_option_as_json)
            self.model = with_metadata(self.model, {OPTIONS: note})

    return begin


def _stored_options(model: Any, task: str) -> dict[str, Any]:
    """Return the options that a model stores for a task class, by name, as JSON values."""
    is_path = isinstance(model, (str, os.PathLike))
    proto = onnx.load(model, load_external_data=False) if is_path else as_proto(model)
    return dict(json.loads(model_metadata(proto).get(OPTIONS, "{}")).get(task, {}))


def fine_tuning_rate(model: ModelProto) -> dict[str, float]:
    """Return `{"learning_rate": 1e-4}` for a `Trainer` of all weights of a deep model, else {}.

    At 0.001, deep models forget: many layers change together, and the statistics of
    BatchNormalization, stored or fused into its convolution, no longer fit the activations.
    """
    kinds = [node.op_type for node in model.graph.node]
    layers = sum(kind.endswith(("Conv", "MatMul", "Gemm", "Attention")) for kind in kinds)
    deep = layers >= _DEEP or "BatchNormalization" in kinds
    return {"learning_rate": GENTLE_RATE} if deep else {}


def slow_start_arguments(rows: int | None, batch_size: int, rate: float = 1e-3) -> dict[str, Any]:
    """Return arguments of a `Trainer` whose first steps change a trained model's weights slowly.

    The learning rate rises in the first quarter of an epoch, and in 100 steps at most; gradients
    are clipped to a norm of 10.
    """
    steps = min((rows or 0) // (4 * batch_size), 100)
    return {"learning_rate": og.schedules.warmup(rate, steps) if steps else rate, "clip_norm": 10.0}


def as_proto(model: Any) -> ModelProto:
    """Return a ModelProto from a ModelProto, a path, bytes or a `Trainer`."""
    if isinstance(model, og.Trainer):
        return model.model
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return model if isinstance(model, ModelProto) else onnx.load(model)


def model_metadata(model: ModelProto) -> dict[str, str]:
    """Return the metadata of a model, `{key: text}`."""
    return {entry.key: entry.value for entry in model.metadata_props}


def with_metadata(model: ModelProto, notes: Mapping[str, str | None]) -> ModelProto:
    """Return the model with changed metadata, `{key: text}`; a text of None removes its key."""
    old = model_metadata(model)
    if (new := {k: v for k, v in {**old, **notes}.items() if v is not None}) == old:
        return model
    noted = ModelProto()
    noted.CopyFrom(model)
    del noted.metadata_props[:]
    for key, value in new.items():
        noted.metadata_props.add(key=key, value=value)
    return noted


def input_shapes(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return `{input: shape}` of a model, None for unknown lengths."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        n: shape for n, shape in _declared_shapes(model.graph.input).items() if n not in weights
    }


def output_shapes(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return `{output: shape}` of a model, None for unknown lengths."""
    return _declared_shapes(model.graph.output)


def _declared_shapes(values: Any) -> dict[str, tuple[int | None, ...]]:
    dims = {v.name: v.type.tensor_type.shape.dim for v in values}
    # old exporters write -1 for any length
    return {name: tuple(max(d.dim_value, 0) or None for d in each) for name, each in dims.items()}


def stored_classes(model: ModelProto) -> list[str]:
    """Return the class names in a model's metadata by onnxgrad or ultralytics; else []."""
    notes = model_metadata(model)
    try:
        own = CLASSES in notes
        found = json.loads(notes[CLASSES]) if own else ast.literal_eval(notes.get("names", ""))
    except (SyntaxError, ValueError):
        return []
    found = [found[i] for i in sorted(found)] if isinstance(found, dict) else found
    return [str(name) for name in found] if isinstance(found, list) else []


def with_classes(model: ModelProto, classes: Sequence[str]) -> ModelProto:
    """Return a model that stores class names, so that predictions need no data."""
    same = stored_classes(model) == [*classes]
    return model if same else with_metadata(model, {CLASSES: json.dumps([*classes])})


def configured_classes(model: ModelProto, home: Path | None) -> list[str]:
    """Return the class names in the `config.json` in `home`; [] for models without logits."""
    path = None if home is None else home / "config.json"
    if path is None or not path.is_file() or "logits" not in output_shapes(model):
        return []
    named = json.loads(path.read_text(encoding="utf-8")).get("id2label", {})
    return [str(named[key]) for key in sorted(named, key=int)]


def class_probabilities(scores: np.ndarray) -> np.ndarray:
    """Return probabilities of classes, on the last axis, from scores or from probabilities."""
    if scores.min() < 0 or not np.allclose(scores.sum(-1), 1, atol=1e-3):  # not probabilities
        return softmax(scores)
    return scores / scores.sum(-1, keepdims=True)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of scores on the last axis."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def safe_cell(value: Any) -> Any:
    """Return the cell of a CSV file; a text that a spreadsheet would run gets an apostrophe."""
    if not isinstance(value, str) or value[:1] not in _FORMULAS:
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> Path:
    """Write a CSV file with cells that spreadsheets do not run, and return its path.

    Folders above it are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(map(safe_cell, row) for row in rows)
    return path


def folder_of_model(model: Any) -> Path | None:
    """Return the folder that holds a model given as a path; None for models in memory."""
    return Path(model).parent if isinstance(model, (str, os.PathLike)) else None


def find_tokenizer(source: Any, home: Path | None) -> Any:
    """Return `source`; if it is None, the path of the tokenizer in `home` or one folder above."""
    if source is None and home is not None:
        places = (home / FILE, home / VOCABULARY, home.parent / FILE)
        source = next((path for path in places if path.is_file()), None)
    if source is None:
        raise ValueError(
            "there is no tokenizer.json or vocab.txt beside the model: pass the path of one as "
            "tokenizer="
        )
    return source


def _copy_tokenizer(source: Any, folder: Path) -> str:
    """Copy a tokenizer's file into a folder; return a sentence about it, "" if nothing was done."""
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
    except OSError as e:  # not raised: the model is already written
        return f"{target} is not written: {e.strerror or e}"
    return f"wrote {target}"


def loss_name_as_json(loss: Any) -> dict[str, str]:
    """Return `{"function": name}` to store in place of a loss function, which JSON cannot hold."""
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    return {_FUNCTION: str(name or getattr(loss, "__qualname__", type(loss).__name__))}


def _option_as_json(value: Any) -> Any:
    """Return an option's value for `json.dumps`; None for objects that JSON cannot hold."""
    maker = re.sub(r"(?<!^)(?=[A-Z])", "_", type(value).__name__).lower()
    if isinstance(value, os.PathLike):
        return {"path": os.path.abspath(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if dataclasses.is_dataclass(value) and maker in _MAKERS:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {_MAKER: maker, "arguments": fields}
    is_named = callable(value) or isinstance(value, og.losses.LossSpec)
    return loss_name_as_json(value) if is_named else None


def _option_from_json(name: str, value: Any) -> Any:
    """Return the value of an option stored as JSON; None for a path that no longer exists."""
    if isinstance(value, list):
        return tuple(_option_from_json(name, each) for each in value)
    if not isinstance(value, dict):
        return value
    if _FUNCTION in value:
        raise ValueError(
            f"{name}=: the model was trained with the function {value[_FUNCTION]!r}, which its "
            "file cannot hold: pass it"
        )
    if "path" in value:
        return value["path"] if Path(value["path"]).exists() else None
    if _MAKER in value:
        maker = value[_MAKER]
        return getattr(_MAKERS[maker], maker)(**_option_from_json(name, value["arguments"]))
    return {key: _option_from_json(name, each) for key, each in value.items()}
