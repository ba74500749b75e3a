"""The step of a `Trainer` and its session, kept from call to call while they stay the same."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Protocol

from onnxgrad.graph.shapes import dims, static
from onnxgrad.native import Target
from onnxgrad.runtime.session import WORK_PER_THREAD, threads, work as multiply_adds
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fields import Fields
from onnxgrad.training.fitted import BuildCache, fingerprint
from onnxgrad.training.in_place import new_runner
from onnxgrad.training.minimized import Minimized
from onnxgrad.training.parallel_runner import shared_runner
from onnxgrad.training.runner import Runner
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.split import SplitStep, splits
from onnxgrad.training.split_runner import Rows, SplitRunner
from onnxgrad.training.step import Step
from onnxgrad.training.update import may_be_in_place

# Multiply-adds of a batch, and for each weight, from which threads compute parts of it: measured
# on the networks of the benchmarks, with 2 threads.
SPLIT_WORK, SPLIT_WORK_PER_WEIGHT = 2e7, 512
Shapes = dict[str, tuple[int, ...]]
_ARGUMENTS = (  # of a trainer, that decide what a step computes
    *("loss", "loss_options", "loss_weights", "optimizer", "clip_norm", "accumulate"),
    *("batch_norm", "dropout", "batch_axes", "carry", "recompute", "device", "seed", "trained"),
)


class OneCall(Protocol):
    """What a `Setup` knows of its call."""

    trainer: Any
    weighted: bool
    sharing: Sharing | None

    def objective(self) -> Minimized:
        """Return a new objective."""

    def step(self, objective: Minimized) -> Step:
        """Return the step, written into the graph of the objective."""

    def split_step(self, objective: Minimized, target: Target) -> SplitStep:
        """Return the step in parts, written into the graph of the objective."""


class Compiled:
    """An objective, its step, and the runner, once it is known for which batches."""

    def __init__(self, objective: Minimized) -> None:
        self.objective = objective
        self.work = multiply_adds(objective.model.graph)  # per row
        self.weights = sum(prod(static(dims(w)) or ()) for w in objective.weights)
        self.step: Step | None = None
        self.running: Runner | None = None
        self._key: Any = None  # what the runner depends on, beside the objective

    def runner(self, call: OneCall, source: BatchSource, fields: Fields, fixed: bool) -> Runner:
        """Return the runner for the batches of `source`.

        `fixed`: whether calls to come have batches of this size, too.
        """
        work = self.work * source.batch_size * call.trainer.accumulate
        size = 1 if call.sharing is None else call.sharing.part.size
        work /= size
        parts = self._parts(call.trainer, work, source) if call.sharing is None else 1
        key = threads(work), work >= WORK_PER_THREAD, parts
        if self.running is None or (fixed and self._key != key):
            if self.step is not None:  # it has taken the graph of the objective
                self.objective = call.objective()
            self.running = self._runner(call, source, fields, work, parts)
            self._key = key
        self.running.fields = fields
        if isinstance(source, ArraySource):
            self.running.expect(source.batch_shapes() if fixed else {}, source.axes)
        else:
            self.running.expect({}, {})
        return self.running

    def _runner(
        self, call: OneCall, source: BatchSource, fields: Fields, work: float, parts: int
    ) -> Runner:
        """Build the step and its runner."""
        objective, device = self.objective, call.trainer.device
        if isinstance(source, ArraySource) and parts > 1:
            axes, shapes = source.axes, source.batch_shapes()
            if splits(objective, axes, shapes):
                split = call.split_step(objective, Target(device, 1, source.batch_size // parts))
                self.step = split.step
                proven, norms = Rows(axes, shapes), call.trainer.callbacks.gradient_norms
                return SplitRunner(split, device, work, fields, parts, proven, norms)
        if call.sharing is not None:
            call.sharing.warn(objective, source)
        self.step = step = call.step(objective)
        target = Target.of(device, work, source.batch_size)
        if (shared := call.sharing) is None:
            return new_runner(step, "terms", target, work, fields, objective.carried)
        target = replace(target, rows=source.batch_size // shared.part.size)
        return shared_runner(step, target, work, fields, shared.group, shared.options)

    def _parts(self, trainer: Any, work: float, source: BatchSource) -> int:
        """Return into how many parts to split a batch, if its rows allow it."""
        if trainer.device.kind != "cpu" or not isinstance(source, ArraySource):
            return 1
        if trainer.accumulate > 1:
            return 1
        if work < max(SPLIT_WORK, SPLIT_WORK_PER_WEIGHT * self.weights):
            return 1
        if may_be_in_place(self.objective.weights, trainer.optimizer):
            return 1
        return min(threads(work), source.batch_size)


def compiled_step(call: OneCall, labels: Shapes, class_weight: Any) -> Compiled:
    """Return the step of a call of `fit`; that of the call before, if it is the same.

    Args:
        call: the call.
        labels: shapes of the labels; of the number of rows only matters whether it is 1.
        class_weight: weights of the classes, computed for these labels.
    """
    trainer = call.trainer
    cache: BuildCache = trainer.built
    norms = trainer.callbacks.gradient_norms
    shapes = {name: (shape[:1] == (1,), shape[1:]) for name, shape in labels.items()}

    def key() -> Any:
        arguments = {name: getattr(trainer, name) for name in _ARGUMENTS}
        arguments["device"] = repr(trainer.device)
        shared = None if call.sharing is None else call.sharing.key
        values = [arguments, class_weight, shapes, norms, call.weighted, shared]
        return id(trainer.proto), fingerprint(values)

    return cache.get("step", key, lambda: Compiled(call.objective()))
