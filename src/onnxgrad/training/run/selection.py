"""The one choice of how a step runs: in one session, in place, or shared by processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from onnxgrad.autodiff.row_proofs import assumed_lengths
from onnxgrad.errors import argument, named
from onnxgrad.native import Target
from onnxgrad.operators import marks
from onnxgrad.parallel.collectives import exchanges
from onnxgrad.parallel.process_groups import Alone, Group
from onnxgrad.runtime.session import WORK_PER_THREAD, threads, work as multiply_adds
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fields import Fields
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.row_parts import (
    Footprint,
    measure_footprint,
    micro_batch_effect,
    mixes_no_rows,
    splits,
)
from onnxgrad.training.run.runner import Compute, Runner
from onnxgrad.training.run.sessions import OneSession
from onnxgrad.training.run.stages import Stages
from onnxgrad.training.run.states import InPlaceStates, ReplacedStates
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.epoch import build_epoch, build_half
from onnxgrad.training.step.exchange import Across
from onnxgrad.training.step.inputs import WHOLE

_FEW = 8  # rows for which shapes that are unknown are not inferred


def new_runner(
    step: Step,
    target: Target,
    work: float,
    carried: Mapping[str, str] | None = None,
    group: Group | None = None,
    part_rows: int | None = None,
) -> Runner:
    """Return the runner of a step, which takes over its graph.

    Args:
        step: it runs in pieces if it has nodes that exchange values.
        target: where the sessions run.
        work: multiply-adds of the rows that this process computes at once.
        carried: the data inputs of buffers whose first value is in the data.
        group: the processes that share the step; None: this one computes all of it.
        part_rows: rows that a process without others computes at once, at most; None: all.
    """
    device, group = target.device.check(), group or Alone()
    in_place = step.updates is not None
    compute: Compute
    if any(map(exchanges, step.model.graph)):
        compute = Stages(step, target, work, group, part_rows)
    else:
        model = build_half(step, target) if in_place else build_epoch(step, target)
        compute = OneSession(model, step, device, work)
    states = InPlaceStates(step, work, group) if in_place else ReplacedStates(step, device)
    return Runner(step, compute, states, group, carried)


class Compiled:
    """An objective, its step, and the runner, once it is known for which batches.

    A job keeps it from call to call, while its recipe stays the same.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.objective = objective = recipe.objective()
        members = recipe.job.members or 1
        self.work = multiply_adds(objective.model.graph) * members  # per row
        data, weights = ([str(x.name) for x in o] for o in (objective.data, objective.weights))
        self._footprint: Footprint | None = Footprint(objective.model.graph, data, weights)
        self.step: Step | None = None
        self.adds_losses = False  # whether a batch has the sum of the losses of micro-batches
        self.running: Runner | None = None
        self._key: Any = None  # the facts that the runner depends on, beside the objective

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
        work = self.work * source.batch_size * recipe.job.accumulate
        work /= 1 if sharing is None else sharing.part.size
        rows = _fixed_rows(recipe, source, fields)
        most = self._part_rows(recipe, sharing, source, rows)
        key = threads(work), work >= WORK_PER_THREAD, most
        lacks = self.step is not None and rows is not None and self.step.fixed_rows is None
        if self.running is None or lacks or (fixed and self._key != key):
            if self.step is not None:  # it has taken the graph of the objective
                self.objective = recipe.objective()
            self.adds_losses = self._adds_losses(recipe, source, rows)
            self.running = self._build_runner(recipe, sharing, source, rows, work, most)
            self._key = key
        self.running.expect(source if fixed and isinstance(source, ArraySource) else None)
        return self.running

    def _build_runner(
        self,
        recipe: Recipe,
        shared: Sharing | None,
        source: BatchSource,
        fixed: int | None,
        work: float,
        most: int | None,
    ) -> Runner:
        """Build the step and its runner, of which `most` rows run at once; None: all.

        `fixed` is the number of rows that the model takes of a batch; None: it takes all.
        """
        objective, rows, device = self.objective, source.batch_size, recipe.job.device
        if shared is not None:
            shared.warn(objective, source)
            rows //= shared.part.size
        across = None if shared is None else shared.across
        if isinstance(source, ArraySource) and most is not None:
            most = most if splits(objective, source.axes, source.batch_shapes()) else None
        if most is not None:
            work, rows, across = work * most / rows, most, Across(WHOLE)
        self.step = step = recipe.step(
            objective,
            across=across,
            members=recipe.members,
            fixed_rows=fixed,
            rows=rows,
            adds_losses=self.adds_losses,
        )
        target = Target.of(device, work, rows)
        group = None if shared is None else shared.group
        return new_runner(step, target, work, objective.carried, group, most)

    def _adds_losses(self, recipe: Recipe, source: BatchSource, fixed: int | None) -> bool:
        """Return whether the loss of a batch is the sum of the losses of its micro-batches.

        Otherwise it is their mean. Warn if neither is proven of micro-batches that a user asks for.
        """
        parts, objective = recipe.job.accumulate, self.objective
        if parts == 1 and fixed is None:
            return False
        if recipe.job.dropout or not mixes_no_rows(objective):
            objective = recipe.objective(training=False)
        if isinstance(source, ArraySource):
            axes, lengths = source.axes, source.batch_shapes()
        else:
            stated = Fields(objective, recipe.job.batch_axes).row_axes.stated
            lengths = assumed_lengths(objective.data)
            axes = {name: stated(name) for name in lengths}
        effect, reason = micro_batch_effect(objective, axes, lengths)
        if self.objective.buffers:
            reason = "BatchNormalization normalizes by the statistics of a batch"
        if reason and fixed is None:
            warnings.warn(
                f"{argument('accumulate', parts)} trains another model than whole batches may do: "
                f"{reason}. The micro-batches are computed by themselves, and their gradients "
                f"averaged. Pass a smaller {named('batch_size')} or {argument('recompute', 'all')} "
                "to save memory otherwise",
                stacklevel=5,
            )
        return effect == "sum"

    def _part_rows(
        self, recipe: Recipe, sharing: Sharing | None, source: BatchSource, fixed: int | None
    ) -> int | None:
        """Return how many rows of a batch to compute at once if their gradients add up; None: all.

        All, where anything else divides a batch, or needs all of its rows.
        """
        job = recipe.job
        whole = sharing is not None or job.members is not None or job.accumulate > 1
        whole |= job.device.kind != "cpu" or fixed is not None
        # the loss in blocks divides the rows itself
        whole |= any(marks.PLAIN_SUM in value.meta for value in self.objective.reported)
        if whole or not isinstance(source, ArraySource):
            return None
        shapes, rows = source.batch_shapes(), source.batch_size
        if self._footprint is not None and self._footprint.unknown and rows > _FEW:
            objective = self.objective if self.step is None else recipe.objective()
            self._footprint = measure_footprint(objective, source.axes, shapes)
        most = None if self._footprint is None else self._footprint.part_rows(shapes, rows)
        return most if most is not None and most < source.rows else None


def _fixed_rows(recipe: Recipe, source: BatchSource, fields: Fields) -> int | None:
    """Return how many rows the model takes of a batch, if it may have more; None for all."""
    fixed = fields.fixed_rows if fields.accumulates else None
    whole = source.cuts and source.batch_size == fixed and recipe.job.accumulate == 1
    return None if whole else fixed
