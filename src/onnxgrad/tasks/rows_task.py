"""`RowsTask`: the base of tasks on tables, images and texts, with a loss as of `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import ClassNames, first_class_names
from onnxgrad.data.columns import Names, class_names, read_names
from onnxgrad.data.field import Field
from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.model.class_labels import Labels
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.model.notes import CLASSES, HEAD, read_metadata
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.weights import constant_refs, fill_weights
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.predictor import ROWS, Predictor
from onnxgrad.tasks.base import Task, as_proto, row_count, with_classes, with_fields
from onnxgrad.tasks.row_predictions import (
    ClassLabels,
    Columns,
    column_writer,
    output_columns,
    stored_loss,
)
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import evaluate
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import loss_output
from onnxgrad.training.modes.inference_form import export_model
from onnxgrad.training.objective import Objective
from onnxgrad.training.output_metrics import select_metrics
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.state import TrainState
from onnxgrad.training.trainer import Trainer


def without_loss_like_outputs(proto: ModelProto, loss: Any, output: str) -> ModelProto:
    """Return the model without the outputs that could be mistaken for the loss.

    `output` names the loss that the model computes where `loss` is None.
    """
    names = [o.name for o in proto.graph.output]
    if isinstance(loss, str) and not loss.endswith(".onnx"):
        floats = [o for o in proto.graph.output if not is_non_tensor(o)]
        if len(floats) > 1:
            choose_output(proto, None, f"say which one with {named('loss={output: loss}')}")
    if loss is not None:
        return proto
    if output not in names:
        raise ValueError(
            f"the model has no output {output!r} (it has {', '.join(map(printable, names))}): "
            f"name a loss with {argument('loss')}, or the output that is one with "
            f"{argument('loss_output')}"
        )
    try:
        chosen = loss_output(proto)
    except ValueError:
        chosen = ""
    if chosen == output:
        return proto
    scalars = (o for o in proto.graph.output if o.name != output and _may_be_loss(o))
    dropped = {o.name for o in scalars}
    return select_model_inputs_outputs(proto, [n for n in names if n not in dropped])


def _may_be_loss(output: Any) -> bool:
    shape = output.type.tensor_type.shape
    return output.name == "loss" or all(d.dim_value == 1 for d in shape.dim)


CROSS_ENTROPY, ONE_SCORE = "cross_entropy", "binary_cross_entropy"


@with_fields
class RowsTask(Task):
    """The base of the tasks Table, Images and Texts: rows of files, and any loss of a `Trainer`.

    The fields are the arguments that all of them take; `data` and `validation` then are rows as
    `Trainer.fit` takes them.

    Attributes:
        rows: number of rows that were read last; None if it is unknown.
        notes: messages about the data and about what was decided, in their order.
        remarks: messages about columns that no input takes, and about the order of columns.
        names: the names of columns and classes, which the trained model stores.
    """

    model: Any
    data: Any = None
    _: KW_ONLY
    loss: Any = None
    loss_options: Mapping[str, Any] | None = None
    loss_weights: Mapping[str, float] | None = None
    loss_output: str = "loss"
    metrics: Any = None
    validation: Any = None
    seed: int = 0
    notes: list[str] = field(default_factory=list, init=False)
    remarks: list[str] = field(default_factory=list, init=False)
    _may_change_model = False  # true while the rows to train on are read
    _noted_loss = ""  # message: the loss is read from the model's metadata

    def __post_init__(self) -> None:
        self.model = as_proto(self.model)
        self.named_classes: list[Any] | None = list(self.classes) if self.classes else None
        if self.named_classes:
            self.model = with_classes(self.model, self.named_classes)
        self.classes = self.named_classes or ()
        self.names = read_names(self.model)
        if self.loss is None and not self._computes_loss and (noted := stored_loss(self.model)):
            for name, value in noted.items():
                setattr(self, name, getattr(self, name) or value)
            by_output: Any = self.loss if isinstance(self.loss, Mapping) else {}
            text = ", ".join(f"{output}={name}" for output, name in by_output.items()) or self.loss
            self._noted_loss = f"loss {text}, as in its training"
        self.arguments = {"loss_options": self.loss_options, "loss_weights": self.loss_weights}
        self._job: Any = None  # the `Job` of model and loss, set when rows are first read
        self._labels: list[Any] = []  # the labels of the loss, set when rows are first read
        data, validation, self.data, self.validation = self.data, self.validation, None, None
        if data is not None:
            self._read_training_data(data, validation)

    # -- methods of subclasses ------------------------------------------------------------------

    def _open_rows(self, data: Any) -> Any:
        """Return a table or a reader of the rows of files."""
        raise NotImplementedError

    def _decide_loss(self, source: Any) -> None:
        """Choose the loss, and maybe a new last layer, if data and model allow only one choice."""

    def _rows_for_model(self, source: Any) -> tuple[Dataset, Names]:
        """Return labeled rows for the model's inputs, and the names of columns and classes to
        store.

        It calls `_training_objective`, and notes messages.
        """
        raise NotImplementedError

    def _input_batches(
        self, source: Any, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Columns, int, Columns]]:
        """Yield `({input: array}, row count, {column: array} to write beside the predictions)`."""
        raise NotImplementedError

    # -- training --------------------------------------------------------------------------------

    def _read_training_data(self, data: Any, validation: Any) -> None:
        """Read the rows to train on, and hold out the rows to validate on."""
        self._may_change_model = True
        rows, self.names = self._read_rows(data)
        self.data = _as_fit_argument(rows)
        self.classes = [*(self._known_classes() or self.names.classes)]
        self.divide_rows(validation, self.seed)

    def _read_rows(self, data: Any) -> tuple[Dataset, Names]:
        """Return labeled rows and the names to store; choose the loss and metrics if not given."""
        source = self._open_rows(data)
        if self._job is None:
            self.notes += [self._noted_loss] * bool(self._noted_loss)
            # data may have another number of classes than the model
            may_need_head = self.named_classes is None and self.loss == CROSS_ENTROPY
            if may_need_head or (self.loss is None and not self._computes_loss):
                self._decide_loss(source)
            trained = without_loss_like_outputs(self.model, self.loss, self.loss_output)
            self._job = Job(trained, loss=self.loss, **self.arguments)
            self._trained = read_names(trained)
        rows, names = self._rows_for_model(source)
        self._check_class_count()
        if self.metrics is None:
            self.metrics = self._default_metrics()
        for name in ("columns", "target", "weight"):  # the columns by which later files are read
            setattr(self._trained, name, getattr(names, name))
        self.rows = row_count(_as_fit_argument(rows))
        return rows, names

    @property
    def _computes_loss(self) -> bool:
        """Whether the model has the output `loss_output`."""
        return any(output.name == self.loss_output for output in self.model.graph.output)

    @property
    def class_count(self) -> int:
        """The count of classes of the output that the loss reads, at least 2."""
        counts = [info.classes for info in self._labels if isinstance(info.classes, int)]
        return next(iter(counts), max(2, len(self.classes)))

    def trainer(self, **arguments: Any) -> Trainer:
        """Return a trainer of the model; `arguments` of a `Trainer` override the task's."""
        pruned = self.model if self._job is None else self._job.proto
        usual = self.usual_arguments(arguments)
        own = {"loss": self.loss, "metrics": self.metrics or (), **usual}
        # the task's loss_options and loss_weights are for its loss
        if arguments.get("loss") is not None:
            own = {name: value for name, value in own.items() if not name.startswith("loss")}
        trainer = self._new_trainer(pruned, {**own, **arguments})
        trainer._names = self.names.copy()
        return trainer

    def finished(self, model: ModelProto) -> ModelProto:
        """Return a trained model with the outputs that its training had removed."""
        outputs = [output.name for output in self.model.graph.output]
        if outputs == [output.name for output in model.graph.output]:
            return model
        known = {ref.name for ref in constant_refs(self.model)}
        values = {ref.name: ref.array() for ref in constant_refs(model) if ref.name in known}
        return fill_weights(export_model(self.model, values, self.names), values)

    # -- evaluation ------------------------------------------------------------------------------

    def read(self, path: Any) -> Any:
        """Return the rows of further files for the same model and classes, as `Trainer.fit` takes
        them.

        Raises:
            ValueError: files that cannot be read, other columns, or a label that is no class.
        """
        return _as_fit_argument(self._read_rows(path)[0])

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and metrics on the rows of files; operators without gradient are
        allowed.
        """
        rows, _ = self._read_rows(data)
        metrics, place = select_metrics(self.metrics), Device.of(device).check()
        job = replace(self._job, metrics=metrics, device=place)
        recipe = Recipe.for_data(job, TrainState(), rows)
        return evaluate(recipe, self._trained, rows, batch_size, "evaluating")

    def _training_objective(self, y: Any = None, classes: Labels | None = None) -> Objective:
        """Return the `Objective` of the training, which names the model's inputs and labels.

        Args:
            y: the labels; None: they are not read yet.
            classes: by which texts in labels are numbers; None: as the model stores them.
        """
        recipe = Recipe.for_data(self._job, TrainState(), Dataset(None, y))
        objective = build_objective(recipe, training=False)
        if classes is not None:
            self._trained.classes = classes
        objective.names, self._labels = self._trained, [*objective.labels.values()]
        return objective

    def _numeric_loss(self) -> str | None:
        """Return the name of the loss if its labels are numbers; None if they are classes."""
        infos, loss = self._training_objective().labels.values(), self._job.loss
        if not infos or any(i.classes is not None or i.threshold is not None for i in infos):
            return None
        return loss if isinstance(loss, str) else "of the model"

    def _default_metrics(self) -> list[str]:
        """Return the default metrics: `["accuracy"]` if the only label is a class; else []."""
        classes = [i for i in self._labels if i.classes is not None or i.threshold is not None]
        return ["accuracy"] if len(self._labels) == len(classes) == 1 else []

    def _check_class_count(self) -> None:
        """Raise `ValueError` if `classes` names more or fewer classes than the model has."""
        if self.named_classes is None:
            return
        every = self._labels
        infos = [info for info in every if isinstance(info.classes, int)]
        given = argument("classes", self.named_classes)
        if every and not any(i.classes is not None or i.threshold is not None for i in every):
            raise ValueError(
                f"{argument('classes')} names classes, and the loss compares with numbers: leave "
                "it out, or choose a loss of classes, such as cross_entropy"
            )
        count = len(self.named_classes)
        if len(infos) == 1 and infos[0].classes != count:
            raise ValueError(
                f"{given} names {count} classes, and the output {infos[0].prediction!r} has "
                f"{infos[0].classes}: name all in their order, or train a new last layer "
                f"({named('replace_head')})"
            )

    def _known_classes(self) -> Labels | None:
        """Return the classes, in order: the task's argument, or the model's stored classes."""
        return self.named_classes or class_names(self.model)

    def _replace_unfit_last_layer(self, names: Sequence[str], count: int | None) -> None:
        """Replace the model's last layer if its scores do not fit the classes, and add a note.

        They cannot if there are more classes than scores, or if the model stores none of the names.
        Fewer classes may be those of its classes that occur in the data.

        Args:
            names: the names of the classes of the data.
            count: the number of scores that the model has; None if it is not known.
        """
        if not self._may_change_model:
            return
        known = read_metadata(self.model, CLASSES)
        others = bool(known) and {*ClassNames(known).texts}.isdisjoint(names)
        more = not known and not read_metadata(self.model, HEAD) and len(names) > max(count or 0, 2)
        if count is None or len(names) < 2 or not (others or more):
            return
        self.model = og.replace_head(self.model, list(names))
        self.notes.append(
            f"the model has {count} scores and the data {len(names)} other classes: a new last "
            f"layer has {first_class_names(names)}"
        )

    def _set_default_loss(self, loss: str, reason: str) -> None:
        """Set `loss` if neither the user nor the model names a loss, and add a note with the
        reason.
        """
        if self.loss is None and not self._computes_loss:
            self.loss = loss
            self.notes.append(f"loss {loss}: {reason}")

    # -- predictions -----------------------------------------------------------------------------

    def predict(self, model: Any, inputs: Any) -> list[Any]:
        """Return the predictions of each row: label and probability of a class, and all outputs.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: files as `data` may be; labels in them are not read.
        """
        rows: list[dict[str, Any]] = []
        for columns in self.prediction_columns(model, inputs):
            # a 1-D array gives Python objects, a 2-D array gives an array for each row
            values = [a.tolist() if a.ndim == 1 else list(a) for a in columns.values()]
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        return rows

    def prediction_columns(
        self,
        model: Any,
        inputs: Any,
        *,
        outputs: Sequence[str] = (),
        batch_size: int | None = None,
        device: str = "cpu",
    ) -> Iterator[Columns]:
        """Yield predictions, some rows at a time, as `{column: array}`.

        Args:
            model: as of `predict`.
            inputs: as of `predict`.
            outputs: the outputs to return; none: all that have a row for each row of the data.
            batch_size: rows of one call of the runtime, 256 by default.
            device: "cpu", "cuda" or "cuda:1".

        Raises:
            ValueError: an unknown output, or one without a row for each row of the data.
        """
        proto = as_proto(model)
        every = [output.name for output in proto.graph.output]
        for name in outputs:
            if name not in every:
                raise unknown("output", name, every)
        predictor = Predictor(proto, outputs, device)
        labels = ClassLabels.of_model(proto, predictor.returned)
        fields = [Field.from_input(ir.from_proto(x)) for x in inputs_without_default(proto)]
        size, self.rows = predictor.fixed_rows or batch_size or ROWS, 0
        for feed, count, extra in self._input_batches(self._open_rows(inputs), fields, size):
            results = predictor.run_rows(feed)
            own = labels.columns(results, count) if labels and labels.output in results else {}
            self.rows += count
            others = output_columns(results, predictor.returned, outputs, self.notes)
            yield {**extra, **own, **others}

    def write_beside(self, folder: str | os.PathLike) -> str:
        """Return "": tasks of rows copy no tokenizer beside the model."""
        return ""

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write predictions as `predictions.csv`, a row each.

        Args:
            inputs: as of `predict`.
            results: what `predict` returned for them.
            folder: is created; a file in it of that name is replaced.
        """
        rows, path = list(results), Path(folder, "predictions.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        with column_writer(path) as write:
            if rows:
                write({name: np.stack([row[name] for row in rows]) for name in rows[0]})
        return [path]


@contextmanager
def name_data_in_errors(name: str) -> Iterator[None]:
    """Put `name`, of the data, in front of errors raised in the `with` block."""
    try:
        yield
    except ValueError as e:
        if repr(name) in str(e):
            raise
        raise DataError(f"{name!r}: {e}") from e


def feature_inputs(name: str, objective: Objective) -> list[ir.Value]:
    """Return the inputs that are features; raise `DataError` unless one more input is the label."""
    features = [x for x in objective.data if x.name not in objective.labels]
    if len(features) != len(objective.data) - 1:
        raise DataError(
            f"{name!r} is read while training, which needs a model with one label input: load the "
            "data first, and pass the arrays"
        )
    return features


def _as_fit_argument(data: Dataset) -> Any:
    """Return a dataset as one argument of `Trainer.fit`: X, (X, y) or (X, y, sample_weight)."""
    if data.y is None and data.sample_weight is None:
        return data.X
    return (data.X, data.y) if data.sample_weight is None else tuple(vars(data).values())
