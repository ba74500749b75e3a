"""`Field`: what one input of a model accepts, and the check of data that users pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.data.arrays import DataError, fit_shape, shape_mismatch, to_numbers
from onnxgrad.data.cells import Cells
from onnxgrad.data.class_numbers import advice_for_labels_outside, mask_labels_outside
from onnxgrad.data.columns import ColumnSelection, column_names, is_table, stack_columns
from onnxgrad.data.indices import IndexedTable
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import argument, join_first, named
from onnxgrad.operators.shapes import Dims, dims

# (mask of wrong values, rule, words for wrong values, remedy) -> None; raises if the mask is true
Refuse = Callable[..., None]
_FEW = 1 << 12  # most values for which `isfinite` of all is faster than of minimum and maximum


@dataclass(frozen=True)
class Field:
    """The dtype, shape and values that one input of a model accepts.

    - `name`, `dtype` and `shape`: as the graph declares; `is_label`: whether it takes labels.
    - `classes`: number of classes of a label; `ignored`: a number that stands for no label.
    - `allowed`: the `LabelBounds` of a loss, or None.
    - `tables`: the tables into which the input holds indices.
    - `is_weight`: whether it takes sample weights.
    - `negative_weights`: whether sample weights may be negative; otherwise they are 0 or more.
    - `ignores_nan`: whether NaN stands for no label; None where no option can say so.
    """

    name: str
    dtype: np.dtype
    shape: Dims | None
    classes: int | str | None = None  # number, or name of the symbolic dimension
    ignored: int | None = None
    allowed: Any = None
    tables: tuple[IndexedTable, ...] = ()
    ignores_nan: bool | None = None
    is_label: bool = False
    is_weight: bool = False
    negative_weights: bool = False

    @classmethod
    def from_input(cls, x: ir.Value) -> Field:
        """Return the `Field` of a graph's input, with the declared dtype and shape."""
        return cls(str(x.name), (x.dtype or ir.DataType.FLOAT).numpy(), dims(x))

    def check(self, data: Any, axis: int | None = 0, whole: bool = False) -> np.ndarray:
        """Return `data` converted to the dtype and shape of the input; raise `ValueError` if values
        or shape are not accepted.

        Args:
            data: array-like, or a table, whose rows are on axis 0.
            axis: the axis of rows, None if there is none; messages name rows, or else elements.
            whole: whether `data` is one batch, whose number of rows must be as declared, too.

        Raises:
            ValueError: the data hold text, NaN, infinity or numbers that the dtype of the input
                cannot represent, labels outside of the classes, or have another shape; the message
                names rows.
        """
        array = self.numbers(data)
        if axis == 0 and not whole:
            if array.ndim == 0:
                raise ValueError(f"{self.name!r} is one number: pass an array with a value per row")
            if len(array) == 0:
                raise ValueError(f"{self.name!r} has no rows: pass at least one row")
        try:
            if axis == 0 and not whole:
                array = fit_shape(array, self.shape, repr(self.name), reshape=False)
            else:
                array = self._fit_declared_shape(array, None if whole else axis)
        except DataError as e:
            # the user passed one label for each row, and the loss takes a label for each output
            several = self.is_label and self.classes is None and len(self.shape or ()) > array.ndim
            whole_numbers = several and array.dtype.kind != "O" and not (array % 1).any()
            remedy = "; numbers of classes need a loss of classes, such as 'cross_entropy'"
            raise DataError(f"{e}{remedy * whole_numbers}") from None

        def refuse(bad: np.ndarray, rule: str, others: str = "", remedy: str = "") -> None:
            _raise_for_bad_rows(bad, rule + others, axis, remedy)

        what = named("sample_weight") if self.is_weight else repr(self.name)
        return self._convert_to_input_dtype(array, what, refuse)

    def _convert_to_input_dtype(self, array: np.ndarray, what: str, refuse: Refuse) -> np.ndarray:
        """Return an array converted to the dtype of the input; call `refuse` with a mask of values
        that the input does not accept.
        """
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
                remedy = "; the option ignore_nan=True of the loss ignores labels that are NaN"
            refuse(bad, f"{what}, as {self.dtype}, holds NaN or infinity", "", remedy)
        if self.is_weight and not self.negative_weights:
            rule = f"{what} must hold numbers of 0 or more, as the loss may be divided by their sum"
            remedy = f"; {argument('loss_options', {'weighted_mean': False})} allows them"
            refuse(values < 0, rule, "; other values", remedy)
        if self.classes is not None:
            count = self.classes if isinstance(self.classes, int) else None
            wrong = mask_labels_outside(values, count)
            if self.ignored is not None:
                wrong &= values != self.ignored
            where, remedy = "below 0", ""
            if count is not None:
                where = f"outside 0..{count - 1}"
                remedy = f"; {advice_for_labels_outside(values, count)}" if wrong.any() else ""
            refuse(wrong, f"{what} holds labels {where}", "", remedy)
        if self.allowed is not None:
            fits = self.allowed.test(values)
            fits = fits | np.isnan(values) if self.ignores_nan else fits
            refuse(~fits, f"{what} must hold labels {self.allowed.text}", "; other values")
        return values

    def accepts_values(self, array: np.ndarray) -> bool:
        """Return whether the input accepts all values of an array of its dtype, of any shape."""
        try:
            self._convert_to_input_dtype(array, "", _refuse_any)
        except ValueError:
            return False
        return True

    def convert_cells(self, cells: Cells) -> np.ndarray:
        """Return columns of a file as the array for the input: numbers, or texts if the input takes
        strings.
        """
        if self.dtype == object:
            return fit_shape(cells.texts(), self.shape, cells.title, reshape=True)
        array = cells.number_array(nan=bool(self.ignores_nan))

        def refuse(bad: np.ndarray, rule: str, others: str = "", remedy: str = "") -> None:
            cells.refuse_values(bad, array, f"{rule}, not" if others else f"{rule}:", remedy)

        values = self._convert_to_input_dtype(array, cells.title, refuse)
        return fit_shape(values, self.shape, cells.title, True, cells.columns)

    def numbers(self, data: Any) -> np.ndarray:
        """Return data as an array of numbers; the columns of a table are reshaped to the input's
        declared shape.
        """
        if self.dtype == object:
            raise ValueError(
                f"the input {self.name!r} holds strings, and batches are numbers: cut the model "
                "behind the nodes that turn strings into numbers with "
                "onnxgrad.graph.select_model_inputs_outputs, and train the rest; "
                "onnxgrad.graph.replace_initializers_into_onnx writes the trained weights into the "
                "whole model"
            )
        if type(data) is np.ndarray and data.dtype == self.dtype:
            return data
        if (cells := self.cells(data)) is not None:
            return self.convert_cells(cells)
        if not is_table(data):
            return to_numbers(self.name, data)
        values, names = stack_columns(self.name, data), column_names(data)
        return fit_shape(values, self.shape, repr(self.name), True, names)

    def cells(self, data: Any) -> Cells | None:
        """Return columns of a `FileTable` as `Cells`; None if `data` were not read from a file."""
        if type(data) is np.ndarray:
            return None
        table = data.table if isinstance(data, ColumnSelection) else data
        if not isinstance(table, FileTable):
            return None
        title = f"input {self.name!r}"
        if self.is_label:
            title = f"{named('label')} {', '.join(map(repr, data.columns))}"
        return table.cells(data.columns, title)

    def _fit_declared_shape(self, array: np.ndarray, axis: int | None) -> np.ndarray:
        """Return `array` in the declared shape, with a last axis of length 1 added or removed.

        The length of `axis` is not checked.
        """
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
        """Raise `ValueError` if the array of this input holds an index that is out of range of a
        tensor in the model.

        Args:
            arrays: the arrays of all inputs, by name.
            axis: the axis of rows; None if there is none.
            cells: the columns of the file from which the array was made.
        """
        for table in self.tables:
            array = arrays[self.name]
            outside = table.mask_outside(array, arrays)
            if cells is not None:
                cells.refuse_values(outside, array, f"{cells.title} must hold {table}, not")
            _raise_for_bad_rows(outside, f"{self.name!r} must hold {table}; other values", axis)


def _refuse_any(bad: np.ndarray, *_texts: str) -> None:
    """Raise `ValueError` if any value of a mask is true."""
    if bad.any():
        raise ValueError


def _all_finite(values: np.ndarray) -> bool:
    """Return whether all numbers of an array are finite, by minimum and maximum if the array is
    large.
    """
    if values.size <= _FEW:
        return bool(np.isfinite(values).all())
    with np.errstate(all="ignore"):
        return bool(np.isfinite([values.min(), values.max()]).all())


def _raise_for_bad_rows(bad: np.ndarray, what: str, axis: int | None, remedy: str = "") -> None:
    """Raise `ValueError` that lists the rows (or elements, if `axis` is None) where the mask `bad`
    is true.
    """
    if not bad.any():
        return
    if axis is None:
        where, of = [str(tuple(i)) for i in np.argwhere(bad).tolist()], f"{bad.size} elements"
    else:
        bad = np.moveaxis(bad, axis, 0)
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        where, of = list(map(str, rows)), f"{len(bad)} rows"
    raise ValueError(f"{what} in {len(where)} of {of}: {join_first(where, 10)}{remedy}")
