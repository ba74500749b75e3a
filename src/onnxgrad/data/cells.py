"""Columns of files: whether their cells are numbers, and messages that name column and row.

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
from onnxgrad.errors import argument

_ENCODED = 20  # different texts that can be columns of zeros and ones


@dataclass(frozen=True)
class Rows:
    """The numbers of rows in a file: all from `first`, or those of the indices `kept`."""

    first: int = 1
    kept: np.ndarray | None = None

    def number(self, index: int) -> int:
        """Return the number of a row."""
        return self.first + (index if self.kept is None else int(self.kept[index]))

    def numbers(self, start: int, count: int) -> np.ndarray:
        """Return the numbers of `count` rows from the index `start` on, int64."""
        indices = np.arange(start, start + count)
        return self.first + (indices if self.kept is None else self.kept[indices])

    def take(self, indices: np.ndarray) -> Rows:
        """Return the numbers of some of the rows."""
        return Rows(self.first, indices if self.kept is None else self.kept[indices])

    def list_rows(self, mask: np.ndarray) -> str:
        """Return the numbers of the rows where a mask holds, the first five."""
        rows = [self.number(i) for i in np.flatnonzero(flat(mask).any(axis=1)).tolist()]
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"


class Cells(ColumnArrays):
    """Columns of a file for one input; `title` is what messages call it."""

    def __init__(self, values: Mapping[str, np.ndarray], title: str, numbers: Rows) -> None:
        super().__init__(values)
        self.title, self.row_numbers = title, numbers

    def texts(self) -> np.ndarray:
        """Return the columns side by side as they are, (rows, values)."""
        return np.concatenate([flat(a) for a in self.values.values()], axis=1)

    def side_by_side(self, nan: bool = False) -> np.ndarray:
        """Return columns of numbers side by side; a single one as it is.

        With `nan`, NaN is a value, such as a label that does not count.
        """
        counts = {name: len(array) for name, array in self.values.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{self.title}: the arrays differ in their number of rows: {counts}")
        self._check_numeric()
        bad = np.isinf if nan else lambda array: ~np.isfinite(array)
        self.refuse_missing({name: bad(array) for name, array in self.values.items()})
        return next(iter(self.values.values())) if len(self.values) == 1 else self.texts()

    def weights(self) -> np.ndarray:
        """Return a column of weights of rows.

        Raises:
            DataError: one is negative, or all are 0.
        """
        weights = self.side_by_side()
        self.refuse(weights < 0, weights, f"{self.title} must hold numbers of 0 or more, not")
        if not weights.any():
            raise DataError(f"{self.title} is 0 in all rows, so that none counts")
        return weights

    def refuse(self, wrong: np.ndarray, values: np.ndarray, rule: str, remedy: str = "") -> None:
        """Raise if any of the values is wrong: the rule, the first one and the rows."""
        if wrong.any():
            rows = self.row_numbers.list_rows(wrong)
            raise DataError(f"{rule} {values[wrong][0]} ({rows}){remedy}")

    def refuse_missing(self, masks: Mapping[str, np.ndarray]) -> None:
        """Raise if a mask of missing cells, by column, holds anywhere."""
        bad = {name: mask for name, mask in masks.items() if mask.any()}
        if not bad:
            return
        where = [
            f"column {name!r}, {self.row_numbers.list_rows(mask)}" for name, mask in bad.items()
        ]
        more = f" and {len(where) - 5} more columns" if len(where) > 5 else ""
        count = sum(int(mask.sum()) for mask in bad.values())
        cells, fill = ("cell that is", "it") if count == 1 else ("cells that are", "them")
        raise DataError(
            f"{count} {cells} empty, NaN or infinite: {'; '.join(where[:5])}{more}; fill {fill} "
            f"in, or leave these rows out with {argument('drop_missing', True)}"
        )

    def _check_numeric(self) -> None:
        """Raise for the first column that is no number; the message names the others, too."""
        wrong = [name for name, array in self.values.items() if array.dtype.kind not in "biuf"]
        if not wrong:
            return
        name, array = wrong[0], self.values[wrong[0]]
        also = f" (also {', '.join(map(repr, wrong[1:6]))})" if len(wrong) > 1 else ""
        leave = argument("ignore", wrong[:6])
        if array.dtype.kind not in "OSU":
            raise DataError(
                f"column {name!r} holds {array.dtype} ({flat(array)[0, 0]}), not numbers{also}: "
                f"convert it, dates to days for instance, or leave out the column with {leave}"
            )
        rows = flat(array)[:, 0].tolist()
        first = first_text(rows)
        filled = [v for v in rows if not is_empty(v)]
        kind = "text" if is_text(rows[first]) else type(rows[first]).__name__
        raise DataError(
            f"column {name!r} is {kind}, first in row {self.row_numbers.number(first)}: "
            f"{short(rows[first])}{also}; {remedy(rows[first], filled)}, or leave out the "
            f"column with {leave}"
        )


def flat(array: np.ndarray) -> np.ndarray:
    """Return an array with one axis behind that of the rows."""
    return array.reshape(len(array), -1)


def first_text(rows: Sequence[Any]) -> int:
    """Return the index of the first cell that is neither a number nor empty; 0 for none."""
    return next((i for i, v in enumerate(rows) if not (_is_number(v) or is_empty(v))), 0)


def is_empty(value: Any) -> bool:
    """Return whether a cell is missing: empty, or NaN."""
    return value is None or value == "" or value != value


def is_text(value: Any) -> bool:
    """Return whether a cell is text."""
    return isinstance(value, (str, bytes))


def _is_number(value: Any) -> bool:
    try:
        float("nan" if value is None else value)
    except (ValueError, TypeError):
        return False
    return "_" not in str(value)  # Python accepts 1_000


def remedy(value: Any, rows: list[Any]) -> str:
    """Return advice about a cell that is not a number."""
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


def short(value: Any) -> str:
    """Return a cell as it is quoted in messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def rows_with_gaps(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which rows have a cell that is empty, NaN or infinite, (rows,)."""
    count = len(next(iter(table.values())))
    gone = np.zeros(count, bool)
    for array in table.values():
        if len(array) != count:
            continue  # an error says so later
        if array.dtype.kind == "f":
            gone |= ~np.isfinite(flat(array)).all(axis=1)
        elif array.dtype.kind == "O":
            gone |= np.array([any(map(is_empty, row)) for row in flat(array)])
    return gone
