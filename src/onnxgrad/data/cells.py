"""Columns of files as numbers, and messages that name the column and the row of a wrong cell.

Messages count rows from 1, without the header of a CSV file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.errors import argument, join_first

_ENCODED = 20  # most different texts for which a message advises columns of zeros and ones


@dataclass(frozen=True)
class RowNumbers:
    """The row numbers in a file of the rows of a table: `first` plus the row's index, or plus
    `kept[index]`.
    """

    first: int = 1
    kept: np.ndarray | None = None

    def in_file(self, index: int) -> int:
        """Return the number in the file of the row with index `index` in the table."""
        return self.first + (index if self.kept is None else int(self.kept[index]))

    def range_in_file(self, start: int, count: int) -> np.ndarray:
        """Return the numbers in the file, int64, of `count` consecutive rows of the table from the
        row `start` on.
        """
        indices = np.arange(start, start + count)
        return self.first + (indices if self.kept is None else self.kept[indices])

    def select_rows(self, indices: np.ndarray) -> RowNumbers:
        """Return the `RowNumbers` of the table that holds the rows with these indices only."""
        return RowNumbers(self.first, indices if self.kept is None else self.kept[indices])

    def rows_in_mask(self, mask: np.ndarray) -> str:
        """Return "row 3" or "rows 3, 5, ...", the numbers in the file of the first five rows where
        the mask is true.
        """
        rows = [self.in_file(i) for i in np.flatnonzero(flatten_rows(mask).any(axis=1)).tolist()]
        return f"row{'s' * (len(rows) > 1)} {join_first(rows, 5)}"


class Cells(ColumnArrays):
    """Columns of a file that are converted for one input; `title` is the name of the input in
    messages.
    """

    def __init__(self, values: Mapping[str, np.ndarray], title: str, numbers: RowNumbers) -> None:
        super().__init__(values)
        self.title, self.row_numbers = title, numbers

    def texts(self) -> np.ndarray:
        """Return the columns as one array (rows, values), without conversion to numbers."""
        return np.concatenate([flatten_rows(a) for a in self.values.values()], axis=1)

    def number_array(self, nan: bool = False) -> np.ndarray:
        """Return the columns as one array of numbers (rows, values); a single column keeps its
        shape.

        With `nan`, NaN is allowed, such as for rows without a label.

        Raises:
            DataError: columns of different length, or cells that are no numbers or are missing.
        """
        counts = {name: len(array) for name, array in self.values.items()}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"{self.title}: all arrays must have the same number of rows, not {counts}"
            )
        self._check_numeric()
        bad = np.isinf if nan else lambda array: ~np.isfinite(array)
        self.raise_for_missing({name: bad(array) for name, array in self.values.items()})
        return next(iter(self.values.values())) if len(self.values) == 1 else self.texts()

    def sample_weights(self) -> np.ndarray:
        """Return the column as sample weights, which are at least 0.

        Raises:
            DataError: a weight is negative, or all are 0.
        """
        weights = self.number_array()
        self.refuse_values(
            weights < 0, weights, f"{self.title} must hold numbers of 0 or more, not"
        )
        if not weights.any():
            raise DataError(
                f"{self.title} is 0 in all rows, so that no row counts: raise some of the weights"
            )
        return weights

    def refuse_values(
        self, wrong: np.ndarray, values: np.ndarray, rule: str, remedy: str = ""
    ) -> None:
        """Raise `DataError` if the mask `wrong` is true anywhere: the message quotes the first
        wrong value and lists the rows.
        """
        if wrong.any():
            rows = self.row_numbers.rows_in_mask(wrong)
            raise DataError(f"{rule} {values[wrong][0]} ({rows}){remedy}")

    def raise_for_missing(self, masks: Mapping[str, np.ndarray]) -> None:
        """Raise `DataError` if a mask of missing cells, one for each column, is true anywhere."""
        bad = {name: mask for name, mask in masks.items() if mask.any()}
        if not bad:
            return
        where = [
            f"column {name!r}, {self.row_numbers.rows_in_mask(mask)}" for name, mask in bad.items()
        ]
        more = f" and {len(where) - 5} more columns" if len(where) > 5 else ""
        count = sum(int(mask.sum()) for mask in bad.values())
        cells, fill = ("cell that is", "it") if count == 1 else ("cells that are", "them")
        raise DataError(
            f"{count} {cells} empty, NaN or infinite: {'; '.join(where[:5])}{more}; fill {fill} "
            f"in, or leave these rows out with {argument('drop_missing', True)}"
        )

    def _check_numeric(self) -> None:
        """Raise `DataError` for a column that does not hold numbers; the message quotes a wrong
        cell.
        """
        wrong = [name for name, array in self.values.items() if array.dtype.kind not in "biuf"]
        if not wrong:
            return
        name, array = wrong[0], self.values[wrong[0]]
        also = f" (also {', '.join(map(repr, wrong[1:6]))})" if len(wrong) > 1 else ""
        leave = argument("ignore", wrong[:6])
        if array.dtype.kind not in "OSU":
            raise DataError(
                f"column {name!r} holds {array.dtype} ({array.ravel()[0]}), not numbers{also}: "
                f"convert it, dates to days for instance, or leave out the column with {leave}"
            )
        rows = flatten_rows(array)[:, 0].tolist()
        first = first_non_number(rows)
        filled = [v for v in rows if not is_empty(v)]
        kind = "text" if is_text(rows[first]) else type(rows[first]).__name__
        advice = number_advice(rows[first], filled)
        raise DataError(
            f"column {name!r} is {kind}, first in row {self.row_numbers.in_file(first)}: "
            f"{quote_cell(rows[first])}{also}; {advice}, or leave out the "
            f"column with {leave}"
        )


def flatten_rows(array: np.ndarray) -> np.ndarray:
    """Return an array as (rows, values)."""
    return array.reshape(len(array), -1)


def first_non_number(rows: Sequence[Any]) -> int:
    """Return the index of the first cell that is neither a number nor empty; 0 if all cells are
    numbers or empty.
    """
    return next((i for i, v in enumerate(rows) if not (_is_number(v) or is_empty(v))), 0)


def is_empty(value: Any) -> bool:
    """Return whether a cell is missing: empty, or NaN."""
    return value is None or value == "" or value != value


def is_text(value: Any) -> bool:
    """Return whether a cell is text."""
    return isinstance(value, (str, bytes))


def _is_number(value: Any) -> bool:
    """Return whether a cell is empty, a number, or a text that is read as a number."""
    try:
        float("nan" if value is None else value)
    except (ValueError, TypeError):
        return False
    return "_" not in str(value)  # Python accepts 1_000


def number_advice(value: Any, rows: list[Any]) -> str:
    """Return the advice, for a message, how to turn a column with the cell `value`, which is no
    number, into numbers.
    """
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"[+-]?[\d.]*(,\d+)+", text):
        return "write numbers without separators of thousands, and with a decimal point"
    if text.lower() in ("yes", "no", "y", "n", "t", "f", "true", "false", "on", "off"):
        return "write 1 and 0"
    if text.lower() in ("na", "n/a", "nan", "null", "none", "?", "-", "."):
        return "fill in the missing numbers, or leave these rows out"
    count = len(set(map(str, rows)))
    if text and count <= _ENCODED and count < len(rows):
        return f"write a column of 0 and 1 for each of its {count} values"
    return "turn it into numbers"


def quote_cell(value: Any) -> str:
    """Return a cell for messages: its `repr`, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def mask_incomplete_rows(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a mask of the rows of a table that have an empty, NaN or infinite cell."""
    count = len(next(iter(table.values())))
    gone = np.zeros(count, bool)
    for array in table.values():
        if len(array) != count:
            continue  # `number_array` raises an error
        if array.dtype.kind == "f":
            gone |= ~np.isfinite(flatten_rows(array)).all(axis=1)
        elif array.dtype.kind == "O":
            gone |= np.array([any(map(is_empty, row)) for row in flatten_rows(array)])
    return gone
