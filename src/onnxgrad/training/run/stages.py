"""Runs the pieces of a step that threads and processes share, and adds up what they compute."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait as wait_for
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.parallel import Exchange, Group, Part, Piece
from onnxgrad.runtime.binding import Binding
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import array_of
from onnxgrad.training.run.sessions import Sessions
from onnxgrad.training.step.build import Step

Value: TypeAlias = ort.OrtValue | np.ndarray
Values: TypeAlias = ChainMap[str, Value]  # of a part of the rows, and behind them those of all
Arrays = dict[str, np.ndarray]
Wait = Callable[[], None]
_SMALL = 1 << 16  # elements that one thread adds up sooner than two begin
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Stages:
    """Runs a step in pieces; what reads rows runs once for each of some parts of the rows.

    Each part has a thread, as each process has its rows: what is added up over the processes is
    added up over the parts first.

    Args:
        pieces: of the graph of the step.
        step: the step.
        device: where to run.
        work: multiply-adds of the rows of this process.
        group: the processes.
        parts: the most parts of a batch.
    """

    def __init__(
        self,
        pieces: list[Piece],
        step: Step,
        device: Device,
        work: float,
        group: Group,
        parts: int = 1,
    ) -> None:
        self.device, self.group = device, group
        self._threads = Threads(parts)
        of_rows = {str(v.name) for v in step.inputs.of_rows}
        self._pieces = []
        for piece in pieces:
            running = _Running(piece, step, device, work, parts, of_rows)
            self._pieces.append(running)
            if running.of_rows:
                of_rows.update(running.outputs)

    def expect(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Announce the shapes of the parts of most batches; an empty sequence announces none."""
        for piece in self._pieces:
            for i, sessions in enumerate(piece.sessions):
                sessions.expect(shapes[i] if shapes else {})

    def run(
        self, values: dict[str, Value], parts: Sequence[Arrays], counts: bool
    ) -> Mapping[str, Value]:
        """Run the step; return all values that pieces gave each other, and the results.

        Args:
            values: the inputs other than data, by name.
            parts: the data of each part of the batch.
            counts: whether the rows of this process count; if not, it sends zeros.
        """
        own: list[Values] = [ChainMap(dict(data), values) for data in parts]
        waiting: dict[str, Wait] = {}
        for piece in self._pieces:
            for name in piece.reads:
                if name in waiting:
                    waiting.pop(name)()
            piece.run(own, parts, self._threads)
            for sent in piece.sums:
                received, wait = sent.start(own, self.group, counts, self._threads)
                values.update(received)
                waiting.update(dict.fromkeys(received, _once(wait)))
            for exchange in piece.broadcasts:
                array = np.array(as_array(own[0][exchange.sent]))
                self.group.broadcast(array, exchange.root or 0)
                values[exchange.received] = self.device.ortvalue(array)
            for name in piece.last:
                for each in (values, *(part.maps[0] for part in own)):
                    each.pop(name, None)
        for wait in waiting.values():
            wait()
        return own[0]


class Threads:
    """Runs jobs at the same time, as many as there are `parts`."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._others = ThreadPoolExecutor(max(1, parts - 1), "onnxgrad")

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all jobs, the first one on this thread; raise what one of them raises."""
        others = [self._others.submit(job) for job in jobs[1:]]
        try:
            jobs[0]()
        finally:
            wait_for(others)  # they use what the caller is about to free
        for other in others:
            other.result()


class _Running:
    """A piece with its sessions.

    A part of the rows has a session of its own: memory that two runs of one session allocate is
    behind one lock. `of_rows` are the values before it that each part has its own of.
    """

    def __init__(
        self,
        piece: Piece,
        step: Step,
        device: Device,
        work: float,
        parts: int,
        of_rows: Collection[str],
    ) -> None:
        graph = piece.model.graph
        self.inputs = [x.name for x in graph.input]
        self.outputs = [y.name for y in graph.output]
        self.reads = {*self.inputs, *(e.sent for e in piece.exchanges)}
        self.last, self.device = piece.last, device
        self.broadcasts = [e for e in piece.exchanges if e.root is not None]
        sums = [e for e in piece.exchanges if e.root is None]
        self.of_rows = bool(sums) or any(name in of_rows for name in self.inputs)
        count = parts if self.of_rows else 1
        self.sessions = [
            Sessions(piece.model, step, device, work / count, single=count > 1)
            for _ in range(count)
        ]
        kinds = dict.fromkeys((e.dtype, e.shape is None) for e in sums)
        self.sums = [
            _Sum([e for e in sums if (e.dtype, e.shape is None) == k], parts) for k in kinds
        ]
        self._bindings: list[dict[ort.InferenceSession, Binding]] = [{} for _ in range(count)]

    def run(self, own: Sequence[Values], parts: Sequence[Arrays], threads: Threads) -> None:
        """Add the results of the model to the values of each part; those of all parts to all."""
        if not self.outputs:
            return
        count = len(own) if self.of_rows else 1
        bindings = [self._binding(i, parts[i]) for i in range(count)]

        def job(i: int) -> None:
            direct: dict[str, np.ndarray] = {}
            if self.device == CPU:
                for sent in self.sums:
                    direct |= sent.places(i)
            inputs = {name: own[i][name] for name in self.inputs}
            results = bindings[i].run(inputs, self.outputs, into=direct)
            values = own[i] if self.of_rows else own[i].maps[-1]
            values.update(zip(self.outputs, results, strict=True))

        threads.run([partial(job, i) for i in range(count)])

    def _binding(self, part: int, arrays: Arrays) -> Binding:
        running = self.sessions[part].of({name: array[None] for name, array in arrays.items()})
        if running not in self._bindings[part]:
            self._bindings[part] = {running: Binding(running, self.device)}
        return self._bindings[part][running]


