"""Running the steps of the members of a stack; one whose numbers are not finite is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.training.row_axes import Axes
from onnxgrad.training.run.runner import Losses, Now, Runner, WeightsAndSlots
from onnxgrad.training.state import Slots, Values
from onnxgrad.training.step.inputs import Slice
from onnxgrad.training.step.weight_groups import Group


class MemberRunner(Runner):
    """Runs the step of members of a stack that share one; all states have their axis.

    Args:
        ids: the numbers of these members among all.
        members: the number of all.
        arguments: the arguments of `Runner`.
    """

    def __init__(self, ids: Sequence[int], members: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ids, self.members = np.asarray(ids), members
        self.member_shape = (len(ids),)
        shared = self.step.members
        assert shared is not None
        self.optimizers = [shared.optimizers[k] for k in shared.sharing]
        self.not_finite: dict[int, int] = {}  # members that a step froze, and their steps
        self._bad: list[int] = []  # for which the last call gave NaN

    @property
    def living(self) -> np.ndarray:
        """Which of its members still train."""
        return np.array([k not in self.now.frozen for k in self.ids.tolist()])

    # -- states -------------------------------------------------------------------------------

    def load(self, values: Values) -> None:
        """Set the states of its members; a slot that is missing gets its initial value."""
        super().load(values)
        self.not_finite = {k: n for k, n in self.not_finite.items() if k in values.frozen}

    def initial_states(self, values: Values, copies: bool) -> list[np.ndarray | None]:
        """Return the states and buffers of its members, None for a buffer without a value."""
        states: list[np.ndarray | None] = []
        for group in self.step.groups:
            members = (self._initial_of_member(group, i, values) for i in range(len(self.ids)))
            states += [np.stack(arrays) for arrays in zip(*members, strict=True)]
        buffers = (values.buffers.get(str(b.name)) for b in self.step.inputs.buffers)
        return [*states, *(None if array is None else array[self.ids] for array in buffers)]

    def _initial_of_member(self, group: Group, i: int, values: Values) -> list[np.ndarray]:
        """Return the arrays of a group of the member `i`."""
        name, shape = next(iter(group.shapes.items()))
        optimizer, k = self.optimizers[i].for_weight(name, shape), self.ids[i]
        slots = {
            name: {s: a[k] for s, a in values.slots.get(name, {}).items() if s in optimizer.slots}
            for name in group.shapes
        }
        weights = {name: values.weights[name][k] for name in group.shapes}
        return replace(group, optimizer=optimizer).initial(weights, slots)

    def split_group(self, group: Group, arrays: list[Any], copies: bool) -> WeightsAndSlots:
        """Return weights and slots of all its members by name, from the arrays of a group."""
        members = [group.split([a[i] for a in arrays], False) for i in range(len(self.ids))]
        weights = {name: np.stack([own[name] for own, _ in members]) for name in group.shapes}
        slots = {
            name: {slot: np.stack([own[name][slot] for _, own in members]) for slot in group.slots}
            for name in group.shapes
        }
        return weights, slots

    # -- steps --------------------------------------------------------------------------------

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece` at the rates (batches, members of the stack).

        The losses are (batches, parts, members that share the step), NaN for frozen members. A
        member whose loss or weights become NaN or infinite is frozen where it was before that
        step, and does not change the steps of other members. Return None if no member is left.
        """
        losses = None
        if self.living.any():
            losses = super().run(piece, rates[:, self.ids], position)
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
            arrays = {name: array[i : i + 1] for name, array in piece.arrays.items()}
            begins = None if piece.begins is None else piece.begins[i : i + 1]
            one = replace(piece, arrays=arrays, batches=1, begins=begins)
            while (losses := super().run(one, rates[i : i + 1, self.ids], position + i)) is None:
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
        self._bad = self.ids[living & ~fine].tolist()
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


