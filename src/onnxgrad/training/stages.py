"""Runs the pieces of a step that several processes share, and what they exchange in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.parallel import Exchange, Group, Piece
from onnxgrad.runtime.binding import Binding
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import array_of
from onnxgrad.training.sessions import Sessions
from onnxgrad.training.step import Step

Value: TypeAlias = ort.OrtValue | np.ndarray
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Stages:
    """Runs a step in pieces.

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

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Announce the shapes of most batches, as those of this process are."""
        for piece in self._pieces:
            piece.sessions.expect(shapes)

    def run(
        self,
        values: dict[str, Value],
        shapes: Mapping[str, np.ndarray],
        counts: bool,
    ) -> dict[str, Value]:
        """Run the step; return all values that pieces gave each other, and the results.

        Args:
            values: the inputs, by name.
            shapes: the stacked data, which choose the sessions.
            counts: whether the rows of this process count; if not, it sends zeros.
        """
        waiting: dict[str, Callable[[], None]] = {}
        for piece in self._pieces:
            for name in piece.reads:
                if name in waiting:
                    waiting.pop(name)()
            piece.run(values, shapes)
            for sent in piece.sums:
                received, wait = sent.start(values, self.group, counts)
                values.update(received)
                waiting.update(dict.fromkeys(received, _once(wait)))
            for exchange in piece.broadcasts:
                array = np.array(as_array(values[exchange.sent]))
                self.group.broadcast(array, exchange.root or 0)
                values[exchange.received] = self.device.ortvalue(array)
            for name in piece.last:
                values.pop(name, None)
        for wait in waiting.values():
            wait()
        return values


class _Running:
    """A piece with its sessions."""

    def __init__(self, piece: Piece, step: Step, device: Device, work: float) -> None:
        graph = piece.model.graph
        self.sessions = Sessions(piece.model, step, device, work)
        self.inputs = [x.name for x in graph.input]
        self.outputs = [y.name for y in graph.output]
        self.reads = {*self.inputs, *(e.sent for e in piece.exchanges)}
        self.last, self.device = piece.last, device
        self.broadcasts = [e for e in piece.exchanges if e.root is not None]
        sums = [e for e in piece.exchanges if e.root is None]
        kinds = dict.fromkeys((e.dtype, e.shape is None) for e in sums)
        self.sums = [_Sum([e for e in sums if (e.dtype, e.shape is None) == k]) for k in kinds]
        self._bindings: dict[ort.InferenceSession, Binding] = {}

    def run(
        self,
        values: dict[str, Value],
        shapes: Mapping[str, np.ndarray],
    ) -> None:
        """Add the results of the model to `values`."""
        if not self.outputs:
            return
        running = self.sessions.of(shapes)
        if running not in self._bindings:
            self._bindings = {running: Binding(running, self.device)}
        direct: dict[str, np.ndarray] = {}
        if self.device == CPU:
            for sent in self.sums:
                direct |= sent.places
        inputs = {name: values[name] for name in self.inputs}
        results = self._bindings[running].run(inputs, self.outputs, into=direct)
        values.update(zip(self.outputs, results, strict=True))


class _Sum:
    """Values of one dtype that are added up over the processes in one buffer.

    Those of 16 bits are added up in float32.
    """

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.exchanges = exchanges
        dtype = exchanges[0].dtype
        self.dtype = dtype.numpy()
        self.wide = np.dtype(np.float32) if dtype in _HALF else self.dtype
        self.buffer = np.empty(0, self.wide)
        self.parts: dict[str, np.ndarray] = {}
        self.places: dict[str, np.ndarray] = {}  # where sessions write, in the buffer
        if all(e.shape is not None for e in exchanges):
            self._place([e.shape or () for e in exchanges])
            if self.wide == self.dtype:
                self.places = self.parts

    def _place(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Make room for values of these shapes."""
        sizes = list(map(prod, shapes))
        self.buffer = np.empty(sum(sizes), self.wide)
        ends = np.cumsum(sizes)
        self.parts = {
            e.sent: self.buffer[end - size : end].reshape(shape)
            for e, end, size, shape in zip(self.exchanges, ends, sizes, shapes, strict=True)
        }

    def start(
        self, values: Mapping[str, Value], group: Group, counts: bool
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Begin to add up; return the values received, by name, and what waits for them."""
        own = {e.sent: as_array(values[e.sent]) for e in self.exchanges}
        if any(array.shape != self.parts[n].shape for n, array in own.items() if self.parts):
            self.parts = {}
        if not self.parts:
            self._place([array.shape for array in own.values()])
        for name, array in own.items():
            if array.ctypes.data != self.parts[name].ctypes.data:
                np.copyto(self.parts[name], array)
        if not counts:
            self.buffer.fill(0)
        wait = group.sum(self.buffer)
        received = {e.received: self.parts[e.sent] for e in self.exchanges}
        if self.wide == self.dtype:
            return received, wait
        narrow = {name: np.empty(array.shape, self.dtype) for name, array in received.items()}

        def rounded() -> None:
            wait()
            for name, array in received.items():
                np.copyto(narrow[name], array, casting="unsafe")

        return narrow, rounded


def as_array(value: Value) -> np.ndarray:
    """Return a value as an array; on the CPU it shares the memory."""
    return value if isinstance(value, np.ndarray) else array_of(value)


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does `action` when it is first called."""
    done = False

    def act() -> None:
        nonlocal done
        if not done:
            done = True
            action()

    return act
