"""`onnxgrad predict`: the outputs of a model for the rows of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.cli.class_labels import ClassLabels
from onnxgrad.cli.command_options import PredictOptions
from onnxgrad.cli.console import note, print_json
from onnxgrad.cli.image_source import ImageSource
from onnxgrad.cli.label_columns import (
    Columns as InputColumns,
    chosen_columns,
    ignored_columns,
    in_other_order,
)
from onnxgrad.cli.model_files import STDOUT, check_not_data, check_output, inputs_of, read_model
from onnxgrad.cli.prediction_files import Columns, check_ending, writer
from onnxgrad.cli.sources import ArrowSource, begin_errors, open_data
from onnxgrad.cli.task import check_counts
from onnxgrad.cli.tasks import has_task, predict_task
from onnxgrad.data.arrays import DataError
from onnxgrad.data.cells import Rows
from onnxgrad.data.columns import read_names
from onnxgrad.data.field import Field
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import escaping, printable, unknown
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.runtime.predictor import ROWS, Predictor

Arrays = dict[str, np.ndarray]


def predict(options: PredictOptions) -> None:
    """Write the outputs."""
    if has_task(options):
        predict_task(options)
        return
    check_ending(options.output)
    inputs = inputs_of(options.model, options.data)
    check_output(options.output, options.overwrite, inputs, options.json, binary=False)
    proto = read_model(options.model, options.data)
    check_not_data(options.output, options.model)
    predictor = PredictedRows(proto, options)
    with writer(options.output) as write:
        for columns in predictor.columns():
            write(columns)
    for text in predictor.notes:
        note(text)
    if options.output == STDOUT:
        return
    if options.json:
        keys = {"rows": predictor.rows, "columns": predictor.names, "remarks": predictor.notes}
        print_json({"files": [options.output], **keys})
    else:
        note(f"wrote {options.output}")


class PredictedRows:
    """Runs a model on data, some rows at a time.

    `rows` counts those that were predicted; `names` are those of the columns; `notes` are messages.
    """

    def __init__(self, proto: ModelProto, options: PredictOptions) -> None:
        self.proto, self.options = proto, options
        self.fields = [Field.of(ir.from_proto(x)) for x in inputs_without_default(proto)]
        self.trained = read_names(proto)
        self.rows, self.names, self.notes = 0, list[str](), list[str]()
        outputs = [y.name for y in proto.graph.output]
        for name in options.outputs:
            if name not in outputs:
                raise unknown("output", name, outputs)
        self.outputs = options.outputs or outputs
        self.fixed = self._fixed_rows()
        self.labels = ClassLabels.of(proto, self.outputs)

    def _fixed_rows(self) -> int:
        """Return the rows of a static batch; 0 if any number goes."""
        first = [(field.shape or (None,))[0] for field in self.fields if field.shape != ()]
        counts = {d for d in first if isinstance(d, int) and d > 0}
        return counts.pop() if len(counts) == 1 and all(isinstance(d, int) for d in first) else 0

    @escaping()
    def columns(self) -> Iterator[Columns]:
        """Yield the columns of some rows at a time."""
        predictor = Predictor(self.proto, self.outputs, self.options.device, self.fixed)
        for feed, count, extra in self._batches():
            named = predictor.run_rows(feed)
            labels = self.labels if self.labels and self.labels.output in named else None
            own = labels.columns(named, count) if labels else {}
            columns = {**extra, **own, **self._by_row(named)}
            self.rows, self.names = self.rows + count, list(columns)
            yield columns

    def _by_row(self, results: Mapping[str, Any]) -> Arrays:
        """Return the columns of outputs with a row each, which are arrays or lists of maps."""
        columns: Arrays = {}
        for name in self.outputs:
            value = results.get(name)
            if isinstance(value, list) and all(isinstance(row, dict) for row in value):
                for key in value[0]:
                    columns[f"{name}_{key}"] = np.array([row[key] for row in value])
            elif isinstance(value, np.ndarray):
                columns[name] = value
            elif name in self.options.outputs:
                raise DataError(
                    f"output {name!r} has no row for each row of the data: leave it out"
                )
            elif (
                text := f"output {printable(name)} has no rows, and is left out"
            ) not in self.notes:
                self.notes.append(text)
        if not columns:
            raise DataError("no output has a row for each row of the data")
        return columns

    # -- data ---------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Arrays, int, Arrays]]:
        """Yield the arrays of the inputs, the number of rows, and further columns."""
        source = open_data(self.options.data, self.options, self.proto)
        size = self.fixed or self.options.batch_size or ROWS
        if isinstance(source, FileTable):
            yield from self._of_table(source, size)
        elif isinstance(source, ImageSource):
            yield from self._of_images(source, size)
        elif isinstance(source, ArrowSource):
            yield from self._of_arrow(source, size)

    def _columns_of(self, names: Sequence[str], arrays: Sequence[str]) -> InputColumns:
        """Return the columns of each input; labels and weights of the training are not read."""
        trained = {name for group in self.trained.columns.values() for name in group}
        gone = {*self.trained.target, *self.trained.weight} - trained
        rest = [name for name in names if name not in gone]
        inputs = [field.name for field in self.fields]
        rest, named = chosen_columns(self.options, rest, inputs, self.trained)
        columns = named.by_input(rest, inputs, arrays)
        self.notes += ignored_columns(names, columns) + in_other_order(names, columns, self.trained)
        return columns

    def _arrays(self, columns: InputColumns, table: FileTable) -> Arrays:
        """Return the array of each input."""
        return {
            field.name: field.of_cells(table.cells(columns[field.name], f"input {field.name!r}"))
            for field in self.fields
        }

    def _of_table(self, source: FileTable, size: int) -> Iterator[tuple[Arrays, int, Arrays]]:
        self.notes += [source.note] * bool(source.note)
        dropped = self.options.drop_missing  # so that rows can be found again
        with begin_errors(source):
            lists = [name for name in source if source[name].ndim > 1]
            arrays = self._arrays(self._columns_of(source.columns, lists), source)
            check_counts(arrays)
        rows = len(next(iter(arrays.values())))
        for start in range(0, rows, size):
            part = {name: array[start : start + size] for name, array in arrays.items()}
            count = min(size, rows - start)
            numbers = {"row": source.row_numbers.numbers(start, count)} if dropped else {}
            yield part, count, numbers

    def _of_images(self, source: ImageSource, size: int) -> Iterator[tuple[Arrays, int, Arrays]]:
        if len(self.fields) != 1:
            raise DataError(f"images are for one input, and the model has {len(self.fields)}")
        field = self.fields[0]
        reader = source.reader(field.name, field.shape, field.dtype, labels=False)
        self.notes.append(source.described(reader))
        start = 0
        for images in reader.batches(size, None, 0):
            files = [str(f) for f in reader.files[start : start + len(images)]]
            start += len(images)
            yield {field.name: images}, len(images), {"file": np.array(files)}

    def _of_arrow(self, source: ArrowSource, size: int) -> Iterator[tuple[Arrays, int, Arrays]]:
        columns = self._columns_of([*source.types], source.lists)
        start = 0
        for (tables,) in source.reader(columns, [], None).batches(size, None, 0):
            values = {n: tables[name][n] for name, group in columns.items() for n in group}
            parts = self._arrays(columns, FileTable(values, source.name, Rows(start + 1)))
            count = len(next(iter(parts.values())))
            start += count
            yield parts, count, {}
