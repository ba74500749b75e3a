"""What one data input of a model takes, and the check of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.data.arrays import fit_shape, to_numbers
from onnxgrad.data.columns import is_table, stacked
from onnxgrad.data.indices import Table
from onnxgrad.graph.shapes import Dims

if TYPE_CHECKING:
    pass  # it imports losses, which check data


@dataclass(frozen=True)
class Field:
    """What one data input of the model takes."""

    name: str
    dtype: np.dtype
    shape: Dims | None
    classes: int | str | None = None  # their number, or the symbol of that dimension
    ignored: int | None = None
    allowed: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None  # a `LabelBounds`
    tables: tuple[Table, ...] = ()  # into which it holds indices

    def check(self, given: Any) -> np.ndarray:
        """Return `given` as the array that the input takes; columns are brought into its shape.

        Raises:
            ValueError: it holds text, NaN, infinity or numbers that the input's type cannot hold,
                labels out of the class range, or has another shape; the message names rows.
        """
        table = is_table(given)
        array = stacked(self.name, given) if table else to_numbers(self.name, given)
        if array.ndim == 0:
            raise ValueError(f"{self.name!r} must have one entry per row, not a single number")
        if len(array) == 0:
            raise ValueError(f"{self.name!r} is empty: it has no row")
        array = fit_shape(array, self.shape, repr(self.name), reshape=table)
        with np.errstate(all="ignore"):
            made = array.astype(self.dtype, copy=False)
        if self.dtype.kind in "iub":
            _refuse(made != array, f"{self.name!r} must hold {self.dtype}; other values")
        else:
            _refuse(~np.isfinite(made), f"{self.name!r}, as {self.dtype}, holds NaN or infinity")
        if self.classes is not None:
            last = self.classes - 1 if isinstance(self.classes, int) else None
            outside = (made < 0) if last is None else (made < 0) | (made > last)
            if self.ignored is not None:
                outside &= made != self.ignored
            where = "below 0" if last is None else f"outside 0..{last}"
            _refuse(outside, f"{self.name!r} holds labels {where}")
        if self.allowed is not None:
            text, test = self.allowed
            _refuse(~test(made), f"{self.name!r} must hold labels {text}; others")
        return made

    def check_indices(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise if what is fed, one of the `arrays`, holds indices that a table lacks."""
        for table in self.tables:
            wrong = table.outside(arrays[self.name], arrays)
            _refuse(wrong, f"{self.name!r} must hold {table}; others")


def _refuse(bad: np.ndarray, what: str) -> None:
    """Raise if any element is `bad`, naming the rows."""
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    if rows.size:
        listed = ", ".join(map(str, rows[:10])) + (", ..." if rows.size > 10 else "")
        raise ValueError(f"{what} in {rows.size} of {len(bad)} rows: {listed}")
