"""Labels of classes, such as texts, as their numbers: the places in the output of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError, column_array, is_arrow
from onnxgrad.data.cells import is_text
from onnxgrad.data.columns import Part, column_names
from onnxgrad.errors import argument, first_number, named

_SHOWN = 12


def class_numbers(
    labels: Any,
    classes: Sequence[Any],
    name: str = "y",
    ignored: int | None = None,
    ignores_nan: bool = False,
) -> Any:
    """Return the numbers of labels that are texts; numbers are returned as they are.

    Where all `classes` are whole numbers, and others than their places 0, 1, 2, ..., labels are
    always some of these: 5 is the second of 3, 5, 8.

    Args:
        labels: an array, a list, a column or a table of columns.
        classes: all classes in the order of the model's output; empty: they are not known.
        name: what messages call the labels.
        ignored: the number of a label that does not count, which is none of the classes.
        ignores_nan: whether labels that are NaN do not count.

    Raises:
        DataError: texts without classes, or a label that is none of these.
    """
    array = _labels(labels)
    if array is None:
        return labels
    if not array.size or (array.dtype.kind != "U" and not are_labels(classes)):
        return labels
    if not classes:
        values = array.ravel().tolist()
        raise DataError(
            f"{name!r} is text, first {values[0]!r}: if these are names of classes, pass them in "
            f"the order of the model's output, as {argument('classes', _some(values))}, or numbers"
        )
    numbers, wrong = numbers_of(array, classes, ignored, ignores_nan)
    if wrong.any():
        at = int(wrong.argmax())
        row = at // max(1, array[:1].size) + first_number()
        raise DataError(
            f"{name!r} has the label {array[wrong].tolist()[0]!r} in row {row}, and the classes "
            f"are {first_names(classes)}: pass all in the order of the model's output, with "
            f"{argument('classes')}"
        )
    return numbers


def numbers_of(
    labels: np.ndarray, classes: Sequence[Any], ignored: int | None = None, nan: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of labels, and which of them are none of the classes.

    A label that is the number `ignored`, and with `nan` one that is NaN, does not count, and stays.
    """
    index: dict[str, float] = {} if ignored is None else {key(ignored): ignored}
    index |= {str(label): number for number, label in enumerate(classes)}
    own, places = np.unique(labels, return_inverse=True)
    found = [index.get(key(value)) for value in own.tolist()]
    if nan and (own != own).any():
        found = [np.nan if value != value else f for f, value in zip(found, own, strict=True)]
    wrong = np.array([number is None for number in found], bool)[places]
    dtype = np.float64 if np.nan in found else np.int64
    numbers = np.array([0 if number is None else number for number in found], dtype)[places]
    return numbers.reshape(labels.shape), wrong.reshape(labels.shape)


def are_labels(classes: Sequence[Any]) -> bool:
    """Return whether classes are called by whole numbers other than their places."""
    names = [str(label) for label in classes]
    whole = bool(names) and all(name.lstrip("-").isdecimal() for name in names)
    return whole and names != list(map(str, range(len(names))))


def check_count(classes: Sequence[str] | int, labels: np.ndarray, count: int) -> None:
    """Raise `DataError` if a model has another number of classes than data, before it trains.

    Args:
        classes: the names of those of the data, all of which the model must have; or their number,
            which the model may exceed.
        labels: their numbers in the rows, int64.
        count: that of the model.
    """
    names = [] if isinstance(classes, int) else classes
    if len(names) == count or (isinstance(classes, int) and classes <= count):
        return
    listed = f" ({first_names(names)})" if names else ""
    wanted = argument("units", names or classes)
    remedy = f"train a new last layer with {wanted} ({named('replace_head')})"
    if not names and len(np.unique(labels)) <= count:
        remedy = outside(labels, count)
    elif names and len(names) < count:
        remedy += f"; or name all {count} in the order of its output with {argument('classes')}"
    raise DataError(
        f"there are {len(names) or classes} classes{listed}, and the output of the model has "
        f"{count}: {remedy}"
    )


def first_names(names: Sequence[Any]) -> str:
    """Return up to 12 names as text."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def outside(labels: np.ndarray, count: int) -> str:
    """Return what to do about labels that are not among the numbers of `count` classes."""
    own = np.unique(labels)
    remedy = f"{named('replace_head')} gives the model another number of classes"
    if len(own) > count or not (own == np.trunc(own)).all():
        return remedy
    names = argument("classes", _some(own.tolist()))
    return f"if they are names of the classes, pass {names} (all of them); otherwise {remedy}"


def _some(labels: list[Any]) -> list[str]:
    """Return the first of the labels that occur, in order."""
    own = sorted({*labels})
    return [*map(key, own[:_SHOWN]), *["..."] * (len(own) > _SHOWN)]


def key(label: Any) -> str:
    """Return a label as text; 3.0 and 3 are the same."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _labels(labels: Any) -> np.ndarray | None:
    """Return texts or numbers as an array, columns side by side; None for what is neither."""
    names = labels.columns if isinstance(labels, Part) else column_names(labels)
    if names is not None:
        columns = [_labels(labels[name]) for name in names]
        if len(columns) == 1:
            return columns[0]
        arrays = [column for column in columns if column is not None]
        same = len(arrays) == len(columns) and len({array.shape for array in arrays}) == 1
        return np.stack(arrays, axis=1) if same else None
    try:
        array = column_array("y", labels) if is_arrow(labels) else np.asarray(labels)
    except ValueError:  # lists of lists that differ in length
        return None
    if array.dtype.kind in "OS":
        values = array.ravel().tolist()
        if not any(map(is_text, values)):
            array = np.array(values).reshape(array.shape) if _are_numbers(values) else array
        elif _are_numbers([v for v in values if not is_text(v)]):
            texts = [v.decode(errors="replace") if isinstance(v, bytes) else key(v) for v in values]
            array = np.array(texts, str).reshape(array.shape)
    return array if array.dtype.kind in "biufU" else None


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
