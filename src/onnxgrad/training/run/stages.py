"""Runs the pieces of a step that processes share, and adds up their gradients and losses.

A process may compute its rows in parts, too, whose sums it adds up before it sends them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.graph.traversal import reads
from onnxgrad.parallel import Exchange, Group, Piece, exchanges
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import Binding, array_of
from onnxgrad.training.run.runner import Asked
from onnxgrad.training.run.sessions import Sessions
from onnxgrad.training.step.build import Step

Value: TypeAlias = ort.OrtValue | np.ndarray
Arrays = dict[str, np.ndarray]
Wait = Callable[[], None]
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATS = (*_HALF, ir.DataType.FLOAT, ir.DataType.DOUBLE)
REQUESTS = 3  # of callbacks, that the first message of a step has


class Stages:
    """Runs a step in pieces, between which processes exchange values.

    Args:
        pieces: of the graph of the step.
        step: the step.
        device: where to run.
        work: multiply-adds of the rows of this process.
        group: the processes.
    """

    def __init__(
        self, pieces: list[Piece], step: Step, device: Device, work: float, group: Group
    ) -> None:
        self.device, self.group = device, group
        self._pieces = [_Running(piece, step, device, work) for piece in pieces]
        self._row_values = _names_of_row_values(step)
        given = {name for piece in self._pieces for name in (*piece.inputs, *piece.outputs)}
        for piece in self._pieces:
            piece.last = [name for name in piece.last if name in given]
        every = (sent for piece in self._pieces for sent in piece.sums if sent.tells)
        self._telling = next(every, None)

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Announce the shapes of the rows of most batches; an empty mapping announces none."""
        for piece in self._pieces:
            piece.expect(shapes)

    def ask(self, requests: Sequence[bool]) -> bool:
        """Send requests with the next step; return whether a message of it has room for them."""
        if self._telling is not None:
            self._telling.requests = list(requests)
        return self._telling is not None

    def run(
        self, values: dict[str, Value], parts: Sequence[Arrays], counts: bool
    ) -> Mapping[str, Value]:
        """Run the step; return all values that pieces gave each other, and the results.

        Args:
            values: the inputs other than data, by name.
            parts: the rows of this process, in one or several parts.
            counts: whether they count; if not, it sends zeros.

        Raises:
            Asked: a process has requests.
        """
        own: list[dict[str, Value]] = [dict(part) for part in parts]  # what each part has
        waiting: dict[str, Wait] = {}
        for piece in self._pieces:
            for name in piece.reads:
                if name in waiting:
                    waiting.pop(name)()
            self._raise_if_asked(waiting)
            repeated = own[: None if piece.reads & self._row_values else 1]
            for i, (part, data) in enumerate(zip(repeated, parts, strict=False)):
                for name, value in piece.run(ChainMap(part, values), data).items():
                    (part if name in self._row_values else values)[name] = value
                for sent in piece.sums:
                    sent.add(ChainMap(part, values), i, len(repeated))
            for sent in piece.sums:
                received, wait = sent.start(values, self.group, counts, waiting)
                values.update(received)
                waiting.update(dict.fromkeys(received, cache(wait)))
            for exchange in piece.broadcasts:
                array = np.array(as_array(values[exchange.sent]))
                self.group.broadcast(array, exchange.root or 0)
                values[exchange.received] = self.device.ortvalue(array)
            for name in piece.last:
                for known in (values, *own):
                    known.pop(name, None)
        for wait in waiting.values():
            wait()
        self._raise_if_asked({})
        return ChainMap(values, own[0])

    def _raise_if_asked(self, waiting: Mapping[str, Wait]) -> None:
        """Break the step off, once it is known that a process has requests."""
        if self._telling is None or not any(requests := self._telling.told()):
            return
        for wait in waiting.values():
            wait()
        raise Asked(requests)


