"""The one choice of how a step runs: in one session, in place, or shared by processes."""

from __future__ import annotations

from typing import Any

from onnxgrad.native import Target
from onnxgrad.runtime.session import WORK_PER_THREAD, threads, work as multiply_adds
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fields import Fields
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.in_place import new_runner
from onnxgrad.training.run.member_runner import MemberRunner, StackRunner
from onnxgrad.training.run.process_runner import shared_runner
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.members import Members


class Compiled:
    """An objective, its step, and the runner, once it is known for which batches.

    A trainer keeps it from call to call, while its recipe stays the same.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.objective = objective = recipe.objective()
        members = recipe.trainer.members or 1
        self.work = multiply_adds(objective.model.graph) * members  # per row
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
        key = threads(work), work >= WORK_PER_THREAD
        parts = _fixed_rows(source, fields)
        lacks = self.step is not None and parts is not None and self.step.fixed_rows is None
        if self.running is None or lacks or (fixed and self._key != key):
            if self.step is not None:  # it has taken the graph of the objective
                self.objective = recipe.objective()
            self.running = self._runner(recipe, sharing, source, fields, work)
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
    ) -> Runner:
        """Build the step and its runner."""
        objective, rows, device = self.objective, source.batch_size, recipe.trainer.device
        if recipe.trainer.members is not None:
            return self._stack_runner(recipe, source, fields, Target.of(device, work, rows), work)
        if shared is not None:
            shared.warn(objective, source)
            rows //= shared.part.size
        across, fixed = None if shared is None else shared.across, _fixed_rows(source, fields)
        self.step = step = recipe.step(objective, across=across, fixed_rows=fixed, rows=rows)
        target = Target.of(device, work, rows)
        if shared is not None:
            arguments = step, target, work, fields, shared.group, shared.options
            return shared_runner(*arguments)
        return new_runner(step, target, work, fields, objective.carried)

    def _stack_runner(
        self, recipe: Recipe, source: BatchSource, fields: Fields, target: Target, work: float
    ) -> MemberRunner | StackRunner:
        """Build the steps of the members of a stack, one for those that share it."""
        every, runners = recipe.members, list[MemberRunner]()
        fixed, rows = _fixed_rows(source, fields), source.batch_size
        assert every is not None
        left, count = list(range(len(every.optimizers))), len(every.optimizers)
        while left:
            objective = self.objective if not runners else recipe.objective()
            members = Members(
                [every.optimizers[k] for k in left], {n: w[left] for n, w in every.weights.items()}
            )
            self.step = step = recipe.step(
                objective, in_place=False, members=members, fixed_rows=fixed, rows=rows
            )
            ids = [left[i] for i in members.sharing]
            arguments = build_epoch(step, target), step, target.device, work, fields
            runners.append(MemberRunner(ids, count, *arguments, objective.carried))
            left = [k for k in left if k not in ids]
        return runners[0] if len(runners) == 1 else StackRunner(runners)


def _fixed_rows(source: BatchSource, fields: Fields) -> int | None:
    """Return how many rows the model takes of a batch, if it may have more; None for all."""
    fixed = fields.fixed_rows if fields.accumulates else None
    return None if source.cuts and source.batch_size == fixed else fixed
