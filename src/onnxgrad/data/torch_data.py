"""Datasets of PyTorch and of Hugging Face, recognized without importing either library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.data.columns import is_table
from onnxgrad.data.readers import IndexedReader, IteratedReader, Reader, full_name
from onnxgrad.errors import unknown
from onnxgrad.runtime.values import to_numpy

_BUFFER_ROWS = 1000  # that a stream shuffles together, the default of `datasets`


def _is_a(X: Any, package: str, *names: str) -> bool:
    """Return whether a class of `X` has one of these names and comes from a package."""
    classes = type(X).__mro__
    return any(c.__name__ in names and c.__module__.split(".")[0] == package for c in classes)


def is_hugging_face(X: Any) -> bool:
    """Return whether `X` is a `datasets.Dataset` or `datasets.IterableDataset`."""
    return _is_a(X, "datasets", "Dataset", "IterableDataset")


def is_hugging_face_stream(X: Any) -> bool:
    """Return whether `X` is a `datasets.IterableDataset`."""
    return _is_a(X, "datasets", "IterableDataset")


def is_stream(X: Any) -> bool:
    """Return whether `X` is a `torch.utils.data.IterableDataset`, which yields rows."""
    return _is_a(X, "torch", "IterableDataset")


def is_map_style(X: Any) -> bool:
    """Return whether `X` gives rows by number, as a `torch.utils.data.Dataset` does."""
    if isinstance(X, (list, tuple, str, Mapping)) or is_table(X) or hasattr(X, "dtype"):
        return False
    has = (hasattr(X, name) for name in ("__getitem__", "__len__"))
    return all(has) and not hasattr(X, "__iter__") and not hasattr(X, "__array__")


def draws_its_order(X: Any) -> bool:
    """Return whether `X` is a DataLoader that orders its samples by random numbers of its own."""
    return "Random" in type(getattr(X, "sampler", None)).__name__


def _copy(sample: Any) -> Any:
    """Return a sample with arrays of its own: the next one may be written to the same memory."""
    if isinstance(sample, (tuple, list)):
        return tuple(map(_copy, sample))
    if isinstance(sample, Mapping):
        return {name: _copy(value) for name, value in sample.items()}
    return to_numpy(sample).copy()


def collate(samples: list[Any]) -> Any:
    """Return samples, each (x, y), (x, y, weight) or a dict, as a batch of the same form."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _stack(name, [sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        parts = [list(part) for part in zip(*samples, strict=True)]
        return tuple(
            collate(part) if isinstance(part[0], Mapping) else _stack(i, part)
            for i, part in enumerate(parts)
        )
    return (_stack(0, samples),)


def _stack(name: object, values: list[Any]) -> np.ndarray:
    arrays = [to_numpy(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise ValueError(
            f"the samples differ in the shape of {name!r}: {shapes[0]} and {shapes[-1]}; pad them, "
            "or use a DataLoader with a collate_fn"
        )
    return np.stack(arrays)


class Samples(IndexedReader):
    """A dataset of samples by number, such as a `torch.utils.data.Dataset`.

    A sample is (x, y), (x, y, weight), x alone, or a dict by input.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.rows = dataset, len(dataset)

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the samples of a batch."""
        numbers = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):  # PyTorch's protocol for whole batches
            return collate(self.dataset.__getitems__(numbers))
        return collate([_copy(self.dataset[i]) for i in numbers])

    def describe(self) -> dict[str, Any]:
        """Return the type of the dataset and the number of samples."""
        return {"kind": full_name(self.dataset), "rows": self.rows}


class Streamed(IteratedReader):
    """A stream of samples, such as a `torch.utils.data.IterableDataset`, in its own order."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def begin_pass(self) -> Iterator[Any]:
        """Return an iterator of the samples."""
        return map(_copy, iter(self.dataset))

    def peek(self) -> Any:
        """Return the first sample as a batch; None if there is none."""
        read = self.peek_items()
        return collate(read) if read else None

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass; the samples of those left out are read and discarded."""
        samples = islice(self.next_pass(), skip * size, None)
        while batch := list(islice(samples, size)):
            yield collate(batch)

    def describe(self) -> dict[str, Any]:
        """Return the type of the dataset."""
        return {"kind": full_name(self.dataset)}


class _HuggingFace(Reader):
    """The columns of a dataset of Hugging Face as X, y and weights."""

    def __init__(self, dataset: Any, targets: list[str] | None, weights: list[str] | None) -> None:
        self.dataset, self.targets, self.weights = dataset, targets, weights
        names = dataset.column_names
        for name in (*(targets or ()), *(weights or ())):
            if names is not None and name not in names:
                raise unknown("column", name, names)

    def _roles(self) -> dict[str, Any]:
        """Return the names of all columns, of labels and of sample weights."""
        names = self.dataset.column_names
        columns = names and list(names)
        return {"columns": columns, "y": self.targets, "sample_weight": self.weights}

    def _parts(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the tables of a batch."""
        arrays = {name: _column(name, values) for name, values in batch.items()}
        targets, weights = self.targets, self.weights
        rest = [n for n in arrays if n not in (*(targets or ()), *(weights or ()))]

        def table(names: list[str]) -> ColumnArrays:
            return ColumnArrays({name: arrays[name] for name in names})

        parts = table(rest), targets and table(targets), weights and table(weights)
        return parts[: 3 if weights else 2 if targets else 1]


def _column(name: str, values: Any) -> np.ndarray:
    array = to_numpy(values)
    if array.dtype == object and len(array):
        return _stack(name, list(array))
    return array


class HuggingFaceRows(_HuggingFace, IndexedReader):
    """A `datasets.Dataset`: rows in Arrow files, by number."""

    def __init__(self, dataset: Any, targets: list[str] | None, weights: list[str] | None) -> None:
        super().__init__(dataset.with_format("numpy"), targets, weights)
        self.rows = len(dataset)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, ...]:
        """Return the columns of the rows."""
        return self._parts(self.dataset[indices.tolist()])

    def describe(self) -> dict[str, Any]:
        """Return the columns, and the fingerprint that `datasets` computes."""
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        return {"kind": "datasets", "rows": self.rows, **self._roles(), "digest": fingerprint}


class HuggingFaceStream(_HuggingFace):
    """A `datasets.IterableDataset`, shuffled by its files and a buffer of 1000 rows."""

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one pass; those that are left out are read and discarded."""
        dataset = self.dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed % (1 << 32), buffer_size=_BUFFER_ROWS)
        for batch in islice(dataset.with_format("numpy").iter(size), skip, None):
            yield self._parts(batch)

    def describe(self) -> dict[str, Any]:
        """Return the columns, and which are labels and weights."""
        return {"kind": "datasets stream", **self._roles()}
