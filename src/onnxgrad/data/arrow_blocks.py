"""Tables of arrays by column, and blocks of rows that decoded pyarrow columns fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError, ragged_message


class ColumnArrays:
    """A table: arrays by the name of the column, in the order of the columns."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values, self.columns = dict(values), list(values)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]

    def rows(self, which: slice | np.ndarray) -> ColumnArrays:
        """Return the table of the rows that a slice or an array of row indices selects."""
        return ColumnArrays({name: array[which] for name, array in self.values.items()})


class MatrixTable(ColumnArrays):
    """A table whose columns are the columns of one array (rows, columns)."""

    def __init__(self, columns: Sequence[str], array: np.ndarray) -> None:
        self.columns, self.array = list(columns), array

    def __getitem__(self, name: str) -> np.ndarray:
        return self.array[:, self.columns.index(name)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def rows(self, which: slice | np.ndarray) -> MatrixTable:
        """Return the table of the rows that a slice or an array of row indices selects."""
        return MatrixTable(self.columns, self.array[which])


class RowBlock:
    """Memory for `size` rows of several tables, one for each input, to which decoded rows are
    appended.

    Every value is copied once, so that the decoded columns can be freed at once.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], size: int) -> None:
        self.groups, self.size, self.rows = groups, size, 0
        self._tables: dict[str, ColumnArrays] = {}

    def append(self, part: Mapping[str, np.ndarray]) -> None:
        """Append rows, given as arrays by column name; raise `DataError` if the lists of a column
        differ in length.
        """
        count = len(next(iter(part.values())))
        where = slice(self.rows, self.rows + count)
        for key, names in self.groups.items():
            if key not in self._tables:
                self._tables[key] = self._allocate_table({name: part[name] for name in names})
            table = self._tables[key]
            if isinstance(table, MatrixTable):
                if {part[name].dtype for name in names} == {table.array.dtype}:
                    for column, name in enumerate(names):
                        table.array[where, column] = part[name]
                    continue
                table = ColumnArrays({name: table[name].copy() for name in names})
                self._tables[key] = table
            for name in names:
                if part[name].shape[1:] != table.values[name].shape[1:]:
                    raise DataError(ragged_message(name))
                # numbers with nulls are floats: widen the dtype of the rows before them
                dtype = np.result_type(table.values[name], part[name])
                table.values[name] = table.values[name].astype(dtype, copy=False)
                table.values[name][where] = part[name]
        self.rows += count

    def _allocate_table(self, part: dict[str, np.ndarray]) -> ColumnArrays:
        """Return an uninitialized table for `size` rows with the column names, dtypes and row
        shapes of `part`.
        """
        # if there are several, floats round large integers
        kinds = {array.dtype for array in part.values()}
        if len(kinds) == 1 and all(a.ndim == 1 and a.dtype.kind in "biuf" for a in part.values()):
            return MatrixTable(list(part), np.empty((self.size, len(part)), kinds.pop()))
        return ColumnArrays(
            {name: np.empty((self.size, *a.shape[1:]), a.dtype) for name, a in part.items()}
        )

    def tables(self, which: slice | np.ndarray) -> dict[str, ColumnArrays]:
        """Return {input: table} of the rows that a slice or an array of row indices selects."""
        return {key: table.rows(which) for key, table in self._tables.items()}
