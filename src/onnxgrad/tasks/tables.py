"""Rows of tables: the columns of a file as the inputs and the labels of a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad.data.arrays import DataError, column_array, fit_shape, is_arrow
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.cells import RowNumbers, is_text
from onnxgrad.data.class_numbers import first_class_names, label_text
from onnxgrad.data.columns import ColumnSelection, Names, column_names, is_table
from onnxgrad.data.field import Field
from onnxgrad.data.tables import FileTable, read_table
from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.operators.shapes import dims
from onnxgrad.tasks.base import with_fields
from onnxgrad.tasks.row_predictions import Columns as Arrays
from onnxgrad.tasks.rows_task import CROSS_ENTROPY, RowsTask, feature_inputs, name_data_in_errors
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.objective import Objective

__all__ = ["Table"]

Columns = dict[str, list[str]]  # {input: its columns}
TargetColumns = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
InputColumns = Sequence[str] | Mapping[str, Sequence[str]] | None


@dataclass(frozen=True)
class Targets:
    """The label columns for each model output with a loss; None stands for the only output."""

    columns: dict[str | None, list[str]]

    @classmethod
    def choose(
        cls,
        target: TargetColumns,
        names: Collection[str],
        trained: Names,
        outputs: Sequence[str] = (),
        weight: str | None = None,
    ) -> Targets:
        """Return the `Targets` that the user names, or else the columns of an earlier training.

        Args:
            target: a column, several, or one or several by output; None: none is named.
            names: all columns.
            trained: the names that the model stores.
            outputs: the outputs that have losses, if they are several.
            weight: the column of sample weights.

        Raises:
            ValueError: a column that is not there or is named twice, or outputs without a column.
        """
        by_output = target if isinstance(target, Mapping) else {None: target} if target else {}
        columns = {
            out: [group] if isinstance(group, str) else list(group)
            for out, group in by_output.items()
        }
        if outputs and (wrong := [out for out in columns if out not in outputs]):
            own = columns[wrong[0]] if wrong[0] is None else wrong
            raise _missing_target_outputs_error(outputs, f", not {own[0]!r}")
        if not columns and trained.target and set(trained.target) <= set(names):
            columns[None] = list(trained.target)
        own_targets = cls(columns)
        for name in own_targets.names:
            if name not in names:
                raise unknown("column", name, names)
        if len(set(own_targets.names)) < len(own_targets.names):
            twice = ", ".join(map(repr, own_targets.names))
            raise DataError(f"{argument('target')} must name each column once, not {twice}")
        if weight in own_targets.names:
            raise DataError(
                f"{argument('sample_weight', weight)} is the target: name the column of the "
                f"weights of rows, or leave out {argument('sample_weight')}"
            )
        if len(columns) == 1 and None in columns:
            return cls({None: trained.copy().order_targets(own_targets.names)})
        return own_targets

    @property
    def names(self) -> list[str]:
        """The names of all label columns."""
        return [name for each in self.columns.values() for name in each]

    def by_label(self, objective: Objective) -> Columns:
        """Return `{label: columns}` for each label of the training's `objective`."""
        inputs = [str(x.name) for x in objective.data]
        infos = {name: info for name, info in objective.labels.items() if name in inputs}
        names = list(infos)
        if not names and self.names:
            names = [next((t for t in self.names if t in inputs), "label")]
            if names[0] not in inputs:
                raise ValueError(
                    f"the model computes its own loss, but has no input {names[0]!r}: "
                    f"{argument('target')} must be the input that takes the labels, one of "
                    f"{', '.join(map(printable, inputs))}"
                )
        if names and not self.names:
            raise ValueError(
                f"the loss compares with labels: name their column with {argument('target')}"
            )
        if len(names) < 2:
            return dict.fromkeys(names, self.names)
        outputs = {str(info.prediction): name for name, info in infos.items()}
        if any(output not in outputs for output in self.columns):
            raise _missing_target_outputs_error(outputs)
        if missing := next((o for o in outputs if o not in self.columns), None):
            raise _missing_target_outputs_error(outputs, f": {missing!r} has none")
        return {name: self.columns[output] for output, name in outputs.items()}


def _missing_target_outputs_error(outputs: Iterable[str], more: str = "") -> ValueError:
    return ValueError(
        f"the losses are of several outputs: write {named('target={output: column}')} for each of "
        f"{', '.join(map(printable, outputs))}{more}"
    )


