"""Files of predictions: CSV and Parquet, written row group by row group, and .npz."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.model.files import replacing
from onnxgrad.tasks.base import safe_cell

Columns = dict[str, np.ndarray]
Write = Callable[[Columns], None]
_PARQUET = (".parquet", ".pq")
_ENDINGS = (".csv", ".tsv", *_PARQUET, ".npz")


def check_ending(output: str) -> None:
    """Raise `ValueError` for a file of another kind."""
    if Path(output).suffix.lower() not in _ENDINGS:
        raise unknown("ending of a file of predictions", Path(output).suffix, _ENDINGS)


@contextmanager
def column_writer(output: str | Path | None) -> Iterator[Write]:
    """Yield a function that writes the columns of some rows; the file is complete or not there.

    Without an output, they are written to standard output, as CSV.
    """
    suffix = ".csv" if output is None else Path(output).suffix.lower()
    with ExitStack() as stack:
        target: Any = (
            sys.stdout.buffer if output is None else stack.enter_context(replacing(output))
        )
        if suffix == ".npz":
            parts: list[Columns] = []
            yield parts.append
            joined = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
            with open(target, "wb") as file:  # savez adds an ending to a path
                np.savez(file, **joined)  # type: ignore[arg-type]
            return
        opened: list[Any] = []

        def write(columns: Columns) -> None:
            table = _table_of(columns, binary=suffix in _PARQUET)
            if not opened:  # the first one decides the columns
                opened.append(stack.enter_context(_table_writer(target, suffix, table.schema)))
            opened[0].write_table(table)

        yield write
        if output is None:
            sys.stdout.buffer.flush()


def _table_of(columns: Columns, binary: bool) -> Any:
    """Return a table of pyarrow; without formulas unless it goes to a `binary` file."""
    import pyarrow as pa

    arrays = _by_number(columns)
    if not binary:
        arrays = {safe_cell(name): _safe_cells(array) for name, array in arrays.items()}
    return pa.table({name: pa.array(a) for name, a in arrays.items()})


def _safe_cells(array: np.ndarray) -> Any:
    """Return a column of CSV."""
    return list(map(safe_cell, array.tolist())) if array.dtype.kind == "U" else array


def _table_writer(target: Any, suffix: str, schema: Any) -> Any:
    """Return what writes tables of pyarrow to a CSV or Parquet file."""
    from pyarrow import csv, parquet

    if suffix in _PARQUET:
        return parquet.ParquetWriter(target, schema)
    delimiter = "\t" if suffix == ".tsv" else ","
    options = csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    return csv.CSVWriter(target, schema, write_options=options)


def _by_number(columns: Columns) -> dict[str, Any]:
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
