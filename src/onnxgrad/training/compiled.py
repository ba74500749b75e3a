"""The step of a `Trainer` and its session, kept from call to call while they stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from onnxgrad.runtime.session import WORK_PER_THREAD, threads
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fields import Fields
from onnxgrad.training.fitted import BuildCache, fingerprint
from onnxgrad.training.in_place import new_runner
from onnxgrad.training.minimized import Minimized
from onnxgrad.training.runner import Runner
from onnxgrad.training.step import Step

Shapes = dict[str, tuple[int, ...]]
_ARGUMENTS = (  # of a trainer, that decide what a step computes
    *("loss", "loss_options", "loss_weights", "optimizer", "clip_norm", "accumulate"),
    *("batch_norm", "dropout", "batch_axes", "carry", "recompute", "device", "seed", "trained"),
)


class OneCall(Protocol):
    """What a `Setup` knows of its call."""

    trainer: Any
    weighted: bool

    def step(self, norms: bool) -> tuple[Step, Minimized]:
        """Return a new step, and its objective."""


@dataclass
class Compiled:
    """A step with its objective, and the runner of its epochs once there is one."""

    step: Step
    objective: Minimized
    running: Runner | None = None
    size: Any = None  # what the session of the runner depends on, beside the step

    def runner(self, call: OneCall, source: BatchSource, fields: Fields, fixed: bool) -> Runner:
        """Return the runner for the batches of `source`.

        `fixed`: whether calls to come have batches of this size, too.
        """
        work = self.step.work * source.batch_size
        size = threads(work), work >= WORK_PER_THREAD
        if self.running is not None and self.size != size:  # an epoch takes its step's graph over
            self.step, self.objective = call.step(call.trainer.callbacks.gradient_norms)
            self.running = None
        if self.running is None:
            device, carried = call.trainer.device, self.objective.carried
            self.running = new_runner(self.step, "terms", device, work, fields, carried)
            self.size = size
        self.running.fields = fields
        shapes = source.batch_shapes() if fixed and isinstance(source, ArraySource) else {}
        self.running.sessions.expect(shapes)
        return self.running


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
        values = [arguments, class_weight, shapes, norms, call.weighted]
        return id(trainer.proto), fingerprint(values)

    return cache.get("step", key, lambda: Compiled(*call.step(norms)))
