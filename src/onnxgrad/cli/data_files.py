"""Data files, and their columns as the arrays that a model takes.

Messages count rows from 1, without the header of a CSV file.
"""

from __future__ import annotations

import math
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from onnxgrad.cli.archives import check_expansion
from onnxgrad.cli.cells import Table, flat, refuse, shell_word, short, stack
from onnxgrad.data.arrays import DataError, column_array, fit_shape
from onnxgrad.data.columns import Names, check_names, same_columns
from onnxgrad.errors import unknown
from onnxgrad.graph.shapes import dims
from onnxgrad.losses.info import LossInfo

STDIN = "-"


def read_table(path: str | os.PathLike) -> Table:
    """Return the columns of a CSV or Parquet file, or the arrays of an `.npz` file, by name.

    A list column becomes an array with more axes; an empty cell becomes NaN.

    Raises:
        DataError: the file cannot be read, holds no rows, or expands to more than `limits` allows.
    """
    if os.fspath(path) == STDIN:
        return _read(_stdin(), ".csv", "standard input", _read_csv)
    path = Path(path)
    readers = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
        ".npz": _read_npz,
    }
    if path.suffix.lower() not in readers:
        raise DataError(f"{str(path)!r} is none of {', '.join(readers)}: convert it to one of them")
    suffix, what = path.suffix.lower(), repr(str(path))
    try:
        with path.open("rb") as opened:  # a pipe cannot be read twice
            file = opened if opened.seekable() else BytesIO(opened.read())
            return _read(file, suffix, what, readers[suffix])
    except OSError as e:
        raise DataError(f"cannot read {what}: {e.strerror or e}") from None


def _stdin() -> BytesIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("standard input is a terminal: pipe a CSV file into the command")
    return BytesIO(sys.stdin.buffer.read())


def _read(file: BinaryIO, suffix: str, what: str, reader: Callable[[BinaryIO], Table]) -> Table:
    """Return the table in an open file; errors begin with `what`."""
    try:
        check_expansion(file, suffix, DataError)
        table = reader(file)
    except DataError as e:
        raise DataError(f"{what}: {e}") from None
    except MemoryError:
        raise DataError(f"{what} declares more data than fits into memory") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        reason = str(e).splitlines()[0] if str(e) else "unexpected end"
        raise DataError(f"{what} is damaged, or no {suffix} file: {reason}") from e
    if not table or not all(map(len, table.values())):
        raise DataError(f"{what} holds no rows of data")
    return table


def _read_csv(file: BinaryIO) -> Table:
    from pyarrow import csv

    try:
        header = file.readline().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("its header is not text in UTF-8: save it in that encoding") from None
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", header).count)
    wrong: list[Any] = []

    def skip(row: Any) -> str:
        wrong.append(row)
        return "skip"

    for threads in (True, False):  # the numbers of rows are only known to a single thread
        file.seek(0)
        wrong.clear()
        options = csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip)
        table = csv.read_csv(file, csv.ReadOptions(use_threads=threads), options)
        if not wrong:
            return _columns(table)
    row = wrong[0]
    raise ValueError(
        f"row {row.number - 1}: Expected {row.expected_columns} columns, got {row.actual_columns}: "
        f"{short(row.text)}; complete the row, or quote cells that hold {delimiter!r}"
    )


def _read_parquet(file: BinaryIO) -> Table:
    from pyarrow import parquet

    return _columns(parquet.read_table(file))


