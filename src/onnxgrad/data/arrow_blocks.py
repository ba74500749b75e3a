"""Blocks of rows of a table, filled from columns of pyarrow as they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError, ragged_message


class ColumnArrays:
    """A table of arrays by column, in this order."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values, self.columns = dict(values), list(values)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]

    def rows(self, which: slice | np.ndarray) -> ColumnArrays:
        """Return these rows."""
        return ColumnArrays({name: array[which] for name, array in self.values.items()})


class Matrix(ColumnArrays):
    """A table whose columns are those of one array."""

    def __init__(self, columns: Sequence[str], array: np.ndarray) -> None:
        self.columns, self.array = list(columns), array

    def __getitem__(self, name: str) -> np.ndarray:
        return self.array[:, self.columns.index(name)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def rows(self, which: slice | np.ndarray) -> Matrix:
        """Return these rows."""
        return Matrix(self.columns, self.array[which])


class Block:
    """Up to `size` rows of the tables of a batch, by input; rows are appended.

    Every value is copied once, into an array of its table: what was decoded is free after it.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], size: int) -> None:
        self.groups, self.size, self.rows = groups, size, 0
        self._tables: dict[str, ColumnArrays] = {}

    def append(self, part: Mapping[str, np.ndarray]) -> None:
        """Append rows; the lists of a column must have one length."""
        count = len(next(iter(part.values())))
        where = slice(self.rows, self.rows + count)
        for key, names in self.groups.items():
            if key not in self._tables:
                self._tables[key] = self._empty({name: part[name] for name in names})
            table = self._tables[key]
            if isinstance(table, Matrix):
                if {part[name].dtype for name in names} == {table.array.dtype}:
                    for column, name in enumerate(names):
                        table.array[where, column] = part[name]
                    continue
                table = ColumnArrays({name: table[name].copy() for name in names})
                self._tables[key] = table
            for name in names:
                if part[name].shape[1:] != table.values[name].shape[1:]:
                    raise DataError(ragged_message(name))
                table.values[name] = _widen(table.values[name], part[name].dtype)
                table.values[name][where] = part[name]
        self.rows += count

    def _empty(self, part: dict[str, np.ndarray]) -> ColumnArrays:
        kinds = {array.dtype for array in part.values()}  # one only: floats round large integers
        if len(kinds) == 1 and all(a.ndim == 1 and a.dtype.kind in "biuf" for a in part.values()):
            return Matrix(list(part), np.empty((self.size, len(part)), kinds.pop()))
        return ColumnArrays(
            {name: np.empty((self.size, *a.shape[1:]), a.dtype) for name, a in part.items()}
        )

    def tables(self, which: slice | np.ndarray) -> dict[str, ColumnArrays]:
        """Return some of the rows, by input."""
        return {key: table.rows(which) for key, table in self._tables.items()}


def _widen(array: np.ndarray, other: np.dtype) -> np.ndarray:
    """Return `array` in a dtype that holds the other too: numbers with nulls are floats."""
    dtype = np.result_type(array.dtype, other)
    return array if dtype == array.dtype else array.astype(dtype)
