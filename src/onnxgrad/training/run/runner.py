"""Running the model of training: slices of batches, with the states on the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import array_of, bind_output, is_finite
from onnxgrad.training.fields import Fields
from onnxgrad.training.row_axes import Axes
from onnxgrad.training.run.sessions import Sessions
from onnxgrad.training.state import Values
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import Call, Slice

SECONDS_PER_CALL = 0.2  # so that progress, callbacks and Ctrl-C get their turn
LARGE_STATE = 1 << 20  # elements of a state
_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64}


@dataclass(frozen=True, eq=False)
class Now:
    """States and buffers on the device, and the number of steps that led to them."""

    states: Sequence[ort.OrtValue | None]  # None: a buffer that the first batch sets
    steps: int
    arrays: Sequence[np.ndarray] = ()  # the first states, with the same memory, if it is theirs
    frozen: Mapping[int, int] = field(default_factory=dict)  # as those of `Values`


@dataclass(frozen=True)
class Losses:
    """The losses of batches: those of a part k are `sums[:, k]` / `counts[:, k]`.

    Those of a stack have a last axis of members.
    """

    sums: np.ndarray
    counts: np.ndarray


class Asked(Exception):
    """A process had `requests` when the step began, so that none has done it."""

    def __init__(self, requests: list[bool]) -> None:
        super().__init__()
        self.requests = requests


class Runner:
    """Runs slices of batches; keeps the states on the device between calls.

    With `in_place`, there is no other copy of the states.

    `fields` are the inputs of data, needed to split batches into micro-batches; `carried` the data
    inputs of buffers whose first value is in the data.
    """

    in_place = False
    of_several = False  # whether other processes run parts of its batches
    not_finite: Mapping[int, int] = {}  # members of a stack that a step froze, and their steps

    def __init__(
        self,
        model: ModelProto,
        step: Step,
        device: Any,
        work: float,
        fields: Fields | None = None,
        carried: Mapping[str, str] | None = None,
    ) -> None:
        self.device = Device.of(device).check()
        self.model, self.sessions = model, Sessions(model, step, self.device, work)
        self.step, self.fields, self.carried = step, fields, carried or {}
        own = [str(v.name) for v in step.inputs.all]
        self.names = dict(zip(own, (x.name for x in model.graph.input), strict=True))
        self.outputs = [y.name for y in model.graph.output]
        self.now = Now([], 0)
        self._memory: dict[str, list[np.ndarray]] = {}  # of large states, by name
        self.seconds_per_batch = SECONDS_PER_CALL
        self.last = 1
        self.norms: dict[str, Any] = {}  # of the gradients in the last step

    def load(self, values: Values) -> None:
        """Set the states; a slot that is missing gets its initial value.

        They may share the memory of the values: steps replace states, and modify none.
        """
        states: list[np.ndarray | None] = []
        for group in self.step.groups:
            states += group.initial(values.weights, values.slots, copies=False)
        states += [values.buffers.get(str(b.name)) for b in self.step.inputs.buffers]
        loaded = [None if state is None else self.device.ortvalue(state) for state in states]
        self.now = Now(loaded, values.steps)

    @property
    def holds_all(self) -> bool:
        """Whether its states are all that is needed to read them again, at hardly any cost."""
        return self.device == CPU

    def expect(self, shapes: Mapping[str, tuple[int, ...]], axes: Axes) -> None:
        """Announce the shapes of most batches, if they are known, and the axes of their rows."""
        self.sessions.expect(shapes)

    def budget(self) -> int:
        """Return how many batches the next call may run."""
        return max(1, min(8 * self.last, int(SECONDS_PER_CALL / self.seconds_per_batch)))

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece` at these learning rates, one a batch.

        `position` is the number of the first batch in its epoch.

        Return None, and leave the states unchanged, if the loss or a weight is not finite.

        Raises:
            Asked: any process has requests, of which `ask` was told; the states are unchanged.
        """
        start = time.perf_counter()
        new, losses = self.computed(self.call(piece, rates, position))
        return self.finished(piece, new, losses, start)

    def call(self, piece: Slice, rates: np.ndarray, position: int) -> Call:
        """Return the steps that follow those that are done; arguments are those of `run`.

        Raises:
            ValueError: a learning rate that is zero in the dtype of a weight.
        """
        self.step.check_rates(rates)
        parts, count = self.step.accumulate, None
        if parts > 1:
            count = micro_batches(piece.own, parts, bool(self.step.inputs.buffers))
        if (fixed := self.step.fixed_rows) is not None:
            count, rest = divmod(piece.own, fixed)
            if rest:
                raise ValueError(
                    f"the model takes {fixed} rows, and a batch, or the part of this process, has "
                    f"{piece.own}: pass a multiple"
                )
        return Call(piece, rates, self.now.steps, position, count)

    def computed(self, call: Call) -> tuple[list[ort.OrtValue], Losses]:
        """Return the states after the steps of a call, and their losses."""
        piece = call.piece
        running = self.sessions.of(piece.arrays)
        binding = running.io_binding()
        states = self.states(piece)
        for name, state in states.items():
            binding.bind_ortvalue_input(self.names[name], state)
        for name, array in self.step.inputs.fed(call, self.data(call)).items():
            binding.bind_cpu_input(self.names[name], array)
        own = map(self._memory_for, states, states.values())
        memory = dict(zip(self.outputs, own, strict=False))
        for name in self.outputs:
            target = memory.get(name)
            if target is None:
                self.device.bind_outputs(binding, [name])
            else:
                bind_output(binding, name, target)
        with escaping():
            running.run_with_iobinding(binding)
        results = binding.get_outputs()
        new = [
            y if target is None else self.device.ortvalue(target)
            for y, target in zip(results, memory.values(), strict=False)
        ]
        return new, self._losses([y.numpy() for y in results[len(states) :]], piece)

    def _memory_for(self, name: str, state: ort.OrtValue) -> np.ndarray | None:
        """Return an array that a call writes a new state into; None: onnxruntime allocates one.

        Large states get that of an earlier one, unless anybody still reads it. What onnxruntime
        frees, it divides between smaller values, and then takes more for the next state.
        """
        dtype = _DTYPES.get(state.data_type())
        if self.device != CPU or dtype is None or prod(state.shape()) < LARGE_STATE:
            return None
        arrays = self._memory.setdefault(name, [])
        unread = next((i for i, n in enumerate(_references(arrays)) if n == _UNREAD), None)
        if unread is not None:
            return arrays[unread]
        arrays[:] = [*arrays[-1:], np.empty(state.shape(), dtype)]
        return arrays[-1]

    def finished(
        self, piece: Slice, new: list[ort.OrtValue], losses: Losses, start: float
    ) -> Losses | None:
        """Keep the new states, if they and the losses are finite; return the losses, or None.

        `start` is the time when the call began.
        """
        finite = np.isfinite(losses.sums).all()
        if not finite or not all(map(is_finite, new)):
            return None
        # in one assignment, which cannot be interrupted
        self.now = Now(new, self.now.steps + piece.batches)
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return losses

    def data(self, call: Call) -> Mapping[str, np.ndarray]:
        """Return the data of the steps of a call, split into micro-batches if they have such."""
        arrays, count = call.piece.arrays, call.micro_batches
        if count is None:
            return arrays
        assert self.fields is not None
        one = {name: array[0] for name, array in arrays.items()}
        axes = self.fields.axes(one, cut=count > 1)
        return {name: split_batches(a, count, axes[name]) for name, a in arrays.items()}

    def states(self, piece: Slice) -> dict[str, ort.OrtValue]:
        """Return states and buffers; one without a value gets zeros of the shape of its input."""
        names = [str(v.name) for v in (*self.step.states, *self.step.inputs.buffers)]
        return {
            name: self.device.ortvalue(self.empty(piece.arrays[self.carried[name]][0]))
            if state is None
            else state
            for name, state in zip(names, self.now.states, strict=True)
        }

    def empty(self, array: np.ndarray) -> np.ndarray:
        """Return the value of a buffer that the first batch sets, from the data there."""
        return np.zeros_like(array)

    def _losses(self, reported: list[np.ndarray], piece: Slice) -> Losses:
        if self.step.norms:
            *reported, norms = reported
            self.norms = dict(zip(self.step.norms, norms[-1].tolist(), strict=True))
        columns = [y.astype(np.float64).reshape(piece.batches) for y in reported]
        half = len(columns) // 2
        return Losses(np.stack(columns[:half], axis=1), np.stack(columns[half:], axis=1))

    def unpacked(self, now: Now, copies: bool = True) -> Values:
        """Return the values of `now`, by name.

        Those of a group of one weight share its memory, as steps replace states, unless they are
        `in_place`; without `copies`, all may share it.
        """
        weights: dict[str, np.ndarray] = {}
        slots: dict[str, dict[str, np.ndarray]] = {}
        arrays = self.arrays_of(now)
        for group in self.step.groups:
            size = len(group.inputs)
            separate = copies and (self.in_place or len(group.shapes) > 1)
            own, own_slots = group.split(arrays[:size], separate)
            arrays = arrays[size:]
            weights |= own
            slots |= own_slots
        names = [str(b.name) for b in self.step.inputs.buffers]
        pairs = zip(names, arrays, strict=True)
        return Values(
            weights, slots, now.steps, {n: np.array(a) for n, a in pairs if a is not None}
        )

    def freeze(self, ids: Sequence[int], not_finite: bool = False) -> None:
        """Let members of a stack keep their state from now on."""
        raise ValueError(f"control.freeze names members of a stack, {ids}, and this is one model")

    def release(self) -> None:
        """Free what only steps need."""
        self._memory.clear()

    @property
    def whole(self) -> bool:
        """Whether the states of this process are all that there are."""
        return True

    def agree(self, requests: Sequence[bool]) -> list[bool]:
        """Return which requests any of the processes has that share the training."""
        return list(requests)

    def ask(self, requests: Sequence[bool]) -> bool:
        """Let the next step tell the requests of all processes; return whether it can."""
        return False

    def collect(self) -> None:
        """Let every process that shares the training have all of its state."""

    def arrays_of(self, now: Now) -> list[Any]:
        """Return the states and buffers of `now` as arrays, None for a buffer without a value."""
        return [None if state is None else array_of(state) for state in now.states]


