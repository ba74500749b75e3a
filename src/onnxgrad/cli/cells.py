"""The cells of columns: whether they are numbers, and messages that name column, row and remedy.

Messages count rows from 1, without the header of a CSV file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError

Table = dict[str, np.ndarray]
_kept: ContextVar[np.ndarray | None] = ContextVar("_kept", default=None)
_ENCODED = 20  # different texts that can be columns of zeros and ones


def stack(columns: Table, what: str) -> np.ndarray:
    """Return numeric columns of equal length side by side; a single one as it is."""
    counts = {name: len(array) for name, array in columns.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{what}: the arrays differ in their number of rows: {counts}")
    _check_numeric(columns)
    refuse_missing({n: ~np.isfinite(a) for n, a in columns.items()})
    if len(columns) == 1:
        return next(iter(columns.values()))
    return np.concatenate([flat(a) for a in columns.values()], axis=1)


def refuse_missing(masks: Mapping[str, np.ndarray]) -> None:
    """Raise if a mask of missing cells, by column, holds anywhere."""
    bad = {name: mask for name, mask in masks.items() if mask.any()}
    if not bad:
        return
    where = [f"column {name!r}, {rows_of(mask)}" for name, mask in bad.items()]
    more = f" and {len(where) - 5} more columns" if len(where) > 5 else ""
    count = sum(int(mask.sum()) for mask in bad.values())
    cells, fill = ("cell that is", "it") if count == 1 else ("cells that are", "them")
    raise DataError(
        f"{count} {cells} empty, NaN or infinite: {'; '.join(where[:5])}{more}; fill {fill} in, "
        "or leave these rows out with --drop-missing"
    )


def flat(array: np.ndarray) -> np.ndarray:
    """Return an array with one axis behind that of the rows."""
    return array.reshape(len(array), -1)


def _check_numeric(columns: Table) -> None:
    """Raise for the first column that is no number; the message names the others, too."""
    wrong = [name for name, array in columns.items() if array.dtype.kind not in "biuf"]
    if not wrong:
        return
    name, array = wrong[0], columns[wrong[0]]
    also = f" (also {', '.join(map(repr, wrong[1:6]))})" if len(wrong) > 1 else ""
    leave = " ".join(f"--ignore {shell_word(n)}" for n in wrong[:6])
    if array.dtype.kind not in "OSU":
        raise DataError(
            f"column {name!r} holds {array.dtype} ({flat(array)[0, 0]}), not numbers{also}: "
            f"convert it, dates to days for instance, or leave it out with {leave}"
        )
    rows = flat(array)[:, 0].tolist()
    first = first_text(rows)
    filled = [v for v in rows if not is_empty(v)]
    kind = "text" if is_text(rows[first]) else type(rows[first]).__name__
    raise DataError(
        f"column {name!r} is {kind}, first in row {row_number(first)}: {short(rows[first])}{also}; "
        f"{remedy(rows[first], filled)}, or leave it out with {leave}"
    )


def first_text(rows: Sequence[Any]) -> int:
    """Return the index of the first cell that is neither a number nor empty; 0 for none."""
    return next((i for i, v in enumerate(rows) if not (_is_number(v) or is_empty(v))), 0)


def is_empty(value: Any) -> bool:
    """Return whether a cell is missing: empty, or NaN."""
    return value is None or value == "" or value != value


def is_text(value: Any) -> bool:
    """Return whether a cell is text."""
    return isinstance(value, (str, bytes))


def shell_word(name: str) -> str:
    """Return a name as a shell takes it."""
    return name if re.fullmatch(r"[\w.-]+", name) else repr(name)


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


def refuse(wrong: np.ndarray, values: np.ndarray, rule: str, advice: str = "") -> None:
    """Raise if any of `values` is `wrong`, naming the rows; the message ends with `advice`."""
    if wrong.any():
        raise DataError(f"{rule}, not {values[wrong][0]} ({rows_of(wrong)}){advice}")


def rows_of(mask: np.ndarray) -> str:
    """Return the numbers of the rows where a mask holds, the first five."""
    rows = [row_number(i) for i in np.flatnonzero(flat(mask).any(axis=1)).tolist()]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"


def row_number(index: int) -> int:
    """Return the number by which messages call a row, counted with those that are left out."""
    kept = _kept.get()
    return (index if kept is None else int(kept[index])) + 1


@contextmanager
def counting(kept: np.ndarray | None) -> Iterator[None]:
    """Let messages count rows in the file, of which only those of the indices `kept` are left."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def missing(table: Mapping[str, np.ndarray]) -> np.ndarray:
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
