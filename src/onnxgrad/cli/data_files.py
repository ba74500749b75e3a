"""Data files, and their columns as the arrays that a model takes.

Messages count rows from 1, without the header of a CSV file.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from onnxgrad.cli.archives import check_expansion
from onnxgrad.data.arrays import DataError, fit_shape
from onnxgrad.data.columns import Names, check_names, same_columns
from onnxgrad.errors import unknown
from onnxgrad.graph.shapes import dims
from onnxgrad.losses.info import LossInfo

Table = dict[str, np.ndarray]


def read_table(path: str | os.PathLike) -> Table:
    """Return the columns of a CSV or Parquet file, or the arrays of an `.npz` file, by name.

    A list column becomes an array with more axes; an empty cell becomes NaN.

    Raises:
        DataError: the file cannot be read, holds no rows, or expands to more than `limits` allows.
    """
    path = Path(path)
    readers = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
        ".npz": _read_npz,
    }
    if path.suffix.lower() not in readers:
        raise DataError(f"{str(path)!r} is none of {', '.join(readers)}: convert it to one of them")
    try:
        with path.open("rb") as opened:  # a pipe cannot be read twice
            file = opened if opened.seekable() else BytesIO(opened.read())
            check_expansion(file, path.suffix.lower(), DataError)
            table = readers[path.suffix.lower()](file)
    except DataError as e:
        raise DataError(f"{str(path)!r}: {e}") from None
    except OSError as e:
        raise DataError(f"cannot read {str(path)!r}: {e.strerror or e}") from None
    except MemoryError:
        raise DataError(f"{str(path)!r} declares more data than fits into memory") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        reason = str(e).splitlines()[0] if str(e) else "unexpected end"
        raise DataError(f"{str(path)!r} is damaged, or no {path.suffix} file: {reason}") from e
    if not table or not all(map(len, table.values())):
        raise DataError(f"{str(path)!r} holds no rows of data")
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
        f"{_short(row.text)}; complete the row, or quote cells that hold {delimiter!r}"
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
    return {name: _to_numpy(name, table[name]) for name in names}


def _to_numpy(name: str, column) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    shape = [len(column)]
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        sizes = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(sizes) != 1 or sizes[0] is None:
            raise DataError(f"the lists of column {name!r} differ in length: pad or truncate them")
        shape.append(sizes[0])
        column = pc.list_flatten(column)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if pa.types.is_null(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return column.to_numpy().reshape(shape)


def assign(
    table: Table,
    targets: Sequence[str],
    inputs: Sequence[ir.Value],
    trained: Names = Names(),  # noqa: B008 - never modified
) -> dict[str, Table]:
    """Return the columns of `table` for each of the `inputs`.

    Each of several inputs takes the columns that it was trained on, or else the column of its
    name. A single input takes the column of its name if that contains arrays, else all columns but
    the targets, in the order of the file, which must be the order of an earlier training.

    Raises:
        ValueError: a target or an input without a column, columns that an input was not trained
            on, or in another order.
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
        if order := trained.columns.get(names[0]):
            same_columns(list(rest), order, f"input {names[0]!r}", "training", first=1)
        return {names[0]: rest}
    columns_of = {name: trained.columns.get(name, [name]) for name in names}
    for name in (column for columns in columns_of.values() for column in columns):
        if name not in rest:
            raise unknown("column (every input of the model needs one)", name, rest)
    return {name: {column: rest[column] for column in columns_of[name]} for name in names}


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
        allowed, test = info.bounds
        refuse(~test(made), made, f"{what}: loss {info.loss!r} takes labels {allowed}")
    if isinstance(count := info.classes, int):
        outside = ((made < 0) | (made >= count)) & (made != info.ignore_index)
        refuse(outside, made, f"{what}: the {count} classes are numbered 0 to {count - 1}")
    return made


def as_value(columns: Table, value: ir.Value, what: str) -> np.ndarray:
    """Return `columns` side by side as one array of the shape and type of `value`."""
    if value.dtype == ir.DataType.STRING:
        array = np.concatenate([_flat(a) for a in columns.values()], axis=1)
        return fit_shape(array, dims(value), what, reshape=True)
    array = stack(columns, what)
    dtype = value.dtype.numpy() if value.dtype else np.dtype(np.float32)
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    lost = converted != array if dtype.kind in "biu" else ~np.isfinite(converted)
    refuse(lost, array, f"{what} takes {dtype}")
    return fit_shape(converted, dims(value), what, reshape=True)


def stack(columns: Table, what: str) -> np.ndarray:
    """Return numeric columns of equal length side by side; a single one as it is."""
    counts = {name: len(array) for name, array in columns.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{what}: the arrays differ in their number of rows: {counts}")
    for name, array in columns.items():
        _check_numeric(name, array)
    bad = {n: ~np.isfinite(a) for n, a in columns.items() if not np.isfinite(a).all()}
    if bad:
        where = [f"column {name!r}, {_rows(mask)}" for name, mask in bad.items()]
        more = f" and {len(where) - 5} more columns" if len(where) > 5 else ""
        raise DataError(
            f"NaN, infinity or empty cells in {'; '.join(where[:5])}{more}: "
            "fill them in, or leave these rows out"
        )
    if len(columns) == 1:
        return next(iter(columns.values()))
    return np.concatenate([_flat(a) for a in columns.values()], axis=1)


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _check_numeric(name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "biuf":
        return
    if array.dtype.kind not in "OSU":
        raise DataError(
            f"column {name!r} holds {array.dtype} ({_flat(array)[0, 0]}), not numbers: "
            "convert it, dates to days for instance, or leave it out of the file"
        )
    rows = _flat(array)[:, 0].tolist()
    first = next((i for i, value in enumerate(rows) if not _is_number(value)), 0)
    kind = "text" if isinstance(rows[first], (str, bytes)) else type(rows[first]).__name__
    raise DataError(
        f"column {name!r} is {kind}, first in row {first + 1}: {_short(rows[first])}; "
        f"{_remedy(rows[first])}"
    )


def _is_number(value: Any) -> bool:
    try:
        float("nan" if value is None else value)
    except (ValueError, TypeError):
        return False
    return "_" not in str(value)  # Python accepts 1_000


def _remedy(value: Any) -> str:
    """Return advice about a cell that is not a number."""
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"[+-]?[\d.]*(,\d+)+", text):
        return "write numbers without separators of thousands, and with a decimal point"
    if text.lower() in ("yes", "no", "y", "n", "t", "f", "true", "false", "on", "off"):
        return "write 1 and 0"
    if text.lower() in ("na", "n/a", "nan", "null", "none", "?", "-", "."):
        return "fill in the missing numbers, or leave these rows out"
    return "turn it into numbers, or leave it out of the file"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def refuse(wrong: np.ndarray, values: np.ndarray, rule: str) -> None:
    """Raise if any of `values` is `wrong`, naming the rows."""
    if wrong.any():
        raise DataError(f"{rule}, not {values[wrong][0]} ({_rows(wrong)})")


def _rows(mask: np.ndarray) -> str:
    rows = np.flatnonzero(_flat(mask).any(axis=1)) + 1
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"
