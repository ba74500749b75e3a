"""Conversion of user data to arrays of numbers, in the shape that an input declares."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from onnxgrad.errors import PrintableError, argument, join_first, printable
from onnxgrad.operators.shapes import Dim, Dims
from onnxgrad.runtime.values import to_numpy

_LISTED = 30  # most columns in a message


class DataError(PrintableError, ValueError):
    """Data cannot be used; the message names the wrong argument, column or row, and the remedy."""


def to_numbers(name: str, values: Any) -> np.ndarray:
    """Return `values` as an array of numbers; `name` is the name of the input in messages."""
    if hasattr(values, "toarray"):
        raise ValueError(f"{name!r} is sparse, which is not supported: pass its .toarray()")
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(f"{name!r} has masked values: fill them, or drop their rows")
    try:
        array = column_array(name, values) if is_arrow(values) else to_numpy(values)
    except ValueError as e:
        if "inhomogeneous" not in str(e):
            raise
        raise ValueError(
            f"the rows of {name!r} differ in shape: pad them, as by_length does, or if they are "
            "batches, pass them without y"
        ) from None
    if array.dtype == object and array.ndim:  # such as a table with columns of several dtypes
        array = _object_array_to_numbers(name, array)
    if array.dtype.kind in "OSUMmc" or array.dtype.names:  # names: of a structured array
        kind = type(values).__name__ if array.dtype == object else array.dtype
        text = ": pass the index of each class or category" * (array.dtype.kind in "SU")
        raise ValueError(f"{name!r} must hold numbers, not {kind}{text}")
    return array


def _object_array_to_numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Return an object array of Python numbers, or of lists of numbers, in a numeric dtype."""
    try:
        numbers = np.array(_nested_lists(array))
    except ValueError:  # lists that differ in length
        numbers = array
    if numbers.dtype.kind not in "biuf":
        for row, values in enumerate(array.reshape(len(array), -1)):
            for value in values:
                if not isinstance(value, (int, float, np.number, np.bool_)):
                    shown = reprlib.repr(value)
                    raise ValueError(
                        f"{name!r} must hold numbers, not {shown} as in row {row}: convert it"
                    )
    return numbers


def _nested_lists(value: Any) -> Any:
    """Return nested object arrays as nested lists, and `Decimal` numbers as floats."""
    if isinstance(value, np.ndarray):
        return [_nested_lists(v) for v in value] if value.dtype == object else value.tolist()
    return float(value) if isinstance(value, Decimal) else value


def is_arrow(values: Any) -> bool:
    """Return whether `values` is an array of pyarrow, such as a column of a table."""
    return type(values).__module__.startswith("pyarrow") and hasattr(values, "null_count")