class StackRunner(Runner):
    """Runs members of a stack that do not share one step: several runners, one after the other."""

    def __init__(self, parts: Sequence[MemberRunner]) -> None:
        self.parts, self.members, first = parts, parts[0].members, parts[0]
        self.member_shape = (self.members,)
        self.step, self.device, self.fields = first.step, first.device, first.fields
        self.now, self.norms = Now([], 0), {}

    def _of_parts(self, now: Now) -> list[Now]:
        """Return the states of each part."""
        nows, states = [], list(now.states)
        for part in self.parts:
            count = len(part.step.inputs.carried)
            nows.append(replace(now, states=states[:count]))
            states = states[count:]
        return nows

    @contextmanager
    def _distribute_states(self) -> Iterator[None]:
        """Let each part have its states, and take over its new states after the block."""
        for part, now in zip(self.parts, self._of_parts(self.now), strict=True):
            part.now = now
        yield
        nows = [part.now for part in self.parts]
        frozen = {k: step for now in nows for k, step in now.frozen.items()}
        states = [state for now in nows for state in now.states]
        self.now = Now(states, max(now.steps for now in nows), frozen=frozen)
        self.not_finite = {k: n for part in self.parts for k, n in part.not_finite.items()}

    def _in_order(self, arrays: Sequence[np.ndarray | None], missing: float = 0.0) -> np.ndarray:
        """Return the rows of all parts in the order of the members."""
        some = next(array for array in arrays if array is not None)
        whole = np.full((self.members, *some.shape[1:]), missing, some.dtype)
        for part, array in zip(self.parts, arrays, strict=True):
            if array is not None:
                whole[part.ids] = array
        return whole

    def load(self, values: Values) -> None:
        """Set the states of all members."""
        self.now = Now([None] * sum(len(part.step.inputs.carried) for part in self.parts), 0)
        with self._distribute_states():
            for part in self.parts:
                part.load(values)

    def expect(self, shapes: Mapping[str, tuple[int, ...]], axes: Axes) -> None:
        """Announce the shapes of most batches, if they are known, and the axes of their rows."""
        for part in self.parts:
            part.fields = self.fields
            part.expect(shapes, axes)

    def budget(self) -> int:
        """Return how many batches the next call may run."""
        return min(part.budget() for part in self.parts)

    def release(self) -> None:
        """Free what only steps need."""
        for part in self.parts:
            part.release()

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batches of `piece`; see `MemberRunner.run`."""
        with self._distribute_states():
            results = [part.run(piece, rates, position) for part in self.parts]
        if all(losses is None for losses in results):
            return None
        parts = self.parts
        self.norms = {n: self._in_order([part.norms[n] for part in parts]) for n in parts[0].norms}
        columns = []
        for name in ("sums", "counts"):
            arrays = [None if own is None else getattr(own, name).T for own in results]
            columns.append(self._in_order(arrays, np.nan).T)
        return Losses(*columns)

    def freeze(self, ids: Sequence[int], not_finite: bool = False) -> None:
        """Let members keep their state from now on; `not_finite`: since they have NaN."""
        with self._distribute_states():
            for part in self.parts:
                part.freeze([k for k in ids if k in part.ids], not_finite)

    def unpacked(self, now: Now, copies: bool = True) -> Values:
        """Return the values of `now`; slots that an optimizer does not have are zero."""
        every = [p.unpacked(own) for p, own in zip(self.parts, self._of_parts(now), strict=True)]
        weights = {n: self._in_order([v.weights.get(n) for v in every]) for n in every[0].weights}
        buffers = {n: self._in_order([v.buffers.get(n) for v in every]) for n in every[0].buffers}
        slots: Slots = {name: {} for name in weights}
        for name, own in slots.items():
            for slot in dict.fromkeys(slot for values in every for slot in values.slots[name]):
                own[slot] = self._in_order([values.slots[name].get(slot) for values in every])
        return Values(weights, slots, now.steps, buffers, dict(now.frozen))
