"""Tables: the values of their columns, and the names of columns that a trained model stores.

A table is any object with column names: a DataFrame of pandas or polars, a table of pyarrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.arrays import DataError, column_array, is_arrow, to_numbers
from onnxgrad.errors import argument, join_first, named, unknown
from onnxgrad.model.class_labels import Labels, stored_labels
from onnxgrad.model.notes import CLASSES, read_metadata, write_metadata

COLUMNS = "onnxgrad.columns"  # key of metadata: {input: names of its columns}, as JSON

TARGET = "onnxgrad.target"  # key of metadata: names of the columns of the label, as JSON

WEIGHT = "onnxgrad.weight"  # key of metadata: [name of the column of sample weights], as JSON

# names under which pandas writes the index of a table as a column
_INDEX_NAMES = frozenset(["", "Unnamed: 0", "__index_level_0__"])


class ColumnSelection:
    """A table of selected columns of another table."""

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        self.table, self.columns = table, list(names)

    def __getitem__(self, name: str) -> Any:
        return self.table[name]


def is_table(X: Any) -> bool:
    """Return whether `X` is a table, with columns that are labeled by names or numbers."""
    return _column_names_or_numbers(X) is not None


def column_names(X: Any) -> list[str] | None:
    """Return the names of the columns of a table; None if some are not strings, or the data are not
    a table.
    """
    labels = _column_names_or_numbers(X)
    if labels and ({*map(type, labels)} == {str} or all(isinstance(n, str) for n in labels)):
        return labels
    return None


def target_names(y: Any) -> list[str] | None:
    """Return the names of the label columns in a table or a series; None if the columns have no
    names.
    """
    name = getattr(y, "name", None)
    return [name] if isinstance(name, str) and name else column_names(y)


def _column_names_or_numbers(X: Any) -> list[Any] | None:
    """Return the labels of the columns of a table, names or numbers; None for other data."""
    if type(X) is np.ndarray or isinstance(X, Mapping):
        return None
    labels = getattr(X, "column_names", None)  # `columns` of a pyarrow table are the values
    labels = getattr(X, "columns", None) if labels is None else labels
    if labels is None or callable(labels):
        return None
    # iteration of an index of pandas is slow
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def stack_columns(name: str, table: Any) -> np.ndarray:
    """Return the columns of `table` as one array, (rows, values).

    A column of lists of T elements gives T values a row. A single column keeps its axes.
    """
    labels = _column_names_or_numbers(table) or []
    if column_names(table):
        check_names(labels)
    if hasattr(table, "__array__") and not is_arrow(table[labels[0]] if labels else None):
        array = np.asarray(table)
        first_row = array[:1].ravel().tolist() if array.dtype == object else []
        if not any(isinstance(value, (list, tuple, np.ndarray)) for value in first_row):
            return to_numbers(name, array)
    columns = [column_array(n, c) if is_arrow(c := table[n]) else c for n in labels]
    parts = [to_numbers(f"{name}, column {n}", c) for n, c in zip(labels, columns, strict=True)]
    counts = {label: len(part) for label, part in zip(labels, parts, strict=True)}
    if len(set(counts.values())) > 1:
        raise DataError(f"{name!r}: all columns must have the same number of rows, not {counts}")
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def check_names(names: Sequence[str]) -> None:
    """Raise `DataError` if two columns have one name, or a column is an index that pandas wrote."""
    if len(set(names)) < len(names):
        repeated = next(n for n in names if names.count(n) > 1)
        raise DataError(f"two columns are called {repeated!r}: rename one")
    if not _INDEX_NAMES.isdisjoint(names):
        index = [n for n in names if n in _INDEX_NAMES]
        raise DataError(
            f"column {names.index(index[0]) + 1} is called {index[0]!r}, the name by which pandas "
            "writes an index: write no index (index=False), or rename the column if it is a feature"
        )


def check_same_columns(names: Sequence[str], trained: Sequence[str], what: str) -> None:
    """Raise `DataError` if a table lacks a column of training, or has another column; the order
    does not matter.
    """
    given, known = {*names}, {*trained}
    missing = [n for n in trained if n not in given]
    extra = [n for n in names if n not in known]
    if not missing and not extra:
        return
    parts = [f"no column {_quote_names(missing)}"] * bool(missing)
    parts += [f"column {_quote_names(extra)} that was not in {named('fit')}"] * bool(extra)
    advice = "correct the names in the data; their order does not matter"
    if not missing:
        option = argument("ignore", extra)  # only the command line has this option
        advice = "leave out this column" + f" with {option}" * option.startswith("--")
    raise DataError(
        f"{what} takes the columns {_quote_names(trained)}; the data has {' and '.join(parts)}: "
        f"{advice}"
    )


def _matching_column(name: str, columns: Sequence[str]) -> str:
    """Return the name of an input's column, also if skl2onnx renamed the input."""
    renamed = [c for c in columns if re.sub(r"^(?=\d)|[^\w+]", "_", c) == name]
    return renamed[0] if name not in columns and len(renamed) == 1 else name


