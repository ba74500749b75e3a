"""Running the steps of a training, with the states on the device between calls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from onnxgrad.parallel.process_groups import Group
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.values import Value, array_of
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.states import InPlaceStates, ReplacedStates, TargetOf
from onnxgrad.training.state import Arrays, Slots, Values
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import Call, Slice

SECONDS_PER_CALL = 0.2  # so that progress, callbacks and Ctrl-C get their turn


@dataclass(frozen=True, eq=False)
class Now:
    """States and buffers on the device, and the number of steps that led to them.

    - `states`: None for a buffer that the first batch sets.
    - `frozen`: the members of a stack that keep their state, and the numbers of their steps.
    - `slots`: the slots of all weights, once processes have collected them.
    """

    states: Sequence[ort.OrtValue | None]
    steps: int
    frozen: Mapping[int, int] = field(default_factory=dict)
    slots: Slots | None = None


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


class Compute(Protocol):
    """How a step is computed: by one session, or in pieces between which values are exchanged."""

    device: Device

    @property
    def joins_batches(self) -> bool:
        """Whether the batches of a slice are one call of onnxruntime."""

    def expect(self, source: ArraySource | None) -> None:
        """Announce the source of most batches; None if it is not known."""

    def ask(self, requests: Sequence[bool]) -> bool:
        """Send requests with the next step; return whether a message of it has room for them."""

    def run(
        self, states: Mapping[str, Value], fed: Arrays, piece: Slice, target_of: TargetOf
    ) -> tuple[list[Value], list[np.ndarray]]:
        """Return the outputs after the last batch that belong to `states`, and reports by batch.

        Args:
            states: the states that the step reads, by the names of its inputs.
            fed: data and feeds by name, one of each for every batch along the first axis.
            piece: the batches.
            target_of: returns the array into which to write a state's output, None for any.
        """


class Runner:
    """Runs slices of batches; keeps the states on the device between calls.

    One model is a stack without the axis of members, so that `member_shape` is ().

    Args:
        step: the step, whose graph `compute` runs.
        compute: how it is computed.
        states: what becomes of its results: new states, or updates of these in memory.
        group: the processes that share the training.
        carried: the data inputs of buffers whose first value is in the data.
    """

    def __init__(
        self,
        step: Step,
        compute: Compute,
        states: ReplacedStates | InPlaceStates,
        group: Group,
        carried: Mapping[str, str] | None = None,
    ) -> None:
        self.step, self.compute, self.states = step, compute, states
        self.device, self.in_place = compute.device, states.in_place
        self.group, self.carried = group, carried or {}
        self.member_shape = () if step.members is None else (len(step.members.optimizers),)
        self.members = prod(self.member_shape)
        self.now = Now([], 0)
        self.not_finite: dict[int, int] = {}  # members that a step froze, and their steps
        self._fine = np.ones(self.member_shape, bool)  # members without NaN after the last call
        self.seconds_per_batch = SECONDS_PER_CALL
        self.last = 1
        self.norms: dict[str, Any] = {}  # of the gradients in the last step

    @property
    def of_several(self) -> bool:
        """Whether other processes run parts of the batches."""
        return self.group.size > 1

    @property
    def joins_epochs(self) -> bool:
        """Whether nothing looks at the states between the steps of a call."""
        return self.compute.joins_batches and not self.member_shape

    # -- steps --------------------------------------------------------------------------------

    def expect(self, source: ArraySource | None) -> None:
        """Announce the source of most batches; None if it is not known."""
        self.compute.expect(source)

    def budget(self) -> int:
        """Return how many batches the next call may run: one, if other processes must agree."""
        if self.in_place or self.of_several:
            return 1
        return max(1, min(8 * self.last, int(SECONDS_PER_CALL / self.seconds_per_batch)))

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece` at learning rates of (batches,) or (batches, members).

        `position` is the number of the first batch in its epoch.

        Return None, and leave the states unchanged, if the loss or a weight is not finite. A member
        of a stack for which this happens is frozen where it was before that step, and does not
        change the steps of other members: its losses are NaN, and None says that no member is left.

        Raises:
            Asked: any process has requests, of which `ask` was told; the states are unchanged.
        """
        if len(self.now.frozen) == self.members:
            return None
        losses = self._run_call(piece, rates, position)
        if losses is None and self.member_shape:  # which member, and when?
            losses = self._run_singly(piece, rates, position)
        if losses is not None:
            for k in self.now.frozen:
                losses.sums[..., k] = np.nan
        return losses

    def _run_call(self, piece: Slice, rates: np.ndarray, position: int) -> Losses | None:
        """Run the batches of a slice in one call; return None if a living member has NaN."""
        start, call = time.perf_counter(), self.call(piece, rates, position)
        values, own = self.state_values(piece), self.step.inputs
        read = {name: values[name] for v in own.carried if (name := str(v.name))}
        fed = own.fed(call)
        new, reported = self.compute.run(read, fed, piece, self.states.target_of)
        losses, now = self.read_losses(reported, piece), self.now
        self._fine = np.isfinite(losses.sums).all(axis=(0, 1))
        self._fine = self._fine & self.states.are_finite(new, call, now.states)
        for k in now.frozen:
            self._fine[k] = True  # it keeps its state
        bad = not self._fine.all()
        # without owners, all processes have the same states
        if any(self.agree([bad])) if self.step.owners else bad:
            return None
        kept = self.states.keep(new, call, now.states, now.frozen)
        # in one assignment, which cannot be interrupted
        self.now = replace(now, states=kept, steps=now.steps + piece.batches, slots=None)
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return losses

    def _run_singly(self, piece: Slice, rates: np.ndarray, position: int) -> Losses | None:
        """Run the batches of a slice one at a time, and freeze members; None if none is left."""
        results = []
        for i in range(piece.batches):
            one = piece.part_of(i, 1)
            while (losses := self._run_call(one, rates[i : i + 1], position + i)) is None:
                self.freeze(np.flatnonzero(~self._fine).tolist(), not_finite=True)
                if len(self.now.frozen) == self.members:
                    return None
            results.append(losses)
        sums = np.concatenate([losses.sums for losses in results])
        return Losses(sums, np.concatenate([losses.counts for losses in results]))

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

    def state_values(self, piece: Slice) -> dict[str, ort.OrtValue]:
        """Return states and buffers; one without a value gets zeros of the shape of its input."""
        names = [str(v.name) for v in (*self.step.states, *self.step.inputs.buffers)]
        return {
            name: self._zeros_like_data(piece, name) if state is None else state
            for name, state in zip(names, self.now.states, strict=True)
        }

    def _zeros_like_data(self, piece: Slice, name: str) -> ort.OrtValue:
        """Return the value of a buffer before the first batch, which has its value as data."""
        array = piece.fed()[self.carried[name]]
        zeros = np.zeros((*self.member_shape, *array.shape[1:]), array.dtype)
        return self.device.ortvalue(zeros)

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

    # -- states -------------------------------------------------------------------------------

    def load(self, values: Values) -> None:
        """Set the states; a slot that is missing gets its initial value.

        They may share the memory of the values, unless steps update them in place.
        """
        if self.in_place:
            self.now = Now([], values.steps)  # which frees the states before there are new ones
        arrays: list[np.ndarray | None] = []
        for group in self.step.groups:
            arrays += group.initial(values.weights, values.slots, self.in_place)
        arrays += (values.buffers.get(str(b.name)) for b in self.step.inputs.buffers)
        states = [None if array is None else self.device.ortvalue(array) for array in arrays]
        self.now = Now(states, values.steps, dict(values.frozen))
        self.not_finite = {k: n for k, n in self.not_finite.items() if k in values.frozen}

    @property
    def holds_all(self) -> bool:
        """Whether states alone give values at hardly any cost, which are copies for a stack."""
        return self.device == CPU and not self.member_shape

    def unpacked(self, now: Now, copies: bool = True) -> Values:
        """Return the values of `now`, by name.

        The values of a group of one weight share the memory of the states, which steps replace,
        unless they are updated `in_place`; without `copies`, all values may share it.
        """
        weights: Arrays = {}
        slots: Slots = {}
        arrays: list[Any] = [None if state is None else array_of(state) for state in now.states]
        for group in self.step.groups:
            own, arrays = arrays[: len(group.inputs)], arrays[len(group.inputs) :]
            own_copies = copies and (self.in_place or len(group.shapes) > 1)
            own_weights, own_slots = group.split(own, own_copies)
            weights |= own_weights
            slots |= own_slots
        if now.slots is not None:
            slots |= {name: dict(own) for name, own in now.slots.items()}
        pairs = zip(self.step.inputs.buffers, arrays, strict=True)
        buffers = {str(b.name): np.array(a) for b, a in pairs if a is not None}
        return Values(weights, slots, now.steps, buffers, dict(now.frozen))

    def freeze(self, ids: Sequence[int], not_finite: bool = False) -> None:
        """Let members of a stack keep their state from now on; `not_finite`: since they have NaN.

        Raises:
            ValueError: this is one model.
        """
        if not self.member_shape:
            raise ValueError(
                f"control.freeze names members of a stack, {ids}, and this is one model"
            )
        new = dict.fromkeys((k for k in ids if k not in self.now.frozen), self.now.steps)
        self.now = replace(self.now, frozen={**self.now.frozen, **new})
        self.not_finite |= new if not_finite else {}

    def release(self) -> None:
        """Free what only steps need."""
        self.states.release()

    # -- what processes have in common --------------------------------------------------------

    def agree(self, requests: Sequence[bool]) -> list[bool]:
        """Return which requests any of the processes has that share the training."""
        counts = np.array(requests, np.float32)
        self.group.sum(counts)()
        return [bool(count > 0) for count in counts]

    def ask(self, requests: Sequence[bool]) -> bool:
        """Let the next step tell the requests of all processes; return whether it can."""
        return self.of_several and self.compute.ask(requests)

    @property
    def whole(self) -> bool:
        """Whether this process has all slots: those that it updates, or all that are collected."""
        return not self.step.owners or self.now.slots is not None

    def collect(self) -> None:
        """Let every process have the slots of all weights."""
        if self.whole:
            return
        own: Slots = {n: s for n, s in self.unpacked(self.now).slots.items() if s}
        every = self.group.gather(own)
        # who has read the values of the state before lacks these slots
        self.now = replace(self.now, slots={n: s for own in every for n, s in own.items()})


def micro_batches(rows: int, parts: int, statistics: bool = False) -> int:
    """Return in how many equal micro-batches to split `rows`, none larger than rows / `parts`.

    If a step computes `statistics` of each, which a single row lacks, rows stay together that no
    number divides, and rows that are fewer than `parts`.
    """
    largest = -(-rows // parts)
    count = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= largest)
    return 1 if statistics and count == rows != parts else count