def _read_npz(file: BinaryIO) -> Table:
    arrays = np.load(file, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise DataError("holds one array without a name: save with numpy.savez(file, name=array)")
    table = dict(arrays)
    if scalars := [name for name, array in table.items() if not array.ndim]:
        raise DataError(f"{scalars[0]!r} is a single number: an array needs one entry a row")
    return table


def _columns(table) -> Table:
    names = table.column_names
    if double := next((n for n in names if names.count(n) > 1), None):
        raise DataError(f"two columns are called {double!r}: rename one")
    if not table.num_rows:
        return {}
    return {name: column_array(name, table[name]) for name in names}


def assign(
    table: Table,
    targets: Sequence[str],
    inputs: Sequence[ir.Value],
    trained: Names = Names(),  # noqa: B008 - never modified
) -> dict[str, Table]:
    """Return the columns of `table` for each of the `inputs`.

    Each of several inputs takes the columns that it was trained on, or else the column of its
    name. A single input takes the column of its name if that contains arrays, else all columns but
    the targets: in the order of an earlier training, which are taken by name, or of the file.

    Raises:
        ValueError: a target or an input without a column, or columns that an input was not trained
            on.
    """
    for name in targets:
        if name not in table:
            raise unknown("column", name, table)
    if len(set(targets)) < len(targets):
        raise DataError(f"a target is named twice: {', '.join(map(repr, targets))}")
    if sorted(targets) == sorted(trained.target):
        same_columns(targets, trained.target, "the target", "training", first=1)
    rest = {name: array for name, array in table.items() if name not in targets}
    if not rest:
        raise DataError("every column is a target: none is left for the inputs of the model")
    names = [str(x.name) for x in inputs]
    if len(names) == 1 and not (names[0] in rest and rest[names[0]].ndim > 1):
        check_names(list(rest))
        order = trained.columns.get(names[0]) or list(rest)
        if sorted(order) != sorted(rest):
            _refuse_columns(names[0], list(rest), order)
        return {names[0]: {name: rest[name] for name in order}}
    columns_of = {name: trained.columns.get(name, [name]) for name in names}
    for name in (column for columns in columns_of.values() for column in columns):
        if name not in rest:
            raise unknown("column (every input of the model needs one)", name, rest)
    return {name: {column: rest[column] for column in columns_of[name]} for name in names}


def _refuse_columns(name: str, names: Sequence[str], order: Sequence[str]) -> None:
    """Raise for columns of an input that are not those of an earlier training."""
    extra = [n for n in names if n not in order]
    try:
        same_columns(names, order, f"input {name!r}", "training", first=1)
    except DataError as e:
        advice = "correct the names in the data; their order does not matter"
        if set(order) <= set(names):
            advice = "leave it out with " + " ".join(f"--ignore {shell_word(n)}" for n in extra[:6])
        raise DataError(f"{str(e).rpartition(': ')[0]}: {advice}") from None


def labels(
    table: Table,
    targets: Sequence[str],
    label: ir.Value,
    info: LossInfo = LossInfo(),  # noqa: B008 - it is frozen
) -> np.ndarray:
    """Return the columns `targets` as one array for the input `label`.

    Args:
        table: what `read_table` returned.
        targets: names of columns.
        label: the input of the model with the loss.
        info: of the loss.

    Raises:
        DataError: values that the loss does not allow, or not as many as it takes.
    """
    what = f"target {', '.join(map(repr, targets))}"
    made = as_value({name: table[name] for name in targets}, label, what)
    if info.bounds is not None:
        allowed = info.bounds
        refuse(~allowed.test(made), made, f"{what}: loss {info.loss!r} takes labels {allowed.text}")
    if isinstance(count := info.classes, int):
        outside = ((made < 0) | (made >= count)) & (made != info.ignore_index)
        refuse(
            outside,
            made,
            f"{what}: the {count} classes are numbered 0 to {count - 1}",
            "; `onnxgrad train --head N` gives the model another number of classes",
        )
    return made


def as_value(columns: Table, value: ir.Value, what: str) -> np.ndarray:
    """Return `columns` side by side as one array of the shape and type of `value`."""
    if value.dtype == ir.DataType.STRING:
        array = np.concatenate([flat(a) for a in columns.values()], axis=1)
        return fit_shape(array, dims(value), what, reshape=True)
    array = stack(columns, what)
    dtype = value.dtype.numpy() if value.dtype else np.dtype(np.float32)
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    lost = converted != array if dtype.kind in "biu" else ~np.isfinite(converted)
    refuse(lost, array, f"{what} takes {dtype}")
    try:
        return fit_shape(converted, dims(value), what, reshape=True)
    except DataError as e:
        raise DataError(f"{e}{_superfluous(columns, value)}") from None


def _superfluous(columns: Table, value: ir.Value) -> str:
    """Return what to do about more columns than an input takes; "" if they are not more."""
    lengths = (dims(value) or ())[1:]
    taken = math.prod(d for d in lengths if isinstance(d, int))
    if len(columns) <= max(taken, 1) or not all(isinstance(d, int) for d in lengths):
        return ""
    leave = f"--ignore {shell_word(list(columns)[-1])}"
    return f"; choose its columns: --ignore leaves out others, such as {leave}"
