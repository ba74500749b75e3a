"""Class indices, in the order of a model's output, for labels such as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError, column_array, is_arrow
from onnxgrad.data.cells import is_text
from onnxgrad.data.columns import ColumnSelection, column_names
from onnxgrad.errors import argument, first_number, join_first, named, unknown

_SHOWN = 12  # most classes in a message


def labels_to_class_indices(
    labels: Any,
    classes: Sequence[Any],
    name: str = "y",
    ignored: int | None = None,
    ignores_nan: bool = False,
) -> Any:
    """Return text labels as class indices; labels that are numbers are returned unchanged.

    Where `classes` are whole numbers other than 0, 1, 2, ..., labels that are numbers are names of
    classes, too: 5 is the second of 3, 5, 8.

    Args:
        labels: an array, a list, a column or a table of columns.
        classes: all classes in the order of the model's output; empty if they are unknown.
        name: the name of the labels in messages.
        ignored: a number that stands for rows without a label, and is none of the classes.
        ignores_nan: whether NaN stands for rows without a label.

    Raises:
        DataError: texts without classes, or a label that is none of the classes.
    """
    array, known = _label_array(labels), ClassNames(classes)
    if array is None:
        return labels
    if not array.size or (array.dtype.kind != "U" and not known.are_other_numbers):
        return labels
    if not classes:
        values = array.ravel().tolist()
        raise DataError(
            f"{name!r} is text, first {values[0]!r}: if these are names of classes, pass them in "
            f"the order of the model's output, as {argument('classes', _smallest_labels(values))}, "
            "or numbers"
        )
    numbers, wrong = known.encode_labels(array, ignored, ignores_nan)
    if wrong.any():
        at = int(wrong.argmax())
        row = at // max(1, array[:1].size) + first_number()
        raise DataError(
            f"{name!r} has the label {array[wrong].tolist()[0]!r} in row {row}, and the classes "
            f"are {first_class_names(classes)}: pass all classes in the order of the model's "
            f"output, with {argument('classes')}"
        )
    return numbers


class ClassNames:
    """The names of a model's classes; the index of a class is its position in the output.

    Names are compared as texts: 3, 3.0 and "3" are one class.
    """

    def __init__(self, classes: Sequence[Any]) -> None:
        self.classes, self.texts = classes, list(map(str, classes))
        self.numbers = {label_text(label): number for number, label in enumerate(classes)}
        self.are_places = self.texts == list(map(str, range(len(self.texts))))

    @property
    def are_other_numbers(self) -> bool:
        """Whether the names of classes are whole numbers other than the class indices."""
        whole = bool(self.texts) and all(name.lstrip("-").isdecimal() for name in self.texts)
        return whole and not self.are_places

    def encode_labels(
        self, labels: np.ndarray, ignored: int | None = None, ignores_nan: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels as class indices, mask of the labels that are not a name of a class).

        The label `ignored`, and with `ignores_nan` NaN, stand for rows without a label: they are
        returned unchanged.
        """
        index: dict[str, float] = {} if ignored is None else {label_text(ignored): ignored}
        index |= self.numbers
        values, places = np.unique(labels, return_inverse=True)
        found = [
            np.nan if ignores_nan and value != value else index.get(label_text(value))
            for value in values.tolist()
        ]
        wrong = np.array([number is None for number in found], bool)[places]
        dtype = np.float64 if np.nan in found else np.int64
        numbers = np.array([0 if number is None else number for number in found], dtype)[places]
        return numbers.reshape(labels.shape), wrong.reshape(labels.shape)


def mask_labels_outside(labels: np.ndarray, count: int | None = None) -> np.ndarray:
    """Return a mask of the labels that are not integers from 0 to `count` - 1.

    The mask is false for NaN.
    """
    wrong = labels < 0
    if count is not None:
        wrong |= labels >= count
    if labels.dtype.kind == "f":
        wrong |= labels % 1 > 0
    return wrong


