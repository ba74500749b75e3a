"""Sources of batches: epochs of arrays in memory, and of data that a thread reads meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import check_class_count, first_class_names
from onnxgrad.data.prefetch import read_ahead
from onnxgrad.data.readers import Batches, Reader, describe_arrays
from onnxgrad.errors import argument
from onnxgrad.parallel.process_groups import Part
from onnxgrad.runtime.values import take_rows
from onnxgrad.training.fields import BatchForm, DataSpec
from onnxgrad.training.row_axes import AxisByInput, RowAxes
from onnxgrad.training.step.inputs import WHOLE, BatchSlice

SLICE_BYTES = 1 << 26  # the most bytes of a slice of several batches
# the most bytes of a slice of several epochs: the Python around a call takes a millisecond, and a
# larger slice would leave the caches of the processor
JOINED_BYTES = 1 << 22
PREFETCHED = 2  # the count of slices that a thread reads before the session needs them

# The count of batches that the next slice may have, by the index of its first batch in the epoch.

Budget = Callable[[int], int]
Slices = Generator[BatchSlice, None, None]


class BatchSource:
    """The data of a training, which `epoch` yields as slices: stacks of one or more batches.

    Attributes:
        rows: rows of an epoch, None if they are unknown before the first has ended.
        batches: batches of an epoch, None if they are unknown.
        batch_size: rows of a batch, where the source cuts them.
        part: the part of the rows of each batch that this process reads.
        shuffles: whether an epoch can have its rows in another order.
        in_memory: whether batches can be read again, as reading them changes nothing.
        cuts: whether the source cuts batches of `batch_size` rows, rather than being given batches.
    """

    part: Part = WHOLE
    rows: int | None
    batches: int | None
    shuffles = True
    batch_size: int
    in_memory = False
    cuts = True

    @property
    def unshuffled_order(self) -> np.ndarray | None:
        """The indices of the rows in the order in which an epoch without shuffling yields them.

        None stands for the order 0, 1, 2, and so on.
        """
        return None

    def select_rows(self, indices: np.ndarray) -> BatchSource:
        """Return a source of the rows with these indices only.

        Raises:
            ValueError: the data can only be read from the beginning to the end.
        """
        raise _unsplittable_data_error()

    @property
    def description(self) -> dict[str, Any]:
        """A description for JSON that identifies the data: a resumed training compares it."""
        raise NotImplementedError

    def row_order(self, rng: np.random.Generator | None) -> np.ndarray | None:
        """Return the indices of all rows in the order in which an epoch yields them.

        `rng` is used as `epoch` uses it. None: the order is not known before the rows are read.
        """
        return None

    def label_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield `{input: array}` to count labels: once for all rows, or once for each batch."""
        for piece in self.epoch(None, 0, lambda batch: 1):
            yield piece.arrays

    def epoch(self, rng: np.random.Generator | None, skip: int, budget: Budget) -> Slices:
        """Yield slices, that is, stacks of batches, until the epoch ends.

        Closing the generator ends a thread that reads ahead.

        Args:
            rng: decides the order of the rows, and is used before the first slice only; None: in
                order.
            skip: number of batches to leave out at the beginning, which changes no other batch.
            budget: called with the index of a batch in the epoch, returns how many batches the
                slice that begins with this batch may have; may be called from a thread.

        Raises:
            ValueError: data that an input does not accept, or no batch.
        """
        raise NotImplementedError