def choose_columns(
    columns: InputColumns, names: list[str], inputs: Sequence[str], trained: Names
) -> tuple[list[str], Names]:
    """Return the feature columns to read, and the column names of each input to store.

    Args:
        columns: the columns of the only input in their order, or of each input; None: all.
        names: the columns that are no labels.
        inputs: of the model, other than labels.
        trained: the names that the model stores.

    Raises:
        ValueError: a column that is not there or is named twice, several inputs without their
            names, or others than in an earlier training.
    """
    if not columns:
        return names, trained
    if not isinstance(columns, Mapping) and len(inputs) > 1:
        raise ValueError(
            f"{argument('columns', list(columns))}: the model has several inputs: write "
            f"{named('columns={input: [...]}')} for each of {', '.join(map(printable, inputs))}"
        )
    by_input = columns if isinstance(columns, Mapping) else {inputs[0]: columns}
    result = trained.copy()
    for name, group in by_input.items():
        if name not in inputs:
            raise unknown(f"input ({argument('columns')})", name, inputs)
        for column in group:
            if column not in names:
                raise unknown(f"column ({argument('columns')})", column, names)
        if len({*group}) < len(group):
            raise ValueError(
                f"{argument('columns')} names a column twice: {first_class_names(group)}"
            )
        if result.columns.setdefault(name, list(group)) != list(group):
            raise ValueError(
                f"{argument('columns', list(group))}: the model was trained on "
                f"{','.join(result.columns[name])}, which it takes by name: leave out "
                f"{argument('columns')}"
            )
    used = {column for group in by_input.values() for column in group}
    return [name for name in names if name in used or name in inputs], result


def column_order_messages(names: Iterable[str], columns: Columns, trained: Names) -> list[str]:
    """Return a message for each input whose columns the data hold in another order."""
    messages = []
    for name, group in columns.items():
        order = [column for column in names if column in group]
        if name in trained.columns and order != group:
            messages.append(
                f"columns of input {name} are taken by name, in the order of its training: "
                f"{first_class_names(group)} (the data has {first_class_names(order)})"
            )
    return messages


def ignored_column_messages(
    names: Iterable[str], columns: Columns, others: Collection[str | None] = ()
) -> list[str]:
    """Return a list of one message about columns that no input reads, except `others`; or []."""
    used = {*others, *(name for group in columns.values() for name in group)}
    left = [name for name in names if name not in used]
    return [f"ignored columns: {first_class_names(left)}"] if left else []


STREAMED = (".arrow", ".feather", ".ipc")
PARQUET = (".parquet", ".pq")
_IN_MEMORY = 1 << 30  # most bytes of a Parquet file that is read into memory


@dataclass(frozen=True)
class ArrowColumns:
    """Parquet or Arrow files that are read while training, with the type of each column."""

    name: str
    types: dict[str, str]

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [*self.types]

    @property
    def array_columns(self) -> list[str]:
        """The names of the columns that hold an array in each row."""
        return [name for name, kind in self.types.items() if "list" in kind or "tensor" in kind]

    def check_numbers(self, names: Collection[str]) -> None:
        """Raise `DataError` if one of the columns `names` holds text."""
        if text := next((n for n in names if "string" in self.types[n]), None):
            raise DataError(
                f"{self.name!r}: column {text!r} is text; write numbers, name the classes of a "
                f"target with {argument('classes')}, or leave out the column with "
                f"{argument('ignore', [text])}"
            )

    def tables(self, columns: Mapping[str, list[str]], size: int) -> Iterator[FileTable]:
        """Yield tables of `size` rows with the columns that the inputs take."""
        start = 0
        for (arrays,) in arrow_dataset(self.name, columns=columns).batches(size, None, 0):
            values = {n: arrays[name][n] for name, group in columns.items() for n in group}
            yield FileTable(values, self.name, RowNumbers(start + 1))
            start += len(next(iter(values.values())))


