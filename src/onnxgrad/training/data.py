"""The data that `fit` is called with, and the sources of batches that read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from typing import Any

import numpy as np

from onnxgrad.data.arrow import arrow_dataset, is_arrow_dataset
from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.data.columns import ColumnSelection, column_names, is_table
from onnxgrad.data.readers import Batches, DiskArrays, Reader, is_batch, is_one_batch
from onnxgrad.data.torch_data import (
    HuggingFaceRows,
    HuggingFaceStream,
    MapStyleRows,
    StreamedRows,
    is_hugging_face,
    is_hugging_face_stream,
    is_map_style,
    is_torch_stream,
)
from onnxgrad.errors import argument, named, unknown
from onnxgrad.losses.objectives import LABEL
from onnxgrad.runtime.values import shape_of
from onnxgrad.training.batches import (
    PREFETCHED,
    ArraySource,
    BatchSource,
    ReaderSource,
    Split,
)
from onnxgrad.training.fields import DataSpec


@dataclass(frozen=True)
class Dataset:
    """The data that `fit` is called with: features, labels and sample weights in any form.

    `X` is an array or a table, or a dict of arrays or tables; a reader, as `image_folder` returns
    one; a path of Parquet files or a dataset of pyarrow; a dataset of torch or Hugging Face; or an
    iterable of batches, or a function that returns one. `y` and `sample_weight` may be names of
    columns of `X`.
    """

    X: Any
    y: Any = None
    sample_weight: Any = None

    @cached_property
    def batched(self) -> bool:
        """Whether `X` yields batches, rather than being arrays or tables of all rows.

        Raises:
            ValueError: sample weights beside batches.
        """
        X = self.X
        if self.reader is not None:
            return not isinstance(self.reader, DiskArrays)
        if isinstance(X, Mapping) or is_table(X) or hasattr(X, "__array__") or hasattr(X, "dtype"):
            return False
        listed = isinstance(X, (list, tuple))
        batches = bool(X) and is_batch(X[0]) if listed else isinstance(X, Iterable) or callable(X)
        if not all(part is None or _is_column_names(part) for part in (self.y, self.sample_weight)):
            if batches and self.y is None:
                raise ValueError(
                    "an iterable of batches brings its sample weights: (X, y, sample_weight)"
                )
            return False
        if not listed or not batches:
            return batches
        return self.y is None or isinstance(X[0], Mapping) or column_names(X[0]) is not None

    @cached_property
    def reader(self) -> Reader | None:
        """The reader of `X`; None for arrays in memory and iterables of batches.

        Raises:
            ValueError: labels or weights beside data that bring their own.
        """
        X, y, weight = self.X, self.y, self.sample_weight
        if type(X) is np.ndarray:
            return None
        listed = isinstance(X, (list, tuple)) and len(X) > 0
        are_paths = all(isinstance(x, (str, os.PathLike)) for x in (X if listed else [X]))
        if are_paths or is_arrow_dataset(X) or is_hugging_face(X):
            columns = _list_column_names(y, "y"), _list_column_names(weight, "sample_weight")
            if not is_hugging_face(X):
                return arrow_dataset(X, *columns)
            form = HuggingFaceStream if is_hugging_face_stream(X) else HuggingFaceRows
            return form(X, *columns)
        own: Reader
        if isinstance(X, Reader):
            own = X
        elif is_torch_stream(X):
            own = StreamedRows(X)
        elif is_map_style(X):
            own = MapStyleRows(X)
        else:
            return DiskArrays(X, y, weight) if self._is_on_disk and not isinstance(y, str) else None
        if y is not None:
            raise ValueError(f"a {type(X).__name__} brings its labels: pass {argument('y', None)}")
        if weight is not None:
            raise ValueError(
                f"a {type(X).__name__} brings its sample weights: leave out "
                f"{argument('sample_weight')}"
            )
        return own

    @property
    def _is_on_disk(self) -> bool:
        """Whether an array of `X` is a memmap, and `X`, `y` and weights have equally many rows."""
        parts = [*self.X.values()] if isinstance(self.X, Mapping) else [self.X]
        if not any(isinstance(part, np.memmap) for part in parts):
            return False
        parts += [part for part in (self.y, self.sample_weight) if part is not None]
        return len({np.shape(part)[:1] for part in parts}) == 1

    @cached_property
    def stream(self) -> Reader | None:
        """The reader of the batches of `X`; None for arrays, in memory or on disk."""
        if not self.batched:
            return None
        if self.reader is None and (self.y is not None or self.sample_weight is not None):
            return NamedBatches(self.X, self.y, self.sample_weight)
        return self.reader or Batches(self.X)

    @cached_property
    def first_batch(self) -> tuple[Any, Any, Any]:
        """Features, labels and sample weights: of all rows, or of the first batch of a stream.

        They are None where reading the first batch would lose it. Labels and weights that are
        columns of a table or a dict stay in the features.
        """
        return _split_batch(self.resolved_columns if self.stream is None else self.stream.peek())

    @property
    def weight_axes(self) -> int:
        """The largest count of axes of sample weights: 0 for none, 1, or 2 for two or more."""
        if self.batched:
            return 2
        if self.sample_weight is None:
            return 0
        shape = array_shape(self.resolved_columns[2]) or ()
        return 1 + (len(shape) > 2 or (len(shape) == 2 and shape[1] != 1))

    @cached_property
    def given_inputs(self) -> frozenset[str] | None:
        """The names of the model's inputs for which there are data; "label" stands for labels.

        A single array of features has no name. None if the names are not known before data are
        read.
        """
        reader = self.reader or self.stream
        first = self.resolved_columns if reader is None else reader.first()
        if first is None:
            return None
        X, y, _ = _split_batch(first)
        names = frozenset([*array_or_column_names(X), *array_or_column_names(y)])
        # where a reader pads rows, it writes the mask, which is not all ones
        padded = {"attention_mask"} if reader is not None and reader.pads else set()
        return names | padded | (set() if y is None else {LABEL})

    @property
    def columns(self) -> list[str] | None:
        """The names of the columns of the table `X`; None if `X` is no table or has other names."""
        return column_names(self.resolved_columns[0]) if self.reader is None else None

    @cached_property
    def resolved_columns(self) -> tuple[Any, Any, Any]:
        """`X`, `y` and sample weights; names of columns are replaced by these columns of `X`.

        Raises:
            ValueError: as `split_columns`.
        """
        return split_columns(self.X, self.y, self.sample_weight)

    def source(self, fields: DataSpec, batch_size: int, prefetch: int = PREFETCHED) -> BatchSource:
        """Return the source that reads the data in batches and checks them by `fields`.

        Args:
            fields: the inputs of the model.
            batch_size: rows of a batch, at most; fewer rows are one batch.
            prefetch: the count of slices that a thread reads ahead, if data are not in memory.

        Raises:
            ValueError: data that the inputs do not accept, or fewer rows than a fixed batch has.
        """
        reader, row_axes = self.reader or self.stream, fields.row_axes
        if fields.fixed_rows and fields.divides:
            batch_size = fields.fixed_rows
        if isinstance(reader, DiskArrays) and (row_axes.batch_axes or row_axes.moved_axes):
            reader = None  # `DiskArrays` cut rows along the first axis only
        if reader is not None:
            if reader.count is None and reader.rows is not None:
                batch_size = min(batch_size, reader.rows)
                fields.check_row_count(reader.rows)
                fields.check_batch_size(batch_size)
            in_memory = self.reader is None and isinstance(self.X, (list, tuple))
            return ReaderSource(reader, fields, batch_size, 0 if in_memory else prefetch)
        arrays = row_axes.rows_first(fields.checked_arrays(*self.resolved_columns))
        source = ArraySource(arrays, row_axes.names_without_rows(arrays), row_axes, batch_size)
        if source.batch_size < source.rows:
            # raises an error where rows may be on another axis
            row_axes.names_without_rows(arrays, cut=True)
        if fields.weight in source.arrays and not source.arrays[fields.weight].any():
            raise ValueError(f"{named('sample_weight')} is 0 in all rows: pass weights above 0")
        fields.check_batch_size(source.batch_size)
        return source


class NamedBatches(Batches):
    """Batches that are tables or dicts; labels and sample weights are some of their columns."""

    def __init__(self, source: Any, y: Any, sample_weight: Any) -> None:
        super().__init__(source)
        self.roles = y, sample_weight

    def begin_pass(self) -> Iterator[Any]:
        """Return an iterator over the batches, as features, labels and sample weights.

        None, which marks the begin of a sequence, is yielded as it comes.
        """
        batches = super().begin_pass()
        return (b if b is None else split_columns(b, *self.roles) for b in batches)

    def describe(self) -> dict[str, Any]:
        """Return a description for JSON: what identifies the batches, and the columns `y` and
        weights.
        """
        return super().describe() | dict(zip(("y", "sample_weight"), self.roles, strict=True))


def split_columns(X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return X, y and sample weights, where names of columns are replaced by these columns of X.

    X is a table or a dict, and the result has X without these columns. `y` may be a dict of names
    by output.

    Raises:
        ValueError: X is no table or dict, or has no such column.
    """
    columns = list(X) if isinstance(X, Mapping) else column_names(X)
    columns_of: dict[str, list[str]] = {}
    # an inner function that calls itself would keep X until the garbage is collected
    parts = (
        _replace_names(X, columns, "y", y, columns_of),
        _replace_names(X, columns, "sample_weight", sample_weight, columns_of),
    )
    if not columns_of:
        return X, y, sample_weight
    taken = [name for names in columns_of.values() for name in names]
    if twice := [name for name in taken if taken.count(name) > 1]:
        roles = [key for key, names in columns_of.items() if twice[0] in names]
        raise ValueError(
            f"the column {twice[0]!r} is named twice, as {' and '.join(roles)}: name different "
            f"columns for labels and {named('sample_weight')}"
        )
    rest = [name for name in columns or () if name not in taken]
    return {name: X[name] for name in rest} if isinstance(X, Mapping) else ColumnSelection(
        X, rest
    ), *parts


