"""The data that one input of a model accepts, and the check of the data that users pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.data.arrays import DataError, fit_shape, shape_mismatch, to_numbers
from onnxgrad.data.cells import Cells
from onnxgrad.data.class_numbers import labels_outside, remedy_outside
from onnxgrad.data.columns import Part, column_names, is_table, stack_columns
from onnxgrad.data.indices import Table
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import named
from onnxgrad.operators.shapes import Dims, dims

# (mask of wrong values, what must be or is wrong, others than that, remedy) raises if any is
Refuse = Callable[..., None]
_FEW = 1 << 12  # numbers of which an array of answers is faster than their extremes


@dataclass(frozen=True)
class Field:
    """The data that one input of a model accepts.

    - `name`, `dtype` and `shape`: of the input, as declared; `is_label`: whether it takes labels.
    - `classes`: number of classes of a label; `ignored`: a class index that is allowed as well.
    - `allowed`: the `LabelBounds` of a loss.
    - `tables`: the tables that the input indexes.
    - `is_weight`: whether it takes the weights of rows, of 0 or more.
    - `ignores_nan`: whether NaN stands for no label; None where no option can say so.
    """

    name: str
    dtype: np.dtype
    shape: Dims | None
    classes: int | str | None = None  # their number, or the symbol of that dimension
    ignored: int | None = None
    allowed: Any = None
    tables: tuple[Table, ...] = ()
    ignores_nan: bool | None = None
    is_label: bool = False
    is_weight: bool = False

    @classmethod
    def of(cls, x: ir.Value) -> Field:
        """Return what an input of a graph accepts, as it is declared."""
        return cls(str(x.name), (x.dtype or ir.DataType.FLOAT).numpy(), dims(x))

    def check(self, data: Any, axis: int | None = 0, whole: bool = False) -> np.ndarray:
        """Return `data` as the array for the input; the columns of a table are reshaped.

        Args:
            data: array-like, or a table, whose rows are on axis 0.
            axis: of the rows, None if there are none; messages name rows, or else elements.
            whole: `data` is one batch: the shape must be the declared one, that of `axis` included.

        Raises:
            ValueError: the data hold text, NaN, infinity or numbers that the dtype of the input
                cannot represent, labels outside of the classes, or have another shape; the message
                names rows.
        """
        array = self.numbers(data)
        if axis == 0 and not whole:
            if array.ndim == 0:
                raise ValueError(f"{self.name!r} must have one entry per row, not a single number")
            if len(array) == 0:
                raise ValueError(f"{self.name!r} is empty: it has no row")
        try:
            if axis == 0 and not whole:
                array = fit_shape(array, self.shape, repr(self.name), reshape=False)
            else:
                array = self._exact(array, None if whole else axis)
        except DataError as e:
            raise DataError(f"{e}{self._remedy(array)}") from None

        def refuse(bad: np.ndarray, rule: str, others: str = "", remedy: str = "") -> None:
            _refuse(bad, rule + others, axis, remedy)

        what = named("sample_weight") if self.is_weight else repr(self.name)
        return self._values(array, what, refuse)

    def _remedy(self, array: np.ndarray) -> str:
        """Return the end of a message: which loss takes labels that are one number for each row."""
        several = self.is_label and self.classes is None and len(self.shape or ()) > array.ndim
        if not several or array.dtype.kind == "O" or (array % 1).any():
            return ""
        return "; numbers of classes take a loss of classes, as 'cross_entropy'"

    def _values(self, array: np.ndarray, what: str, refuse: Refuse) -> np.ndarray:
        """Return numbers in the dtype of the input; `refuse` raises for those that it lacks."""
        values = array
        if array.dtype != self.dtype:
            with np.errstate(all="ignore"):
                values = array.astype(self.dtype)
        if self.dtype.kind in "iub":
            if values is not array:
                refuse(values != array, f"{what} must hold {self.dtype}", "; other values")
        elif not _all_finite(values):
            bad, nan = ~np.isfinite(values), np.isnan(values)
            remedy = ""
            if self.ignores_nan:
                bad &= ~nan
            elif self.ignores_nan is not None and nan.any():
                remedy = "; the option ignore_nan=True of the loss leaves out labels that are NaN"
            refuse(bad, f"{what}, as {self.dtype}, holds NaN or infinity", "", remedy)
        if self.is_weight:
            refuse(values < 0, f"{what} must hold numbers of 0 or more", "; others")
        if self.classes is not None:
            count = self.classes if isinstance(self.classes, int) else None
            wrong = labels_outside(values, count)
            if self.ignored is not None:
                wrong &= values != self.ignored
            where, remedy = "below 0", ""
            if count is not None:
                where = f"outside 0..{count - 1}"
                remedy = f"; {remedy_outside(values, count)}" if wrong.any() else ""
            refuse(wrong, f"{what} holds labels {where}", "", remedy)
        if self.allowed is not None:
            rule = f"{what} must hold labels {self.allowed.text}"
            allowed = self.allowed.test(values)
            refuse(~(allowed | np.isnan(values) if self.ignores_nan else allowed), rule, "; others")
        return values

    def of_cells(self, cells: Cells) -> np.ndarray:
        """Return columns of a file as the array for the input; texts are left as they are."""
        if self.dtype == object:
            return fit_shape(cells.texts(), self.shape, cells.title, reshape=True)
        array = cells.side_by_side(nan=bool(self.ignores_nan))

        def refuse(bad: np.ndarray, rule: str, others: str = "", remedy: str = "") -> None:
            cells.refuse(bad, array, f"{rule}, not" if others else f"{rule}:", remedy)

        values = self._values(array, cells.title, refuse)
        return fit_shape(values, self.shape, cells.title, True, cells.columns)

    def numbers(self, data: Any) -> np.ndarray:
        """Return `data` as an array of numbers, that of a table in the shape of the input."""
        if self.dtype == object:
            raise ValueError(
                f"the input {self.name!r} holds strings, and batches are numbers: cut the model "
                "behind what it computes from them by onnxgrad.graph.select_model_inputs_outputs, "
                "and train the rest; onnxgrad.graph.replace_initializers_into_onnx writes its "
                "weights into the whole model"
            )
        if type(data) is np.ndarray and data.dtype == self.dtype:
            return data
        if (cells := self.cells(data)) is not None:
            return self.of_cells(cells)
        if not is_table(data):
            return to_numbers(self.name, data)
        values, names = stack_columns(self.name, data), column_names(data)
        return fit_shape(values, self.shape, repr(self.name), True, names)

    def cells(self, data: Any) -> Cells | None:
        """Return the columns of a file in `data`; None if it is none, or a part of none."""
        if type(data) is np.ndarray:
            return None
        table = data.table if isinstance(data, Part) else data
        if not isinstance(table, FileTable):
            return None
        title = f"input {self.name!r}"
        if self.is_label:
            title = f"{named('label')} {', '.join(map(repr, data.columns))}"
        return table.cells(data.columns, title)

    def _exact(self, array: np.ndarray, axis: int | None) -> np.ndarray:
        """Return `array` in the declared shape, up to the length of `axis` and a last one of 1."""
        if self.shape is None:
            return array
        shape = [None if isinstance(d, int) and d <= 0 else d for d in self.shape]
        if axis is not None and -len(shape) <= axis < len(shape):
            shape[axis] = None
        if not (wrong := shape_mismatch(array.shape, shape)):
            return array
        if shape[-1:] == [1] and array.ndim == len(shape) - 1:
            array = array[..., None]
        elif array.shape[-1:] == (1,) and array.ndim == len(shape) + 1:
            array = array[..., 0]
        if shape_mismatch(array.shape, shape):
            raise DataError(f"{self.name!r} {wrong}")
        return array

    def check_indices(
        self, arrays: Mapping[str, np.ndarray], axis: int | None = 0, cells: Cells | None = None
    ) -> None:
        """Raise if the array of this input holds indices outside of a table.

        `arrays` are those of all inputs, `cells` the columns of a file that its array was made of.
        """
        for table in self.tables:
            array = arrays[self.name]
            outside = table.outside(array, arrays)
            if cells is not None:
                cells.refuse(outside, array, f"{cells.title} must hold {table}, not")
            _refuse(outside, f"{self.name!r} must hold {table}; others", axis)


def _all_finite(values: np.ndarray) -> bool:
    """Return whether all numbers are finite; of many, without an array of as many answers."""
    if values.size <= _FEW:
        return bool(np.isfinite(values).all())
    with np.errstate(all="ignore"):
        return bool(np.isfinite([values.min(), values.max()]).all())


def _refuse(bad: np.ndarray, what: str, axis: int | None, remedy: str = "") -> None:
    """Raise if any element of the mask is true, naming the rows along `axis`, or the elements."""
    if not bad.any():
        return
    if axis is None:
        where, of = [str(tuple(i)) for i in np.argwhere(bad).tolist()], f"{bad.size} elements"
    else:
        bad = np.moveaxis(bad, axis, 0)
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        where, of = list(map(str, rows)), f"{len(bad)} rows"
    listed = ", ".join(where[:10]) + (", ..." if len(where) > 10 else "")
    raise ValueError(f"{what} in {len(where)} of {of}: {listed}{remedy}")
