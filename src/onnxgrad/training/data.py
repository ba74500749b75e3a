"""The data that `fit` is called with, and the source of batches for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.arrow import arrow_dataset, is_arrow_dataset
from onnxgrad.data.batch_forms import are_parts, is_batch
from onnxgrad.data.columns import Part, column_names, is_table
from onnxgrad.data.readers import Batches, DiskArrays, Reader
from onnxgrad.data.torch_data import (
    HuggingFaceRows,
    HuggingFaceStream,
    Samples,
    Streamed,
    is_hugging_face,
    is_hugging_face_stream,
    is_map_style,
    is_stream,
)
from onnxgrad.errors import argument, named, unknown
from onnxgrad.losses.objectives import LABEL
from onnxgrad.training.batches import PREFETCHED, ArraySource, BatchSource, ReaderSource, Slice
from onnxgrad.training.fields import Fields
from onnxgrad.training.row_axes import Axes, count_rows

_ROWS = 1024  # of a batch that is only concatenated with others


class Given(NamedTuple):
    """The names of the inputs that data have, none for a single array, and whether of labels."""

    names: frozenset[str]
    labeled: bool


@dataclass(frozen=True)
class Dataset:
    """The data that `fit` is called with.

    `X` is an array, a table or a dict of these; a reader such as `image_folder` returns; a path of
    Parquet files or a dataset of pyarrow; a dataset of torch or Hugging Face; or an iterable of
    batches, or a function that returns one. The names of columns of `X` stand for `y` and
    `sample_weight`.
    """

    X: Any
    y: Any = None
    sample_weight: Any = None

    @cached_property
    def batched(self) -> bool:
        """Whether `X` yields batches, rather than being an array, a table or a dict of these."""
        X = self.X
        if self.reader is not None:
            return not isinstance(self.reader, DiskArrays)
        if self.y is not None or isinstance(X, Mapping) or is_table(X):
            return False
        if hasattr(X, "__array__") or hasattr(X, "dtype"):
            return False
        if not isinstance(X, (list, tuple)):
            return isinstance(X, Iterable) or callable(X)
        return bool(X) and is_batch(X[0])

    @cached_property
    def reader(self) -> Reader | None:
        """What reads `X` batch by batch, None for arrays in memory and iterables of batches.

        Raises:
            ValueError: labels or weights beside data that bring their own.
        """
        X, y, weight = self.X, self.y, self.sample_weight
        if type(X) is np.ndarray:
            return None
        if _is_path(X) or is_arrow_dataset(X) or _are_paths(X):
            return arrow_dataset(X, y=_names(y, "y"), sample_weight=_names(weight, "sample_weight"))
        if is_hugging_face(X):
            form = HuggingFaceStream if is_hugging_face_stream(X) else HuggingFaceRows
            return form(X, _names(y, "y"), _names(weight, "sample_weight"))
        own: Reader | None = None
        if isinstance(X, Reader):
            own = X
        elif is_stream(X):
            own = Streamed(X)
        elif is_map_style(X):
            own = Samples(X)
        elif self._on_disk and not isinstance(y, str):
            return DiskArrays(X, y, weight)
        if own is not None and y is not None:
            raise ValueError(f"a {type(X).__name__} brings its labels: pass {argument('y', None)}")
        if own is not None and weight is not None:
            raise ValueError(f"a {type(X).__name__} brings its sample weights: pass None")
        return own

    @property
    def _on_disk(self) -> bool:
        """Whether an array is a memmap, with as many rows as the others."""
        parts = [*self.X.values()] if isinstance(self.X, Mapping) else [self.X]
        if not any(isinstance(part, np.memmap) for part in parts):
            return False
        parts += [part for part in (self.y, self.sample_weight) if part is not None]
        return len({np.shape(part)[:1] for part in parts}) == 1

    @property
    def first_labels(self) -> Any:
        """The labels, or those of the first batch of a list; a dict may have features, too."""
        first = self.X
        if self.y is not None or isinstance(first, Mapping):
            return first if self.y is None else self.y
        if not isinstance(first, (list, tuple)) or self.reader is not None or not self.batched:
            return None
        first = first[0]
        return first if isinstance(first, Mapping) else next(iter(first[1:]), None)

    @property
    def weighted(self) -> bool:
        """Whether the data have sample weights, or batches that may have some."""
        return self.sample_weight is not None or self.batched

    @property
    def weight_axes(self) -> int:
        """How many axes sample weights may have: 0 for none, 2 for one or more behind the rows."""
        if self.batched:
            return 2
        if self.sample_weight is None:
            return 0
        shape = np.shape(self.sample_weight)
        return 1 + (len(shape) > 2 or (len(shape) == 2 and shape[1] != 1))

    @cached_property
    def given(self) -> Given | None:
        """Which inputs the data have; None if that is not known before they are read."""
        X, y, reader = self.X, self.y, self.reader
        if reader is None and self.batched:
            reader = Batches(X)
        if reader is None:
            X, y, _ = self.by_name
            names = _names_in(X)
            return Given(names | _names_in(y), y is not None or LABEL in names)
        first = reader.first()
        if first is None:
            return None
        parts = first if isinstance(first, (tuple, list)) else [first]
        names = frozenset().union(*map(_names_in, parts[:2]))
        padded = {"attention_mask"} if reader.pads else set()  # for which ones would be wrong
        return Given(names | padded, LABEL in names or any(p is not None for p in parts[1:2]))

    @property
    def columns(self) -> list[str] | None:
        """The names of the columns of `X`; None unless they are all text."""
        return column_names(self.by_name[0]) if self.reader is None else None

    @cached_property
    def by_name(self) -> tuple[Any, Any, Any]:
        """Return X, y and weights, with the columns of the table X that strings name.

        Raises:
            ValueError: X is no table, or has no such column.
        """
        others, columns = {"y": self.y, "sample_weight": self.sample_weight}, column_names(self.X)
        columns_of = {
            key: _names(value, key)
            for key, value in others.items()
            if isinstance(value, str) or (columns is not None and _is_named(value))
        }
        if not columns_of:
            return self.X, self.y, self.sample_weight
        if columns is None:
            key, name = next(iter(columns_of.items()))
            raise ValueError(f"{key}={name} names columns, and X is no table with named columns")
        taken = [name for each in columns_of.values() for name in each or ()]
        if twice := [name for name in taken if taken.count(name) > 1]:
            raise ValueError(
                f"the column {twice[0]!r} is both label and weight: {named('sample_weight')} "
                "must be another one"
            )
        if wrong := next((name for name in taken if name not in columns), None):
            raise unknown("column", wrong, columns)
        rest = Part(self.X, [name for name in columns if name not in taken])
        parts = {key: Part(self.X, each or ()) for key, each in columns_of.items()}
        return rest, parts.get("y", self.y), parts.get("sample_weight", self.sample_weight)

    def arrays(self, fields: Fields) -> dict[str, np.ndarray]:
        """Return the checked arrays by input name, those of all batches concatenated.

        Raises:
            ValueError: data that the inputs do not accept, batches that differ in shape, or no
                batch.
        """
        if not self.batched:
            return fields.arrays(*self.by_name)
        reader, size = self.reader or self._batches(), fields.fixed_rows or _ROWS
        slices = list(ReaderSource(reader, fields, size, 0).epoch(None, 0, lambda batch: 1))
        axes = fields.axes({name: array[0] for name, array in slices[0].arrays.items()})
        return {name: _join(name, slices, axes) for name in fields.fields}

    def source(
        self,
        fields: Fields,
        batch_size: int,
        batch_axes: Mapping[str, int | None] | None = None,
        prefetch: int = PREFETCHED,
    ) -> BatchSource:
        """Return the source of batches.

        Args:
            fields: the inputs.
            batch_size: rows of a batch, at most; fewer rows are one batch.
            batch_axes: `{input: axis of its rows}`, None for an array that every batch gets whole;
                the default is that of `fields`.
            prefetch: slices that a thread reads ahead, of data that are not in memory.

        Raises:
            ValueError: data that the inputs do not accept, or fewer rows than a fixed batch has.
        """
        fields, reader = fields.with_axes(batch_axes), self.reader
        if fields.fixed_rows and fields.divides:
            batch_size = fields.fixed_rows
        if reader is None and self.batched:
            in_memory = isinstance(self.X, (list, tuple))
            return ReaderSource(self._batches(), fields, batch_size, 0 if in_memory else prefetch)
        if reader is not None and not (isinstance(reader, DiskArrays) and fields.may_move_rows):
            if reader.count is None and reader.rows is not None:
                batch_size = min(batch_size, reader.rows)
                fields.check_rows(reader.rows)
                fields.check_batch(batch_size)
            return ReaderSource(reader, fields, batch_size, prefetch)
        arrays = fields.arrays(*self.by_name)
        axes = fields.axes(arrays)
        batch_size = min(batch_size, rows := count_rows(arrays, axes))
        if batch_size < rows:
            fields.axes(arrays, cut=True)
        if fields.weight in arrays and not arrays[fields.weight].any():
            raise ValueError(f"{named('sample_weight')} is 0 in all rows, so that none counts")
        source = ArraySource(arrays, axes, batch_size)
        fields.check_batch(batch_size)
        return source

    def _batches(self) -> Batches:
        if self.sample_weight is not None:
            raise ValueError(
                "an iterable of batches brings its sample weights: (X, y, sample_weight)"
            )
        return Batches(self.X)


def as_dataset(X: Any, y: Any = None, sample_weight: Any = None) -> Dataset:
    """Return the data; a tuple (X,), (X, y) or (X, y, sample_weight) is taken apart.

    Raises:
        ValueError: a tuple that may be one of these or one of batches.
    """
    if y is None and sample_weight is None and isinstance(X, tuple) and are_parts(X):
        return Dataset(*X)
    return Dataset(X, y, sample_weight)


def _names_in(X: Any) -> frozenset[str]:
    """Return the names of the arrays of a dict, or of the columns of a table; none of an array."""
    return frozenset(X if isinstance(X, Mapping) else column_names(X) or ())


def _is_path(X: Any) -> bool:
    return isinstance(X, (str, os.PathLike))


def _are_paths(X: Any) -> bool:
    return isinstance(X, (list, tuple)) and bool(X) and all(map(_is_path, X))


def _is_named(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(n, str) for n in value)
    )


def _names(value: Any, key: str) -> list[str] | None:
    """Return the names of columns in `value`, a name or a list of names.

    Raises:
        ValueError: it is anything else.
    """
    if value is None:
        return None
    if not _is_named(value):
        raise ValueError(f"{key} must name columns of the data, not be {type(value).__name__}")
    return [value] if isinstance(value, str) else list(value)


def _join(name: str, slices: Sequence[Slice], axes: Axes) -> np.ndarray:
    """Return the rows of all slices, of one batch each, in one array."""
    arrays, axis = [piece.arrays[name][0] for piece in slices], axes[name]
    if axis is None:
        if any(not np.array_equal(array, arrays[0]) for array in arrays[1:]):
            raise ValueError(f"{name!r} has no rows and differs between batches")
        return arrays[0]
    try:
        return np.concatenate(arrays, axis)
    except ValueError as e:
        raise ValueError(f"the batches of {name!r} differ in shape: {e}") from None
