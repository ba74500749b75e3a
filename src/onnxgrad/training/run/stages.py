"""Runs a step that processes share in pieces, between which they add up gradients and losses.

A process may compute its rows in parts, whose sums it adds up before it sends them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf, prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.graph.traversal import reads
from onnxgrad.native import Target, to_native
from onnxgrad.parallel.collectives import MESSAGES, Exchange, Piece, cut_at_exchanges, is_exchange
from onnxgrad.parallel.process_groups import Group, Part
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import Binding, Value, array_of
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.row_parts import process_rows_per_part, rows_per_part
from onnxgrad.training.run.sessions import Sessions
from onnxgrad.training.run.states import OutputArray, as_state
from onnxgrad.training.state import Arrays
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import BatchSlice, feed_of

Wait = Callable[[], None]
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATS = (*_HALF, ir.DataType.FLOAT, ir.DataType.DOUBLE)
LARGE = 1 << 23  # bytes from which it pays to send half of a message earlier
REQUESTS = 3  # requests of callbacks, which are sent with the first message of a step


class StepRefused(Exception):
    """Raised in place of a step, which no process has run, because a process has `requests`."""

    def __init__(self, requests: list[bool]) -> None:
        super().__init__()
        self.requests = requests


class Stages:
    """Computes a step in pieces, between which processes exchange values.

    A process that is alone may compute the rows in parts, so that few rows need memory at once.

    Args:
        step: the step, which has nodes that exchange values.
        target: the device of the sessions, and the work and rows of a batch.
        work: multiply-adds of the rows of this process.
        group: the group of processes.
        part_rows: the most rows that are computed at once; None: all.
    """

    joins_batches = False

    def __init__(
        self,
        step: Step,
        target: Target,
        work: float,
        group: Group,
        part_rows: int | None = None,
    ) -> None:
        rewrite(step.model.graph, GROUPS[MESSAGES])
        to_native(step.model.graph, target, step.recomputes)
        self.device, self.group = target.device, group
        self.part, self.part_rows = Part(group.rank, group.size), part_rows
        self._data = [str(v.name) for v in step.data.values()]
        self._outputs = [str(y.name) for y in step.model.graph.outputs]
        pieces = cut_at_exchanges(step.model, LARGE if group.size > 1 else inf)
        places = [target.device] * len(pieces)
        if target.device.copies_tensors:  # slots, which the last piece reads, need not be copied
            places[-1] = CPU
        self._pieces = [
            _PieceRunner(piece, step, place, work)
            for piece, place in zip(pieces, places, strict=True)
        ]
        self._row_values = _names_of_row_values(step)
        given = {name for piece in self._pieces for name in (*piece.inputs, *piece.outputs)}
        for piece in self._pieces:
            piece.last = [name for name in piece.last if name in given]
        every = (sent for piece in self._pieces for sent in piece.sums if sent.tells)
        self._telling = next(every, None)

    def expect_source(self, source: ArraySource | None) -> None:
        """Announce the source of most batches, whose shapes are usual; None if unknown."""
        shapes: dict[str, tuple[int, ...]] = {}
        if source is not None:
            rows = process_rows_per_part(source.batch_size, self.part, self.part_rows)
            shapes = dict(source.batch_shapes(rows))
        for piece in self._pieces:
            piece.expect_shapes(shapes)

    def send_requests(self, requests: Sequence[bool]) -> bool:
        """Send requests with the next step; return whether its messages have room for requests."""
        if self._telling is not None:
            self._telling.requests = list(requests)
        return self._telling is not None

    def run(
        self, states: Mapping[str, Value], fed: Arrays, piece: BatchSlice, output_array: OutputArray
    ) -> tuple[list[Value], list[np.ndarray]]:
        """Return the new states after the last batch, and the reports of the step, by batch.

        See `OneSession.run` for the arguments.

        Raises:
            StepRefused: a process has requests of callbacks.
        """
        every, new = [], list(states.values())
        for i in range(piece.batches):
            arrays = {name: np.asarray(stack[i], order="C") for name, stack in fed.items()}
            data = {name: arrays.pop(name) for name in self._data}
            own = dict(zip(states, (as_state(y, self.device) for y in new), strict=True))
            values = self._run_batch(own | arrays, self._split_rows(data, piece), piece.counted > 0)
            results = [values[name] for name in self._outputs]
            new = results[: len(states)]
            every.append([np.array(array_of(y)) for y in results[len(states) :]])
        return new, [np.stack(column) for column in zip(*every, strict=True)]

    def _split_rows(self, data: Arrays, piece: BatchSlice) -> list[Arrays]:
        """Return the rows of one batch, `data`, in parts that run one after the other."""
        if self.part_rows is None:
            return [data]
        axes, size = piece.row_axes, rows_per_part(piece.own, self.part_rows)
        rows_first = axes.rows_first(data)
        parts = [
            axes.as_declared(axes.take_rows(rows_first, slice(i, i + size)))
            for i in range(0, piece.own, size)
        ]
        return [{n: np.asarray(a, order="C") for n, a in part.items()} for part in parts]

    def _run_batch(
        self, values: dict[str, Value], parts: Sequence[Arrays], counts: bool
    ) -> Mapping[str, Value]:
        """Run the step for one batch; return the results, and all values passed between pieces.

        Args:
            values: the inputs other than data, by name.
            parts: the rows of this process, in one or several parts.
            counts: whether these rows count in the loss; if not, the process sends zeros.

        Raises:
            StepRefused: a process has requests of callbacks.
        """
        own: list[dict[str, Value]] = [dict(part) for part in parts]  # values of each part
        waiting: dict[str, Wait] = {}
        for piece in self._pieces:
            for name in piece.reads:
                if name in waiting:
                    waiting.pop(name)()
            self._raise_if_requested(waiting)
            repeated = own[: None if piece.reads & self._row_values else 1]
            for i, (part, data) in enumerate(zip(repeated, parts, strict=False)):
                for name, value in piece.run(ChainMap(part, values), data).items():
                    (part if name in self._row_values else values)[name] = value
                for sent in piece.sums:
                    sent.add_part(ChainMap(part, values), i, len(repeated))
            for sent in piece.sums:
                received, wait = sent.start_sum(values, self.group, counts, waiting)
                values.update(received)
                waiting.update(dict.fromkeys(received, cache(wait)))
            for exchange in piece.broadcasts:
                array = np.array(array_of(values[exchange.sent]))
                self.group.broadcast(array, exchange.root or 0)
                values[exchange.received] = self.device.ortvalue(array)
            for name in piece.last:
                for known in (values, *own):
                    known.pop(name, None)
        for wait in waiting.values():
            wait()
        self._raise_if_requested({})
        return ChainMap(values, own[0])

    def _raise_if_requested(self, waiting: Mapping[str, Wait]) -> None:
        """Raise `StepRefused` once messages say that a process has requests."""
        if self._telling is None or not any(requests := self._telling.received_requests()):
            return
        for wait in waiting.values():
            wait()
        raise StepRefused(requests)


class _PieceRunner:
    """Runs a piece of a step in sessions; processes add up or broadcast the results."""

    def __init__(self, piece: Piece, step: Step, device: Device, work: float) -> None:
        graph = piece.model.graph
        self.inputs = [x.name for x in graph.input]
        self.outputs = [y.name for y in graph.output]
        self.reads = {*self.inputs, *(e.sent for e in piece.exchanges)}
        self.last, self.device = piece.last, device
        self.broadcasts = [e for e in piece.exchanges if e.root is not None]
        sums = [e for e in piece.exchanges if e.root is None]
        self.sessions = Sessions(piece.model, step, device, work)
        kinds = dict.fromkeys((e.dtype, e.shape is None) for e in sums)
        self.sums = [
            _SummedValues([e for e in sums if (e.dtype, e.shape is None) == k]) for k in kinds
        ]
        self._binding: Binding | None = None
        self._shapes: list[tuple[int, ...]] = []  # the shapes of data for which the binding is

    def expect_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Announce the shapes of most batches, by input name."""
        self.sessions.expect_shapes(shapes)
        self._binding = None

    def run(self, values: Mapping[str, Value], data: Arrays) -> dict[str, Value]:
        """Return the results of the piece by name, for inputs among `values`."""
        if not self.outputs:
            return {}
        direct: dict[str, np.ndarray] = {}
        if self.device == CPU:
            for sent in self.sums:
                direct |= sent.views if sent.wide == sent.dtype else {}
        shapes = [array.shape for array in data.values()]
        if self._binding is None or shapes != self._shapes:
            stacks = {name: array[None] for name, array in data.items()}
            running = self.sessions.session_for(stacks)
            self._binding, self._shapes = Binding(running, self.device), shapes
        inputs = {name: values[name] for name in self.inputs}
        results = self._binding.run(inputs, self.outputs, into=direct)
        own = {name: array for name, array in direct.items() if name in self.outputs}
        return {**dict(zip(self.outputs, results, strict=True)), **own}


