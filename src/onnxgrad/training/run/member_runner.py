"""Running the step of the members of a stack; one whose numbers are not finite is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.training.run.runner import Losses, Now, Runner, WeightsAndSlots
from onnxgrad.training.state import Values
from onnxgrad.training.step.inputs import Slice
from onnxgrad.training.step.weight_groups import Group


class MemberRunner(Runner):
    """Runs the step of the members of a stack; all states have their axis."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.step.members is not None
        self.optimizers = self.step.members.optimizers
        self.member_shape = (len(self.optimizers),)
        self.not_finite: dict[int, int] = {}  # members that a step froze, and their steps
        self._bad: list[int] = []  # for which the last call gave NaN

    @property
    def living(self) -> np.ndarray:
        """Which members still train."""
        return np.array([k not in self.now.frozen for k in range(len(self.optimizers))])

    # -- states -------------------------------------------------------------------------------

    def load(self, values: Values) -> None:
        """Set the states of all members; a slot that is missing gets its initial value."""
        super().load(values)
        self.not_finite = {k: n for k, n in self.not_finite.items() if k in values.frozen}

    def initial_states(self, values: Values, copies: bool) -> list[np.ndarray | None]:
        """Return the states and buffers of all members, None for a buffer without a value."""
        states: list[np.ndarray | None] = []
        for group in self.step.groups:
            members = [self._initial_of_member(group, k, values) for k in range(*self.member_shape)]
            states += [np.stack(arrays) for arrays in zip(*members, strict=True)]
        return [*states, *(values.buffers.get(str(b.name)) for b in self.step.inputs.buffers)]

    def _initial_of_member(self, group: Group, k: int, values: Values) -> list[np.ndarray]:
        """Return the arrays of a group of the member `k`."""
        name, shape = next(iter(group.shapes.items()))
        optimizer = self.optimizers[k].for_weight(name, shape)
        slots = {
            name: {s: a[k] for s, a in values.slots.get(name, {}).items() if s in optimizer.slots}
            for name in group.shapes
        }
        weights = {name: values.weights[name][k] for name in group.shapes}
        return replace(group, optimizer=optimizer).initial(weights, slots)

    def split_group(self, group: Group, arrays: list[Any], copies: bool) -> WeightsAndSlots:
        """Return weights and slots of all members by name, from the arrays of a group."""
        members = [group.split([a[k] for a in arrays], False) for k in range(*self.member_shape)]
        weights = {name: np.stack([own[name] for own, _ in members]) for name in group.shapes}
        slots = {
            name: {slot: np.stack([own[name][slot] for _, own in members]) for slot in group.slots}
            for name in group.shapes
        }
        return weights, slots

    # -- steps --------------------------------------------------------------------------------

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece` at the rates (batches, members).

        The losses are (batches, parts, members), NaN for frozen members. A member whose loss or
        weights become NaN or infinite is frozen where it was before that step, and does not change
        the steps of other members. Return None if no member is left.
        """
        losses = None
        if self.living.any():
            losses = super().run(piece, rates, position)
            if losses is None:  # one step after the other, to see which member and when
                losses = self._run_singly(piece, rates, position)
        if not self.living.any():
            return None
        assert losses is not None
        losses.sums[:, :, ~self.living] = np.nan
        return losses

    def _run_singly(self, piece: Slice, rates: np.ndarray, position: int) -> Losses | None:
        """Run the batches of a slice one at a time, and freeze members; None if none is left."""
        results = []
        for i in range(piece.batches):
            one = piece.part_of(i, 1)
            while (losses := super().run(one, rates[i : i + 1], position + i)) is None:
                self.freeze(self._bad, not_finite=True)
                if not self.living.any():
                    return None
            results.append(losses)
        sums = np.concatenate([losses.sums for losses in results])
        return Losses(sums, np.concatenate([losses.counts for losses in results]))

    def freeze(self, ids: Sequence[int], not_finite: bool = False) -> None:
        """Let members keep their state from now on; `not_finite`: since they have NaN."""
        new = dict.fromkeys((k for k in ids if k not in self.now.frozen), self.now.steps)
        self.now = replace(self.now, frozen={**self.now.frozen, **new})
        self.not_finite |= new if not_finite else {}

    def finite_states(
        self, new: list[ort.OrtValue], losses: Losses
    ) -> Sequence[ort.OrtValue | None] | None:
        """Return the states to keep after a call; None if a living member has NaN in them."""
        living, arrays = self.living, self.arrays_of(Now(new, 0))
        fine = np.isfinite(losses.sums).all(axis=(0, 1))
        for array in arrays:
            fine &= np.isfinite(array.reshape(len(fine), -1)).all(axis=1)
        self._bad = np.flatnonzero(living & ~fine).tolist()
        if self._bad:
            return None
        if living.all():
            return new
        pairs = zip(arrays, self.arrays_of(self.now), strict=True)
        return self.on_device([self._restore_frozen(*pair) for pair in pairs])

    def _restore_frozen(self, new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
        """Return a new state with the old values of frozen members."""
        array = np.array(new)
        if old is not None:
            array[~self.living] = old[~self.living]
        return array
