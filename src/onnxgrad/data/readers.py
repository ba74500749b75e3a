"""Readers: data that are read batch by batch, in an order that a seed decides."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np

from onnxgrad.data.prefetch import read_ahead
from onnxgrad.operators.shapes import Dims
from onnxgrad.runtime.values import to_numpy

P = ParamSpec("P")
R = TypeVar("R", bound="Reader")

_DIGESTED = 1 << 20  # bytes
_SAMPLED = 16  # batches of a list
_LISTED = 10_000  # files whose sizes and times are read


class Reader:
    """Data that are read batch by batch.

    A batch is a tuple (X,), (X, y) or (X, y, sample_weight), as `fit` takes them, with rows on
    axis 0, or a dict of arrays by input, which goes into the model as it is. In front of a batch,
    None says that a sequence begins: inputs that `Trainer(carry=...)` carries have the values that
    are in the data of that batch. The first batch of a pass always begins one.

    Attributes:
        rows: number of rows, None if it is unknown.
        count: number of batches, None if the rows decide it, or it is unknown.
        shuffles: whether a seed changes the order of the rows.
        reuses: whether the arrays of a batch may be written to when the next one is read.
        pads: whether rows are padded, of which only a mask tells how long they were.
        sequences: whether a seed changes the order of whole sequences only, each of which begins
            with None, so that states can be carried although rows are shuffled.
        late_labels: function `(X, y) -> y` that computes the labels of a batch right before it is
            used, in the thread that trains, such as labels that follow from predictions; None: the
            labels that were read. Batches are read ahead without it, and trained one by one.
        arguments: those of the function that returned it, which a resumed training must have equal,
            without the data, which `describe` identifies.

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
        """The numbers of the rows in the order of batches without a seed; None: as they are."""
        return None

    def first(self) -> Any:
        """Return a batch of one row, or of more if batches are given; None if there is none."""
        return next((batch for batch in self.batches(1, None, 0) if batch is not None), None)

    def peek(self) -> Any:
        """Return the same as `first`; what is iterated is not iterated again for it."""
        return self.first()

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass, without the first `skip`.

        Args:
            size: rows of a batch; the last may have fewer. Readers of whole batches ignore it.
            seed: decides the order of the rows, and what is random about them; None: in `order`,
                and nothing is random.
            skip: number of batches to leave out; None that stands in front of the next is not.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what identifies the data, for JSON; a change of the data changes it."""
        return {"kind": type(self).__name__, "rows": self.rows}

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> Reader:
        """Return the reader for features of these declared shapes, by name."""
        return self

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes that labels number, which trained models store; often none."""
        return ()

    @property
    def remembered(self) -> Mapping[str, list[Any]]:
        """How data become numbers, by keys of metadata, which trained models store; often none."""
        return {}

    def for_dtypes(self, dtypes: Mapping[str, np.dtype]) -> Reader:
        """Return the reader for features of these dtypes, by name."""
        return self

    def count_batches(self, size: int) -> int | None:
        """Return the number of batches of one pass with this size; None if it is unknown."""
        if self.count is not None or self.rows is None:
            return self.count
        return -(-self.rows // size)

    def subset(self, numbers: np.ndarray) -> Reader | None:
        """Return the reader of the rows with these numbers; None if rows cannot be drawn."""
        return None


def with_arguments(data: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the reader that a function returns keep its arguments: `Reader.arguments`.

    Each argument counts in a resumed training, unless it is named in `data`: what `describe` of the
    reader identifies by its content.
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
    """Rows that can be read in any order: `take` reads those of a batch.

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
        """Return the batch of the rows with these indices, in their order."""
        raise NotImplementedError

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass: a permutation of all rows, cut."""
        order = None if seed is None else np.random.default_rng(seed).permutation(self.rows)
        for start in range(skip * size, self.rows, size):
            stop = min(start + size, self.rows)
            yield self.take(np.arange(start, stop) if order is None else order[start:stop], seed)


class FileReader(IndexedReader):
    """Rows of which each is decoded from a file when a batch needs it.

    What is random about a row follows from the seed and its number. Subclasses name in `per_row`
    their attributes that have an entry for each row.
    """

    per_row: tuple[str, ...]

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[Any, ...]:
        """Return the arrays of a row, as `rng` draws them; None in evaluations."""
        raise NotImplementedError

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the stacked arrays of the rows with these indices."""
        rows = []
        for row in map(int, indices):
            rng = None if seed is None else np.random.default_rng([seed, row])
            rows.append(self.read_row(row, rng))
        return tuple(np.stack(arrays) for arrays in zip(*rows, strict=True))

    def subset(self, numbers: np.ndarray) -> Self:
        """Return the reader of the rows with these numbers."""
        part = copy.copy(self)
        part.rows = len(numbers)
        for name in self.per_row:
            entries = getattr(self, name)
            if entries is not None:
                is_array = isinstance(entries, np.ndarray)
                setattr(part, name, entries[numbers] if is_array else [entries[i] for i in numbers])
        return part


class DiskArrays(IndexedReader):
    """Arrays of which some are on disk (`numpy.memmap`): rows are read and checked by batch."""

    def __init__(self, X: Any, y: Any = None, sample_weight: Any = None) -> None:
        parts = [X] if y is None and sample_weight is None else [X, y, sample_weight]
        self.parts = [_map_arrays(part, lambda a: a) for part in parts]
        arrays = list(_leaves(self.parts))
        counts = {len(array) for array in arrays}
        if len(counts) > 1:
            raise ValueError(f"the arrays have different numbers of rows: {sorted(counts)}")
        self.rows = counts.pop()

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, ...]:
        """Return the rows of every array."""
        order = np.argsort(indices)  # from the beginning of the file to its end
        back = np.argsort(order)
        return tuple(_map_arrays(part, lambda a: a[indices[order]][back]) for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """Return shapes, dtypes and a digest of some rows."""
        return describe_arrays("arrays", {str(i): a for i, a in enumerate(_leaves(self.parts))})


def _leaves(parts: Sequence[Any]) -> Iterator[np.ndarray]:
    for part in parts:
        yield from part.values() if isinstance(part, Mapping) else [part] * (part is not None)


def to_array(value: Any) -> np.ndarray:
    """Return `value` as an array, a memmap as it is."""
    return value if isinstance(value, np.ndarray) else to_numpy(value)


def _map_arrays(part: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    if part is None:
        return None
    if isinstance(part, Mapping):
        return {name: function(to_array(a)) for name, a in part.items()}
    return function(to_array(part))


class IteratedReader(Reader):
    """Data that an iterable yields, which is iterated once a pass.

    What `peek` has read is the beginning of the next pass, so that an iterable that draws random
    numbers draws no others for it. One thread iterates all of that pass.
    """

    shuffles = False
    _peeked: tuple[list[Any], Iterator[Any]] | None = None

    def begin_pass(self) -> Iterator[Any]:
        """Return an iterator of what is iterated."""
        raise NotImplementedError

    def next_pass(self) -> Iterator[Any]:
        """Yield the items of one pass, first those that were read already."""
        read, items = self._peeked or ([], self.begin_pass())
        self._peeked = None
        yield from read
        yield from items

    def peek_items(self) -> list[Any]:
        """Return the first item of the next pass, and each None in front of it."""
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
    """An iterable of batches such as a torch DataLoader, or a function that returns one.

    The iterable is iterated, or the function called, once per pass.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.reuses = not isinstance(source, (list, tuple))
        try:
            self.count = len(source) - sum(b is None for b in self._listed())
        except (TypeError, NotImplementedError):
            self.count = None
        self._once = not callable(source) and isinstance(source, Iterator)
        self._begun = False

    def first(self) -> Any:
        """Return the first batch; None where reading it would lose it."""
        return None if self._once else super().first()

    def peek(self) -> Any:
        """Return the first batch of the next pass; None where reading it would lose it."""
        if self._once or self._listed():
            return self.first()
        return next(iter(self.peek_items()[-1:]), None)

    def begin_pass(self) -> Iterator[Any]:
        """Return an iterator of the batches.

        Raises:
            ValueError: they were read already, and can be read once.
        """
        if self._once and self._begun:
            raise ValueError(
                f"a {type(self.source).__name__} can be read only once, and each epoch reads it "
                "again: a generator function, a list of batches or a DataLoader can be read again"
            )
        self._begun = True
        return iter(self.source() if callable(self.source) else self.source)

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield what the iterable gives; those that are left out are read and discarded."""
        yield from _behind(self.next_pass(), skip)

    def describe(self) -> dict[str, Any]:
        """Return the type, the number of batches, and for a list a digest of some."""
        entries: dict[str, Any] = {"kind": full_name(self.source), "batches": self.count}
        if listed := [batch for batch in self._listed() if batch is not None]:
            chosen = np.unique(np.linspace(0, len(listed) - 1, _SAMPLED).astype(int))
            arrays = enumerate(_numeric([listed[i] for i in chosen]))
            described = describe_arrays("batches", {str(i): array for i, array in arrays})
            entries["digest"] = described["digest"]
            if len(listed) < len(self._listed()):
                entries["begins"] = [i for i, b in enumerate(self._listed()) if b is None]
        return entries

    def _listed(self) -> Sequence[Any]:
        return self.source if isinstance(self.source, (list, tuple)) else ()


def _behind(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """Yield what is behind the first `skip` batches; None in front of a batch is none."""
    for _ in range(skip):
        while next(batches, batches) is None:
            pass
    yield from batches


def full_name(value: Any) -> str:
    """Return the name of the type of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _numeric(batches: Sequence[Any]) -> Iterator[np.ndarray]:
    for batch in batches:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        for part in parts if isinstance(parts, (tuple, list)) else [*parts]:
            if part is not None and (array := to_numpy(part)).dtype.kind in "biuf":
                yield array


def describe_arrays(kind: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the entries that describe arrays: shapes, dtypes, and a digest of about 1 MB."""
    digest = hashlib.blake2b(digest_size=16)
    total = sum(array.nbytes for array in arrays.values())
    for array in arrays.values():
        share = array if total <= _DIGESTED else _sample(array, total)
        digest.update(np.ascontiguousarray(share).view(np.uint8).data if share.size else b"")
    inputs = {n: {"shape": [*a.shape], "dtype": str(a.dtype)} for n, a in arrays.items()}
    return {"kind": kind, "inputs": inputs, "digest": digest.hexdigest()}


def _sample(array: np.ndarray, total: int) -> np.ndarray:
    """Return evenly spaced rows, as many as the share of the array in `total` bytes allows."""
    if array.ndim == 0:
        return array
    count = max(1, len(array) * _DIGESTED // total)
    return array[np.linspace(0, len(array) - 1, count).astype(np.int64)]


def describe_files(files: Sequence[str | os.PathLike], root: str | os.PathLike = "") -> str:
    """Return a digest of the names (relative to `root`), sizes and times of change of files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files[:: max(1, len(files) // _LISTED)]:
        path = Path(file)
        name = path.relative_to(root).as_posix() if root else path.name
        entry = path.stat() if path.is_file() else None  # files of remote systems have none
        times = (entry.st_size, entry.st_mtime_ns) if entry else ()
        digest.update(repr((name, times)).encode())
    return digest.hexdigest()
