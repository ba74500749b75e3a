"""Tables in CSV, Parquet and `.npz` files, read into memory at once."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad.checks import check_limit
from onnxgrad.data.arrays import DataError, column_array
from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.data.cells import (
    Cells,
    RowNumbers,
    first_non_number,
    is_empty,
    is_text,
    mask_incomplete_rows,
    number_advice,
    quote_cell,
)
from onnxgrad.data.class_numbers import ClassNames, first_class_names, label_text
from onnxgrad.errors import argument, join_first, unknown
from onnxgrad.model.class_labels import Labels

Columns = dict[str, np.ndarray]
_RATIO = 10  # ratio of expanded size and file size above which the limit is checked


def read_table(
    source: str | os.PathLike | BinaryIO, ignore: Sequence[str] = (), drop_missing: bool = False
) -> FileTable:
    """Return the columns of a CSV or Parquet file, or the arrays of an `.npz` file.

    A list column becomes an array with more axes, an empty cell NaN. `fit` takes the result like
    any table; its error messages then name columns, and rows counted from 1.

    Args:
        source: path of a `.csv`, `.tsv`, `.parquet`, `.pq` or `.npz` file, or an open file of
            CSV. The delimiter is a comma, a semicolon or a tab.
        ignore: columns to leave out.
        drop_missing: leave out the rows with an empty cell, NaN or infinity.

    Raises:
        ValueError: the file cannot be read, holds no rows, lacks a column of `ignore`, or expands
            to more bytes than the limit `table_bytes` of `set_limits`.

    Examples:
        >>> import tempfile, pathlib, onnxgrad as og
        >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.csv")
        >>> _ = path.write_text("a,b,kind\\n1,2,cat\\n,3,dog\\n4,5,dog\\n")
        >>> table = og.data.read_table(path, ignore=["b"], drop_missing=True)
        >>> table["a"].tolist(), table.encode("kind", ["cat", "dog"])["kind"].tolist()
        ([1.0, 4.0], [0, 1])
    """
    name, values = _file_name_and_columns(source)
    for column in ignore:
        if column not in values:
            raise unknown(f"column ({argument('ignore')})", column, values)
    table = FileTable({n: a for n, a in values.items() if n not in ignore}, name, RowNumbers())
    return table.without_missing() if drop_missing and table.columns else table


class FileTable(ColumnArrays):
    """The columns of a file, in the order of the file: the result of `read_table`.

    - `columns`: names of the columns; `values`: their arrays by name.
    - `name`: name of the file; `row_numbers`: numbers in the file of the rows of the table.
    - `note`: which rows were left out, "" if none.

    Examples:
        >>> import io, onnxgrad as og
        >>> table = og.data.read_table(io.BytesIO(b"a,y\\n1,2\\n,4\\n5,6\\n"), drop_missing=True)
        >>> table.columns, table["y"].tolist(), table.note
        (['a', 'y'], [2, 6], 'left out 1 of 3 rows with missing values: 2')
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        name: str,
        numbers: RowNumbers,
        note: str = "",
    ) -> None:
        super().__init__(values)
        self.name, self.row_numbers, self.note = name, numbers, note

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def rows(self, which: slice | np.ndarray) -> FileTable:
        """Return the table of the rows that a slice or an array of row indices selects."""
        numbers = self.row_numbers.select_rows(np.arange(len(self[self.columns[0]]))[which])
        values = {name: array[which] for name, array in self.values.items()}
        return FileTable(values, self.name, numbers, self.note)

    def cells(self, names: Iterable[str], title: str) -> Cells:
        """Return the columns `names` as `Cells` for one input; `title` is the name of the input in
        messages.
        """
        return Cells({name: self.values[name] for name in names}, title, self.row_numbers)

    def without_missing(self) -> FileTable:
        """Return the table of the rows without empty cells, NaN and infinity.

        Raises:
            DataError: no row is left.
        """
        gone = mask_incomplete_rows(self.values)
        if not gone.any():
            return self
        if gone.all():
            raise DataError(
                f"{self.name!r}: no row is left, as every row has a missing value: fill some in"
            )
        kept, rows = np.flatnonzero(~gone), (np.flatnonzero(gone) + 1).tolist()
        left = self.rows(kept)
        counts = f"{len(rows)} of {len(gone)} rows"
        left.note = f"left out {counts} with missing values: {join_first(rows, 5)}"
        return left

    def encode(
        self,
        column: str,
        classes: Labels | None,
        numeric_loss: Callable[[], str | None] = lambda: None,
        ignored: int | None = None,
    ) -> FileTable:
        """Return the table with the labels in a column replaced by class indices.

        A column of numbers that are not all names of classes stays unchanged.

        Args:
            column: name of the column.
            classes: names of the classes in the order of the model's output; None: unknown.
            numeric_loss: returns the name of the loss if it compares with numbers, else None.
            ignored: a number that stands for rows without a label, and stays.

        Raises:
            DataError: the column has texts that are no `classes`.
        """
        array = self.values[column]
        cells, values = self.cells([column], f"column {column!r}"), array.ravel().tolist()
        texts = array.dtype.kind in "OSU" and any(map(is_text, values))
        if texts:
            empty = np.array(list(map(is_empty, values))).reshape(array.shape)
            cells.raise_for_missing({column: empty})
            if classes is None:
                raise self._text_label_error(column, values, numeric_loss())
        if classes is None:
            return self
        known = ClassNames(classes)
        labels = np.array(list(map(label_text, values)), str).reshape(array.shape)
        numbers, wrong = known.encode_labels(labels, ignored)
        if not texts and (wrong.any() or known.are_places):
            return self
        cells.refuse_values(
            wrong, array, f"{cells.title}: the classes are {first_class_names(classes)}, not"
        )
        return FileTable(self.values | {column: numbers}, self.name, self.row_numbers, self.note)

    def _text_label_error(self, column: str, values: list[Any], loss: str | None) -> DataError:
        """Return the error for a label column of texts whose classes are not named."""
        first = first_non_number(values)
        row, cell = self.row_numbers.in_file(first), quote_cell(values[first])
        where = f"column {column!r} is text, first in row {row}: {cell}"
        if loss:
            advice = number_advice(values[first], values)
            return DataError(
                f"{where}; the loss {loss} compares with numbers: {advice}, or name another column "
                f"with {argument('y')}"
            )
        names = sorted({str(value) for value in values})
        shown = [*names[:8], *["..."] * (len(names) > 8)]
        return DataError(
            f"{where}; if texts name classes, list these in the order of the model's output with "
            f"{argument('classes', shown)}, or train a new last layer with "
            f"{argument('units', shown)}"
        )


