"""Readers: data that are read batch by batch, in an order that follows from a seed."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np

from onnxgrad.data.columns import is_table
from onnxgrad.data.prefetch import read_ahead
from onnxgrad.operators.shapes import Dims
from onnxgrad.runtime.values import shape_of, to_numpy

P = ParamSpec("P")
R = TypeVar("R", bound="Reader")

_DIGESTED = 1 << 20  # bytes of arrays in a digest
_COMPARED, _SEEDS = 16, 2  # rows that are read again, and how often
_SAMPLED = 16  # batches of a list in a digest
_LISTED = 10_000  # files in a digest


class Reader:
    """Base of data that are read batch by batch.

    A batch is a tuple (X,), (X, y) or (X, y, sample_weight) with rows on axis 0, as `fit` takes
    it, or a dict of arrays by input, which the model gets unchanged. In front of a batch, None says
    that a sequence begins: inputs that `Trainer(carry=...)` carries have the values in the data of
    that batch. The first batch of a pass always begins a sequence.

    Attributes:
        rows: number of rows, None if it is unknown.
        count: number of batches, None if it follows from the rows, or is unknown.
        shuffles: whether a seed changes the order of the rows.
        reuses: whether the arrays of a batch may be written to when the next one is read.
        pads: whether rows are padded, so that only a mask tells their lengths.
        sequences: whether a seed changes the order of whole sequences only, each of which begins
            with None, so that states can be carried although rows are shuffled.
        late_labels: function `(X, y) -> y` that computes the labels of a batch right before it is
            used, in the thread that trains, such as labels that follow from predictions; None: the
            labels that were read. Batches are read ahead without it, and trained one by one.
        arguments: arguments of the function that returned the reader, which must be equal in a
            resumed training; without the data, which `describe` identifies.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> class Lines(og.data.Reader):
        ...     shuffles = False
        ...     def batches(self, size, seed, skip):
        ...         for start in range(skip * size, 6, size):
        ...             x = np.arange(start, min(start + size, 6), dtype=np.float32)
        ...             yield x[:, None], 2 * x[:, None]
        >>> [len(X) for X, y in Lines().batches(4, None, 0)]
        [4, 2]
    """

    rows: int | None = None
    count: int | None = None
    shuffles = True
    reuses = False
    pads = False
    sequences = False
    late_labels: Callable[[Any, Any], Any] | None = None
    arguments: Mapping[str, Any] = MappingProxyType({})

    @property
    def order(self) -> np.ndarray | None:
        """The row indices in the order of an evaluation; None if rows keep their order."""
        return None

    def first(self) -> Any:
        """Return the first row as a batch; if the data are batches, the first batch; None if the
        data are empty.
        """
        return next((batch for batch in self.batches(1, None, 0) if batch is not None), None)

    def peek(self) -> Any:
        """Return the first row or batch, as `first` does; an item that is read from an iterable
        stays in its next pass.
        """
        return self.first()

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass, without the first `skip` batches.

        Args:
            size: rows of a batch; the last may have fewer. Readers of whole batches ignore it.
            seed: decides the order of the rows, and their random changes; None: rows are in
                `order`, without random changes.
            skip: number of batches to leave out; None in front of the first yielded batch stays.
        """
        raise NotImplementedError

    def row_order(self, size: int, seed: int | None) -> np.ndarray | None:
        """Return the indices of all rows in the order of a pass of `batches`.

        None: the order is not known before the rows are read, or a batch has more than its rows,
        such as padding.
        """
        return None

    def changes_rows(self) -> bool:
        """Return whether a seed changes rows, and not only their order."""
        return True

    def describe(self) -> dict[str, Any]:
        """Return a dict for JSON that identifies the data: other data give another dict."""
        return {"kind": type(self).__name__, "rows": self.rows}

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> Reader:
        """Return the reader adapted to inputs of these declared shapes, `{name: shape}`."""
        return self

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes by class index, which a trained model stores; empty if classes
        have no names.
        """
        return ()

    @property
    def remembered(self) -> Mapping[str, list[Any]]:
        """The metadata entries {key: value} that say how a trained model's data become numbers."""
        return {}

    def for_dtypes(self, dtypes: Mapping[str, np.dtype]) -> Reader:
        """Return the reader adapted to inputs of these dtypes, `{name: dtype}`."""
        return self

    def count_batches(self, size: int) -> int | None:
        """Return the count of batches in one pass with this batch size; None if unknown."""
        if self.count is not None or self.rows is None:
            return self.count
        return -(-self.rows // size)

    def subset(self, numbers: np.ndarray) -> Reader | None:
        """Return the reader of the rows with these indices; None if rows cannot be selected."""
        return None


def keep_arguments(data: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that stores the arguments of a function in the `Reader` that the function
    returns.

    Each argument must be equal in a resumed training, except the arguments that `data` names, whose
    content `Reader.describe` identifies.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, contents = inspect.signature(function), data.split()

        @functools.wraps(function)
        def make_reader(*values: P.args, **named_values: P.kwargs) -> R:
            reader = function(*values, **named_values)
            given = signature.bind(*values, **named_values)
            given.apply_defaults()
            reader.arguments = {
                name: value.arguments if isinstance(value, Reader) else value
                for name, value in given.arguments.items()
                if isinstance(value, Reader) or name not in contents
            }
            return reader

        make_reader.data_arguments = contents  # type: ignore[attr-defined]
        return make_reader

    return decorate


class IndexedReader(Reader):
    """Rows that can be read in any order: `take` reads the rows of a batch.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> class Squares(og.data.IndexedReader):
        ...     rows = 100
        ...     def take(self, indices, seed):
        ...         return np.float32(indices)[:, None], np.float32(indices**2)[:, None]
        >>> [X.ravel().tolist() for X, y in Squares().batches(50, None, 1)][0][:3]
        [50.0, 51.0, 52.0]
    """

    rows: int

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the batch of the rows with these indices, in this order."""
        raise NotImplementedError

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass: all rows, permuted by `seed`, cut into batches."""
        order = self.row_order(size, seed)
        for start in range(skip * size, self.rows, size):
            yield self.take(order[start : start + size], seed)

    def row_order(self, size: int, seed: int | None) -> np.ndarray:
        """Return all rows, permuted by `seed`."""
        rows = np.arange(self.rows)
        return rows if seed is None else np.random.default_rng(seed).permutation(self.rows)

    def changes_rows(self) -> bool:
        """Return whether some rows, read several times, are not the same each time."""
        rows = np.arange(self.rows)[:: max(1, self.rows // _COMPARED)]
        batches = (self.take(rows, seed) for seed in (None, *range(_SEEDS)))
        first, *others = (
            list(map(to_numpy, _arrays_of_batch(b if isinstance(b, tuple) else (b,))))
            for b in batches
        )
        return any(
            len(other) != len(first)
            or not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
            for other in others
        )


class FileReader(IndexedReader):
    """Rows that are each decoded from a file when a batch needs the row.

    What is random about a row follows from the seed and its number. Subclasses name in `per_row`
    their attributes that have an entry for each row.
    """

    per_row: tuple[str, ...]

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[Any, ...]:
        """Return the arrays of a row; `rng` draws random changes, and is None in evaluations."""
        raise NotImplementedError

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the stacked arrays of the rows with these indices."""
        rows = []
        for row in map(int, indices):
            rng = None if seed is None else np.random.default_rng([seed, row])
            rows.append(self.read_row(row, rng))
        return tuple(np.stack(arrays) for arrays in zip(*rows, strict=True))

    def changes_rows(self) -> bool:
        """Return whether a row draws random numbers, or differs when it is read again."""
        rng, untouched = np.random.default_rng(0), np.random.default_rng(0)
        self.read_row(0, rng)
        draws = rng.bit_generator.state != untouched.bit_generator.state
        return draws or super().changes_rows()

    def subset(self, numbers: np.ndarray) -> Self:
        """Return the reader of the rows with these indices."""
        part = copy.copy(self)
        part.rows = len(numbers)
        for name in self.per_row:
            entries = getattr(self, name)
            if entries is not None:
                is_array = isinstance(entries, np.ndarray)
                setattr(part, name, entries[numbers] if is_array else [entries[i] for i in numbers])
        return part


class DiskArrays(IndexedReader):
    """Arrays on disk (`numpy.memmap`) or in memory, whose rows are read and checked by batch."""

    def __init__(self, X: Any, y: Any = None, sample_weight: Any = None) -> None:
        parts = [X] if y is None and sample_weight is None else [X, y, sample_weight]
        self.parts = [_map_arrays(part, lambda a: a) for part in parts]
        arrays = list(_arrays_of_batch(self.parts))
        counts = {len(array) for array in arrays}
        if len(counts) > 1:
            raise ValueError(
                f"X, y and weights must have the same number of rows, not {sorted(counts)}"
            )
        self.rows = counts.pop()

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, ...]:
        """Return the rows with these indices of every array."""
        order = np.argsort(indices)  # read the file from its beginning to its end
        back = np.argsort(order)
        return tuple(_map_arrays(part, lambda a: a[indices[order]][back]) for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """Return shapes, dtypes and a digest of some rows."""
        arrays = enumerate(_arrays_of_batch(self.parts))
        return describe_arrays("arrays", {str(i): array for i, array in arrays})


def _arrays_of_batch(parts: Sequence[Any]) -> Iterator[np.ndarray]:
    """Yield all arrays in (X, y, weights), each of which is an array, a dict of arrays or None."""
    for part in parts:
        yield from part.values() if isinstance(part, Mapping) else [part] * (part is not None)


def to_array(value: Any) -> np.ndarray:
    """Return `value` as an array; a `numpy.memmap` stays on disk."""
    return value if isinstance(value, np.ndarray) else to_numpy(value)


def _map_arrays(part: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Apply a function to an array or to each array of a dict; return None for None."""
    if part is None:
        return None
    if isinstance(part, Mapping):
        return {name: function(to_array(a)) for name, a in part.items()}
    return function(to_array(part))


class IteratedReader(Reader):
    """Base of readers of an iterable that is iterated once for each pass over the data.

    The items that `peek` has read begin the next pass, so that an iterable that draws random
    numbers draws the same numbers with and without `peek`. One thread iterates all of that pass.
    """

    shuffles = False
    _peeked: tuple[list[Any], Iterator[Any]] | None = None

    def begin_pass(self) -> Iterator[Any]:
        """Return a new iterator of the items of a pass."""
        raise NotImplementedError

    def iterate_pass(self) -> Iterator[Any]:
        """Yield the items of one pass, beginning with the items that `peek` has read."""
        read, items = self._peeked or ([], self.begin_pass())
        self._peeked = None
        yield from read
        yield from items

    def peek_items(self) -> list[Any]:
        """Read the next pass up to the first item that is not None, and return the items that were
        read.
        """
        if self._peeked is None:
            items = read_ahead((item for item in self.begin_pass()), 0)
            read = []
            for item in items:
                read.append(item)
                if item is not None:
                    break
            self._peeked = read, items
        return self._peeked[0]


class Batches(IteratedReader):
    """An iterable of batches such as a torch DataLoader, or a function that returns an iterable.

    The iterable is iterated, or the function called, once per pass.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.reuses = not isinstance(source, (list, tuple))
        try:
            self.count = len(source) - sum(b is None for b in self._batches_of_list())
        except (TypeError, NotImplementedError):
            self.count = None
        self._once = not callable(source) and isinstance(source, Iterator)
        self._begun = False

    def first(self) -> Any:
        """Return the first batch; None for an iterator, which can be read once only."""
        return None if self._once else super().first()

    def peek(self) -> Any:
        """Return the first batch of the next pass; None for an iterator, which can be read once
        only.
        """
        if self._once or self._batches_of_list():
            return self.first()
        return next(iter(self.peek_items()[-1:]), None)

    def begin_pass(self) -> Iterator[Any]:
        """Return a new iterator of the batches.

        Raises:
            ValueError: the source can be read only once, and was read before.
        """
        if self._once and self._begun:
            raise ValueError(
                f"a {type(self.source).__name__} can be read only once, and each epoch reads it "
                "again: a generator function, a list of batches or a DataLoader can be read again"
            )
        self._begun = True
        return iter(self.source() if callable(self.source) else self.source)

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of the iterable; the first `skip` batches are read and discarded.

        None in front of a batch does not count as a batch.
        """
        batches = self.iterate_pass()
        for _ in range(skip):
            while next(batches, batches) is None:
                pass
        yield from batches

    def describe(self) -> dict[str, Any]:
        """Return a dict that identifies the iterable: its type, number of batches and, for a list,
        a digest.
        """
        entries: dict[str, Any] = {"kind": type_name(self.source), "batches": self.count}
        if listed := [batch for batch in self._batches_of_list() if batch is not None]:
            chosen = np.unique(np.linspace(0, len(listed) - 1, _SAMPLED).astype(int))
            arrays = enumerate(_numeric_arrays([listed[i] for i in chosen]))
            described = describe_arrays("batches", {str(i): array for i, array in arrays})
            entries["digest"] = described["digest"]
            if len(listed) < len(self._batches_of_list()):
                entries["begins"] = [i for i, b in enumerate(self._batches_of_list()) if b is None]
        return entries

    def _batches_of_list(self) -> Sequence[Any]:
        """Return the batches of a list or tuple; empty for another iterable."""
        return self.source if isinstance(self.source, (list, tuple)) else ()


def type_name(value: Any) -> str:
    """Return the name of the type of a value with its module, such as
    `torch.utils.data.DataLoader`.
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _numeric_arrays(batches: Sequence[Any]) -> Iterator[np.ndarray]:
    """Yield the arrays in batches whose dtype is numeric."""
    for batch in batches:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        for part in parts if isinstance(parts, (tuple, list)) else [*parts]:
            if part is not None and (array := to_numpy(part)).dtype.kind in "biuf":
                yield array


def describe_arrays(kind: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a dict for JSON that identifies arrays: shapes, dtypes, and a digest of about 1 MB of
    values.
    """
    digest = hashlib.blake2b(digest_size=16)
    total = sum(array.nbytes for array in arrays.values())
    for array in arrays.values():
        share = array if total <= _DIGESTED else _evenly_spaced_rows(array, total)
        digest.update(np.ascontiguousarray(share).view(np.uint8).data if share.size else b"")
    inputs = {n: {"shape": [*a.shape], "dtype": str(a.dtype)} for n, a in arrays.items()}
    return {"kind": kind, "inputs": inputs, "digest": digest.hexdigest()}


def _evenly_spaced_rows(array: np.ndarray, total: int) -> np.ndarray:
    """Return evenly spaced rows for the digest of arrays of `total` bytes."""
    if array.ndim == 0:
        return array
    count = max(1, len(array) * _DIGESTED // total)
    return array[np.linspace(0, len(array) - 1, count).astype(np.int64)]


def describe_files(files: Sequence[str | os.PathLike], root: str | os.PathLike = "") -> str:
    """Return a digest of files: names (relative to `root`), sizes and times of change."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files[:: max(1, len(files) // _LISTED)]:
        path = Path(file)
        name = path.relative_to(root).as_posix() if root else path.name
        entry = path.stat() if path.is_file() else None  # files of remote systems have no entry
        times = (entry.st_size, entry.st_mtime_ns) if entry else ()
        digest.update(repr((name, times)).encode())
    return digest.hexdigest()


def is_batch(item: Any) -> bool:
    """Return whether an item of a list is a batch: a dict, a table, a tuple or list of arrays."""
    if isinstance(item, tuple):
        return not all(isinstance(part, (int, float)) for part in item)
    is_mapping = isinstance(item, Mapping)
    return is_mapping or is_table(item) or (isinstance(item, list) and _has_arrays(item))


def is_one_batch(items: tuple[Any, ...]) -> bool:
    """Return whether a tuple is one batch, (X,), (X, y) or (X, y, sample_weight), rather than
    several batches.

    It is a tuple of batches if its items are dicts with a name in common, or tuples and lists of
    arrays that are not the rows of one array.

    Raises:
        ValueError: both are possible: lists of arrays of one shape, which may be rows of X and y.
    """
    if len(items) not in (2, 3):
        return len(items) == 1 and hasattr(items[0], "shape")
    if all(isinstance(item, Mapping) for item in items):
        return not {*items[0]} & {*items[1]}
    lists = [item for item in items if not isinstance(item, Mapping)]
    if not all(isinstance(item, (tuple, list)) and _has_arrays(item) for item in lists):
        return True
    weights = len(items) < 3 or all(prod(shape_of(part)) == 1 for part in items[2])
    if weights and len({len(item) for item in lists}) == 1 and all(map(_may_be_rows, lists)):
        if len(lists[0]) > 3:
            return True
        raise ValueError(
            f"a tuple of {len(items)} lists of arrays of one shape may be batches, or the rows of "
            "X and of y: pass a list of batches, as [(X, y), (X, y)], or X and y as one array each"
        )
    return False


def _has_arrays(parts: Any) -> bool:
    """Return whether any element of a tuple or list is an array or a dict."""
    return any(hasattr(part, "shape") or isinstance(part, Mapping) for part in parts)


def _may_be_rows(parts: Any) -> bool:
    """Return whether all elements of a tuple or list are arrays of one shape, so that each may be a
    row.
    """
    if not all(hasattr(part, "shape") for part in parts):
        return False
    return len({tuple(shape_of(part)) for part in parts}) == 1
