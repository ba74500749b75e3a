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
            joined = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
            with open(target, "wb") as file:  # savez adds an ending to a path
                np.savez(file, **joined)  # type: ignore[arg-type]
            return
        opened: list[Any] = []

        def write(columns: Columns) -> None:
            table = _table_of(columns)
            if not opened:  # the first one decides the columns
                opened.append(stack.enter_context(_table_writer(target, suffix, table.schema)))
            opened[0].write_table(table)

        yield write
        if output == STDOUT:
            sys.stdout.buffer.flush()


def _table_of(columns: Columns) -> Any:
    """Return a table of pyarrow."""
    import pyarrow as pa

    return pa.table({name: pa.array(a) for name, a in _by_number(columns).items()})


def _table_writer(target: Any, suffix: str, schema: Any) -> Any:
    """Return what writes tables of pyarrow to a CSV or Parquet file."""
    from pyarrow import csv, parquet

    if suffix in (".parquet", ".pq"):
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