def _quote_names(names: Sequence[str]) -> str:
    return join_first([*map(repr, names)], 8)


@dataclass
class Names:
    """The names of columns and classes in the order of training, which a trained model stores.

    - `columns`: by input, without inputs that were not fed from a table with column names.
    - `target`, `weight`: columns of labels and of sample weights.
    - `classes`: labels that are texts, in the order of the output; empty if unknown.
    - `notes`: further entries of the metadata of the trained model, by key.
    """

    columns: dict[str, list[str]] = field(default_factory=dict)
    target: list[str] = field(default_factory=list)
    weight: list[str] = field(default_factory=list)
    classes: Labels = field(default_factory=list)
    notes: Mapping[str, list[Any]] = field(default_factory=dict)

    def order_columns(self, name: str, names: Sequence[str]) -> list[str]:
        """Return the columns of an input in the order of training; the first call stores `names` as
        this order.

        Raises:
            DataError: other columns than in training.
        """
        check_names(names)
        check_same_columns(names, self.columns.setdefault(name, list(names)), f"input {name!r}")
        return self.columns[name]

    def order_targets(self, names: Sequence[str]) -> list[str]:
        """Return the label columns in the order of training; names that differ from training
        replace the stored names.
        """
        if sorted(names) != sorted(self.target):
            self.target = list(names)
        return self.target

    def columns_by_input(
        self, names: Iterable[str], inputs: Sequence[str], arrays: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Return {input: columns} for the columns of a table that hold no labels.

        Each of several inputs takes the columns that it was trained on, or else the column of its
        name, or the only column that skl2onnx renames to it. A single input takes all columns, in
        the order of training; or the column of its name, if this is among `arrays`, the columns
        that hold an array in each row.
        """
        rest, first = list(names), inputs[0]
        if not rest:
            raise DataError(f"every column is a {named('label')}: no column is left for the inputs")
        if len(inputs) == 1 and first not in arrays:
            return {first: list(self.copy().order_columns(first, rest))}
        columns = {name: self.columns.get(name, [_matching_column(name, rest)]) for name in inputs}
        for name in (name for group in columns.values() for name in group):
            if name not in rest:
                raise unknown("column (every input of the model needs one)", name, rest)
        return columns

    def copy(self) -> Names:
        """Return a copy of the names, which can be modified independently."""
        return replace(self, columns=dict(self.columns))

    def write_metadata(self, proto: ModelProto) -> None:
        """Write the names of columns and classes into the metadata of `proto`, in place.

        Inputs that `proto` lacks, and single columns with the name of the input, are left out.
        """
        inputs = {x.name for x in proto.graph.input}
        kept = {n: list(c) for n, c in self.columns.items() if n in inputs and list(c) != [n]}
        names: dict[str, Any] = {COLUMNS: kept, TARGET: self.target, WEIGHT: self.weight}
        if self.classes and self.classes != class_names(proto):
            names[CLASSES] = list(self.classes)
        notes = {key: value for key, value in names.items() if value}
        for key, note in {**notes, **self.notes}.items():
            write_metadata(proto, key, note)


def read_names(proto: ModelProto) -> Names:
    """Return the `Names` of columns and classes that a trained model stores.

    Classes that are numbers in a node of another tool, such as a ZipMap, are left out: labels may
    as well be the positions of these classes.
    """
    entries = {e.key: e.value for e in proto.metadata_props}
    try:
        columns = json.loads(entries.get(COLUMNS, "{}"))
        target, weight = (json.loads(entries.get(key, "[]")) for key in (TARGET, WEIGHT))
        groups = (*columns.values(), target, weight) if isinstance(columns, dict) else (columns,)
        names = [n for group in groups for n in (group if isinstance(group, list) else [None])]
        fits = isinstance(columns, dict) and all(isinstance(name, str) for name in names)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"the model's metadata {COLUMNS!r} must be JSON as {{input: [names]}}, and {TARGET!r} "
            f"and {WEIGHT!r} as [names]: correct or remove these entries"
        )
    classes = read_metadata(proto, CLASSES) or stored_labels(proto) or []
    are_names = bool(read_metadata(proto, CLASSES)) or isinstance((*classes, 0)[0], str)
    return Names(columns, target, weight, classes if are_names else [])


def class_names(proto: ModelProto) -> Labels | None:
    """Return the class labels that a model stores in its metadata or nodes, in the order of the
    output; None if it stores none.
    """
    return read_metadata(proto, CLASSES) or stored_labels(proto)
