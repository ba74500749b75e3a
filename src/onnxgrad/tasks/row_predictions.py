"""The predictions of a model for rows, as columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.arrays import DataError
from onnxgrad.data.field import Field
from onnxgrad.errors import escaping, printable, unknown
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.class_labels import ClassLabels

Columns = dict[str, np.ndarray]


class RowPredictions:
    """Runs a model on rows, and returns columns: the label of a class, and outputs with rows.

    Args:
        proto: the model.
        fields: its inputs.
        outputs: the outputs to return; none: all that have a row for each row of the data.
        notes: gets messages about outputs that are left out.
    """

    def __init__(
        self, proto: ModelProto, fields: Sequence[Field], outputs: Sequence[str], notes: list[str]
    ) -> None:
        every = [output.name for output in proto.graph.output]
        for name in outputs:
            if name not in every:
                raise unknown("output", name, every)
        self.proto, self.notes = proto, notes
        self.chosen, self.outputs = list(outputs), list(outputs) or every
        self.fixed_rows = _fixed_rows(fields)
        self.labels = ClassLabels.of(proto, self.outputs)

    @escaping()
    def columns(
        self, batches: Iterable[tuple[Columns, int, Columns]], device: str
    ) -> Iterator[Columns]:
        """Yield columns for batches of arrays by input, numbers of rows, and further columns."""
        predictor = Predictor(self.proto, self.outputs, device, self.fixed_rows)
        for feed, count, extra in batches:
            results = predictor.run_rows(feed)
            labels = self.labels if self.labels and self.labels.output in results else None
            own = labels.columns(results, count) if labels else {}
            yield {**extra, **own, **self._output_columns(results)}

    def _output_columns(self, results: Mapping[str, Any]) -> Columns:
        """Return the columns of outputs with a row each, which are arrays or lists of maps."""
        columns: Columns = {}
        for name in self.outputs:
            value = results.get(name)
            if isinstance(value, list) and all(isinstance(row, dict) for row in value):
                for key in value[0]:
                    columns[f"{name}_{key}"] = np.array([row[key] for row in value])
            elif isinstance(value, np.ndarray):
                columns[name] = value
            elif name in self.chosen:
                raise DataError(
                    f"output {name!r} has no row for each row of the data: leave out this output"
                )
            elif (
                text := f"output {printable(name)} has no rows, and is left out"
            ) not in self.notes:
                self.notes.append(text)
        if not columns:
            raise DataError("no output has a row for each row of the data")
        return columns


def _fixed_rows(fields: Sequence[Field]) -> int:
    """Return the rows of a static batch; 0 if any number goes."""
    first = [(field.shape or (None,))[0] for field in fields if field.shape != ()]
    counts = {d for d in first if isinstance(d, int) and d > 0}
    return counts.pop() if len(counts) == 1 and all(isinstance(d, int) for d in first) else 0
