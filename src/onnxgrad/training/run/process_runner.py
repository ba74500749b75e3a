"""Running a step in pieces: several processes share it, or one computes its rows in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.parallel import MESSAGES, Group, Part, cut
from onnxgrad.runtime.values import is_finite
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.in_place import InPlaceRunner
from onnxgrad.training.run.row_parts import rows_at_once, rows_of_part
from onnxgrad.training.run.runner import Losses, Now, Runner
from onnxgrad.training.run.stages import Stages, Value, as_array
from onnxgrad.training.state import Arrays, Slots, Values
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import Call, Slice

LARGE = 1 << 23  # bytes of a message, from which it pays to send half of it earlier


class PieceRunner(Runner):
    """A `Runner` of one of several processes, each of which computes the gradient of some rows.

    A process that is alone may compute the rows in parts, so that few of them need memory at once.

    Args:
        step: it has nodes that exchange values.
        target: where the sessions run.
        work: multiply-adds of the rows of this process.
        group: the processes.
        part_rows: rows that are computed at once, at most; None: all.
    """

    def __init__(
        self,
        step: Step,
        target: Target,
        work: float,
        group: Group,
        part_rows: int | None = None,
    ) -> None:
        graph = step.model.graph
        rewrite(graph, GROUPS[MESSAGES])
        to_native(graph, target)
        super().__init__(to_proto(step.model), step, target.device, work)
        self.group, self.part = group, Part(group.rank, group.size)
        self.of_several, self.part_rows = group.size > 1, part_rows
        pieces = cut(step.model, LARGE if group.size > 1 else inf)
        self.stages = Stages(pieces, step, self.device, work, group)
        self._collected: tuple[Now, dict[str, Arrays]] | None = None

    def expect(self, source: ArraySource | None) -> None:
        """Announce the source of most batches; None if it is not known."""
        if source is None:
            self.stages.expect({})
        else:
            rows = rows_of_part(source.batch_size, self.part, self.part_rows)
            self.stages.expect(source.batch_shapes(rows))

    def budget(self) -> int:
        """Return how many batches the next call may run: as many as in the other processes."""
        return super().budget() if self.group.size == 1 else 1

    def computed(self, call: Call) -> tuple[list[ort.OrtValue], Losses]:
        """Return the states after the steps of a call, and their losses."""
        piece, states = call.piece, dict[str, Value](self.states(call.piece))
        fed = self.step.inputs.fed(call)
        every = []
        for i in range(piece.batches):
            arrays = {name: np.asarray(stack[i], order="C") for name, stack in fed.items()}
            results = self.results({**states, **arrays}, piece)
            states = {name: self._keep_state(y) for name, y in zip(states, results, strict=False)}
            every.append([np.array(as_array(y)) for y in results[len(states) :]])
        reported = [np.stack(column) for column in zip(*every, strict=True)]
        return list(states.values()), self.read_losses(reported, piece)

    def finished(
        self, piece: Slice, new: list[ort.OrtValue], losses: Losses, start: float
    ) -> Losses | None:
        """Keep the new states, if they are finite in all processes; return the losses, or None."""
        self._collected = None  # which is as large as the slots of all weights
        # without owners, all processes have the same states
        if self.step.owners and any(self.agree([not all(map(is_finite, new))])):
            return None
        return super().finished(piece, new, losses, start)

    def results(self, inputs: dict[str, Value], piece: Slice) -> list[Value]:
        """Return the outputs of the step, for the values of all inputs and a batch of `piece`."""
        names = [str(v.name) for v in self.step.inputs.data.values()]
        data = {name: as_array(inputs.pop(name)) for name in names}
        parts = self._split_rows(data, piece)
        values = self.stages.run(inputs, parts, counts=piece.counted > 0)
        return [values[name] for name in self.outputs]

    def _split_rows(self, data: Arrays, piece: Slice) -> list[Arrays]:
        """Return the rows of a batch of `piece` in parts, which run one after the other."""
        if self.part_rows is None:
            return [data]
        axes, size = piece.row_axes, rows_at_once(piece.own, self.part_rows)
        rows_first = axes.rows_first(data)
        parts = [
            axes.as_declared(axes.take_rows(rows_first, slice(i, i + size)))
            for i in range(0, piece.own, size)
        ]
        return [{n: np.asarray(a, order="C") for n, a in part.items()} for part in parts]

    def _keep_state(self, value: Value) -> ort.OrtValue:
        """Return a state; an array, which is in the buffer of an exchange, is copied."""
        return self.device.ortvalue(value.copy()) if isinstance(value, np.ndarray) else value

    # -- what processes have in common --------------------------------------------------------

    def ask(self, requests: Sequence[bool]) -> bool:
        """Send requests with the next step; return whether it can tell the requests of all."""
        return self.of_several and self.stages.ask(requests)

    @property
    def whole(self) -> bool:
        """Whether the states of this process are all that there are."""
        return not self.step.owners or self._collected_slots() is not None

    def collect(self) -> None:
        """Let every process have the slots of all weights."""
        if self.whole:
            return
        own: dict[str, Arrays] = {n: s for n, s in super().unpacked(self.now).slots.items() if s}
        every = self.group.gather(own)
        self.now = replace(self.now)  # who has read the values of this one lacks these slots
        self._collected = self.now, {n: s for slots in every for n, s in slots.items()}

    def _collected_slots(self) -> Slots | None:
        """Return the slots of all weights; None if they are not collected since the last step."""
        now, slots = self._collected or (None, None)
        return slots if now is self.now else None

    def unpacked(self, now: Now, copies: bool = True) -> Values:
        """Return the values of `now`, with all slots if they are collected."""
        values = super().unpacked(now, copies)
        if self.step.owners and (slots := self._collected_slots()) is not None and now is self.now:
            values.slots.update({name: dict(own) for name, own in slots.items()})
        return values


class InPlacePieceRunner(PieceRunner, InPlaceRunner):
    """A `PieceRunner` whose states are in memory once."""

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batch of `piece`."""
        return InPlaceRunner.run(self, piece, rates, position)

    def half(self, inputs: Mapping[str, Value], piece: Slice) -> list[Any]:
        """Return the outputs of the first half; the gradients are also in `self.gradients`."""
        results = self.results(dict(inputs), piece)
        count = len(self.step.groups)
        self.gradients = [as_array(y) for y in results[:count]]
        return [*results[:count], *(self._keep_state(y) for y in results[count:])]

    def exchange(self) -> None:
        """Give each process the weights that others have updated."""
        self._collected = None
        for owner, (weights, *_) in zip(self.step.owners, self.by_group(), strict=False):
            self.group.broadcast(weights.reshape(-1), owner)


def shared_runner(
    step: Step,
    target: Target,
    work: float,
    group: Group,
    part_rows: int | None = None,
) -> PieceRunner:
    """Return the runner of a step for one process of a group; it takes the step over."""
    kind = PieceRunner if step.updates is None else InPlacePieceRunner
    return kind(step, target, work, group, part_rows)
