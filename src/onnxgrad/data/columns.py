"""Tables: the names of their columns, which a trained model stores, and their values as one array.

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
from onnxgrad.errors import argument, named, unknown
from onnxgrad.model.class_labels import Labels, stored_labels
from onnxgrad.model.notes import CLASSES, read_note, write_note

COLUMNS = "onnxgrad.columns"  # metadata: {input: names of its columns}, as JSON

TARGET = "onnxgrad.target"  # metadata: names of the columns of the label, as JSON

WEIGHT = "onnxgrad.weight"  # metadata: name of the column of sample weights, in a list, as JSON

# names under which pandas writes the index of a table as a column
_INDEX_NAMES = frozenset(["", "Unnamed: 0", "__index_level_0__"])


class Part:
    """A table of some columns of another table."""

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        self.table, self.columns = table, list(names)

    def __getitem__(self, name: str) -> Any:
        return self.table[name]


def is_table(X: Any) -> bool:
    """Return whether `X` has columns, labeled by names or numbers."""
    return _labels(X) is not None


def column_names(X: Any) -> list[str] | None:
    """Return the names of the columns of a table; None if they are not all strings."""
    labels = _labels(X)
    if labels and ({*map(type, labels)} == {str} or all(isinstance(n, str) for n in labels)):
        return labels
    return None


def target_names(y: Any) -> list[str] | None:
    """Return the names of the columns of labels, which are a table or a series."""
    name = getattr(y, "name", None)
    return [name] if isinstance(name, str) and name else column_names(y)


def _labels(X: Any) -> list[Any] | None:
    if type(X) is np.ndarray or isinstance(X, Mapping):
        return None
    labels = getattr(X, "column_names", None)  # of pyarrow, whose `columns` are the values
    labels = getattr(X, "columns", None) if labels is None else labels
    if labels is None or callable(labels):
        return None
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)  # pandas iterates slowly


def stack_columns(name: str, table: Any) -> np.ndarray:
    """Return the columns of `table` as one array, (rows, values).

    A column of lists gives as many values a row as the lists have elements. A single column keeps
    its axes.
    """
    labels = _labels(table) or []
    if column_names(table):
        check_names(labels)
    if hasattr(table, "__array__") and not is_arrow(table[labels[0]] if labels else None):
        array = np.asarray(table)
        if array.dtype != object or not any(map(_is_list, array[:1].ravel().tolist())):
            return to_numbers(name, array)
    columns = [column_array(n, c) if is_arrow(c := table[n]) else c for n in labels]
    parts = [to_numbers(f"{name}, column {n}", c) for n, c in zip(labels, columns, strict=True)]
    counts = {label: len(part) for label, part in zip(labels, parts, strict=True)}
    if len(set(counts.values())) > 1:
        raise DataError(f"{name!r}: the columns differ in their number of rows: {counts}")
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def check_names(names: Sequence[str]) -> None:
    """Raise if columns have the same name, or one is the index of a table that pandas wrote."""
    if len(set(names)) < len(names):
        repeated = next(n for n in names if names.count(n) > 1)
        raise DataError(f"two columns are called {repeated!r}: rename one")
    if not _INDEX_NAMES.isdisjoint(names):
        index = [n for n in names if n in _INDEX_NAMES]
        raise DataError(
            f"column {names.index(index[0]) + 1} is called {index[0]!r}, the name by which pandas "
            "writes an index: write no index (index=False), or rename the column if it is a feature"
        )


def same_columns(names: Sequence[str], fitted: Sequence[str], what: str) -> None:
    """Raise if the columns of a table are not those of training, in any order."""
    own, known = {*names}, {*fitted}
    missing = [n for n in fitted if n not in own]
    extra = [n for n in names if n not in known]
    if not missing and not extra:
        return
    parts = [f"no column {_listed(missing)}"] * bool(missing)
    parts += [f"column {_listed(extra)} that was not in {named('fit')}"] * bool(extra)
    advice = "correct the names in the data; their order does not matter"
    if not missing:
        option = argument("ignore", extra)  # which only the shell has
        advice = "leave out this column" + f" with {option}" * option.startswith("--")
    raise DataError(
        f"{what} takes the columns {_listed(fitted)}; the data has {' and '.join(parts)}: {advice}"
    )


def _named_by(name: str, columns: Sequence[str]) -> str:
    """Return the column of an input, which skl2onnx may call by another name."""
    renamed = [c for c in columns if re.sub(r"^(?=\d)|[^\w+]", "_", c) == name]
    return renamed[0] if name not in columns and len(renamed) == 1 else name


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(repr, names[:8])) + more


@dataclass
class Names:
    """The names of the columns of inputs, labels and sample weights, and of the classes.

    They are in the order of training. Inputs that were not fed from tables with column names are
    missing. `classes` are those that texts name, in the order of the output; empty if unknown.
    `notes` are what else the trained model stores of its training, by key of its metadata.
    """

    columns: dict[str, list[str]] = field(default_factory=dict)
    target: list[str] = field(default_factory=list)
    weight: list[str] = field(default_factory=list)
    classes: Labels = field(default_factory=list)
    notes: Mapping[str, list[Any]] = field(default_factory=dict)

    def order(self, name: str, names: Sequence[str]) -> list[str]:
        """Return the columns `names` of an input in the order of training: theirs, if it is new.

        Raises:
            DataError: other columns than in training.
        """
        check_names(names)
        same_columns(names, self.columns.setdefault(name, list(names)), f"input {name!r}")
        return self.columns[name]

    def target_order(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the label in the order of training: theirs, if they are others."""
        if sorted(names) != sorted(self.target):
            self.target = list(names)
        return self.target

    def by_input(
        self, names: Iterable[str], inputs: Sequence[str], arrays: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Return the columns of a table that each input takes; `names` are those of no label.

        Each of several inputs takes the columns that it was trained on, or else the column of its
        name, or the only one that skl2onnx calls so. A single input takes all columns, by name if
        it was trained on some; or the column of its name, if that is among `arrays`, which hold an
        array for each row.
        """
        rest, first = list(names), inputs[0]
        if not rest:
            raise DataError(f"every column is a {named('label')}: none is left for the inputs")
        if len(inputs) == 1 and first not in arrays:
            return {first: list(self.copy().order(first, rest))}
        columns = {name: self.columns.get(name, [_named_by(name, rest)]) for name in inputs}
        for name in (name for group in columns.values() for name in group):
            if name not in rest:
                raise unknown("column (every input of the model needs one)", name, rest)
        return columns

    def copy(self) -> Names:
        """Return a copy that can be modified independently."""
        return replace(self, columns=dict(self.columns))

    def keep(self, proto: ModelProto) -> None:
        """Write the names into the metadata of `proto`, in place.

        Inputs that `proto` lacks, and single columns of the same name as the input, are left out.
        """
        inputs = {x.name for x in proto.graph.input}
        kept = {n: list(c) for n, c in self.columns.items() if n in inputs and list(c) != [n]}
        for key, value in ((COLUMNS, kept), (TARGET, self.target), (WEIGHT, self.weight)):
            if value:
                entry = next((e for e in proto.metadata_props if e.key == key), None)
                entry = proto.metadata_props.add(key=key) if entry is None else entry
                entry.value = json.dumps(value)
        if self.classes and self.classes != class_names(proto):
            write_note(proto, CLASSES, list(self.classes))
        for key, note in self.notes.items():
            write_note(proto, key, note)


def read_names(proto: ModelProto) -> Names:
    """Return the names of the columns that `proto` was trained on, and of its classes.

    Numbers in nodes of another tool, such as a ZipMap, are left out: labels of a training may as
    well be their places.
    """
    entries = {e.key: e.value for e in proto.metadata_props}
    try:
        columns = json.loads(entries.get(COLUMNS, "{}"))
        target, weight = (json.loads(entries.get(key, "[]")) for key in (TARGET, WEIGHT))
        groups = (*columns.values(), target, weight) if isinstance(columns, dict) else (columns,)
        fits = isinstance(columns, dict) and all(map(_is_names, groups))
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"the model's metadata {COLUMNS!r} must be JSON as {{input: [names]}}, and {TARGET!r} "
            f"and {WEIGHT!r} as [names]: correct or remove these entries"
        )
    classes = read_note(proto, CLASSES) or stored_labels(proto) or []
    own = bool(read_note(proto, CLASSES)) or isinstance((*classes, 0)[0], str)
    return Names(columns, target, weight, classes if own else [])


def class_names(proto: ModelProto) -> Labels | None:
    """Return the labels of the classes that a model stores, in the order of its output."""
    return read_note(proto, CLASSES) or stored_labels(proto)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, str) for n in value)
