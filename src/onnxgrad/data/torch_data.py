"""Readers of datasets of PyTorch and Hugging Face, recognized without importing the libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.data.columns import is_table
from onnxgrad.data.readers import IndexedReader, IteratedReader, Reader, type_name
from onnxgrad.errors import unknown
from onnxgrad.runtime.values import to_numpy

_BUFFER_ROWS = 1000  # rows of a stream that are shuffled together, the default of `datasets`


def _is_class_of_package(X: Any, package: str, *names: str) -> bool:
    """Return whether a class of `X` has one of these names and comes from this package."""
    classes = type(X).__mro__
    return any(c.__name__ in names and c.__module__.split(".")[0] == package for c in classes)


def is_hugging_face(X: Any) -> bool:
    """Return whether `X` is a `datasets.Dataset` or `datasets.IterableDataset`."""
    return _is_class_of_package(X, "datasets", "Dataset", "IterableDataset")


def is_hugging_face_stream(X: Any) -> bool:
    """Return whether `X` is a `datasets.IterableDataset`."""
    return _is_class_of_package(X, "datasets", "IterableDataset")


def is_torch_stream(X: Any) -> bool:
    """Return whether `X` is a `torch.utils.data.IterableDataset`, which yields rows."""
    return _is_class_of_package(X, "torch", "IterableDataset")


def is_map_style(X: Any) -> bool:
    """Return whether `X` returns rows by index, as a `torch.utils.data.Dataset` does."""
    if isinstance(X, (list, tuple, str, Mapping)) or is_table(X) or hasattr(X, "dtype"):
        return False
    names = ("__getitem__", "__len__", "__iter__", "__array__")
    methods = {name for name in names if hasattr(X, name)}
    return methods == {"__getitem__", "__len__"}


def has_random_sampler(X: Any) -> bool:
    """Return whether `X` is a DataLoader that shuffles rows by its own random numbers."""
    return "Random" in type(getattr(X, "sampler", None)).__name__


def _copy_row(row: Any) -> Any:
    """Return a copy of a row and its arrays, as the dataset may write the next row to the same
    memory.
    """
    if isinstance(row, (tuple, list)):
        return tuple(map(_copy_row, row))
    if isinstance(row, Mapping):
        return {name: _copy_row(value) for name, value in row.items()}
    return to_numpy(row).copy()


def collate(rows: list[Any]) -> Any:
    """Return a batch, stacked from rows that are (x, y), (x, y, weight), a dict by input, or x
    alone.
    """
    first = rows[0]
    if isinstance(first, Mapping):
        return {name: _stack_values(name, [row[name] for row in rows]) for name in first}
    if isinstance(first, (tuple, list)):
        parts = [list(part) for part in zip(*rows, strict=True)]
        return tuple(
            collate(part) if isinstance(part[0], Mapping) else _stack_values(i, part)
            for i, part in enumerate(parts)
        )
    return (_stack_values(0, rows),)


def _stack_values(name: object, values: list[Any]) -> np.ndarray:
    """Return the values of one input in several rows, stacked to one array."""
    arrays = [to_numpy(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise ValueError(
            f"the rows differ in the shape of {name!r}: {shapes[0]} and {shapes[-1]}; pad them, "
            "or use a DataLoader with a collate_fn"
        )
    return np.stack(arrays)


class MapStyleRows(IndexedReader):
    """The rows of a dataset that returns rows by index, such as `torch.utils.data.Dataset`.

    A row is (x, y), (x, y, weight), x alone, or a dict by input.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.rows = dataset, len(dataset)

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the rows with these indices, stacked to a batch."""
        numbers = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):  # PyTorch's protocol for whole batches
            return collate(self.dataset.__getitems__(numbers))
        return collate([_copy_row(self.dataset[i]) for i in numbers])

    def describe(self) -> dict[str, Any]:
        """Return the type of the dataset and the count of rows."""
        return {"kind": type_name(self.dataset), "rows": self.rows}


class StreamedRows(IteratedReader):
    """The rows of a `torch.utils.data.IterableDataset`, in the order of the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def begin_pass(self) -> Iterator[Any]:
        """Return a new iterator of the rows."""
        return map(_copy_row, iter(self.dataset))

    def peek(self) -> Any:
        """Return the first row as a batch; None if there are no rows."""
        read = self.peek_items()
        return collate(read) if read else None

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass; the rows of `skip` batches are read and discarded."""
        rows = islice(self.iterate_pass(), skip * size, None)
        while batch := list(islice(rows, size)):
            yield collate(batch)

    def describe(self) -> dict[str, Any]:
        """Return the type of the dataset."""
        return {"kind": type_name(self.dataset)}


class _HuggingFaceColumns(Reader):
    """Base of readers that take X, y and weights from the columns of a Hugging Face dataset."""

    def __init__(self, dataset: Any, targets: list[str] | None, weights: list[str] | None) -> None:
        self.dataset, self.targets, self.weights = dataset, targets, weights
        names = dataset.column_names
        for name in (*(targets or ()), *(weights or ())):
            if names is not None and name not in names:
                raise unknown("column", name, names)

    def _column_roles(self) -> dict[str, Any]:
        """Return a dict of the names of all columns, of the label columns, and of the columns of
        sample weights.
        """
        names = self.dataset.column_names
        columns = names and list(names)
        return {"columns": columns, "y": self.targets, "sample_weight": self.weights}

    def _batch_tables(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the columns of a batch as tables (X,), (X, y) or (X, y, sample_weight)."""
        arrays = {name: _stack_column(name, values) for name, values in batch.items()}
        targets, weights = self.targets, self.weights
        rest = [n for n in arrays if n not in (*(targets or ()), *(weights or ()))]

        def table(names: list[str]) -> ColumnArrays:
            return ColumnArrays({name: arrays[name] for name in names})

        parts = table(rest), targets and table(targets), weights and table(weights)
        return parts[: 3 if weights else 2 if targets else 1]


def _stack_column(name: str, values: Any) -> np.ndarray:
    """Return the values of a column as one array; values that are arrays are stacked."""
    array = to_numpy(values)
    if array.dtype == object and len(array):
        return _stack_values(name, list(array))
    return array


class HuggingFaceRows(_HuggingFaceColumns, IndexedReader):
    """The rows of a `datasets.Dataset`, which are read by index from Arrow files."""

    def __init__(self, dataset: Any, targets: list[str] | None, weights: list[str] | None) -> None:
        super().__init__(dataset.with_format("numpy"), targets, weights)
        self.rows = len(dataset)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, ...]:
        """Return the columns of the rows with these indices."""
        return self._batch_tables(self.dataset[indices.tolist()])

    def describe(self) -> dict[str, Any]:
        """Return the columns, and the fingerprint that `datasets` computes."""
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        return {
            "kind": "datasets",
            "rows": self.rows,
            **self._column_roles(),
            "digest": fingerprint,
        }


class HuggingFaceStream(_HuggingFaceColumns):
    """The rows of a `datasets.IterableDataset`, shuffled by files and within a buffer of rows."""

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one pass; the first `skip` batches are read and discarded."""
        dataset = self.dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed % (1 << 32), buffer_size=_BUFFER_ROWS)
        for batch in islice(dataset.with_format("numpy").iter(size), skip, None):
            yield self._batch_tables(batch)

    def describe(self) -> dict[str, Any]:
        """Return the names of all columns, of the labels, and of the sample weights."""
        return {"kind": "datasets stream", **self._column_roles()}
