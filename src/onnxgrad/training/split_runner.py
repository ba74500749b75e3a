"""Running a step whose batches are split between threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnxruntime as ort

from onnxgrad.runtime.binding import Binding
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import array_of
from onnxgrad.training.batches import Slice, rows_of
from onnxgrad.training.fields import Fields
from onnxgrad.training.row_axes import Axes
from onnxgrad.training.runner import Losses, Runner
from onnxgrad.training.sessions import Sessions
from onnxgrad.training.split import SplitStep

Arrays = Mapping[str, np.ndarray]


class Rows:
    """Where the rows of a batch are, and how long all other axes are."""

    def __init__(self, axes: Axes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.axes = {n: None if a is None else a % len(shapes[n]) for n, a in axes.items()}
        self.lengths = {
            name: [d for i, d in enumerate(shape) if i != self.axes[name]]
            for name, shape in shapes.items()
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class SplitRunner(Runner):
    """Runs slices of batches as `Runner` does, with the rows of each batch in `parts` parts.

    Each part runs on a thread of its own, in a session of its own: memory that two runs of one
    session allocate is behind one lock. Batches other than `proven` are one part. With `measures`,
    the norms of the gradients of the last batch of a slice are computed, outside of the graph.
    """

    def __init__(
        self,
        split: SplitStep,
        device: Device,
        work: float,
        fields: Fields,
        parts: int,
        proven: Rows,
        measures: bool = False,
    ) -> None:
        super().__init__(split.gradients, split.step, "terms", device, work, fields)
        self.split, self.parts, self.proven = split, parts, proven
        self.measures = measures
        self.axes: Axes = dict(proven.axes)
        self._sessions = [
            Sessions(split.gradients, split.step, device, work / parts, single=True)
            for _ in range(parts)
        ]
        self._bindings: dict[tuple[int, ort.InferenceSession], Binding] = {}
        self._updates: dict[int, _Update] = {}
        self._counts = session(split.counts, device, 0.0)
        self._counted = [x.name for x in split.counts.graph.input]
        carried = self.step.carried
        self._weights = [carried.index(group.state) for group in self.step.groups]
        self._threads = ThreadPoolExecutor(parts - 1, "onnxgrad")

    def expect(self, shapes: Mapping[str, tuple[int, ...]], axes: Axes) -> None:
        """Announce the shapes of most batches, if they are known, and the axes of their rows."""
        self.axes = axes
        part = {}
        for name, shape in shapes.items():
            axis = axes[name]
            rows = None if axis is None else axis % len(shape)
            part[name] = tuple(-(-n // self.parts) if i == rows else n for i, n in enumerate(shape))
        for sessions in self._sessions:
            sessions.expect(part)

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece`, as that of `Runner`."""
        start = time.perf_counter()
        states, scalars = self.states(piece), self._scalars(piece, rates, position)
        sums, counts = [], []
        for i in range(piece.batches):
            batch = {name: array[i] for name, array in piece.arrays.items()}
            counted = self._counts.run(None, {name: batch[name] for name in self._counted})
            half = len(counted) // 2
            gradients, terms = self._gradients(states, batch, piece.rows, counted[half:])
            states = self._update(states, gradients, [stack[i, ...] for stack in scalars])
            sums.append(terms)
            counts.append(np.array(counted[:half], np.float64))
        if self.measures:
            self.norms = self._norms(gradients)
        return self.finished(piece, states, Losses(np.stack(sums), np.stack(counts)), start)

    def _gradients(
        self, states: list[ort.OrtValue], batch: Arrays, rows: int, inverses: list[np.ndarray]
    ) -> tuple[list[list[ort.OrtValue]], np.ndarray]:
        """Return the gradients of each part, and the sums of the terms of the batch."""
        weights = [states[i] for i in self._weights]
        jobs = []
        for i, arrays in enumerate(self._cut(batch, rows)):
            inputs = dict(zip(self.names, [*weights, *arrays.values(), *inverses], strict=True))
            jobs.append((self._binding(i, arrays), inputs))
        waiting = [self._threads.submit(b.run, inputs, self.outputs) for b, inputs in jobs[1:]]
        binding, inputs = jobs[0]
        parts = [binding.run(inputs, self.outputs), *(job.result() for job in waiting)]
        terms = [[float(y.numpy()) for y in part[len(weights) :]] for part in parts]
        return [part[: len(weights)] for part in parts], np.sum(terms, axis=0)

    def _norms(self, gradients: list[list[ort.OrtValue]]) -> dict[str, float]:
        """Return the 2-norm of the gradient of each weight, the sum of those of the parts."""
        norms = {}
        for group, *of_parts in zip(self.step.groups, *gradients, strict=True):
            first, *others = (array_of(g) for g in of_parts)
            total = sum(others, first)
            for name, g in group.unpack(total, copies=False).items():
                norms[name] = float(np.linalg.norm(g.astype(np.float64, copy=False)))
        return norms

    def _binding(self, part: int, arrays: Arrays) -> Binding:
        running = self._sessions[part].of({name: array[None] for name, array in arrays.items()})
        if (part, running) not in self._bindings:
            self._bindings[part, running] = Binding(running, self.device)
        return self._bindings[part, running]

    def _cut(self, batch: Arrays, rows: int) -> list[Arrays]:
        """Return the parts of a batch, whose numbers of rows differ by one at most."""
        if (
            rows < self.parts
            or Rows(self.axes, {n: a.shape for n, a in batch.items()}) != self.proven
        ):
            return [batch]
        bounds = [-(-rows * i // self.parts) for i in range(self.parts + 1)]
        return [
            {
                name: np.ascontiguousarray(rows_of(array, self.axes[name], slice(start, end)))
                for name, array in batch.items()
            }
            for start, end in pairwise(bounds)
        ]

    def _update(
        self,
        states: list[ort.OrtValue],
        gradients: list[list[ort.OrtValue]],
        scalars: list[np.ndarray],
    ) -> list[ort.OrtValue]:
        """Return the new states."""
        parts = len(gradients)
        if parts not in self._updates:
            model = self.split.update(parts)
            self._updates[parts] = _Update(
                Binding(session(model, self.device, 0.0), self.device),
                [x.name for x in model.graph.input],
                [y.name for y in model.graph.output],
            )
        update = self._updates[parts]
        by_group = (g for of_parts in zip(*gradients, strict=True) for g in of_parts)
        inputs = dict(zip(update.inputs, [*states, *by_group, *scalars], strict=True))
        return update.binding.run(inputs, update.outputs)


@dataclass(frozen=True)
class _Update:
    """The update by the gradients of some number of parts: its session, and the names it has."""

    binding: Binding
    inputs: list[str]
    outputs: list[str]
