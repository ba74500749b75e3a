"""Rows of tables: the columns of a file as the inputs and the labels of a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad.data.arrays import DataError, column_array, fit_shape, is_arrow
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.cells import RowNumbers, is_text
from onnxgrad.data.class_numbers import first_names, label_text
from onnxgrad.data.columns import ColumnSelection, Names, column_names, is_table
from onnxgrad.data.field import Field
from onnxgrad.data.readers import Reader
from onnxgrad.data.tables import FileTable, read_table
from onnxgrad.errors import argument, unknown
from onnxgrad.operators.shapes import dims
from onnxgrad.tasks.model_with_loss import ModelWithLoss
from onnxgrad.tasks.row_predictions import Columns
from onnxgrad.tasks.rows_task import (
    CROSS_ENTROPY,
    MappedRows,
    RowsTask,
    begin_errors,
    only_features,
)
from onnxgrad.tasks.table_columns import (
    InputColumns,
    TargetColumns,
    Targets,
    choose_columns,
    ignored_columns,
    in_other_order,
)
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import Objective

__all__ = ["Table"]

STREAMED = (".arrow", ".feather", ".ipc")
PARQUET = (".parquet", ".pq")
_IN_MEMORY = 1 << 30  # bytes of a Parquet file that is read as a whole


@dataclass(frozen=True)
class ArrowColumns:
    """Parquet or Arrow files; `types` are the types of the columns."""

    name: str
    types: dict[str, str]

    @property
    def lists(self) -> list[str]:
        """The columns that hold an array for each row."""
        return [name for name, kind in self.types.items() if "list" in kind or "tensor" in kind]

    def check_numbers(self, names: Collection[str]) -> None:
        """Raise `DataError` if one of these columns is text."""
        if text := next((n for n in names if "string" in self.types[n]), None):
            raise DataError(
                f"{self.name!r}: column {text!r} is text; write numbers, name the classes of a "
                f"target with {argument('classes')}, or leave it out with "
                f"{argument('ignore', [text])}"
            )

    def reader(self, columns: Any, y: list[str], weight: str | None) -> Reader:
        """Return what reads these columns."""
        return arrow_dataset(self.name, y=y or None, sample_weight=weight, columns=columns)


class Table(RowsTask):
    """Rows of a table: columns of numbers in, columns of numbers or classes out.

    One input takes all columns that are no target, in their order, reshaped to its shape; several
    inputs take the columns of their names. Columns may hold lists. The trained model stores the
    names: other data are taken by name, so that `Table("mine.onnx")` predicts and evaluates without
    further arguments. `validation` holds a fifth of the rows, unless it is said otherwise.

    Args:
        model: model, serialized model or path.
        data: the rows to train on: a CSV, TSV, Parquet or `.npz` file, a folder of Parquet files, a
            table of pandas, polars or pyarrow, a dict of columns, or what `og.data.read_table`
            returns; files beyond 1 GB are read while training. None: `model` is one that was
            trained.
        target: the column of the labels, or several; `{output: column}` for losses of several
            outputs. None: as in an earlier training.
        columns: the columns of the input in this order, or `{input: columns}`; None: all.
        sample_weight: the column of the weights of rows.
        ignore: columns to leave out.
        drop_missing: whether rows with an empty cell, NaN or infinity are left out.
        classes: the names of the classes that labels are, in the order of the model's output; None:
            the names in the model.
        loss: as of `Trainer`. None: as in an earlier training, or the output `loss_output` of the
            model; or `cross_entropy`, where labels are names of classes. Names of other classes
            than the model has give it a new last layer.
        loss_options, loss_weights: as of `Trainer`.
        loss_output: the output of the model that is its loss.
        metrics: as of `Trainer`; None: accuracy, where the labels are classes.
        validation: the share of the rows to hold out, or other data; 0: none.
        seed: of the rows that are held out.

    Attributes:
        data: `(X, y)` or `(X, y, sample_weight)`, or a reader, as `Trainer.fit` takes them.
        validation: the same, of the rows that are held out; None without.

    Raises:
        ValueError: a file that cannot be read, a column that is not there, a label that is no
            class; or no loss, where data and model leave a choice.
        TypeError: data that are neither a path nor a table.

    Examples:
        >>> import pathlib, tempfile, onnx, onnxgrad as og
        >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.csv")
        >>> rows = "".join(f"{i % 5},{i % 3},{2 * (i % 5) + i % 3}\\n" for i in range(60))
        >>> _ = path.write_text("a,b,price\\n" + rows)
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0, 0}> { y = MatMul(x, w) }''')
        >>> task = og.tasks.Table(model, path, target="price", loss="squared_error")
        >>> trainer = task.trainer(learning_rate=0.1)
        >>> trainer = trainer.fit(task.data, validation=task.validation, epochs=80)
        >>> [round(float(row["y"][0])) for row in task.predict(trainer, path)[:3]]
        [0, 3, 6]
    """

    def __init__(
        self,
        model: Any,
        data: Any = None,
        *,
        target: TargetColumns = None,
        columns: InputColumns = None,
        sample_weight: str | None = None,
        ignore: Sequence[str] = (),
        drop_missing: bool = False,
        classes: Sequence[str] | Sequence[int] | None = None,
        loss: Any = None,
        loss_options: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        loss_output: str = "loss",
        metrics: Any = None,
        validation: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            classes=classes,
            loss=loss,
            loss_options=loss_options,
            loss_weights=loss_weights,
            loss_output=loss_output,
            metrics=metrics,
        )
        self._target, self._columns, self._weight = target, columns, sample_weight
        self._ignore, self._drops = list(ignore), drop_missing
        if data is not None:
            self._begin_training(data, validation, seed)

    # -- rows with labels ------------------------------------------------------------------------

    def _open_rows(self, data: Any) -> FileTable | ArrowColumns:
        """Return a table in memory, or columns that are read while training."""
        if isinstance(data, FileTable):
            return data
        if isinstance(data, Mapping) or is_table(data):
            names = list(data) if isinstance(data, Mapping) else column_names(data)
            if names is None:
                raise DataError("the columns of the table have no names: name them, or fit arrays")
            columns = {name: data[name] for name in names}
            values = {
                n: column_array(n, c) if is_arrow(c) else np.asarray(c) for n, c in columns.items()
            }
            return FileTable(values, "the table", RowNumbers())
        if isinstance(data, (str, os.PathLike)) and _is_read_while_training(Path(data)):
            return self._open_arrow(os.fspath(data))
        if not isinstance(data, (str, os.PathLike)) and not hasattr(data, "read"):
            raise TypeError(
                f"data is a {type(data).__name__}, and no path or table: pass arrays to the fit of "
                "a Trainer"
            )
        source: str | BinaryIO = os.fspath(data) if isinstance(data, os.PathLike) else data
        return read_table(source, self._ignore, self._drops)

    def _open_arrow(self, path: str) -> ArrowColumns:
        types = dict(arrow_dataset(path).describe()["columns"])
        for name in self._ignore:
            if name not in types:
                raise unknown(f"column ({argument('ignore')})", name, types)
        if self._drops:
            raise DataError(
                f"{path!r} is read while training, where {argument('drop_missing')} cannot count "
                "rows: leave them out of the files"
            )
        return ArrowColumns(path, {n: t for n, t in types.items() if n not in self._ignore})

    def _decide_loss(self, source: FileTable | ArrowColumns) -> None:
        """Choose cross entropy for one column of names of classes, and a head for new ones."""
        names = [*source] if isinstance(source, FileTable) else [*source.types]
        if isinstance(self.loss, Mapping) or isinstance(self._target, Mapping):
            return
        targets = Targets.of(self._target, names, self.names, weight=self._weight)
        if len(targets.names) != 1 or isinstance(source, ArrowColumns):
            return
        column, values = targets.names[0], source[targets.names[0]].ravel().tolist()
        if source[column].dtype.kind not in "OSU" or not any(map(is_text, values)):
            return
        if self.named_classes is None:
            known = sorted({label_text(value) for value in values})
            self._choose_head(known, self._count_scores())
        if len(self._known_classes() or ()) > 1:
            self._choose_loss(CROSS_ENTROPY, f"column {column!r} holds names of classes")

    def _count_scores(self) -> int | None:
        """Return the last length of the only output of floats, (rows, scores); None for others."""
        outputs = [y for y in self.model.graph.output if y.type.HasField("tensor_type")]
        floats = [y for y in outputs if y.type.tensor_type.elem_type in (1, 10, 11, 16)]
        shapes = [y.type.tensor_type.shape.dim for y in floats]
        return shapes[0][1].dim_value or None if len(shapes) == 1 and len(shapes[0]) == 2 else None

    def _map_rows(
        self, source: FileTable | ArrowColumns, scored: ModelWithLoss
    ) -> tuple[MappedRows, Objective]:
        classes = self._known_classes()
        if isinstance(source, ArrowColumns):
            objective = scored.describe(None)
            scored.names.classes = classes or []
            objective.names = scored.names
            with begin_errors(source.name):
                return self._map_arrow(source, objective), objective
        loss = scored.job.loss
        several = list(loss) if isinstance(loss, Mapping) and len(loss) > 1 else []
        with begin_errors(source.name):
            targets = Targets.of(self._target, source.columns, scored.names, several, self._weight)
            source = _with_class_numbers(source, targets, scored, classes)
            labels = {
                output: source.cells(each, "the target").side_by_side(nan=True)
                for output, each in targets.columns.items()
            }
            objective = scored.describe(labels.get(None, labels or None) if labels else None)
            scored.names.classes = []  # the labels are numbers of classes already
            objective.names = scored.names
            return self._map_table(source, objective, targets), objective

    def _map_table(self, table: FileTable, objective: Objective, targets: Targets) -> MappedRows:
        """Return the arrays of a table, whose labels of classes are their numbers."""
        weight, trained = self._weight, objective.names
        labels = targets.by_label(objective)
        inputs = [str(x.name) for x in objective.data if x.name not in labels]
        if weight is not None and weight not in table:
            raise unknown(f"column ({argument('sample_weight')})", weight, table.columns)
        others = _labels_and_weights(targets, weight, trained)
        rest = [name for name in table if name not in others]
        rest, named = choose_columns(self._columns, rest, inputs, trained)
        lists = [name for name in rest if table[name].ndim > 1]
        columns = named.by_input(rest, inputs, lists)
        parts = {name: ColumnSelection(table, group) for name, group in (columns | labels).items()}
        arrays = Fields(objective).arrays(parts)
        weights = None
        if weight is not None:
            weights = table.cells([weight], argument("sample_weight", weight)).weights()
        y = {name: arrays.pop(name) for name in labels if objective.labels}
        label: Any = next(iter(y.values())) if len(y) == 1 else y or None
        rows = len(next(iter(arrays.values())))
        names = _stored_names(columns, lists, targets, weight)
        notes = [*[table.note] * bool(table.note), *in_other_order(table.columns, columns, trained)]
        remarks = _column_remarks(table.columns, columns, trained, *targets.names, weight)
        return MappedRows(Dataset(arrays, label, weights), rows, names, notes, remarks)

    def _map_arrow(self, source: ArrowColumns, objective: Objective) -> MappedRows:
        """Return what reads columns while training, for a model with one label."""
        features = only_features(source.name, objective)
        inputs = [str(x.name) for x in features]
        weight, classes, trained = self._weight, self._known_classes(), objective.names
        targets = Targets.of(self._target, source.types, trained, weight=weight)
        targets.by_label(objective)
        others = _labels_and_weights(targets, weight, trained)
        rest = [name for name in source.types if name not in others]
        rest, named = choose_columns(self._columns, rest, inputs, trained)
        columns = named.by_input(rest, inputs, source.lists)
        numbers = [n for group in columns.values() for n in group]
        source.check_numbers(numbers if classes else [*numbers, *targets.names])
        for x in features:
            group = columns[str(x.name)]
            if {*group}.isdisjoint(source.lists):
                fit_shape(np.empty((1, len(group))), dims(x), f"input {x.name!r}", True, group)
        reader = source.reader(columns, targets.names, weight)
        names = _stored_names(columns, source.lists, targets, weight)
        names.classes = classes or []
        notes = in_other_order(source.types, columns, trained)
        remarks = _column_remarks(source.types, columns, trained, *targets.names, weight)
        return MappedRows(Dataset(reader), reader.rows, names, notes, remarks)

    # -- rows to predict -------------------------------------------------------------------------

    def _input_batches(
        self, source: FileTable | ArrowColumns, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Columns, int, Columns]]:
        if isinstance(source, ArrowColumns):
            yield from self._arrow_batches(source, fields, size)
            return
        self.notes += [source.note] * bool(source.note)
        with begin_errors(source.name):
            lists = [name for name in source if source[name].ndim > 1]
            columns = self._columns_to_predict(source.columns, fields, lists)
            arrays = _input_arrays(columns, source, fields)
            _check_counts(arrays)
        rows = len(next(iter(arrays.values())))
        for start in range(0, rows, size):
            part = {name: array[start : start + size] for name, array in arrays.items()}
            count = min(size, rows - start)
            # so that rows can be found again, where some were left out
            numbers = {"row": source.row_numbers.numbers(start, count)} if self._drops else {}
            yield part, count, numbers

    def _arrow_batches(
        self, source: ArrowColumns, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Columns, int, Columns]]:
        columns = self._columns_to_predict([*source.types], fields, source.lists)
        start = 0
        for (tables,) in source.reader(columns, [], None).batches(size, None, 0):
            values = {n: tables[name][n] for name, group in columns.items() for n in group}
            table = FileTable(values, source.name, RowNumbers(start + 1))
            parts = _input_arrays(columns, table, fields)
            count = len(next(iter(parts.values())))
            start += count
            yield parts, count, {}

    def _columns_to_predict(
        self, names: Sequence[str], fields: Sequence[Field], lists: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the columns of each input; labels and weights of the training are not read."""
        trained = self.names
        used = {name for group in trained.columns.values() for name in group}
        gone = {*trained.target, *trained.weight} - used
        rest = [name for name in names if name not in gone]
        inputs = [field.name for field in fields]
        rest, named = choose_columns(self._columns, rest, inputs, trained)
        columns = named.by_input(rest, inputs, lists)
        self.notes += ignored_columns(names, columns) + in_other_order(names, columns, trained)
        return columns


def _is_read_while_training(path: Path) -> bool:
    """Return whether a path is a folder of Parquet files, an Arrow file or a large Parquet file."""
    suffix = path.suffix.lower()
    return path.is_dir() or suffix in STREAMED or (suffix in PARQUET and _is_large(path))


def _is_large(path: Path) -> bool:
    """Return whether the columns of a Parquet file need more memory than a table may take."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ArrowException):
        return False  # `read_table` says what is wrong
    groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return sum(groups) > _IN_MEMORY


def _with_class_numbers(
    table: FileTable, targets: Targets, scored: ModelWithLoss, classes: Any
) -> FileTable:
    """Return the table with numbers of classes in the columns of labels that are classes.

    Several columns of one class index a row are shares of classes, and columns of several
    scores have a class each: these are numbers already.
    """
    known: dict[str, tuple[bool, int | None]] = {}
    if classes is not None:
        objective = scored.describe(None)
        fields = Fields(objective)
        for label, columns in targets.by_label(objective).items():
            field = fields.fields[label]
            shares = len(columns) > 1 and len(field.shape or ()) == 1
            own = label in fields.classified or not objective.labels
            known |= dict.fromkeys(columns, (own and not shares, field.ignored))
    for name in targets.names:
        encodes, ignored = known.get(name, (True, None))
        table = table.encode(name, classes if encodes else None, scored.numeric_loss, ignored)
    return table


def _input_arrays(
    columns: Mapping[str, list[str]], table: FileTable, fields: Sequence[Field]
) -> Columns:
    """Return the array of each input."""
    return {
        field.name: field.convert_cells(table.cells(columns[field.name], f"input {field.name!r}"))
        for field in fields
    }


def _check_counts(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise `DataError` if arrays differ in their number of rows."""
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"the arrays differ in their number of rows: {counts}")


def _labels_and_weights(targets: Targets, weight: str | None, trained: Names) -> set[str | None]:
    """Return the columns that no input takes: labels and weights, also of the training."""
    used = {name for group in trained.columns.values() for name in group}
    return {*targets.names, weight} | ({*trained.target, *trained.weight} - used)


def _stored_names(
    columns: Mapping[str, list[str]], lists: Collection[str], targets: Targets, weight: str | None
) -> Names:
    """Return the names that a trained model stores: of inputs that take columns of numbers."""
    named = {n: list(group) for n, group in columns.items() if not {*group} <= {*lists}}
    return Names(named, targets.names, [weight] if weight else [])


def _column_remarks(
    names: Collection[str],
    columns: Mapping[str, list[str]],
    trained: Names,
    *others: str | None,
) -> list[str]:
    """Return messages about the order of columns where it is new, and about columns not used."""
    first = [
        f"columns of input {name}, in this order: {first_names(group)}"
        for name, group in columns.items()
        if name not in trained.columns and len(group) > 1
    ]
    return first + ignored_columns(names, dict(columns), others)
