"""`RowsTask`: rows of files for a model, with a loss that is chosen as for a `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import ClassNames, first_names
from onnxgrad.data.columns import Names, class_names, read_names
from onnxgrad.data.field import Field
from onnxgrad.errors import argument, named
from onnxgrad.model.class_labels import Labels
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.model.notes import CLASSES, HEAD, read_note
from onnxgrad.model.weights import constant_refs
from onnxgrad.model.without_elements import fill_weights
from onnxgrad.runtime.predictor import ROWS
from onnxgrad.tasks.base import Task, model_of, with_classes
from onnxgrad.tasks.model_with_loss import ModelWithLoss, noted_loss, with_loss
from onnxgrad.tasks.prediction_files import column_writer
from onnxgrad.tasks.row_predictions import Columns, RowPredictions
from onnxgrad.training.data import Dataset
from onnxgrad.training.modes.inference_form import export_model
from onnxgrad.training.objective import Objective
from onnxgrad.training.trainer import Trainer

CROSS_ENTROPY, ONE_SCORE = "cross_entropy", "binary_cross_entropy"


@dataclass
class MappedRows:
    """Data that fit a model and its loss.

    - `data`: what `fit` and `evaluate` take; `rows`: their number, None if it is unknown.
    - `names`: the names of columns and classes, which the trained model stores.
    - `notes`: messages before training; `remarks`: messages after it, about columns.
    """

    data: Dataset
    rows: int | None
    names: Names
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class RowsTask(Task):
    """A task on rows of files, whose loss is chosen as for a `Trainer`: see its subclasses.

    Attributes:
        rows: number of rows that were read last; None if it is unknown.
        notes: messages about the data and about what was decided, in their order.
        remarks: messages about columns that no input takes, and about the order of columns.
        names: the names of columns and classes, which the trained model stores.
    """

    notes: list[str]
    remarks: list[str]
    _may_change_model = False  # before its training only: evaluations are of the given model
    _noted_loss = ""  # a message, where the loss is the one of an earlier training

    def __init__(
        self,
        model: Any,
        *,
        classes: Sequence[Any] | None,
        loss: Any,
        loss_options: Mapping[str, Any] | None,
        loss_weights: Mapping[str, float] | None,
        loss_output: str,
        metrics: Any,
    ) -> None:
        self.model = model_of(model)
        self.notes, self.remarks = list[str](), list[str]()
        self.named_classes: list[Any] | None = list(classes) if classes else None
        if self.named_classes:
            self.model = with_classes(self.model, self.named_classes)
        self.names = read_names(self.model)
        self._loss_output = loss_output
        stated = {"loss": loss, "loss_options": loss_options, "loss_weights": loss_weights}
        if loss is None and not self._computes_loss and (noted := noted_loss(self.model)):
            stated |= {name: value for name, value in noted.items() if not stated[name]}
            self._noted_loss = f"loss {_loss_text(noted['loss'])}, as in its training"
        self.loss = stated.pop("loss")
        self.arguments = stated
        self.metrics = metrics
        self._scored: ModelWithLoss | None = None
        self._objective: Objective | None = None

    # -- what subclasses read ------------------------------------------------------------------

    def _open_rows(self, data: Any) -> Any:
        """Return what reads the rows of files."""
        raise NotImplementedError

    def _decide_loss(self, source: Any) -> None:
        """Choose the loss and the head that data and model leave no choice of, and note them."""

    def _map_rows(self, source: Any, scored: ModelWithLoss) -> tuple[MappedRows, Objective]:
        """Return rows with labels for the inputs of the model and its loss."""
        raise NotImplementedError

    def _input_batches(
        self, source: Any, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Columns, int, Columns]]:
        """Yield arrays by input, their number of rows, and columns that go with predictions."""
        raise NotImplementedError

    # -- training --------------------------------------------------------------------------------

    def _begin_training(self, data: Any, validation: Any, seed: int) -> None:
        """Read the rows to train on, and hold out the rows to validate on."""
        self._may_change_model = True
        mapped = self._read_rows(data)
        self.names, self.data = mapped.names, _as_passed(mapped.data)
        known: Sequence[Any] = self._known_classes() or self.names.classes
        self.classes = list(known)
        self.divide_rows(validation, seed)

    def _read_rows(self, data: Any) -> MappedRows:
        """Return rows with labels; the first ones decide loss and metrics that are not stated."""
        source = self._open_rows(data)
        if self._scored is None:
            self.notes += [self._noted_loss] * bool(self._noted_loss)
            if (self.loss is None and not self._computes_loss) or self._may_need_head:
                self._decide_loss(source)
            trained = with_loss(self.model, self.loss, self._loss_output)
            self._scored = ModelWithLoss(trained, self.loss, **self.arguments)
        mapped, self._objective = self._map_rows(source, self._scored)
        self._check_classes(self._objective)
        if self.metrics is None:
            self.metrics = self._usual_metrics(self._objective)
        for name in ("columns", "target", "weight"):  # other data are read by the same names
            setattr(self._scored.names, name, getattr(mapped.names, name))
        self.rows = mapped.rows
        self.notes += mapped.notes
        self.remarks += mapped.remarks
        return mapped

    @property
    def _computes_loss(self) -> bool:
        """Whether the model has an output of the name of its loss."""
        return any(output.name == self._loss_output for output in self.model.graph.output)

    @property
    def _may_need_head(self) -> bool:
        """Whether the loss is one of classes, of which data may have another number."""
        return self.named_classes is None and self.loss == CROSS_ENTROPY

    @property
    def class_count(self) -> int:
        """The number of classes of the output that the loss reads, at least 2."""
        infos = () if self._objective is None else self._objective.labels.values()
        counts = [info.classes for info in infos if isinstance(info.classes, int)]
        return next(iter(counts), max(2, len(self.classes)))

    def trainer(self, **arguments: Any) -> Trainer:
        """Return a trainer of the model; `arguments`, named as for `Trainer`, win."""
        pruned = self.model if self._scored is None else self._scored.job.proto
        usual = self.usual_arguments(arguments)
        own = {"loss": self.loss, "metrics": self.metrics or (), **usual}
        if arguments.get("loss") is not None:  # whose options are others
            own = {name: value for name, value in own.items() if not name.startswith("loss")}
        trainer = self._new_trainer(pruned, {**own, **arguments})
        trainer._names = self.names.copy()
        return trainer

    def finished(self, model: ModelProto) -> ModelProto:
        """Return a trained model with the outputs that its training left out."""
        outputs = [output.name for output in self.model.graph.output]
        if outputs == [output.name for output in model.graph.output]:
            return model
        known = {ref.name for ref in constant_refs(self.model)}
        values = {ref.name: ref.array() for ref in constant_refs(model) if ref.name in known}
        return fill_weights(export_model(self.model, values, self.names), values)

    # -- evaluation ------------------------------------------------------------------------------

    def read(self, path: Any) -> Any:
        """Return other rows for the same model and classes, as `Trainer.fit` takes them.

        Raises:
            ValueError: files that cannot be read, other columns, or a label that is no class.
        """
        return _as_passed(self._read_rows(path).data)

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model, which need not be one that can train."""
        rows = self._read_rows(data).data
        assert self._scored is not None
        return self._scored.evaluate(rows, self.metrics, batch_size, device)

    def _usual_metrics(self, objective: Objective) -> list[str]:
        """Return accuracy for data whose only labels are classes; none for other data."""
        infos = list(objective.labels.values())
        classes = [i for i in infos if i.classes is not None or i.threshold is not None]
        return ["accuracy"] if len(infos) == len(classes) == 1 else []

    def _check_classes(self, objective: Objective) -> None:
        """Raise `ValueError` if more or fewer classes are named than the model has."""
        if self.named_classes is None:
            return
        every = objective.labels.values()
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
        """Return the labels of the classes by number: given, or stored in the model."""
        return self.named_classes or class_names(self.model)

    def _choose_head(self, names: Sequence[str], count: int | None) -> None:
        """Give the model a new last layer for classes that its own cannot be, and note it.

        These are more than its scores, or all others than the ones that it stores. Fewer may be
        some of its classes, which the data happen to have.

        Args:
            names: the names of the classes of the data.
            count: the number of scores that the model has; None if it is not known.
        """
        if not self._may_change_model:
            return
        known = read_note(self.model, CLASSES)
        others = bool(known) and {*ClassNames(known).texts}.isdisjoint(names)
        more = not known and not read_note(self.model, HEAD) and len(names) > max(count or 0, 2)
        if count is None or len(names) < 2 or not (others or more):
            return
        self.model = og.replace_head(self.model, list(names))
        self.notes.append(
            f"the model has {count} scores and the data {len(names)} other classes: a new last "
            f"layer has {first_names(names)}"
        )

    def _choose_loss(self, loss: str, reason: str) -> None:
        """Take a loss that data and model leave no choice of, and note it."""
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
            # labels and numbers as Python's, and arrays of several numbers
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
        """Yield the predictions of some rows at a time, as arrays by the name of a column.

        Args:
            model: as of `predict`.
            inputs: as of `predict`.
            outputs: the outputs to return; none: all that have a row for each row of the data.
            batch_size: rows of one call of the runtime, 256 by default.
            device: "cpu", "cuda" or "cuda:1".

        Raises:
            ValueError: an unknown output, or one without a row for each row of the data.
        """
        proto = model_of(model)
        fields = [Field.of(ir.from_proto(x)) for x in inputs_without_default(proto)]
        predictions = RowPredictions(proto, fields, outputs, self.notes)
        source = self._open_rows(inputs)
        size = predictions.fixed_rows or batch_size or ROWS
        rows = self.rows = 0
        for columns in predictions.columns(self._input_batches(source, fields, size), device):
            rows += len(next(iter(columns.values())))
            self.rows = rows
            yield columns

    def write_beside(self, folder: str | os.PathLike) -> str:
        """Return "": files of rows need no other beside them, folders are written as a whole."""
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
def begin_errors(name: str) -> Iterator[None]:
    """Begin the errors of the block with the name of the data."""
    try:
        yield
    except ValueError as e:
        if repr(name) in str(e):
            raise
        raise DataError(f"{name!r}: {e}") from e


def only_features(name: str, objective: Objective) -> list[ir.Value]:
    """Return the inputs other than the only label; raise `DataError` if there are several."""
    features = [x for x in objective.data if x.name not in objective.labels]
    if len(features) != len(objective.data) - 1:
        raise DataError(f"{name!r} is read while training, for models with one label input")
    return features


def _as_passed(data: Dataset) -> Any:
    """Return data as the first argument of `Trainer.fit`."""
    if data.y is None and data.sample_weight is None:
        return data.X
    return (data.X, data.y) if data.sample_weight is None else tuple(vars(data).values())


def _loss_text(loss: Any) -> str:
    if not isinstance(loss, Mapping):
        return str(loss)
    return ", ".join(f"{output}={name}" for output, name in loss.items())