def _references(items: list[Any]) -> list[int]:
    """Return how many references there are to each item, those of this function included."""
    return [sys.getrefcount(items[i]) for i in range(len(items))]


# of an item to which nothing but its list refers; versions of Python count differently
(_UNREAD,) = _references([object()])


def micro_batches(rows: int, parts: int, statistics: bool = False) -> int:
    """Return in how many equal micro-batches to split `rows`, none larger than rows / `parts`.

    If a step computes `statistics` of each, which a single row lacks, rows stay together that no
    number divides, and those that are fewer than `parts`.
    """
    largest = -(-rows // parts)
    count = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= largest)
    return 1 if statistics and count == rows != parts else count


def split_batches(array: np.ndarray, count: int, axis: int | None) -> np.ndarray:
    """Return [batches, ...] as [batches, micro-batches, ...], split along the axis of the rows."""
    if axis is None:
        return np.repeat(array[:, None], count, axis=1)
    axis %= array.ndim - 1
    return np.stack(np.split(array, count, axis=axis + 1), axis=1)


def pieces(
    arrays: Mapping[str, np.ndarray], size: int
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Yield the arrays in pieces of `size` rows, the last one shorter, and the rows of a piece."""
    count = len(next(iter(arrays.values())))
    for start in range(0, count, size):
        rows = min(size, count - start)
        yield {name: array[start : start + rows] for name, array in arrays.items()}, rows
