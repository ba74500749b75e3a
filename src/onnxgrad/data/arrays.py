"""Arrays from what users pass, in the shape that an input declares."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from onnxgrad.errors import PrintableError, printable
from onnxgrad.graph.shapes import Dims
from onnxgrad.runtime.values import to_numpy


def to_numbers(name: str, given: Any) -> np.ndarray:
    """Return `given` as an array of numbers; Python objects that are numbers are converted.

    Raises:
        ValueError: it is sparse, has masked values, or holds something else than real numbers.
    """
    if hasattr(given, "toarray"):
        raise ValueError(f"{name!r} is sparse, which is not supported: pass its .toarray()")
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise ValueError(f"{name!r} has masked values: fill them, or drop their rows")
    array = to_numpy(given)
    if array.dtype == object and array.ndim:  # a table with columns of several dtypes, for one
        array = _unboxed(name, array)
    if array.dtype.kind in "OSUMmc" or array.dtype.names:  # names: of a structured array
        kind = type(given).__name__ if array.dtype == object else array.dtype
        raise ValueError(f"{name!r} must hold numbers, not {kind}")
    return array


def _unboxed(name: str, array: np.ndarray) -> np.ndarray:
    try:
        made = np.array(array.tolist())
    except ValueError:  # of lists that differ in length
        made = array
    if made.dtype.kind not in "biuf":
        for row, values in enumerate(array.reshape(len(array), -1)):
            for value in values:
                if not isinstance(value, (int, float, np.number, np.bool_)):
                    shown = reprlib.repr(value)
                    raise ValueError(f"{name!r} must hold numbers, not {shown} as in row {row}")
    return made


"""x"""


class DataError(PrintableError, ValueError):
    """The data cannot be used; the message says which part of it, and what to do."""


def fit_shape(array: np.ndarray, shape: Dims | None, what: str, reshape: bool) -> np.ndarray:
    """Return `array` in the shape that an input declares, whose first axis is that of the rows.

    Args:
        array: with a first axis of rows.
        shape: the declared one; None fits all.
        what: has it, in the message.
        reshape: the values of a row, those of columns, take any shape that holds as many. If not,
            a last axis of length one may be added or left out.

    Raises:
        DataError: it does not fit.
    """
    if shape is None:
        return array
    lengths = [d if isinstance(d, int) and d > 0 else None for d in shape[1:]]
    one_less = [array[..., 0]] if array.shape[-1] == 1 else []
    for candidate in [array] if reshape else [array, array[..., None], *one_less]:
        pairs = zip(lengths, candidate.shape[1:], strict=False)
        if candidate.ndim == len(shape) and all(d in (None, n) for d, n in pairs):
            return candidate
    wanted = ", ".join(["rows", *map(printable, shape[1:])])
    if not reshape or not shape:
        raise DataError(f"{what} must have shape ({wanted}), not {array.shape}")
    count, least = math.prod(array.shape[1:]), math.prod(d for d in lengths if d)
    free = lengths.count(None)
    if free > 1 or (count % least if free else count != least):
        multiple = "a multiple of " * bool(free)
        raise DataError(
            f"{what} takes {multiple}{least} values a row (shape ({wanted})); "
            f"the data has {count} (shape {array.shape})"
        )
    return array.reshape(len(array), *(-1 if d is None else d for d in lengths))