class _Sum:
    """Values of one dtype that are added up, in one buffer for each part of the rows.

    Those of 16 bits are added up in float32.
    """

    def __init__(self, exchanges: list[Exchange], parts: int) -> None:
        self.exchanges = exchanges
        dtype = exchanges[0].dtype
        self.dtype = dtype.numpy()
        self.wide = np.dtype(np.float32) if dtype in _HALF else self.dtype
        self.buffers: list[_Buffer | None] = [None] * parts
        if all(e.shape is not None for e in exchanges):
            self.buffers = [self._buffer([e.shape or () for e in exchanges]) for _ in range(parts)]

    def _buffer(self, shapes: Sequence[tuple[int, ...]]) -> _Buffer:
        return _Buffer([e.sent for e in self.exchanges], shapes, self.wide)

    def places(self, part: int) -> dict[str, np.ndarray]:
        """Return where sessions write what they send, by name."""
        buffer = self.buffers[part]
        return {} if buffer is None or self.wide != self.dtype else buffer.views

    def start(
        self, own: Sequence[Mapping[str, Value]], group: Group, counts: bool, threads: Threads
    ) -> tuple[dict[str, Any], Wait]:
        """Begin to add up; return the values received, by name, and what waits for them."""
        threads.run([partial(self._fill, i, values) for i, values in enumerate(own)])
        first, *others = (b for b in self.buffers[: len(own)] if b is not None)
        if not counts:
            first.whole.fill(0)
        if others:
            _add_up([first.whole, *(b.whole for b in others)], threads)
        wait = group.sum(first.whole)
        received = {e.received: first.views[e.sent] for e in self.exchanges}
        if self.wide == self.dtype:
            return received, wait
        narrow = {name: np.empty(array.shape, self.dtype) for name, array in received.items()}

        def rounded() -> None:
            wait()
            for name, array in received.items():
                np.copyto(narrow[name], array, casting="unsafe")

        return narrow, rounded

    def _fill(self, part: int, values: Mapping[str, Value]) -> None:
        """Copy what a part sends into its buffer, unless its session has written it there."""
        arrays = [as_array(values[e.sent]) for e in self.exchanges]
        buffer = self.buffers[part]
        if buffer is None or any(
            array.shape != view.shape
            for array, view in zip(arrays, buffer.views.values(), strict=True)
        ):
            buffer = self.buffers[part] = self._buffer([array.shape for array in arrays])
        for array, view in zip(arrays, buffer.views.values(), strict=True):
            if array.ctypes.data != view.ctypes.data:
                np.copyto(view, array)


class _Buffer:
    """Arrays of these names and shapes, as `views` of a vector."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: np.dtype
    ) -> None:
        sizes = list(map(prod, shapes))
        ends = np.cumsum(sizes)
        self.whole = np.empty(sum(sizes), dtype)
        self.views = {
            name: self.whole[end - size : end].reshape(shape)
            for name, end, size, shape in zip(names, ends, sizes, shapes, strict=True)
        }


def _add_up(vectors: Sequence[np.ndarray], threads: Threads) -> None:
    """Add vectors of one length to the first one, each thread some of the elements."""
    total, *others = vectors
    count = threads.parts if total.size > _SMALL else 1

    def add(rows: slice) -> None:
        for other in others:
            np.add(total[rows], other[rows], out=total[rows])

    threads.run([partial(add, Part(i, count).rows(total.size)) for i in range(count)])


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
