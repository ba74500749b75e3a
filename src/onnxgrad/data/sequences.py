"""Sequences of different length: padding, masks, and batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.arrays import to_numbers
from onnxgrad.data.readers import Reader, described
from onnxgrad.errors import unknown

_POOL = 50  # batches whose rows are sorted by length together


def pad_sequences(
    sequences: Sequence[Any], value: float = 0, length: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sequences of different length as one array, padded at the end.

    Args:
        sequences: N arrays (T_i, ...), which differ in their first axis only.
        value: what is filled in.
        length: T, at least that of the longest sequence; None: that of the longest.

    Returns:
        The array (N, T, ...); the mask (N, T), bool, true where the array has an element of the
        sequence; and the lengths (N,), int64.

    Raises:
        ValueError: no sequence, a `length` below that of a sequence, sequences that differ in other
            axes, or a `value` that their dtype cannot represent.

    Examples:
        >>> from onnxgrad import pad_sequences
        >>> array, mask, lengths = pad_sequences([[5, 6, 7], [8]], value=-1)
        >>> array.tolist(), lengths.tolist()
        ([[5, 6, 7], [8, -1, -1]], [3, 1])
        >>> mask.astype(int).tolist()
        [[1, 1, 1], [1, 0, 0]]
    """
    arrays = [_sequence(i, sequence) for i, sequence in enumerate(sequences)]
    if not arrays:
        raise ValueError("there is no sequence to pad")
    lengths = np.array([len(array) for array in arrays], np.int64)
    longest = int(lengths.max())
    if length is not None and length < longest:
        number = int(lengths.argmax())
        raise ValueError(f"length={length}, and sequence {number} has {longest} elements: cut it")
    width = longest if length is None else length
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the sequences differ in other axes than the first: {sorted(shapes)}")
    filled = [array.dtype for array in arrays if array.size] or [arrays[0].dtype]
    dtype = np.result_type(*filled)
    if np.asarray(value).astype(dtype) != value:
        raise ValueError(f"the sequences hold {dtype}, which cannot represent the value {value}")
    padded = np.full((len(arrays), width, *shapes.pop()), value, dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded, np.arange(width) < lengths[:, None], lengths


def _sequence(number: int, values: Any) -> np.ndarray:
    array = to_numbers(f"sequence {number}", values)
    if not array.ndim:
        raise ValueError(f"sequence {number} is a single number")
    return array


def by_length(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    mask: str | None = None,
    lengths: str | None = None,
    value: float = 0,
    y_value: float | None = None,
) -> Reader:
    """Return sequences as data for `fit`, in batches of similar length, padded to their longest.

    Shuffled rows are sorted by length within 50 batches, cut, and the batches shuffled.

    Args:
        X: N sequences (T_i, ...), or a dict of them by input, in which entries of one row have one
            length; arrays in the dict are not padded, they have one entry a row.
        y: labels: an array (N, ...), or a list of N sequences, one label an element, padded too.
        sample_weight: (N,).
        mask: name of an input (N, T) for the mask: 1 where a sequence has an element, else 0.
        lengths: name of an input (N,) for the lengths.
        value: what fills the sequences.
        y_value: what fills sequences of labels, and is ignored by the loss; None: -100 for class
            indices. Labels that are not integers need a value.

    Returns:
        A reader, which `fit(reader)` takes as X.

    Raises:
        ValueError: different numbers of rows or lengths, no sequence in X, `mask` or `lengths`
            where X is not a dict, or no `y_value` for labels that are floats.

    Examples:
        >>> from onnxgrad import by_length
        >>> reader = by_length({"ids": [[1, 2, 3], [4], [5, 6]]}, [0, 1, 1], mask="mask")
        >>> X, y, _ = next(reader.batches(2, None, 0))
        >>> X["ids"].tolist(), X["mask"].tolist(), y.tolist()
        ([[1, 2, 3], [4, 0, 0]], [[True, True, True], [True, False, False]], [0, 1])
    """
    if (mask or lengths) and not isinstance(X, Mapping):
        raise ValueError("mask and lengths are inputs beside X: pass X as {input: sequences}")
    for name in (mask, lengths):
        if name is not None and name in X:
            raise ValueError(f"X has the input {name!r} already: it is computed from the lengths")
    return ByLength(X, y, sample_weight, (mask, lengths), (value, y_value))


class ByLength(Reader):
    """Sequences in batches of similar length; what `by_length` returns."""

    rows: int

    def __init__(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        names: tuple[str | None, str | None],
        values: tuple[float, float | None],
    ) -> None:
        self._dict = isinstance(X, Mapping)
        columns = dict(X) if self._dict else {"X": X}
        self._X = {name: _column(column) for name, column in columns.items()}
        self._y = None if y is None else _column(y)
        self._weight = None if sample_weight is None else np.asarray(sample_weight)
        self._names, self._values = names, (values[0], -100 if values[1] is None else values[1])
        everything = {**self._X, "y": self._y, "sample_weight": self._weight}
        counts = {n: len(column) for n, column in everything.items() if column is not None}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the inputs have different numbers of rows: {counts}")
        ragged = {n: c for n, c in self._X.items() if isinstance(c, list)}
        if not ragged or not next(iter(ragged.values())):
            raise ValueError("X has no sequences: a list of arrays is one, an array is not padded")
        if isinstance(self._y, list):
            ragged |= {"y": self._y}
            if values[1] is None and any(np.asarray(s).dtype.kind == "f" for s in self._y):
                raise ValueError("y holds sequences of floats: say with y_value what fills them")
        self.rows = next(iter(counts.values()))
        each = {name: np.array([len(s) for s in column]) for name, column in ragged.items()}
        first, self._lengths = next(iter(each.items()))
        for name, other in each.items():
            if (wrong := np.flatnonzero(other != self._lengths)).size:
                row = int(wrong[0])
                raise ValueError(
                    f"row {row} has {other[row]} elements of {name!r}, and {self._lengths[row]} of "
                    f"{first!r}: sequences of one row must have one length"
                )

    def for_inputs(self, shapes: Any) -> Reader:
        """Check that the model has the inputs for the mask and the lengths."""
        for name in self._names:
            if name is not None and name not in shapes:
                raise unknown("input", name, shapes)
        return self

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one pass; in order, they are not sorted."""
        rows = np.arange(self.rows)
        cut = [rows[start : start + size] for start in range(0, self.rows, size)]
        if seed is not None:
            rng = np.random.default_rng(seed)
            rows = rng.permutation(self.rows)
            cut = []
            for start in range(0, self.rows, size * _POOL):
                pool = rows[start : start + size * _POOL]
                pool = pool[np.argsort(self._lengths[pool], kind="stable")]
                cut += [pool[at : at + size] for at in range(0, len(pool), size)]
            cut = [cut[i] for i in rng.permutation(len(cut))]
        for indices in cut[skip:]:
            yield self._batch(indices)

    def _batch(self, indices: np.ndarray) -> tuple[Any, ...]:
        value, y_value = self._values
        columns = {name: _taken(column, indices, value) for name, column in self._X.items()}
        lengths = self._lengths[indices]
        if self._names[0] is not None:
            columns[self._names[0]] = np.arange(lengths.max()) < lengths[:, None]
        if self._names[1] is not None:
            columns[self._names[1]] = lengths
        y = (
            None
            if self._y is None
            else _taken(self._y, indices, -100 if y_value is None else y_value)
        )
        weight = None if self._weight is None else self._weight[indices]
        return columns if self._dict else columns["X"], y, weight

    def describe(self) -> dict[str, Any]:
        """Return the number of rows, and a digest of the lengths and labels."""
        arrays = {"lengths": self._lengths}
        if isinstance(self._y, np.ndarray):
            arrays["y"] = self._y
        return described("sequences", arrays) | {"rows": self.rows}


def _column(values: Any) -> list[Any] | np.ndarray:
    """Return a list of sequences as a list, and anything else as an array."""
    if isinstance(values, np.ndarray) or not len(values) or not np.ndim(_first(values)):
        return np.asarray(values)
    return list(values)


def _first(values: Any) -> Any:
    return values[0] if hasattr(values, "__getitem__") else next(iter(values))


def _taken(column: list[Any] | np.ndarray, indices: np.ndarray, value: float) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column[indices]
    return pad_sequences([column[i] for i in indices], value)[0]