def check_class_count(names: Sequence[str], labels: np.ndarray, count: int) -> None:
    """Raise `DataError` if the data have more or fewer classes than the model's output.

    Args:
        names: the names of the classes of the data, all of which the model must have; empty if
            classes have numbers only: then the model may have more classes.
        labels: the numbers of the classes in the rows, int64.
        count: the number of classes of the model.
    """
    needed = len(names) or int(labels.max()) + 1
    if needed == count or (not names and needed <= count):
        return
    listed = f" ({first_class_names(names)})" if names else ""
    units = argument("units", names or needed)
    remedy = f"train a new last layer with {units} ({named('replace_head')})"
    if not names and len(np.unique(labels)) <= count:
        remedy = advice_for_labels_outside(labels, count)
    elif names and len(names) < count:
        remedy += f"; or pass all {count} in the order of its output with {argument('classes')}"
    raise DataError(
        f"there are {needed} classes{listed}, and the output of the model has {count}: {remedy}"
    )


def first_class_names(names: Sequence[Any]) -> str:
    """Return the first 12 class names as text, and the number of names that are left out."""
    return join_first(names, _SHOWN)


def advice_for_labels_outside(labels: np.ndarray, count: int) -> str:
    """Return the advice, for an error message, what to do about labels that are not integers from 0
    to `count` - 1.
    """
    values = np.unique(labels)
    remedy = f"{named('replace_head')} gives the model another number of classes"
    if len(values) > count or not (values == np.trunc(values)).all():
        return remedy
    names = argument("classes", _smallest_labels(values.tolist()))
    return f"if labels are names of classes, pass {names} (all classes); otherwise {remedy}"


def _smallest_labels(labels: list[Any]) -> list[str]:
    """Return the 12 smallest different labels as texts, followed by "..." if there are more."""
    values = sorted({*labels})
    return [*map(label_text, values[:_SHOWN]), *["..."] * (len(values) > _SHOWN)]


def label_text(label: Any) -> str:
    """Return a label as text; a whole float such as 3.0 becomes "3"."""
    if isinstance(label, bytes):
        return label.decode(errors="replace")
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _label_array(labels: Any) -> np.ndarray | None:
    """Return labels (texts or numbers) as an array, (rows, columns) for a table of several columns;
    None for data of other types.
    """
    names = labels.columns if isinstance(labels, ColumnSelection) else column_names(labels)
    if names is not None:
        columns = [_label_array(labels[name]) for name in names]
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
            array = np.array(values).reshape(array.shape) if _all_python_numbers(values) else array
        elif _all_python_numbers([v for v in values if not is_text(v)]):
            texts = list(map(label_text, values))
            array = np.array(texts, str).reshape(array.shape)
    return array if array.dtype.kind in "biufU" else None


def _all_python_numbers(values: list[Any]) -> bool:
    """Return whether all values are Python numbers."""
    return all(isinstance(value, (int, float)) for value in values)


def class_weights_by_index(weights: Any, classes: Sequence[Any], count: int | None = None) -> Any:
    """Return class weights with class indices in place of class names; the weights may be {class:
    weight}, or {output: {class: weight}}.

    Args:
        weights: `{class, by name or number: weight}`, or a dict of these by output; other
            weights, such as "balanced", are returned unchanged.
        classes: the names of the classes; empty if classes have numbers only.
        count: the number of classes, if texts may be numbers, as on the command line.

    Raises:
        ValueError: a name that is none of the classes.
    """
    if not isinstance(weights, Mapping):
        return weights
    known, numbered = ClassNames(classes), {}
    for label, weight in weights.items():
        if not np.isscalar(weight) or isinstance(weight, str):  # the weights of an output
            numbered[label] = class_weights_by_index(weight, classes, count)
        else:
            numbered[_class_index(label, known, count)] = weight
    return numbered


def _class_index(label: Any, known: ClassNames, count: int | None) -> Any:
    """Return the index of a class that is given by its name or by its index.

    Where the names of classes are numbers other than 0, 1, 2, ..., `label` is a name.
    """
    text, words = label_text(label), isinstance(next(iter(known.classes), ""), str)
    by_name = bool(known.numbers) and (isinstance(label, str) or not words)
    if by_name and text in known.numbers:
        return known.numbers[text]
    if count is None and not by_name:
        return label
    if count is not None and text.isdigit() and int(text) < count:
        return int(text)
    valid = [*known.numbers] or map(str, range(count or 0))
    raise unknown(f"class ({argument('class_weight')})", text, valid)