def _file_name_and_columns(source: str | os.PathLike | BinaryIO) -> tuple[str, Columns]:
    """Return (name of the file for messages, columns of the file)."""
    if not isinstance(source, (str, os.PathLike)):
        name = "standard input"
        return name, _read_and_check_table(BytesIO(source.read()), ".csv", name, _read_csv)
    path = Path(source)
    name, suffix = str(path), path.suffix.lower()
    if suffix not in _READERS:
        if not path.exists():
            raise DataError(f"cannot read {name!r}: No such file or directory")
        raise DataError(f"{name!r} must be one of {', '.join(_READERS)}: convert the file")
    try:
        with path.open("rb") as opened:  # a pipe cannot be read twice
            file = opened if opened.seekable() else BytesIO(opened.read())
            return name, _read_and_check_table(file, suffix, repr(name), _READERS[suffix])
    except OSError as e:
        raise DataError(f"cannot read {name!r}: {e.strerror or e}") from None


def _read_and_check_table(
    file: BinaryIO, suffix: str, what: str, reader: Callable[[BinaryIO], Columns]
) -> Columns:
    """Return the table that `reader` reads from an open file; raise `DataError` if it is damaged or
    empty.
    """
    try:
        _check_uncompressed_size(file, suffix)
        table = reader(file)
    except DataError as e:
        raise DataError(f"{what}: {e}") from None
    except MemoryError:
        raise DataError(
            f"{what} declares more data than fit into memory: split the file, or write Parquet"
        ) from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        reason = str(e).splitlines()[0] if str(e) else "unexpected end"
        raise DataError(f"{what} is damaged, or no {suffix} file: {reason}") from e
    if not table or not all(map(len, table.values())):
        raise DataError(f"{what} holds no rows of data")
    return table


def _check_uncompressed_size(file: BinaryIO, suffix: str) -> None:
    """Raise `DataError` if a compressed file expands to more bytes than `table_bytes`.

    A file that expands less than tenfold passes, however large it is.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    expanded = 0
    if suffix == ".npz" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            expanded = sum(entry.file_size for entry in archive.infolist())
    elif suffix in (".parquet", ".pq"):
        from pyarrow import parquet

        metadata = parquet.ParquetFile(file).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        columns = (group.column(i) for group in groups for i in range(group.num_columns))
        expanded = sum(max(c.total_uncompressed_size, 8 * c.num_values) for c in columns)
    file.seek(0)
    if expanded > _RATIO * size:
        check_limit("table_bytes", expanded, "expands to too many bytes", DataError)


def _read_csv(file: BinaryIO) -> Columns:
    """Return the columns of a CSV file; the delimiter is the most frequent one in the header."""
    from pyarrow import csv

    try:
        header = file.readline().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("its header is not text in UTF-8: save it in that encoding") from None
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", header).count)
    wrong: list[Any] = []

    def skip_wrong_row(row: Any) -> str:
        wrong.append(row)
        return "skip"

    for threads in (True, False):  # pyarrow numbers the wrong rows only with a single thread
        file.seek(0)
        wrong.clear()
        options = csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip_wrong_row)
        table = csv.read_csv(file, csv.ReadOptions(use_threads=threads), options)
        if not wrong:
            return _column_arrays(table)
    row = wrong[0]
    raise ValueError(
        f"row {row.number - 1}: Expected {row.expected_columns} columns, got {row.actual_columns}: "
        f"{quote_cell(row.text)}; complete the row, or quote cells that hold {delimiter!r}"
    )


def _read_parquet(file: BinaryIO) -> Columns:
    """Return the columns of a Parquet file."""
    from pyarrow import parquet

    return _column_arrays(parquet.read_table(file))


def _read_npz(file: BinaryIO) -> Columns:
    """Return the arrays of an `.npz` file."""
    arrays = np.load(file, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise DataError("holds one array without a name: use numpy.savez(file, name=array)")
    table = dict(arrays)
    if scalars := [name for name, array in table.items() if not array.ndim]:
        raise DataError(f"{scalars[0]!r} is a single number: an array needs an entry for each row")
    return table


def _column_arrays(table: Any) -> Columns:
    """Return the columns of a pyarrow table as arrays."""
    names = table.column_names
    if double := next((n for n in names if names.count(n) > 1), None):
        raise DataError(f"two columns are called {double!r}: rename one")
    if not table.num_rows:
        return {}
    return {name: column_array(name, table[name]) for name in names}


_READERS = {
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    **{".parquet": _read_parquet, ".npz": _read_npz, ".pq": _read_parquet},
}
