"""Running the model of training: slices of batches, with the states on the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.parallel import Alone, Group
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import array_of, bind_output, is_finite
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.sessions import Sessions
from onnxgrad.training.state import Arrays, Slots, Values
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import Call, Slice
from onnxgrad.training.step.weight_groups import Group as WeightGroup

SECONDS_PER_CALL = 0.2  # so that progress, callbacks and Ctrl-C get their turn
LARGE_STATE = 1 << 20  # elements of a state
WeightsAndSlots = tuple[Arrays, Slots]
_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64}


@dataclass(frozen=True, eq=False)
class Now:
    """States and buffers on the device, and the number of steps that led to them."""

    states: Sequence[ort.OrtValue | None]  # None: a buffer that the first batch sets
    steps: int
    arrays: Sequence[np.ndarray] = ()  # the first states, with the same memory, if it is theirs
    frozen: Mapping[int, int] = field(default_factory=dict)  # members, and their steps


@dataclass(frozen=True)
class Losses:
    """The losses of batches: the loss of part k is `sums[:, k]` / `counts[:, k]`.

    The losses of a stack have a last axis of members.
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

    With `in_place`, there is no other copy of the states. `carried` are the data inputs of buffers
    whose first value is in the data.
    """

    in_place = False
    group: Group = Alone()  # the processes that share the training
    of_several = False  # whether other processes run parts of its batches
    member_shape: tuple[int, ...] = ()  # of the members of a stack, one axis of states and losses
    not_finite: Mapping[int, int] = {}  # members of a stack that a step froze, and their steps

    def __init__(
        self,
        model: ModelProto,
        step: Step,
        device: Any,
        work: float,
        carried: Mapping[str, str] | None = None,
    ) -> None:
        self.device = Device.of(device).check()
        self.model, self.sessions = model, Sessions(model, step, self.device, work)
        self.step, self.carried = step, carried or {}
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
        states = self.initial_states(values, copies=False)
        self.now = Now(self.on_device(states), values.steps, frozen=dict(values.frozen))

    def initial_states(self, values: Values, copies: bool) -> list[np.ndarray | None]:
        """Return the states and buffers as arrays, None for a buffer without a value."""
        states: list[np.ndarray | None] = []
        for group in self.step.groups:
            states += group.initial(values.weights, values.slots, copies)
        return [*states, *(values.buffers.get(str(b.name)) for b in self.step.inputs.buffers)]

    def on_device(self, states: Sequence[np.ndarray | None]) -> list[ort.OrtValue | None]:
        """Return the states as values of the device."""
        return [None if state is None else self.device.ortvalue(state) for state in states]

    @property
    def holds_all(self) -> bool:
        """Whether states alone give values at hardly any cost, which are copies for a stack."""
        return self.device == CPU and not self.member_shape

    def expect(self, source: ArraySource | None) -> None:
        """Announce the source of most batches; None if it is not known."""
        self.sessions.expect({} if source is None else source.batch_shapes())

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
        """Return the next steps of the training, for the arguments of `run`.

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
        running = self.sessions.of(piece.fed())
        binding = running.io_binding()
        states = self.states(piece)
        for name, state in states.items():
            binding.bind_ortvalue_input(self.names[name], state)
        for name, array in self.step.inputs.fed(call).items():
            binding.bind_cpu_input(self.names[name], array)
        arrays = map(self._memory_for, states, states.values())
        memory = dict(zip(self.outputs, arrays, strict=False))
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
        return new, self.read_losses([y.numpy() for y in results[len(states) :]], piece)

    def _memory_for(self, name: str, state: ort.OrtValue) -> np.ndarray | None:
        """Return an array that a call writes a new state into; None: onnxruntime allocates one.

        Large states get the array of an earlier state, unless anybody still reads it. onnxruntime
        divides memory that it frees between smaller values, and takes more for the next state.
        """
        dtype = _DTYPES.get(state.data_type())
        if self.device != CPU or dtype is None or prod(state.shape()) < LARGE_STATE:
            return None
        arrays = self._memory.setdefault(name, [])
        unread = next((i for i, n in enumerate(_count_references(arrays)) if n == _UNREAD), None)
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
        kept = self.finite_states(new, losses)
        if kept is None:
            return None
        # in one assignment, which cannot be interrupted
        self.now = replace(self.now, states=kept, steps=self.now.steps + piece.batches)
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return losses

    def finite_states(
        self, new: list[ort.OrtValue], losses: Losses
    ) -> Sequence[ort.OrtValue | None] | None:
        """Return the states to keep after a call; None if they or the losses are not finite."""
        finite = np.isfinite(losses.sums).all() and all(map(is_finite, new))
        return new if finite else None

    def states(self, piece: Slice) -> dict[str, ort.OrtValue]:
        """Return states and buffers; one without a value gets zeros of the shape of its input."""
        names = [str(v.name) for v in (*self.step.states, *self.step.inputs.buffers)]
        return {
            name: self.device.ortvalue(self._first_state(piece, name)) if state is None else state
            for name, state in zip(names, self.now.states, strict=True)
        }

    def _first_state(self, piece: Slice, name: str) -> np.ndarray:
        """Return the zeros of a buffer before the first batch, which has its value as data."""
        array = piece.fed()[self.carried[name]]
        return np.zeros((*self.member_shape, *array.shape[1:]), array.dtype)

    def read_losses(self, reported: list[np.ndarray], piece: Slice) -> Losses:
        """Return the losses from the outputs of a step, and keep the norms of its gradients."""
        if self.step.norms:
            *reported, norms = reported  # (batches, members, weights), or without members
            last = norms[-1].T if self.member_shape else norms[-1].tolist()
            self.norms = dict(zip(self.step.norms, last, strict=True))
        shape = piece.batches, *self.member_shape
        each = piece.batches, *(-1 for _ in self.member_shape)
        columns = [np.broadcast_to(y.astype(np.float64).reshape(each), shape) for y in reported]
        half = len(columns) // 2
        return Losses(np.stack(columns[:half], axis=1), np.stack(columns[half:], axis=1))

    def unpacked(self, now: Now, copies: bool = True) -> Values:
        """Return the values of `now`, by name.

        The values of a group of one weight share the memory of the states, which steps replace,
        unless they are updated `in_place`; without `copies`, all values may share it.
        """
        weights: Arrays = {}
        slots: Slots = {}
        arrays = self.arrays_of(now)
        for group in self.step.groups:
            size = len(group.inputs)
            own, own_slots = self.split_group(group, arrays[:size], copies)
            arrays = arrays[size:]
            weights |= own
            slots |= own_slots
        pairs = zip(self.step.inputs.buffers, arrays, strict=True)
        buffers = {str(b.name): np.array(a) for b, a in pairs if a is not None}
        return Values(weights, slots, now.steps, buffers, dict(now.frozen))

    def split_group(self, group: WeightGroup, arrays: list[Any], copies: bool) -> WeightsAndSlots:
        """Return weights and slots by name, from the arrays of a group."""
        return group.split(arrays, copies and (self.in_place or len(group.shapes) > 1))

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
        counts = np.array(requests, np.float32)
        self.group.sum(counts)()
        return [bool(count > 0) for count in counts]

    def ask(self, requests: Sequence[bool]) -> bool:
        """Let the next step tell the requests of all processes; return whether it can."""
        return False

    def collect(self) -> None:
        """Let every process that shares the training have all of its state."""

    def arrays_of(self, now: Now) -> list[Any]:
        """Return the states and buffers of `now` as arrays, None for a buffer without a value."""
        return [None if state is None else array_of(state) for state in now.states]


def _count_references(items: list[Any]) -> list[int]:
    """Return how many references there are to each item, also from this function."""
    return [sys.getrefcount(items[i]) for i in range(len(items))]


# of an item to which nothing but its list refers; versions of Python count differently
(_UNREAD,) = _count_references([object()])


def micro_batches(rows: int, parts: int, statistics: bool = False) -> int:
    """Return in how many equal micro-batches to split `rows`, none larger than rows / `parts`.

    If a step computes `statistics` of each, which a single row lacks, rows stay together that no
    number divides, and rows that are fewer than `parts`.
    """
    largest = -(-rows // parts)
    count = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= largest)
    return 1 if statistics and count == rows != parts else count