@with_fields
class Table(RowsTask):
    """Tables: training on columns as inputs and labels (numbers or classes), and prediction.

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

    _: KW_ONLY
    target: TargetColumns = None
    columns: InputColumns = None
    sample_weight: str | None = None
    ignore: Sequence[str] = ()
    drop_missing: bool = False
    classes: Sequence[str] | Sequence[int] | None = None

    # -- rows with labels ------------------------------------------------------------------------

    def _open_rows(self, data: Any) -> FileTable | ArrowColumns:
        """Return a table in memory, or columns that are read while training."""
        if isinstance(data, FileTable):
            return data
        if isinstance(data, Mapping) or is_table(data):
            names = list(data) if isinstance(data, Mapping) else column_names(data)
            if names is None:
                raise DataError("the columns of the table have no names: name them, or fit arrays")
            values = {
                name: column_array(name, c) if is_arrow(c := data[name]) else np.asarray(c)
                for name in names
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
        return read_table(source, self.ignore, self.drop_missing)

    def _open_arrow(self, path: str) -> ArrowColumns:
        types = dict(arrow_dataset(path).describe()["columns"])
        for name in self.ignore:
            if name not in types:
                raise unknown(f"column ({argument('ignore')})", name, types)
        if self.drop_missing:
            raise DataError(
                f"{path!r} is read while training, where {argument('drop_missing')} cannot count "
                "rows: remove rows with empty cells from the files"
            )
        return ArrowColumns(path, {n: t for n, t in types.items() if n not in self.ignore})

    def _decide_loss(self, source: FileTable | ArrowColumns) -> None:
        """Choose cross entropy if the target column holds class names, and a layer for new
        classes.
        """
        names = [*source] if isinstance(source, FileTable) else [*source.types]
        if isinstance(self.loss, Mapping) or isinstance(self.target, Mapping):
            return
        targets = Targets.choose(self.target, names, self.names, weight=self.sample_weight)
        if len(targets.names) != 1 or isinstance(source, ArrowColumns):
            return
        column, values = targets.names[0], source[targets.names[0]].ravel().tolist()
        if source[column].dtype.kind not in "OSU" or not any(map(is_text, values)):
            return
        if self.named_classes is None:
            known = sorted({label_text(value) for value in values})
            self._replace_unfit_last_layer(known, self._count_scores())
        if len(self._known_classes() or ()) > 1:
            self._set_default_loss(CROSS_ENTROPY, f"column {column!r} holds names of classes")

    def _count_scores(self) -> int | None:
        """Return the width of the only float output, if its shape is (rows, scores); else None."""
        outputs = [y for y in self.model.graph.output if y.type.HasField("tensor_type")]
        floats = [y for y in outputs if y.type.tensor_type.elem_type in (1, 10, 11, 16)]
        shapes = [y.type.tensor_type.shape.dim for y in floats]
        return shapes[0][1].dim_value or None if len(shapes) == 1 and len(shapes[0]) == 2 else None

    def _rows_for_model(self, source: FileTable | ArrowColumns) -> tuple[Dataset, Names]:
        """Return labeled rows, as arrays or as a reader, and the column names to store."""
        classes, trained, weight = self._known_classes(), self._trained, self.sample_weight
        loss = self._job.loss
        by_output = loss if isinstance(loss, Mapping) else {}
        in_memory = isinstance(source, FileTable)
        several = list(by_output) if in_memory and len(by_output) > 1 else []
        with name_data_in_errors(source.name):
            targets = Targets.choose(self.target, source.columns, trained, several, weight)
            y: Any = None
            if isinstance(source, FileTable):
                source = self._encode_class_names(source, targets, classes)
                y = {
                    output: source.cells(each, "the target").number_array(nan=True)
                    for output, each in targets.columns.items()
                }
            # in a table in memory, labels are already class indices
            known = [] if in_memory else classes or []
            objective = self._training_objective(y.get(None, y) if y else None, known)
            if not in_memory:
                feature_inputs(source.name, objective)
            labels = targets.by_label(objective)
            if in_memory and weight is not None and weight not in source.columns:
                raise unknown(f"column ({argument('sample_weight')})", weight, source.columns)
            inputs = [str(x.name) for x in objective.data if x.name not in labels]
            others = {*targets.names, weight}
            columns = self._columns_by_input(source, inputs, trained, others)
            read: Any = self._table_dataset if in_memory else self._arrow_dataset
            rows = read(source, objective, columns, labels)
        named = {
            n: group for n, group in columns.items() if not {*group} <= {*_array_columns(source)}
        }
        names = Names(named, targets.names, [weight] if weight else [], trained.classes)
        if isinstance(source, FileTable) and source.note:
            self.notes.append(source.note)
        self.notes += column_order_messages(source.columns, columns, trained)
        self.remarks += [
            f"columns of input {name}, in this order: {first_class_names(group)}"
            for name, group in columns.items()
            if name not in trained.columns and len(group) > 1
        ]
        self.remarks += ignored_column_messages(source.columns, columns, others)
        return rows, names

    def _encode_class_names(self, table: FileTable, targets: Targets, classes: Any) -> FileTable:
        """Return the table with class indices in place of class names in label columns.

        Several columns of one class index a row are shares of classes, and columns of several
        scores have a class each: these are numbers already.
        """
        known: dict[str, tuple[bool, int | None]] = {}
        if classes is not None:
            objective = self._training_objective()
            fields = DataSpec(objective)
            for label, columns in targets.by_label(objective).items():
                field = fields.fields[label]
                shares = len(columns) > 1 and len(field.shape or ()) == 1
                own = label in fields.classified or not objective.labels
                known |= dict.fromkeys(columns, (own and not shares, field.ignored))
        for name in targets.names:
            encodes, ignored = known.get(name, (True, None))
            table = table.encode(name, classes if encodes else None, self._numeric_loss, ignored)
        return table

    def _columns_by_input(
        self,
        source: FileTable | ArrowColumns,
        inputs: Sequence[str],
        trained: Names,
        others: Collection[str | None] = (),
    ) -> dict[str, list[str]]:
        """Return `{input: columns}`, where `others` and the label columns are left out."""
        used = {name for group in trained.columns.values() for name in group}
        others = {*others} | ({*trained.target, *trained.weight} - used)
        rest = [name for name in source.columns if name not in others]
        rest, named = choose_columns(self.columns, rest, inputs, trained)
        return named.columns_by_input(rest, inputs, _array_columns(source))

    def _table_dataset(
        self, table: FileTable, objective: Objective, columns: Columns, labels: Columns
    ) -> Dataset:
        """Return the `Dataset` of a table in memory: arrays by input, labels and row weights."""
        parts = {name: ColumnSelection(table, group) for name, group in (columns | labels).items()}
        arrays = DataSpec(objective).checked_arrays(parts)
        weight, weights = self.sample_weight, None
        if weight is not None:
            weights = table.cells([weight], argument("sample_weight", weight)).sample_weights()
        y = {name: arrays.pop(name) for name in labels if objective.labels}
        label: Any = next(iter(y.values())) if len(y) == 1 else y or None
        return Dataset(arrays, label, weights)

    def _arrow_dataset(
        self, source: ArrowColumns, objective: Objective, columns: Columns, labels: Columns
    ) -> Dataset:
        """Return the `Dataset` of Arrow or Parquet columns, which are read while training."""
        targets = [name for group in labels.values() for name in group]
        numbers = [name for group in columns.values() for name in group]
        source.check_numbers(numbers if objective.names.classes else [*numbers, *targets])
        for x in objective.data:
            group = columns.get(str(x.name))
            if group and {*group}.isdisjoint(source.array_columns):
                fit_shape(np.empty((1, len(group))), dims(x), f"input {x.name!r}", True, group)
        reader = arrow_dataset(
            source.name, y=targets or None, sample_weight=self.sample_weight, columns=columns
        )
        return Dataset(reader)

    # -- rows to predict -------------------------------------------------------------------------

    def _input_batches(
        self, source: FileTable | ArrowColumns, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Arrays, int, Arrays]]:
        with name_data_in_errors(source.name):
            columns = self._columns_by_input(source, [field.name for field in fields], self.names)
            self.notes += ignored_column_messages(source.columns, columns)
            self.notes += column_order_messages(source.columns, columns, self.names)
            if isinstance(source, FileTable):
                self.notes += [source.note] * bool(source.note)
            tables = [source] if isinstance(source, FileTable) else source.tables(columns, size)
            for table in tables:
                arrays = {
                    field.name: field.convert_cells(
                        table.cells(columns[field.name], f"input {field.name!r}")
                    )
                    for field in fields
                }
                counts = {name: len(array) for name, array in arrays.items()}
                rows = max(counts.values())
                if rows > min(counts.values()):
                    raise DataError(
                        f"the inputs have different numbers of rows, {counts}: correct the arrays"
                    )
                for start in range(0, rows, size):
                    count = min(size, rows - start)
                    # so that users find a row where other rows were left out
                    numbers = table.row_numbers.range_in_file(start, count)
                    part = {name: array[start : start + size] for name, array in arrays.items()}
                    yield part, count, {"row": numbers} if self.drop_missing else {}


def _array_columns(source: FileTable | ArrowColumns) -> list[str]:
    """Return the names of the columns that hold an array in each row."""
    if isinstance(source, ArrowColumns):
        return source.array_columns
    return [name for name in source if source[name].ndim > 1]


def _is_read_while_training(path: Path) -> bool:
    """Return whether a path is a folder, an Arrow file or a Parquet file too large for a table."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix not in PARQUET:
        return path.is_dir() or suffix in STREAMED
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ArrowException):
        return False  # and `read_table` raises the error
    groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return sum(groups) > _IN_MEMORY
