"""Sequences of different length: padding, masks, and batches of similar length."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrad.data.arrays import to_numbers
from onnxgrad.data.readers import Reader, describe_arrays, keep_arguments
from onnxgrad.errors import unknown
from onnxgrad.reporting import logger
from onnxgrad.runtime.values import to_numpy

_POOL = 50  # batches within which rows are sorted by length


def pad_sequences(
    sequences: Sequence[Any], value: float = 0, length: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sequences of different length as one array, padded at the end.

    Args:
        sequences: N arrays (T_i, ...), which differ in their first axis only.
        value: the value of padded elements.
        length: T, at least the length of the longest sequence; None: this length.

    Returns:
        The array (N, T, ...); the mask (N, T), bool, true where the array has an element of the
        sequence; and the lengths (N,), int64.

    Raises:
        ValueError: no sequence, a sequence longer than `length`, sequences that differ in other
            axes, or a `value` that their dtype cannot represent.

    Examples:
        >>> from onnxgrad.data import pad_sequences
        >>> array, mask, lengths = pad_sequences([[5, 6, 7], [8]], value=-1)
        >>> array.tolist(), lengths.tolist()
        ([[5, 6, 7], [8, -1, -1]], [3, 1])
        >>> mask.astype(int).tolist()
        [[1, 1, 1], [1, 0, 0]]
    """
    arrays = [to_numbers(f"sequence {i}", sequence) for i, sequence in enumerate(sequences)]
    if not arrays:
        raise ValueError("sequences is empty: pass at least one sequence")
    if numbers := [i for i, array in enumerate(arrays) if not array.ndim]:
        raise ValueError(f"sequence {numbers[0]} is a single number: pass a list or an array")
    lengths = np.array([len(array) for array in arrays], np.int64)
    longest = int(lengths.max())
    if length is not None and length < longest:
        number = int(lengths.argmax())
        raise ValueError(f"length={length}: sequence {number} has {longest} elements: cut it")
    width = longest if length is None else length
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"the sequences must have one shape behind their first axis, not {sorted(shapes)}"
        )
    filled = [array.dtype for array in arrays if array.size] or [arrays[0].dtype]
    dtype = np.result_type(*filled)
    if np.asarray(value).astype(dtype) != value:
        raise ValueError(
            f"the sequences hold {dtype}, which cannot represent value={value}: pass another value"
        )
    padded = np.full((len(arrays), width, *shapes.pop()), value, dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded, np.arange(width) < lengths[:, None], lengths


@keep_arguments(data="X y sample_weight")
def by_length(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    mask: str | Mapping[str, str] | None = None,
    lengths: str | Mapping[str, str] | None = None,
    value: float | Mapping[str, float] | None = None,
    y_value: float | None = None,
    axis: int | Mapping[str, int] | None = None,
    same_length: bool | None = None,
) -> Reader:
    """Return sequences as data for `fit`, in batches of similar length, padded per batch.

    Shuffled rows are sorted by length within 50 batches, cut into batches, and the batches
    shuffled. Sequences without a mask are not padded, as convolutions or recurrent networks would
    read the padded elements: rows of a batch have one length, some batches have fewer rows, and the
    logger says so. A mask is `mask` or `lengths`, also of other sequences with the same lengths;
    or sequences of ones, or an array of the lengths, in X. A `value` pads without a mask, too.

    Args:
        X: N sequences (T_i, ...), or other arrays that differ in length along one axis, such as
            images of one height; or a dict by input of such sequences, and of arrays with an entry
            for each row, which are not padded. Lists with an attribute `shapes`, the shapes of
            their arrays, are read by batch.
        y: labels: an array (N, ...), or a list of N sequences, padded too; or a dict by output.
        sample_weight: (N,).
        mask: name of an input (N, T) for the mask: 1 where a sequence has an element, else 0; or
            `{input: name of its mask}`, "y" for y, where lengths in one row differ.
        lengths: name of an input (N,) for the lengths, or a dict as for `mask`.
        value: value of padded elements, or `{input: value}`. None: 0, in sequences with a mask.
        y_value: value of padded labels, which the loss must ignore; None: -100, for integers only.
        axis: axis of a row along which lengths differ, or `{input: axis}`. None: the first axis
            with different lengths, or 0.
        same_length: whether all sequences of a row must have one length, as tokens and labels have,
            or need not, as a text and its translation. None: two sequences must have one length if
            they have it in most rows.

    Returns:
        A reader, which `fit(reader)` takes as X.

    Raises:
        ValueError: different numbers of rows or lengths, arrays that differ along several axes, no
            sequence in X, a name that X does not have, or labels of floats without `y_value`.

    Examples:
        >>> from onnxgrad.data import by_length
        >>> reader = by_length({"ids": [[1, 2, 3], [4], [5, 6]]}, [0, 1, 1], mask="mask")
        >>> X, y, _ = next(reader.batches(2, None, 0))
        >>> X["ids"].tolist(), X["mask"].tolist(), y.tolist()
        ([[1, 2, 3], [4, 0, 0]], [[True, True, True], [True, False, False]], [0, 1])
    """
    if (mask or lengths) and not isinstance(X, Mapping):
        raise ValueError("mask and lengths are inputs beside X: pass X as {input: sequences}")
    features = dict(X) if isinstance(X, Mapping) else {"X": X}
    key = "labels" if "y" in features else "y"
    labels = {} if y is None else dict(y) if isinstance(y, Mapping) else {key: y}
    axes = _option_by_name("axis", axis, [*features, *labels])
    values = _option_by_name("value", value, [*features])
    columns = {n: _ragged_rows_or_array(n, c, axes[n], values[n] or 0) for n, c in features.items()}
    targets = {n: _ragged_rows_or_array(n, c, axes[n], y_value) for n, c in labels.items()}
    dicts = isinstance(X, Mapping), isinstance(y, Mapping)
    reader = ByLength(columns, targets, sample_weight, dicts, same_length)
    reader.add_length_inputs("mask", mask, axes).add_length_inputs("lengths", lengths, axes)
    return reader.separate_lengths({name for name in features if values[name] is not None})


def _option_by_name(option: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} of an option that is given as one value for all names, or as a dict by
    name.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            raise unknown(f"input in {option}", name, names)
    return {name: given.get(name) for name in names}


@dataclass(frozen=True)
class _RaggedRows:
    """One array for each row; the rows differ in length along `axis`, and batches pad them with
    `value`.
    """

    rows: Sequence[Any]
    axis: int
    value: float
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray, axis: int = 0) -> _RaggedRows:
        """Return the rows with these indices without padding, as numpy's `take`."""
        return replace(self, rows=[self.rows[i] for i in indices], lengths=self.lengths[indices])

    def is_attention_mask(self) -> bool:
        """Return whether all elements of all rows are 1, so that after padding, zeros mark the
        padded elements.

        Rows that are read by batch count as other values: this would read all of them.
        """
        return isinstance(self.rows, list) and all(
            (np.asarray(row) == 1).all() for row in self.rows
        )

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return an array of the rows with these indices, padded to the longest row."""
        rows = [self.rows[i] for i in indices]
        if self.axis:
            rows = [np.moveaxis(to_numpy(row), self.axis, 0) for row in rows]
        return np.moveaxis(pad_sequences(rows, self.value)[0], 1, 1 + self.axis)


def _ragged_rows_or_array(
    name: str, values: Any, axis: int | None, value: float | None
) -> _RaggedRows | np.ndarray:
    """Return a list of arrays as `_RaggedRows`, which batches pad, and other values as an array."""
    stated = getattr(values, "shapes", None)
    if stated is None:
        if isinstance(values, np.ndarray) or not len(values) or not np.ndim(next(iter(values))):
            return np.asarray(values)
        values = list(values)
    rows, shapes = values, [np.shape(row) for row in values] if stated is None else list(stated)
    if len(ranks := {len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"the rows of {name!r} have {sorted(ranks)} axes: give all rows as many axes"
        )
    lengths = np.array(shapes)
    differ = np.flatnonzero((lengths != lengths[0]).any(axis=0)).tolist()
    axis = next(iter(differ), 0) if axis is None else axis % lengths.shape[1]
    if others := [other for other in differ if other != axis]:
        raise ValueError(
            f"the rows of {name!r} differ in length along axis {others[0]} beside axis {axis}, and "
            f"only axis {axis} is padded: cut or pad them along axis {others[0]}"
        )
    if value is None and any(np.asarray(row).dtype.kind == "f" for row in rows):
        raise ValueError(f"{name} holds sequences of floats: pass y_value, which pads them")
    return _RaggedRows(rows, axis, -100 if value is None else value, lengths[:, axis])


class ByLength(Reader):
    """Sequences in batches of similar length: the reader of `by_length`."""

    rows: int
    pads = True

    def __init__(
        self,
        X: dict[str, _RaggedRows | np.ndarray],
        y: dict[str, _RaggedRows | np.ndarray],
        weight: Any,
        dicts: tuple[bool, bool],
        same_length: bool | None,
    ) -> None:
        self._X, self._y, self._dicts = X, y, dicts
        self._weight = None if weight is None else np.asarray(weight)
        # {input: ("mask" or "lengths", lengths)}
        self._beside: dict[str, tuple[str, np.ndarray]] = {}
        everything = {**X, **y, "sample_weight": self._weight}
        counts = {n: len(column) for n, column in everything.items() if column is not None}
        if len(set(counts.values())) > 1:
            raise ValueError(f"X, y and weights must have the same number of rows, not {counts}")
        if not any(isinstance(column, _RaggedRows) for column in X.values()):
            raise ValueError("X has no sequences: pass lists of arrays, as arrays are not padded")
        self.rows = next(iter(counts.values()))
        self._sorted_by = self._distinct_row_lengths(same_length)
        self._apart: dict[str, np.ndarray] = {}  # lengths of sequences that are not padded
        self._told = False

    @property
    def _ragged_columns(self) -> dict[str, _RaggedRows]:
        """The columns of features and labels whose rows are sequences, by name."""
        return {n: c for n, c in {**self._X, **self._y}.items() if isinstance(c, _RaggedRows)}

    def _distinct_row_lengths(self, same: bool | None) -> list[np.ndarray]:
        """Return the arrays of row lengths that occur among the columns; columns with equal lengths
        share one array.

        Raises:
            ValueError: lengths differ that must be equal, see `same_length`.
        """
        first: dict[str, np.ndarray] = {}  # row lengths by the first column that has these lengths
        for name, column in self._ragged_columns.items():
            for other, lengths in first.items():
                wrong = np.flatnonzero(column.lengths != lengths)
                if not len(wrong):
                    break
                if same or (same is None and 2 * len(wrong) < self.rows):
                    row = int(wrong[0])
                    raise ValueError(
                        f"row {row} has {column.lengths[row]} elements of {name!r}, and "
                        f"{lengths[row]} of {other!r}: sequences of one row must have one length, "
                        "unless same_length=False"
                    )
            else:
                first[name] = column.lengths
        return [*first.values()]

    def add_length_inputs(
        self, kind: str, given: str | Mapping[str, str] | None, axes: Mapping[str, int | None]
    ) -> ByLength:
        """Add the model inputs that get masks or lengths of sequences, given as the arguments of
        `by_length`.
        """
        named = given if isinstance(given, Mapping) else {}
        if isinstance(given, str):
            features = {n: c for n, c in self._ragged_columns.items() if n in self._X}
            first = next(iter(features))
            if any((c.lengths != features[first].lengths).any() for c in features.values()):
                raise ValueError(
                    f"the sequences {list(features)} differ in length: name the input to which "
                    f"{given!r} belongs, such as {kind}={{{first!r}: {given!r}}}"
                )
            named = {first: given}
        for name, beside in named.items():
            if name not in self._ragged_columns:
                raise unknown(f"sequences in {kind}", name, self._ragged_columns)
            if beside in (*self._X, *self._beside):
                raise ValueError(
                    f"X has the input {beside!r}, which {kind}= computes from lengths: leave it out"
                )
            if self._ragged_columns[name].axis and axes[name] is None:
                raise ValueError(
                    f"{kind}= of {name!r} needs the axis along which lengths differ: pass axis="
                )
            self._beside[beside] = kind, self._ragged_columns[name].lengths
        return self

    def separate_lengths(self, filled: set[str]) -> ByLength:
        """Make batches of rows of equal length, if a column of sequences has neither a mask nor a
        padding value.

        A mask counts for all columns of the same lengths.
        """
        masked = [lengths for _, lengths in self._beside.values()]
        for name, column in self._X.items():
            if not isinstance(column, _RaggedRows):
                masked.append(column)  # an array may hold the lengths
            elif name not in filled and column.is_attention_mask():
                masked.append(column.lengths)
        for name, column in self._X.items():
            if isinstance(column, _RaggedRows) and name not in filled:
                same = (np.array_equal(column.lengths, lengths) for lengths in masked)
                if len({*column.lengths.tolist()}) > 1 and not any(same):
                    self._apart[name] = column.lengths
        return self

    def for_inputs(self, shapes: Any) -> Reader:
        """Return the reader; raise `ValueError` if the model lacks an input for a mask or lengths,
        and warn if sequences are not padded.
        """
        for name in self._beside:
            if name not in shapes:
                raise unknown("input", name, shapes)
        if self._apart and not self._told:
            logger.warning(
                "%s: batches have rows of one length, as the model gets no mask or lengths that "
                "mark padded elements; by_length(..., value=0) pads without them",
                ", ".join(map(repr, self._apart)),
            )
            self._told = True
        return self

    @property
    def order(self) -> np.ndarray | None:
        """The row indices in the order of an evaluation, which has no seed; None means 0, 1, 2,
        ....
        """
        return np.argsort(self._length_group_of_rows(), kind="stable") if self._apart else None

    def _length_group_of_rows(self) -> np.ndarray:
        """Return a group number for each row; only rows of the same group may be in one batch."""
        lengths = np.stack([*self._apart.values()])
        return np.unique(lengths, axis=1, return_inverse=True)[1].reshape(-1)

    def count_batches(self, size: int) -> int:
        """Return the count of batches in one pass with this batch size."""
        if not self._apart:
            return -(-self.rows // size)
        return int((-(-np.bincount(self._length_group_of_rows()) // size)).sum())

    def subset(self, numbers: np.ndarray) -> ByLength:
        """Return the reader of the rows with these indices."""
        part = copy.copy(self)
        part._X, part._y = (
            {name: column.take(numbers, axis=0) for name, column in columns.items()}
            for columns in (self._X, self._y)
        )
        part._apart = {name: lengths[numbers] for name, lengths in self._apart.items()}
        part._weight = None if self._weight is None else self._weight[numbers]
        beside = self._beside.items()
        part._beside = {name: (kind, lengths[numbers]) for name, (kind, lengths) in beside}
        part._sorted_by = [lengths[numbers] for lengths in self._sorted_by]
        part.rows = len(numbers)
        return part

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one pass; without a `seed`, the rows have the order of `order`."""
        rng = None if seed is None else np.random.default_rng(seed)
        rows = np.arange(self.rows) if rng is None else rng.permutation(self.rows)
        if self._apart:
            groups = self._length_group_of_rows()[rows]
            ends = np.cumsum(np.bincount(groups))[:-1]
            pools = np.split(rows[np.argsort(groups, kind="stable")], ends)
        else:
            pools = [rows[at : at + size * _POOL] for at in range(0, self.rows, size * _POOL)]
            if rng is not None:
                columns = self._sorted_by[::-1]
                pools = [pool[np.lexsort([lengths[pool] for lengths in columns])] for pool in pools]
        cut = [pool[at : at + size] for pool in pools for at in range(0, len(pool), size)]
        if rng is not None:
            cut = [cut[i] for i in rng.permutation(len(cut))]
        for indices in cut[skip:]:
            yield self._padded_batch(indices)

    def _padded_batch(self, indices: np.ndarray) -> tuple[Any, ...]:
        """Return the batch (X, y, weight) of the rows with these indices, padded."""
        X = {name: column[indices] for name, column in self._X.items()}
        y = {name: column[indices] for name, column in self._y.items()}
        for name, (kind, lengths) in self._beside.items():
            rows = lengths[indices]
            X[name] = rows if kind == "lengths" else np.arange(rows.max()) < rows[:, None]
        weight = None if self._weight is None else self._weight[indices]
        parts = [
            columns if is_dict else next(iter(columns.values()), None)
            for columns, is_dict in zip((X, y), self._dicts, strict=True)
        ]
        return *parts, weight

    def describe(self) -> dict[str, Any]:
        """Return the count of rows, and a digest of lengths, arrays and some sequences."""
        arrays = {f"lengths {i}": lengths for i, lengths in enumerate(self._sorted_by)}
        some = np.unique(np.linspace(0, self.rows - 1, 16).astype(int))
        for name, column in {**self._X, **self._y, "sample_weight": self._weight}.items():
            array = column[some] if isinstance(column, _RaggedRows) else column
            if array is not None and not array.dtype.hasobject:
                arrays[name] = array
        return describe_arrays("sequences", arrays) | {"rows": self.rows, "apart": [*self._apart]}
