"""The inputs of a step other than weights and slots: batches of data, and feeds.

A feed is an input whose values follow from the call of the runtime, such as the learning rate. It
is declared once, by its `Feed`: name, dtype, and the values for the steps of a call. A graph reads
it as `Feed.input_in`, which carries the `Feed` in its `meta`; a runner feeds all such inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators import marks
from onnxgrad.parallel.process_groups import Part
from onnxgrad.training.row_axes import RowAxes

Arrays = dict[str, np.ndarray]
WHOLE = Part(0, 1)


class Batch(NamedTuple):
    """One batch: arrays by input, the indices of their rows in the data, and a text for messages.

    `of` is the text behind indices of rows in messages: "" for the data, or " of batch 3".
    """

    arrays: Mapping[str, np.ndarray]
    rows: Sequence[int]
    of: str = ""


@dataclass
class BatchSlice:
    """Batches of one shape for one call of the runtime: each array is [batches, rows, ...].

    Attributes:
        arrays: the data by input; an array without rows is [batches, ...].
        batches: the count of batches.
        rows: the count of rows of a batch, in all processes.
        row_axes: the axes on which the model has the rows.
        part: the part of each batch that this process has.
        own: the count of rows of a batch in the arrays of this process.
        counted: how many of these rows, from the first on, enter the loss. If it is 0, `own` is 1
            all the same, as a model needs a row.
        numbers: the indices in the data of all rows of this process; None for data that are not in
            memory.
        begins: which batches begin a sequence; None: only the first batch of an epoch does.
    """

    arrays: dict[str, np.ndarray]
    batches: int
    rows: int
    row_axes: RowAxes
    part: Part = WHOLE
    own: int = -1
    counted: int = -1
    numbers: np.ndarray | None = None
    begins: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.own < 0:
            self.own = self.part.count(self.rows)
        if self.counted < 0:
            self.counted = len(range(self.rows)[self.part.rows(self.rows)])

    def model_arrays(self, micro_batches: int | None = None) -> Mapping[str, np.ndarray]:
        """Return the arrays in the model's layout, [batches, ...] or in parts [batches, parts,
        ...].

        Args:
            micro_batches: the count of parts into which the rows of each batch are cut; None: the
                arrays have no axis of parts.

        Raises:
            ValueError: the rows are to be cut, and may be on several axes of an array.
        """
        if micro_batches is None:
            return self.row_axes.as_declared(self.arrays, 1)
        parts, split = micro_batches, {}
        whole = self.row_axes.names_without_rows(self.first_batch(), cut=parts > 1)
        for name, array in self.arrays.items():
            if name in whole:
                split[name] = np.repeat(array[:, None], parts, axis=1)
            else:
                shape = len(array), parts, array.shape[1] // parts, *array.shape[2:]
                split[name] = array.reshape(shape)
        return self.row_axes.as_declared(split, 2)

    def first_batch(self) -> Arrays:
        """Return the arrays of the first batch."""
        return {name: np.asarray(array[0]) for name, array in self.arrays.items()}

    def rows_of_first_batch(self, rows: slice) -> Arrays:
        """Return the rows `rows` of the first batch, as arrays [1, rows, ...]."""
        taken = self.row_axes.take_rows(self.first_batch(), rows)
        return {name: array[None] for name, array in taken.items()}

    def batches_from(self, first: int, batches: int) -> BatchSlice:
        """Return the slice with `batches` batches, of which `first` is the index of the first."""
        taken = slice(first, first + batches)
        numbers = self.numbers
        if numbers is not None:
            numbers = numbers[first * self.own : (first + batches) * self.own]
        begins = None if self.begins is None else self.begins[taken]
        arrays = {name: array[taken] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, batches=batches, numbers=numbers, begins=begins)

    def each_batch(self, first: int) -> Iterator[Batch]:
        """Yield the batches in the layout of the model; `first` is the index of the first batch."""
        fed = self.model_arrays()
        for i in range(self.batches):
            arrays = {name: stack[i] for name, stack in fed.items()}
            if self.numbers is None:
                yield Batch(arrays, range(self.own), f" of batch {first + i}")
            else:
                yield Batch(arrays, self.numbers[i * self.own : (i + 1) * self.own].tolist())


@dataclass(frozen=True)
class RuntimeCall:
    """The batches of one call of the runtime, one for each step, with learning rates.

    - `piece`: the batches, one for each step.
    - `rates`: the learning rates of the steps, (steps,); in a stack (steps, members).
    - `position`: the index of the first batch in its epoch.
    - `done`: the count of steps before this call.
    - `micro_batches`: the count of parts into which each batch is split; None: it is not split.
    """

    piece: BatchSlice
    rates: np.ndarray
    position: int
    done: int = 0
    micro_batches: int | None = None

    def batches_from(self, first: int, batches: int) -> RuntimeCall:
        """Return the call with `batches` batches, of which `first` is the index of the first."""
        piece, rates = self.piece.batches_from(first, batches), self.rates[first : first + batches]
        return RuntimeCall(piece, rates, self.position + first)

    def each_batch(self) -> Iterator[Batch]:
        """Yield the batches of this call, in the layout of the model."""
        return self.piece.each_batch(self.position)

    @property
    def step_indices(self) -> np.ndarray:
        """The indices of the steps of this call, counted from the first step of the training."""
        return self.done + np.arange(self.piece.batches)


@dataclass(frozen=True, eq=False)
class Feed:
    """An input of a step that the call decides, such as the learning rate: a value for each step.

    - `values`: returns the values for the steps of a call, along the first axis.
    - `shape`: the shape of one value.
    - `of_rows`: whether each micro-batch has a separate value.
    - `of_members`: whether each member of a stack has a separate value.
    """

    name: str
    dtype: ir.DataType
    values: Callable[[RuntimeCall], np.ndarray]
    shape: tuple[Any, ...] = ()
    of_rows: bool = False
    of_members: bool = False

    def input_in(self, op: Emit, wide: bool = False) -> ir.Value:
        """Return the input of the graph of `op` that gets this feed, after adding a missing input.

        An added input has float64 in place of float32 if it is `wide`.
        """
        if (known := feed_inputs(op.graph).get(self.name)) is not None:
            return known
        dtype = ir.DataType.DOUBLE if wide and self.dtype == ir.DataType.FLOAT else self.dtype
        value = ir.Value(
            name=op.name(self.name), type=ir.TensorType(dtype), shape=ir.Shape(self.shape)
        )
        op.graph.inputs.append(self.mark_input(value))
        return value

    def mark_input(self, value: ir.Value) -> ir.Value:
        """Mark `value` as an input that runners feed with the values of this feed; return it."""
        value.meta[marks.FEED] = self
        return value

    def arrays_of_call(self, call: RuntimeCall, dtype: ir.DataType | None) -> np.ndarray:
        """Return the values of this feed for the steps of a call, in the dtype of an input."""
        assert dtype is not None
        return self.values(call).astype(dtype.numpy())


FEEDS: dict[str, Feed] = {}  # by name, in the order of the inputs of a step


def declare_feed(feed: Feed) -> Feed:
    """Add a feed to `FEEDS`, and return it.

    The updates of optimizers can read a feed if `UpdateInputs` has a field with the feed's name.
    """
    FEEDS[feed.name] = feed
    return feed


def feed_of(value: ir.Value) -> Feed | None:
    """Return the feed that an input gets; None for weights, slots, buffers and data."""
    return value.meta.get(marks.FEED)


def feed_inputs(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the graph inputs that get feeds, `{feed name: input}`, in the order of `FEEDS`."""
    feeds = ((feed_of(v), v) for v in graph.inputs)
    found = {feed.name: v for feed, v in feeds if feed is not None}
    return {name: found[name] for name in (*FEEDS, *found) if name in found}


