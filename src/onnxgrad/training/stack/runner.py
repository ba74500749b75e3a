"""Running the steps of all members, and freezing those that become NaN."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.autodiff.forms import finish
from onnxgrad.graph.emit import Emit
from onnxgrad.native import Target
from onnxgrad.optimizers import Optimizer
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import work as multiply_adds
from onnxgrad.training.batches import Slice
from onnxgrad.training.fields import Fields
from onnxgrad.training.run.runner import Losses, Now, Runner
from onnxgrad.training.stack.objective import StackedObjective
from onnxgrad.training.stack.update import write_stacked_update
from onnxgrad.training.stack.weight_groups import StackGroup
from onnxgrad.training.state import Values
from onnxgrad.training.step.build import Step, write_gradients
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.inputs import RATE, STEP, StepInputs


@dataclass
class StackedStep:
    """The step of all members: its graph, and the groups of weights whose states it has."""

    step: Step
    groups: list[StackGroup]


def build_stacked_step(objective: StackedObjective, optimizers: Sequence[Optimizer]) -> StackedStep:
    """Return the step of all members, written into the graph of the objective.

    Raises:
        ValueError: the loss depends on none of the weights, or a pattern of an optimizer matches
            none.
        NoGradientRule: an operator on the way has no rule.
    """
    graph = objective.model.graph
    work, op = multiply_adds(graph), Emit(graph)
    parts, unreached = write_gradients(op, objective, objective.cotangents(op))
    update = write_stacked_update(op, parts.of, optimizers)
    carried = [v for group in update.groups for v in group.inputs]
    scalars = {RATE.name: update.rate, STEP.name: update.step}
    inputs = StepInputs(
        [], carried, parts.data, {n: v for n, v in scalars.items() if v is update.rate or v.uses()}
    )
    graph.inputs[:] = inputs.all
    protected = set(graph.inputs)
    reported = [op.copy_of(v) for v in parts.reported]
    new = zip(carried, update.new, strict=True)
    graph.outputs[:] = [
        op.name_output(after, f"{before.name}.new", before, protected) for before, after in new
    ] + reported
    finish(objective.model)
    step = Step(
        model=objective.model,
        groups=[],
        inputs=inputs,
        rate=update.rate,
        number=update.step,
        unreached=unreached,
        work=work,
        rounding=parts.rounding,
    )
    return StackedStep(step, update.groups)


@dataclass
class Members:
    """What happened to the members: the steps of each, and since when some are frozen."""

    steps: np.ndarray
    frozen: dict[int, int] = field(default_factory=dict)  # the step at which a member was frozen

    @property
    def alive(self) -> np.ndarray:
        """Which members are not frozen."""
        alive = np.ones(len(self.steps), bool)
        alive[list(self.frozen)] = False
        return alive


class StackRunner(Runner):
    """Runs slices of batches for all members; a member with NaN keeps its last finite state."""

    def __init__(
        self, stacked: StackedStep, device: Device, rows: int, fields: Fields, members: int
    ) -> None:
        step = stacked.step
        work = step.work * rows
        model = build_epoch(step, Target.of(device, work, rows))
        super().__init__(model, step, device, work, fields)
        self.groups, self.members = stacked.groups, Members(np.zeros(members, np.int64))
        self._bad = np.zeros(0, np.int64)  # members for which the last run gave NaN

    def load_members(self, values: Sequence[Values]) -> None:
        """Set the states of all members; a slot that is missing gets its initial value."""
        arrays: list[np.ndarray] = []
        weights, slots = [v.weights for v in values], [v.slots for v in values]
        for group in self.groups:
            arrays += group.initial(weights, slots)
        self.now = Now([self.device.ortvalue(a) for a in arrays], 0)
        self.members = Members(np.zeros(len(values), np.int64))

    def train(self, piece: Slice, rates: np.ndarray, position: int) -> Losses:
        """Train on the batches of `piece` at the rates (batches, members).

        The losses are (batches, parts, members); those of a frozen member are NaN. A member whose
        loss or weights become NaN or infinite is frozen where it was before that step, and the
        steps of the others are those that they would be without it.
        """
        losses = self.run(piece, rates, position)
        if losses is None:  # again, one step after the other, to see which member and when
            losses = self._one_by_one(piece, rates, position)
        self.members.steps[self.members.alive] = self.now.steps
        losses.sums[:, :, ~self.members.alive] = np.nan
        return losses

    def _one_by_one(self, piece: Slice, rates: np.ndarray, position: int) -> Losses:
        """Run the batches of a slice one at a time, and freeze members."""
        results = []
        for i in range(piece.batches):
            one = Slice({n: a[i : i + 1] for n, a in piece.arrays.items()}, 1, piece.rows)
            losses = self.run(one, rates[i : i + 1], position + i)
            if losses is None:
                self.freeze(self._bad.tolist())
                losses = self.run(one, rates[i : i + 1], position + i)
                assert losses is not None
            results.append(losses)
        sums = np.concatenate([losses.sums for losses in results])
        return Losses(sums, np.concatenate([losses.counts for losses in results]))

    def freeze(self, members: Sequence[int]) -> None:
        """Let members keep their state from now on."""
        for k in map(int, members):
            if k not in self.members.frozen:
                self.members.frozen[k] = self.members.steps[k] = self.now.steps

    def finished(
        self, piece: Slice, new: list[ort.OrtValue], losses: Losses, start: float
    ) -> Losses | None:
        """Keep the new states; return None, and keep the old ones, if a member has NaN in them."""
        alive = self.members.alive
        fine = np.isfinite(losses.sums).all(axis=(0, 1)) & self._finite(new)
        bad = np.flatnonzero(alive & ~fine)
        if len(bad):
            self._bad = bad
            return None
        if self.members.frozen:
            new = self._restored(new)
        self.now = Now(new, self.now.steps + piece.batches)
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return losses

    def _finite(self, states: Sequence[ort.OrtValue]) -> np.ndarray:
        """Return which members have only finite values."""
        fine = np.ones(len(self.members.steps), bool)
        for group, arrays in self._by_group([self.array(state) for state in states]):
            fine &= group.finite(arrays)
        return fine

    def _restored(self, new: Sequence[ort.OrtValue]) -> list[ort.OrtValue]:
        """Return new states with those of frozen members as they were."""
        after = [np.array(self.array(state)) for state in new]
        before = [self.array(state) for state in self.now.states]
        pairs = zip(self._by_group(after), self._by_group(before), strict=True)
        for (group, arrays), (_, old) in pairs:
            for k in self.members.frozen:
                group.restore(arrays, old, k)
        return [self.device.ortvalue(a) for a in after]

    def array(self, state: Any) -> np.ndarray:
        """Return a state as an array."""
        return self.arrays_of(Now([state], 0))[0]

    def _by_group(self, arrays: Sequence[Any]) -> list[tuple[StackGroup, Sequence[Any]]]:
        pairs, start = [], 0
        for group in self.groups:
            count = len(group.inputs)
            pairs.append((group, arrays[start : start + count]))
            start += count
        return pairs

    def values(self, k: int) -> Values:
        """Return the weights and slots of member `k`, copies."""
        weights: dict[str, np.ndarray] = {}
        slots: dict[str, dict[str, np.ndarray]] = {}
        for group, arrays in self._by_group(self.arrays_of(self.now)):
            own, own_slots = group.split(arrays, k)
            weights |= own
            slots |= own_slots
        return Values(weights, slots, int(self.members.steps[k]))

    def _losses(self, reported: list[np.ndarray], piece: Slice) -> Losses:
        half = len(reported) // 2
        sums = [y.astype(np.float64).reshape(piece.batches, -1) for y in reported[:half]]
        counts = [y.astype(np.float64).reshape(piece.batches) for y in reported[half:]]
        return Losses(np.stack(sums, axis=1), np.stack(counts, axis=1))