def _names_of_row_values(step: Step) -> set[str]:
    """Return the names of the values of a step that are computed from the rows of a batch."""
    fed = ((feed_of(v), v) for v in step.feeds.values())
    found = {*step.data.values(), *(v for feed, v in fed if feed and feed.of_rows)}
    for node in step.model.graph:
        if not is_exchange(node) and not found.isdisjoint(reads(node)):
            found.update(node.outputs)
    return {str(value.name) for value in found}


class _SummedValues:
    """Values of one dtype that processes add up, in one buffer; floats of 16 bits in float32.

    Behind the values, the buffer has room for the `requests` of this process, and after the sum for
    the requests of all processes.
    """

    def __init__(self, exchanges: list[Exchange]) -> None:
        dtype = exchanges[0].dtype
        self.exchanges = sorted(exchanges, key=lambda e: bool(e.ratio))
        self.dtype = dtype.numpy()
        self.wide = np.dtype(np.float32) if dtype in _HALF else self.dtype
        self.tells, self.requests = dtype in _FLOATS, [False] * REQUESTS
        self._told: np.ndarray | None = None
        self._total: np.ndarray | None = None  # the sum over parts of the rows
        self.buffer, self.views = np.empty(0, self.wide), dict[str, np.ndarray]()
        if all(e.shape is not None for e in exchanges):
            self._allocate_buffer([e.shape or () for e in self.exchanges])

    def _allocate_buffer(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Allocate the buffer for values of the given shapes, and a view of it for each value."""
        lengths = list(map(prod, shapes))
        self.buffer = np.empty(sum(lengths) + REQUESTS, self.wide)
        self.buffer[-REQUESTS:] = 0
        parts = np.split(self.buffer, np.cumsum(lengths))
        pairs = zip(self.exchanges, parts, shapes, strict=False)
        self.views = {e.sent: part.reshape(shape) for e, part, shape in pairs}

    def add_part(self, values: Mapping[str, Value], part: int, count: int) -> None:
        """Add the values of a part of the rows to the values of earlier parts in the buffer.

        `part` is the index of the part, and `count` the count of parts. The session may have
        written the values into the buffer already.
        """
        arrays = [array_of(values[e.sent]) for e in self.exchanges]
        shapes = [array.shape for array in arrays]
        if [view.shape for view in self.views.values()] != shapes:
            self._allocate_buffer(shapes)
        for array, view in zip(arrays, self.views.values(), strict=True):
            if array is not view:
                np.copyto(view, array)
        own = self.buffer
        if part == 0:
            self._total = own.copy() if count > 1 else None
        elif self._total is not None:
            self._total += own
        if part + 1 == count and self._total is not None:
            np.copyto(own, self._total)
            self._total = None

    def start_sum(
        self,
        values: Mapping[str, Value],
        group: Group,
        counts: bool,
        waiting: Mapping[str, Wait],
    ) -> tuple[dict[str, Any], Wait]:
        """Begin to sum over processes; return the sums by name, and a function that waits for sums.

        Args:
            values: all values, by name.
            group: the group of processes.
            counts: whether the rows of this process count; if not, it sends zeros.
            waiting: functions that wait for values of earlier messages, by name.
        """
        if not counts:
            self.buffer.fill(0)
        told = self.buffer[-REQUESTS:]
        told[:], self.requests = self.requests, [False] * REQUESTS
        summed = group.sum(self.buffer)
        received = {e.received: self.views[e.sent] for e in self.exchanges}
        multiply = self._scaling_by_count_ratio({**values, **received}, waiting)
        narrow = received
        if self.wide != self.dtype:
            narrow = {n: np.empty(array.shape, self.dtype) for n, array in received.items()}

        def wait_for_sum() -> None:
            summed()
            self._told = told
            multiply()
            if narrow is not received:
                for name, array in received.items():
                    np.copyto(narrow[name], array, casting="unsafe")

        return narrow, wait_for_sum

    def _scaling_by_count_ratio(
        self, values: Mapping[str, Value], waiting: Mapping[str, Wait]
    ) -> Callable[[], None]:
        """Return a function that multiplies sums by the ratio of the expected to the real count."""
        scaled = [e for e in self.exchanges if e.ratio]
        if not scaled:
            return lambda: None
        expected, count = (array_of(values[name]) for name in scaled[0].ratio)
        ready = waiting.get(scaled[0].ratio[1])
        size = sum(self.views[e.sent].size for e in scaled)  # these are the last ones
        part = self.buffer[-REQUESTS - size : -REQUESTS]

        def scale_by_ratio() -> None:
            if ready is not None:
                ready()
            if count.item() not in (0, expected.item()):
                np.multiply(part, expected.item() / count.item(), out=part)

        return scale_by_ratio

    def received_requests(self) -> list[bool]:
        """Return for each request whether some process sent it; [] before messages have arrived."""
        told, self._told = self._told, None
        return [] if told is None else [number > 0 for number in told.tolist()]
