"""The data that one input of a model accepts, and the check of the data that users pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.data.arrays import fit_shape, to_numbers
from onnxgrad.data.columns import is_table, stacked
from onnxgrad.data.indices import Table
from onnxgrad.graph.shapes import Dims


@dataclass(frozen=True)
class Field:
    """The data that one input of a model accepts.

    - `name`, `dtype` and `shape`: of the input, as declared.
    - `classes`: number of classes of a label; `ignored`: a class index that is allowed as well.
    - `allowed`: other labels that a loss allows, in words, and the test for them.
    - `tables`: the tables that the input indexes.
    """

    name: str
    dtype: np.dtype
    shape: Dims | None
    classes: int | str | None = None  # their number, or the symbol of that dimension
    ignored: int | None = None
    allowed: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None  # a `LabelBounds`
    tables: tuple[Table, ...] = ()

    def check(self, data: Any) -> np.ndarray:
        """Return `data` as the array for the input; the columns of a table are reshaped.

        Raises:
            ValueError: the data hold text, NaN, infinity or numbers that the dtype of the input
                cannot represent, labels outside of the classes, or have another shape; the message
                names rows.
        """
        table = is_table(data)
        array = stacked(self.name, data) if table else to_numbers(self.name, data)
        if array.ndim == 0:
            raise ValueError(f"{self.name!r} must have one entry per row, not a single number")
        if len(array) == 0:
            raise ValueError(f"{self.name!r} is empty: it has no row")
        array = fit_shape(array, self.shape, repr(self.name), reshape=table)
        with np.errstate(all="ignore"):
            values = array.astype(self.dtype, copy=False)
        if self.dtype.kind in "iub":
            _refuse(values != array, f"{self.name!r} must hold {self.dtype}; other values")
        else:
            _refuse(~np.isfinite(values), f"{self.name!r}, as {self.dtype}, holds NaN or infinity")
        if self.classes is not None:
            last = self.classes - 1 if isinstance(self.classes, int) else None
            outside = (values < 0) if last is None else (values < 0) | (values > last)
            if self.ignored is not None:
                outside &= values != self.ignored
            where = "below 0" if last is None else f"outside 0..{last}"
            _refuse(outside, f"{self.name!r} holds labels {where}")
        if self.allowed is not None:
            text, test = self.allowed
            _refuse(~test(values), f"{self.name!r} must hold labels {text}; others")
        return values

    def check_indices(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise if the array of this input holds indices outside of a table.

        `arrays` has the arrays of all inputs, by name.
        """
        for table in self.tables:
            outside = table.outside(arrays[self.name], arrays)
            _refuse(outside, f"{self.name!r} must hold {table}; others")


def _refuse(bad: np.ndarray, what: str) -> None:
    """Raise if any element of the mask is true, naming the rows."""
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    if rows.size:
        listed = ", ".join(map(str, rows[:10])) + (", ..." if rows.size > 10 else "")
        raise ValueError(f"{what} in {rows.size} of {len(bad)} rows: {listed}")
