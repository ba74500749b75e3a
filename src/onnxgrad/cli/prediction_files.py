"""Files of predictions: CSV and Parquet, written row group by row group, and .npz."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.cli.model_files import STDOUT
from onnxgrad.errors import unknown
from onnxgrad.model.files import replacing

Columns = dict[str, np.ndarray]
Write = Callable[[Columns], None]
_ENDINGS = (".csv", ".tsv", ".parquet", ".pq", ".npz")


def check_ending(output: str) -> None:
    """Raise `ValueError` for a file of another kind."""
    if output != STDOUT and Path(output).suffix.lower() not in _ENDINGS:
        raise unknown("ending of a file of predictions", Path(output).suffix, _ENDINGS)


@contextmanager
def writer(output: str) -> Iterator[Write]:
    """Yield a function that writes the columns of some rows; the file is complete or not there."""
    suffix = ".csv" if output == STDOUT else Path(output).suffix.lower()
    with ExitStack() as stack:
        target: Any = (
            sys.stdout.buffer if output == STDOUT else stack.enter_context(replacing(output))
        )
        if suffix == ".npz":
            parts: list[Columns] = []
            yield parts.append
            with open(target, "wb") as file:  # savez adds an ending to a path
                np.savez(file, **_joined(parts))  # type: ignore[arg-type]
            return
        tables = stack.enter_context(_Tables(target, suffix))
        yield tables.write
        if output == STDOUT:
            sys.stdout.buffer.flush()


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Tables:
    """Writes tables to a CSV or Parquet file; the first one decides the columns."""

    def __init__(self, target: Any, suffix: str) -> None:
        self.target, self.suffix = target, suffix
        self._writer: Any = None

    def __enter__(self) -> _Tables:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Columns) -> None:
        """Write the columns of some rows."""
        import pyarrow as pa
        from pyarrow import csv, parquet

        table = pa.table({name: pa.array(a) for name, a in _flattened(columns).items()})
        if self._writer is None:
            if self.suffix in (".parquet", ".pq"):
                self._writer = parquet.ParquetWriter(self.target, table.schema)
            else:
                delimiter = "\t" if self.suffix == ".tsv" else ","
                options = csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
                self._writer = csv.CSVWriter(self.target, table.schema, write_options=options)
        self._writer.write_table(table)


def _flattened(columns: Columns) -> dict[str, Any]:
    """Return one column for each number of a row: name, or name_0, name_1 and so on."""
    flat: dict[str, Any] = {}
    for name, array in columns.items():
        values = array.reshape(len(array), -1)
        if array.dtype.kind in "OSU":
            values = values.astype(str)
        if values.dtype == np.float16:
            values = values.astype(np.float32)
        if values.shape[1] == 1:
            flat[name] = values[:, 0]
        else:
            flat |= {f"{name}_{i}": values[:, i] for i in range(values.shape[1])}
    return flat
