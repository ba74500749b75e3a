"""The one choice of how a step runs: in one session, in place, or in parts of the rows."""

from __future__ import annotations

from math import prod
from typing import Any

from onnxgrad.graph.shapes import dims, static
from onnxgrad.native import Target
from onnxgrad.parallel import Alone
from onnxgrad.runtime.session import WORK_PER_THREAD, threads, work as multiply_adds
from onnxgrad.training.batches import WHOLE, ArraySource, BatchSource
from onnxgrad.training.fields import Fields
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.in_place import new_runner
from onnxgrad.training.run.member_runner import MemberRunner, StackRunner
from onnxgrad.training.run.parts import Together, shared_runner
from onnxgrad.training.run.row_parts import Splitting, splits
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.settings import Settings
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.exchange import Across
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import may_be_in_place

# Threads, multiply-adds of a batch, and those for each weight, from which on threads compute parts
# of it. Two threads that share the work of each node are faster, on all but one of the networks of
# the benchmarks that were measured: see docs/benchmarks.md.
SPLIT_THREADS, SPLIT_WORK, SPLIT_WORK_PER_WEIGHT = 3, 2e7, 512
Shapes = dict[str, tuple[int, ...]]


class Compiled:
    """An objective, its step, and the runner, once it is known for which batches.

    A trainer keeps it from call to call, while its recipe stays the same.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.objective = objective = recipe.objective()
        members = recipe.trainer.members or 1
        self.work = multiply_adds(objective.model.graph) * members  # per row
        self.weights = sum(prod(static(dims(w)) or ()) for w in objective.weights)
        self.step: Step | None = None
        self.running: Runner | None = None
        self._key: Any = None  # what the runner depends on, beside the objective

    def runner(
        self,
        recipe: Recipe,
        source: BatchSource,
        fields: Fields,
        fixed: bool,
        sharing: Sharing | None = None,
    ) -> Runner:
        """Return the runner for the batches of `source`, which processes may share.

        `fixed`: whether calls to come have batches of this size, too.
        """
        work = self.work * source.batch_size * recipe.trainer.accumulate
        size = 1 if sharing is None else sharing.part.size
        work /= size
        parts = self._parts(recipe.trainer, sharing, work, source)
        key = threads(work), work >= WORK_PER_THREAD, parts
        if self.running is None or (fixed and self._key != key):
            if self.step is not None:  # it has taken the graph of the objective
                self.objective = recipe.objective()
            self.running = self._runner(recipe, sharing, source, fields, work, parts)
            self._key = key
        self.running.fields = fields
        if isinstance(source, ArraySource):
            self.running.expect(source.batch_shapes() if fixed else {}, source.axes)
        else:
            self.running.expect({}, {})
        return self.running

    def _runner(
        self,
        recipe: Recipe,
        shared: Sharing | None,
        source: BatchSource,
        fields: Fields,
        work: float,
        parts: int,
    ) -> Runner:
        """Build the step and its runner."""
        objective, rows, device = self.objective, source.batch_size, recipe.trainer.device
        if recipe.trainer.members is not None:
            return self._stack_runner(recipe, fields, Target.of(device, work, rows), work)
        splitting: Splitting | None = None
        if isinstance(source, ArraySource) and parts > 1:
            axes, shapes = source.axes, source.batch_shapes()
            if splits(objective, axes, shapes):
                splitting = Splitting(parts, axes, shapes)
        across = None if splitting is None else Across(WHOLE)
        if shared is not None:
            shared.warn(objective, source)
            across, rows = shared.across, rows // shared.part.size
        self.step = step = recipe.step(objective, across=across)
        target = Target.of(device, work, rows)
        if splitting is not None:
            target = Target(target.device, 1, rows // parts)
        if shared is not None:
            arguments = step, target, work, fields, shared.group, shared.options
            return shared_runner(*arguments, splitting)
        if splitting is not None:
            return Together(step, target, work, fields, Alone(), splitting=splitting)
        return new_runner(step, target, work, fields, objective.carried)

    def _stack_runner(
        self, recipe: Recipe, fields: Fields, target: Target, work: float
    ) -> MemberRunner | StackRunner:
        """Build the steps of the members of a stack, one for those that share it."""
        every, runners = recipe.members, list[MemberRunner]()
        assert every is not None
        left, count = list(range(len(every.optimizers))), len(every.optimizers)
        while left:
            objective = self.objective if not runners else recipe.objective()
            members = Members(
                [every.optimizers[k] for k in left], {n: w[left] for n, w in every.weights.items()}
            )
            self.step = step = recipe.step(objective, in_place=False, members=members)
            ids = [left[i] for i in members.sharing]
            arguments = build_epoch(step, target), step, target.device, work, fields
            runners.append(MemberRunner(ids, count, *arguments, objective.carried))
            left = [k for k in left if k not in ids]
        return runners[0] if len(runners) == 1 else StackRunner(runners)

    def _parts(
        self, trainer: Settings, shared: Sharing | None, work: float, source: BatchSource
    ) -> int:
        """Return into how many parts threads divide a batch, if its rows allow it."""
        size = 1 if shared is None else shared.part.size
        alone = shared is not None and shared.across is None
        whole = alone or trainer.accumulate > 1 or trainer.members is not None
        if trainer.device.kind != "cpu" or whole or not isinstance(source, ArraySource):
            return 1
        if work < max(SPLIT_WORK, SPLIT_WORK_PER_WEIGHT * self.weights):
            return 1
        if may_be_in_place(self.objective.weights, trainer.optimizer):
            return 1
        parts = min(threads(work), source.batch_size // size)
        return parts if parts >= SPLIT_THREADS else 1