class _Running:
    """A piece with its sessions."""

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
        self.sums = [_Sum([e for e in sums if (e.dtype, e.shape is None) == k]) for k in kinds]
        self._binding: Binding | None = None
        self._shapes: list[tuple[int, ...]] = []  # for which the binding is

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Announce the shapes of most batches."""
        self.sessions.expect(shapes)
        self._binding = None

    def run(self, values: Mapping[str, Value], data: Arrays) -> dict[str, Value]:
        """Return the results of the model for these values."""
        if not self.outputs:
            return {}
        direct: dict[str, np.ndarray] = {}
        if self.device == CPU:
            for sent in self.sums:
                direct |= sent.places()
        shapes = [array.shape for array in data.values()]
        if self._binding is None or shapes != self._shapes:
            running = self.sessions.of({name: array[None] for name, array in data.items()})
            self._binding, self._shapes = Binding(running, self.device), shapes
        inputs = {name: values[name] for name in self.inputs}
        results = self._binding.run(inputs, self.outputs, into=direct)
        own = {name: array for name, array in direct.items() if name in self.outputs}
        return {**dict(zip(self.outputs, results, strict=True)), **own}


def _names_of_row_values(step: Step) -> set[str]:
    """Return the names of the values that depend on the rows of a part."""
    found = set(step.inputs.of_rows)
    for node in step.model.graph:
        if not exchanges(node) and not found.isdisjoint(reads(node)):
            found.update(node.outputs)
    return {str(value.name) for value in found}


class _Sum:
    """Values of one dtype that are added up, in one buffer; 16 bits in float32.

    Behind them, the buffer has room for the `requests` of this process, and then of all.
    """

    def __init__(self, exchanges: list[Exchange]) -> None:
        dtype = exchanges[0].dtype
        self.exchanges = sorted(exchanges, key=lambda e: bool(e.ratio))
        self.dtype = dtype.numpy()
        self.wide = np.dtype(np.float32) if dtype in _HALF else self.dtype
        self.tells, self.requests = dtype in _FLOATS, [False] * REQUESTS
        self._told: np.ndarray | None = None
        self.buffer: _Buffer | None = None
        self._total: np.ndarray | None = None  # of several parts
        if all(e.shape is not None for e in exchanges):
            self.buffer = self._new_buffer([e.shape or () for e in self.exchanges])

    def _new_buffer(self, shapes: Iterable[tuple[int, ...]]) -> _Buffer:
        return _Buffer([e.sent for e in self.exchanges], shapes, self.wide)

    def places(self) -> dict[str, np.ndarray]:
        """Return the arrays into which sessions write values that are sent, by name."""
        return {} if self.buffer is None or self.wide != self.dtype else self.buffer.views

    def add(self, values: Mapping[str, Value], part: int, count: int) -> None:
        """Take the values that part number `part` of `count` sends, added to earlier parts."""
        own = self._fill_buffer(values).whole
        if part == 0:
            self._total = own.copy() if count > 1 else None
        elif self._total is not None:
            self._total += own
        if part + 1 == count and self._total is not None:
            np.copyto(own, self._total)
            self._total = None

    def start(
        self,
        values: Mapping[str, Value],
        group: Group,
        counts: bool,
        waiting: Mapping[str, Wait],
    ) -> tuple[dict[str, Any], Wait]:
        """Begin to add up; return the values received, by name, and a function that waits for them.

        `waiting` has such functions for values of earlier messages.
        """
        own = self.buffer
        assert own is not None  # it has what `add` took
        if not counts:
            own.whole.fill(0)
        own.requests[:], self.requests = self.requests, [False] * REQUESTS
        summed = group.sum(own.whole)
        received = {e.received: own.views[e.sent] for e in self.exchanges}
        scale = self._ratio_scaling(own, {**values, **received}, waiting)
        narrow = received
        if self.wide != self.dtype:
            narrow = {n: np.empty(array.shape, self.dtype) for n, array in received.items()}

        def wait() -> None:
            summed()
            self._told = own.requests
            scale()
            if narrow is not received:
                for name, array in received.items():
                    np.copyto(narrow[name], array, casting="unsafe")

        return narrow, wait

    def _ratio_scaling(
        self, own: _Buffer, values: Mapping[str, Value], waiting: Mapping[str, Wait]
    ) -> Callable[[], None]:
        """Return a function that multiplies sums by their ratio, which is often 1."""
        scaled = [e for e in self.exchanges if e.ratio]
        if not scaled:
            return lambda: None
        expected, count = (as_array(values[name]) for name in scaled[0].ratio)
        ready = waiting.get(scaled[0].ratio[1])
        part = own.whole[own.starts[scaled[0].sent] : -REQUESTS]

        def scale() -> None:
            if ready is not None:
                ready()
            if count.item() not in (0, expected.item()):
                np.multiply(part, expected.item() / count.item(), out=part)

        return scale

    def told(self) -> list[bool]:
        """Return the requests that any process has sent, once the sums are received."""
        told, self._told = self._told, None
        return [] if told is None else [number > 0 for number in told.tolist()]

    def _fill_buffer(self, values: Mapping[str, Value]) -> _Buffer:
        """Return the buffer with the values to send, which the session may have written there."""
        arrays = [as_array(values[e.sent]) for e in self.exchanges]
        buffer, shapes = self.buffer, [array.shape for array in arrays]
        if buffer is None or [view.shape for view in buffer.views.values()] != shapes:
            buffer = self.buffer = self._new_buffer(shapes)
        for array, view in zip(arrays, buffer.views.values(), strict=True):
            if array is not view:
                np.copyto(view, array)
        return buffer


class _Buffer:
    """Arrays of these names and shapes, as `views` of a vector, with `requests` at its end."""

    def __init__(
        self, names: Sequence[str], shapes: Iterable[tuple[int, ...]], dtype: np.dtype
    ) -> None:
        self.views: dict[str, np.ndarray] = {}
        self.starts: dict[str, int] = {}
        shapes = list(shapes)
        self.whole = np.empty(sum(map(prod, shapes)) + REQUESTS, dtype)
        end = 0
        for name, shape in zip(names, shapes, strict=True):
            self.starts[name] = begin = end
            end += prod(shape)
            self.views[name] = self.whole[begin:end].reshape(shape)
        self.requests = self.whole[end:]
        self.requests[:] = 0


def as_array(value: Value) -> np.ndarray:
    """Return a value as an array; on the CPU it shares the memory."""
    return value if isinstance(value, np.ndarray) else array_of(value)