def _replace_names(
    X: Any, columns: list[str] | None, key: str, value: Any, columns_of: dict[str, list[str]]
) -> Any:
    """Return the columns of X that `value` names, or `value` itself if it names none.

    `columns` are the names of the columns of X; None if X has no names. `columns_of` gets the names
    in `value`, which the role `key` has.
    """
    if isinstance(value, Mapping) and columns is not None:
        return {
            name: _replace_names(X, columns, f"{key}[{name!r}]", part, columns_of)
            for name, part in value.items()
        }
    if not isinstance(value, str):
        if columns is None or not _is_column_names(value):
            return value
        rows = len(X[columns[0]]) if columns else 0
        if len(value) == rows and {*value}.isdisjoint(columns):  # texts are labels
            return value
    names = columns_of[key] = _list_column_names(value, key) or []
    if columns is None:
        raise ValueError(f"{key}={names} names columns: pass a table or dict with them as X")
    if wrong := next((name for name in names if name not in columns), None):
        raise unknown("column", wrong, columns)
    return (
        ColumnArrays({n: X[n] for n in names})
        if isinstance(X, Mapping)
        else ColumnSelection(X, names)
    )


def _split_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Return features, labels and sample weights of a batch (X,), (X, y) or (X, y, weight).

    Labels or weights that the batch lacks are None.
    """
    parts = [*batch] if isinstance(batch, (tuple, list)) else [batch]
    X, y, weight, *_ = [*parts, None, None, None]
    return X, y, weight


def array_shape(array: Any) -> tuple[int, ...] | None:
    """Return the shape of an array, a table or a list of rows; None for other values.

    The shape of a table is (rows, values), where a column of lists has the values of one list.
    """
    if isinstance(array, (list, tuple)) and array:
        return len(array), *np.shape(array[0])
    if not is_table(array):
        return tuple(shape_of(array)) if hasattr(array, "shape") else None
    names = list(getattr(array, "column_names", array.columns))
    if len(names) == 1 and len(shape := array_shape(array[names[0]]) or ()) > 1:
        return shape
    heads = [np.asarray(array[name][:1]).tolist() for name in names]
    return len(array[names[0]]) if names else 0, sum(int(np.size(head)) for head in heads)


def as_dataset(X: Any, y: Any = None, sample_weight: Any = None) -> Dataset:
    """Return the `Dataset` of the arguments; `X` may be a tuple (X, y) or (X, y, sample_weight).

    Raises:
        ValueError: a tuple that may be (X, y) or a tuple of batches.
    """
    if y is None and sample_weight is None and isinstance(X, tuple) and is_one_batch(X):
        return Dataset(*X)
    return Dataset(X, y, sample_weight)


def held_out_data(validation: Any) -> Dataset | float | Split | None:
    """Return the argument `validation` as data, or as the share of rows to hold out of training.

    Raises:
        ValueError: a number that is no share, or a list that holds no batches.
    """
    if validation is None or isinstance(validation, Split):
        return validation
    is_scalar = isinstance(validation, np.ndarray) and validation.ndim == 0
    if is_scalar or isinstance(validation, (Number, np.bool_)):
        share = np.asarray(validation)
        if share.dtype.kind != "f" or not 0 < share < 1:
            raise ValueError(
                f"{argument('validation', share.item())} is no share of the rows: pass a number "
                "above 0 and below 1, or validation data as (X, y)"
            )
        return float(share)
    if isinstance(validation, list) and 1 < len(validation) < 4:
        arrays = (isinstance(item, str) or getattr(item, "shape", ()) for item in validation)
        if not all(item is None or is_batch(item) for item in validation) and any(arrays):
            raise ValueError(
                f"{argument('validation')}[...] is a list, whose items must be batches, and these "
                "are arrays: pass X and y as a tuple, (X, y)"
            )
    return as_dataset(validation)


def array_or_column_names(X: Any) -> list[Any]:
    """Return the names of the arrays in a dict, or of the columns of a table; [] for an array."""
    return [*X] if isinstance(X, Mapping) else column_names(X) or []


def _is_column_names(value: Any) -> bool:
    """Return whether a value is the name of a column, or a list of names of columns."""
    names = [value] if isinstance(value, str) else value
    listed = isinstance(names, (list, tuple)) and len(names) > 0
    return listed and all(isinstance(name, str) for name in names)


def _list_column_names(value: Any, key: str) -> list[str] | None:
    """Return `value`, a name of a column or a list of names, as a list; None is returned as None.

    Raises:
        ValueError: `value` is anything else; the message calls it `key`.
    """
    if value is None:
        return None
    if not _is_column_names(value):
        raise ValueError(f"{key} must be names of columns of X, not a {type(value).__name__}")
    return [value] if isinstance(value, str) else list(value)