def column_array(name: str, column: Any) -> np.ndarray:
    """Return a column of pyarrow as an array; lists become axes, missing numbers become NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds, shape, order = pa.types, [len(column)], [0]
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    while True:
        kind = column.type
        if isinstance(kind, pa.FixedShapeTensorType):
            column, _ = _list_elements_and_length(name, column.storage)
            order += [len(shape) + i for i in kind.permutation or range(len(kind.shape))]
            shape += kind.shape
        elif hasattr(kind, "value_field"):  # of every kind of lists
            column, length = _list_elements_and_length(name, column)
            order.append(len(shape))
            shape.append(length)
        elif isinstance(kind, pa.BaseExtensionType):
            column = column.storage
        elif kinds.is_dictionary(kind):
            column = column.dictionary.take(column.indices)
        elif kinds.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        else:
            break
    if kinds.is_boolean(kind):
        column = column.cast(pa.uint8())
    if kinds.is_null(kind) or kinds.is_decimal(kind):
        column = column.cast(pa.float64())
    return column.to_numpy(zero_copy_only=False).reshape(shape).transpose(order)


def _list_elements_and_length(name: str, column: Any) -> tuple[Any, int]:
    """Return the elements of a column of lists, and the length that all lists have."""
    import pyarrow.compute as pc

    if column.null_count:
        raise DataError(f"column {name!r} has missing lists (null): fill them, or drop their rows")
    sizes = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(sizes) > 1:
        raise DataError(ragged_message(name))
    return pc.list_flatten(column), sizes[0] if sizes else 0


def ragged_message(name: str) -> str:
    """Return the error message for a column whose lists differ in length."""
    return f"the lists of column {name!r} differ in length: pad or truncate them"


def shape_mismatch(shape: Sequence[int], declared: Sequence[Dim] | None) -> str:
    """Return how a shape differs from the declared shape, as the end of a message; "" if the shape
    fits.

    A symbolic or unknown dimension fits any length; if `declared` is None, any shape fits.
    The result is the end of a message: "must have shape (N, 3), not (7, 2): axis 1 differs".
    """
    if declared is None:
        return ""
    if len(shape) != len(declared):
        reason = f"its rank is {len(shape)}, not {len(declared)}"
    else:
        pairs = enumerate(zip(shape, declared, strict=True))
        axes = [axis for axis, (n, d) in pairs if isinstance(d, int) and n != d]
        if not axes:
            return ""
        reason = f"axis {axes[0]} differs" if len(axes) == 1 else f"axes {axes} differ"
    return f"must have shape {shape_text(declared)}, not {shape_text(shape)}: {reason}"


def shape_text(shape: Sequence[Dim]) -> str:
    """Return a shape as text, "?" for an unknown length."""
    lengths = ["?" if d is None else printable(d) for d in shape]
    return f"({lengths[0]},)" if len(lengths) == 1 else f"({', '.join(lengths)})"


def fit_shape(
    array: np.ndarray,
    shape: Dims | None,
    what: str,
    reshape: bool,
    columns: Sequence[str] | None = None,
) -> np.ndarray:
    """Return `array` in the shape that an input declares; rows are on its first axis.

    Args:
        array: of rank 1 or more.
        shape: the declared shape, whose first length is not checked; None fits any array.
        what: the subject of the message, such as the quoted name of the input.
        reshape: whether the values of a row, which come from columns, get any declared shape of as
            many elements. If false, only a last axis of length one may be added or removed.
        columns: the names of the columns that hold the values of a row.

    Raises:
        DataError: the shapes do not fit.
    """
    if shape is None:
        return array
    # a declared length below one counts as unknown
    lengths = [None if isinstance(d, int) and d <= 0 else d for d in shape[1:]]
    declared = ("rows", *lengths) if shape else ()
    if not shape_mismatch(array.shape, declared):
        return array
    one_less = [array[..., 0]] if array.shape[-1] == 1 else []
    for candidate in [] if reshape else [array[..., None], *one_less]:
        if not shape_mismatch(candidate.shape, declared):
            return candidate
    if not reshape or not shape:
        raise DataError(f"{what} {shape_mismatch(array.shape, declared)}")
    fixed = [d if isinstance(d, int) else -1 for d in lengths]
    count, least = math.prod(array.shape[1:]), math.prod(d for d in fixed if d > 0)
    free = fixed.count(-1)
    if free > 1 or (count % least if free else count != least):
        multiple, chosen = "a multiple of " * bool(free), ""
        if not free and columns is not None and len(columns) > 1 and count > least:
            chosen = f"; {_advice_to_leave_out_columns(columns, len(columns) - count + least)}"
        raise DataError(
            f"{what} takes {multiple}{least} values a row (shape {shape_text(declared)}); "
            f"the data has {count} (shape {shape_text(array.shape)}){chosen}"
        )
    return array.reshape(len(array), *fixed)


def _advice_to_leave_out_columns(columns: Sequence[str], count: int) -> str:
    """Return the advice to leave out columns until `count` are left, as the end of an error
    message.
    """
    extra, option = len(columns) - count if count > 0 else "some", argument("ignore")
    how = f" with {option}, or name others with {argument('columns')}" * option.startswith("--")
    return f"leave out {extra} of its columns{how}: {join_first(columns, _LISTED)}"