def remove_unread_feeds(graph: ir.Graph, but: Feed | None = None) -> None:
    """Remove the inputs for feeds that no node reads, except the input of the feed `but`."""
    for value in feed_inputs(graph).values():
        if not value.uses() and feed_of(value) is not but:
            graph.inputs.remove(value)


def draw_numbers(call: RuntimeCall) -> np.ndarray:
    """Return integers that differ by step, micro-batch and process, as seeds of random numbers."""
    part = call.piece.part
    numbers = call.step_indices * part.size + part.rank
    if call.micro_batches is None:
        return numbers
    return (numbers[:, None] << 20) + np.arange(call.micro_batches)


def _sequence_start_flags(call: RuntimeCall) -> np.ndarray:
    """Return for each batch of a call whether it begins an epoch or a sequence."""
    first = call.step_indices == call.done - call.position
    return first if call.piece.begins is None else first | call.piece.begins


def _row_counts_of_batches(call: RuntimeCall) -> np.ndarray:
    """Return the count of rows of each batch of a call, in all processes together."""
    return np.full(call.piece.batches, call.piece.rows)


def _row_shares_of_process(call: RuntimeCall) -> np.ndarray:
    """Return for each batch of a call the share of its rows that this process computes."""
    return np.full(call.piece.batches, call.piece.counted / call.piece.rows)


RATE = declare_feed(
    Feed("minus_learning_rate", ir.DataType.FLOAT, lambda call: -call.rates, of_members=True)
)
STEP = declare_feed(Feed("step", ir.DataType.INT64, lambda call: call.step_indices + 1))
DRAW = declare_feed(Feed("draw", ir.DataType.INT64, draw_numbers, of_rows=True))
FIRST = declare_feed(Feed("first", ir.DataType.BOOL, _sequence_start_flags))
ROWS = declare_feed(Feed("rows", ir.DataType.FLOAT, _row_counts_of_batches))
SHARE = declare_feed(Feed("share", ir.DataType.DOUBLE, _row_shares_of_process, of_rows=True))


def stacked_input(value: ir.Value, length: int | str | None) -> ir.Value:
    """Return an input of a Scan for its scanned `value`, with a further first axis of `length`.

    With None as `length`, the input has the shape of `value`, for a state of the Scan.
    """
    shape = value.shape if length is None else stacked_shape(value, length)
    return ir.Value(name=f"{value.name}/all", type=value.type, shape=shape)


def stacked_shape(value: ir.Value, length: int | str) -> ir.Shape | None:
    """Return the shape of `value` with a further first axis of `length`; None if it is unknown."""
    return None if value.shape is None else ir.Shape([length, *value.shape])