class ArraySource(BatchSource):
    """Batches drawn from arrays: every row once an epoch, the last batch shorter.

    Args:
        arrays: checked arrays by input; those with rows have them on the first axis.
        whole: the names of the arrays without rows, which go into every batch.
        row_axes: the axes on which the model has the rows.
        batch_size: rows of a batch, at most; fewer rows are one batch.
    """

    in_memory = True

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        whole: Collection[str],
        row_axes: RowAxes,
        batch_size: int,
    ) -> None:
        self.arrays, self.whole, self.row_axes = arrays, whole, row_axes
        self.rows: int = next(len(a) for n, a in arrays.items() if n not in whole)
        self.batch_size = min(int(batch_size), self.rows)
        self.numbers: np.ndarray | None = None  # the indices of the rows in the data before a split
        self.batches: int = -(-self.rows // self.batch_size)
        per_row = sum(a.nbytes for n, a in arrays.items() if n not in whole) / self.rows
        without_rows = sum(arrays[name].nbytes for name in whole)
        self._nbytes = max(1, per_row * self.batch_size + without_rows)  # the bytes of a batch

    def label_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield the arrays of all rows once."""
        yield self.arrays

    @property
    def axes_of_rows(self) -> AxisByInput:
        """The axis of the rows in the model by input; None for an array without rows."""
        moved = self.row_axes.moved_axes
        return {name: None if name in self.whole else moved.get(name, 0) for name in self.arrays}

    def batch_shapes(self, rows: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shapes in which the model gets a batch of `rows` rows, by input.

        None stands for `batch_size` rows.
        """
        rows = self.batch_size if rows is None else rows
        batch = self.row_axes.as_declared(take_rows(self.arrays, slice(rows), self.whole))
        return {name: array.shape for name, array in batch.items()}

    def select_rows(self, indices: np.ndarray) -> ArraySource:
        """Return a source of copies of the rows with these indices."""
        arrays = take_rows(self.arrays, indices, self.whole)
        taken = ArraySource(arrays, self.whole, self.row_axes, self.batch_size)
        taken.numbers = indices
        return taken

    @cached_property
    def description(self) -> dict[str, Any]:
        """The shapes, the dtypes and a digest of the arrays, and the count of rows."""
        arrays = self.row_axes.as_declared(self.arrays)
        return describe_arrays("arrays", arrays) | {"rows": self.rows}

    def epoch(self, rng: np.random.Generator | None, skip: int, budget: Budget) -> Slices:
        """Yield the slices of one epoch, cut from the arrays."""
        rows, size = self.rows, self.batch_size
        order = self.row_order(rng)
        start = skip * size
        most = max(1, int(SLICE_BYTES / self._nbytes))
        while start < rows:
            length = min(size, rows - start)
            batches = max(1, min(budget(start // size), most, (rows - start) // length))
            taken = slice(start, start + batches * length)
            start = taken.stop
            in_place = rng is None and self.part == WHOLE  # slices are views
            yield self._slice_rows(order[taken], length, taken if in_place else None)

    def join_epochs(self, rngs: Sequence[np.random.Generator | None]) -> BatchSlice:
        """Return one slice with the batches of several epochs, each shuffled by one of `rngs`.

        All batches have the same length. There are at most `most_joined_epochs` epochs.
        """
        return self._slice_rows(
            np.concatenate([self.row_order(rng) for rng in rngs]), self.batch_size
        )

    @property
    def most_joined_epochs(self) -> int:
        """The most epochs whose batches fit into one slice; 0 if batches differ in length."""
        if self.rows % self.batch_size:
            return 0
        return int(JOINED_BYTES / (self._nbytes * self.batches))

    def row_order(self, rng: np.random.Generator | None) -> np.ndarray:
        """Return the indices of all rows, shuffled by `rng`; in increasing order without `rng`."""
        return np.arange(self.rows) if rng is None else rng.permutation(self.rows)

    def _slice_rows(self, order: np.ndarray, length: int, taken: slice | None = None) -> BatchSlice:
        """Return the rows with the indices `order` as a slice of batches of `length` rows each.

        `taken` is the range of these rows if they are consecutive, so that the arrays are views;
        None: the arrays are copies.
        """
        batches = len(order) // length
        chosen = order.reshape(batches, length)[:, self.part.computed_rows(length)].ravel()
        piece = BatchSlice({}, batches, length, self.row_axes, self.part)
        rows = take_rows(self.arrays, chosen if taken is None else taken, self.whole)
        for name, array in rows.items():
            if name in self.whole:
                piece.arrays[name] = np.broadcast_to(array, (batches, *array.shape))
            else:
                piece.arrays[name] = array.reshape(batches, piece.own, *array.shape[1:])
        piece.numbers = chosen if self.numbers is None else self.numbers[chosen]
        return piece


@dataclass(frozen=True)
class Split:
    """The indices of the rows to train on, and of the rows held out for validation."""

    trained: np.ndarray
    held_out: np.ndarray


def hold_out(
    source: BatchSource, evaluated: BatchSource, share: float | Split, seed: int, unit: int = 1
) -> tuple[BatchSource, BatchSource]:
    """Return the source of the rows to train on, and the source of the validation rows.

    Args:
        source: all rows, as training reads them.
        evaluated: the same rows, as evaluations read them.
        share: the share of the rows that is held out for validation, or the indices of both.
        seed: draws the validation rows.
        unit: the count of validation rows is a multiple of it.

    Raises:
        ValueError: one of both sources has no rows, or rows cannot be drawn from the data.
    """
    if isinstance(share, Split):
        return source.select_rows(share.trained), evaluated.select_rows(share.held_out)
    if source.rows is None:
        raise _unsplittable_data_error()
    count = round(source.rows * share / unit) * unit
    if not 0 < share < 1 or count in (0, source.rows):
        raise ValueError(
            f"{argument('validation', share)} of {source.rows} rows, in multiples of {unit} rows, "
            "leaves no row to validate on or no row to train on: pass another share between 0 and "
            "1, or (X, y)"
        )
    order = np.random.default_rng([seed, 1]).permutation(source.rows)
    return source.select_rows(np.sort(order[count:])), evaluated.select_rows(np.sort(order[:count]))


def _unsplittable_data_error() -> ValueError:
    """Return the error for data that can only be read in order, so that no rows can be held out."""
    return ValueError(
        f"{argument('validation')}<share> needs arrays, tables or texts in memory: pass other "
        "validation data"
    )


class ReaderSource(BatchSource):
    """Batches that a `Reader` reads in a separate thread, where each batch is checked.

    Args:
        reader: reads the batches.
        fields: the inputs of the model, which check the batches.
        batch_size: rows of a batch, where the reader cuts batches.
        prefetch: the count of slices that are read ahead; 0 reads without a thread.
    """

    def __init__(
        self, reader: Reader, fields: DataSpec, batch_size: int, prefetch: int = PREFETCHED
    ) -> None:
        self.reader, self.fields = adapt_reader(reader, fields), fields
        self.arguments = reader.arguments
        self.batch_size, self.prefetch = int(batch_size), prefetch
        self.rows, self.batches = reader.rows, self.reader.count_batches(self.batch_size)
        self.shuffles = reader.shuffles and not reader.sequences
        self.cuts = reader.count is None and reader.rows is not None
        self.in_memory = isinstance(reader, Batches) and not reader.reuses

    @property
    def unshuffled_order(self) -> np.ndarray | None:
        """The indices of the rows in the order that the reader yields them; None: 0, 1, 2, ..."""
        return self.reader.order

    def select_rows(self, indices: np.ndarray) -> BatchSource:
        """Return a source of the rows with these indices, if the reader can read single rows."""
        part = self.reader.subset(indices)
        if part is None:
            return super().select_rows(indices)
        part.arguments = self.arguments
        return ReaderSource(part, self.fields, min(self.batch_size, len(indices)), self.prefetch)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The reader's description of its data, with the arguments of the reader."""
        return self.reader.describe() | {"arguments": dict(self.arguments)}

    def row_order(self, rng: np.random.Generator | None) -> np.ndarray | None:
        """Return the indices of all rows in the order in which an epoch yields them, or None."""
        return self.reader.row_order(self.batch_size, self._epoch_seed(rng))

    def _epoch_seed(self, rng: np.random.Generator | None) -> int | None:
        """Return the seed of an epoch, for generators that only the thread of the reader uses."""
        return int(rng.integers(1 << 62)) if rng is not None and self.reader.shuffles else None

    def epoch(self, rng: np.random.Generator | None, skip: int, budget: Budget) -> Slices:
        """Yield the slices of one epoch, as the reader yields its batches."""
        seed = self._epoch_seed(rng)
        counts, slices = [0, 0], self._read_slices(seed, skip, budget)
        if self.prefetch and self.reader.late_labels is None:
            slices = read_ahead(slices, self.prefetch)
        try:
            for piece in slices:
                counts[0] += piece.batches
                counts[1] += piece.batches * piece.rows
                yield piece
        finally:
            slices.close()
        if not skip:
            if not counts[0]:
                raise ValueError(
                    "the iterable gave no batch: a generator can be read only once; "
                    "pass a list of batches or a DataLoader"
                )
            self.batches, self.rows = counts

    def _read_slices(self, seed: int | None, skip: int, budget: Budget) -> Slices:
        """Yield slices: each is a stack of batches of the reader that have equal shapes.

        Of a batch in the form of the batch before, only the values are checked, for all batches of
        a slice together.
        """
        number, most, shapes = skip, 1, None
        form: BatchForm | None = None
        held: list[tuple[dict[str, np.ndarray], bool]] = []
        unchecked: list[tuple[int, Any]] = []  # numbers and contents of batches in `held`
        rows, begin = 0, False
        for item in self._read_batches(seed, skip):
            if item is None:
                begin = True
                continue
            known = None if form is None else form.arrays_of(item)
            if form is None or known is None:
                arrays, count = self._checked_batch(item, number)
                divides = self.fields.divides
                form = None if divides else self.fields.batch_form(item, arrays, count)
            else:
                arrays, count = known, form.rows
            if self.reader.reuses:
                arrays = {name: array.copy() for name, array in arrays.items()}
            new_shapes = {name: a.shape for name, a in arrays.items()}
            if held and shapes != new_shapes:
                yield self._stack_checked_batches(held, rows, unchecked)
                held, unchecked = [], []
            size = self.fields.fixed_rows or count
            if self.fields.divides and count != size:  # the model takes fixed batches only
                for start in range(0, count, size):
                    part = self.fields.row_axes.take_rows(arrays, slice(start, start + size))
                    yield self._stack_batches([(part, begin and not start)], size)
                begin = False
                continue
            if not held:
                shapes, rows = new_shapes, count
                nbytes = max(1, sum(a.nbytes for a in arrays.values()))
                together = 1 if self.reader.late_labels else budget(number)
                most = max(1, min(together, SLICE_BYTES // nbytes))
            held.append((arrays, begin))
            if form is not None and known is not None:
                unchecked.append((number, form.batch_of(arrays)))
            begin = False
            number += 1
            if len(held) >= most:
                yield self._stack_checked_batches(held, rows, unchecked)
                held, unchecked = [], []
        if held:
            yield self._stack_checked_batches(held, rows, unchecked)

    def _checked_batch(self, item: Any, number: int) -> tuple[dict[str, np.ndarray], int]:
        """Return the checked arrays of a batch by input, and its count of rows; errors name its
        number.
        """
        try:
            return self.fields.checked_batch(item)
        except ValueError as e:
            raise ValueError(f"batch {number}: {e}") from e

    def _read_batches(self, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of the reader, with labels that another model computes from each batch.

        Such labels (`late_labels`) are computed in the calling thread, all others in the reader's.
        """
        items = (item for item in self.reader.batches(self.batch_size, seed, skip))
        if (label := self.reader.late_labels) is None:
            yield from items
            return
        with closing(read_ahead(items, self.prefetch) if self.prefetch else items) as ahead:
            for item in ahead:
                yield item if item is None else (item[0], label(*item[:2]), *item[2:])

    def _stack_checked_batches(
        self,
        held: Sequence[tuple[dict[str, np.ndarray], bool]],
        rows: int,
        unchecked: Sequence[tuple[int, Any]],
    ) -> BatchSlice:
        """Return stacked batches after a check of their values; see `_stack_batches`.

        `unchecked` has the numbers and contents of batches whose values were not checked.
        """
        piece = self._stack_batches(held, rows)
        if unchecked and not self.fields.accepts_values(piece.arrays):
            for number, item in unchecked:  # one of them raises the error, which names its rows
                self._checked_batch(item, number)
        return piece

    def _stack_batches(
        self, held: Sequence[tuple[dict[str, np.ndarray], bool]], rows: int
    ) -> BatchSlice:
        """Return the batches of `held` stacked along a new first axis, as a `BatchSlice`.

        `held` has pairs: a batch, and whether a new sequence begins with the batch. `rows` is the
        count of rows of each batch.
        """
        batches, begins = zip(*held, strict=True)
        if len(batches) == 1:
            arrays = {name: a[None] for name, a in batches[0].items()}
        else:
            arrays = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        begin = np.array(begins) if any(begins) else None
        return BatchSlice(arrays, len(batches), rows, self.fields.row_axes, begins=begin)


def adapt_reader(reader: Reader, fields: DataSpec) -> Reader:
    """Return `reader`, which learns the inputs' shapes and dtypes; `fields` gets its class names.

    Raises:
        DataError: the reader has other classes than the model, or in another order.
    """
    names, labels = fields.names, getattr(reader, "labels", None)
    own, known = list(reader.class_names), list(map(str, names.classes))
    count = fields.fields[fields.labels[0]].classes if len(fields.labels) == 1 else None
    if labels is not None and isinstance(count, int) and len(labels):
        check_class_count(own, labels, count)
    if own and known and own != known:
        raise DataError(
            f"the reader numbers labels as the classes {first_class_names(own)}, and the model has "
            f"the classes {first_class_names(known)}: pass {argument('classes', known[:12])} to "
            "the reader"
        )
    names.classes = names.classes or own
    fields.numbered = bool(own)
    features = {name: fields.fields[name] for name in fields.features}
    adapted = reader.for_inputs({name: field.shape for name, field in features.items()})
    return adapted.for_dtypes({name: field.dtype for name, field in features.items()})
