"""A step of a training alone: the one that gave NaN or infinity, or the last one as a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.loop import Loop
from onnxgrad.training.setup import Setup

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sample:
    """The model of one step, its inputs, and the arguments of `session` for it."""

    model: ModelProto
    inputs: Arrays
    work: float
    in_order: bool


def failed_step(setup: Setup, loop: Loop) -> tuple[ModelProto, Arrays] | None:
    """Return the model of the step that failed, and its inputs; None if none did.

    Of several processes that share the step, each returns that of its own rows; None if it does not
    have all slots, if its statistics are those of all rows, or if its own step is finite.
    """
    if loop.failed is None or _is_shared(setup, loop):
        return None
    piece, rates, position = loop.failed
    runner = loop.runner
    step = setup.step(setup.objective(), norms=False, in_place=False, blocks=not runner.in_place)
    model = to_proto(step.model)
    running = session(model, setup.trainer.device, step.work, step.recomputes)
    names = [x.name for x in running.get_inputs()]
    states = [to_numpy(state) for state in runner.states(piece)]
    fed = runner.fed(piece, rates, position)[: len(names) - len(states)]  # without the share
    for batch in range(piece.batches):
        values = [*states, *(np.asarray(stack[batch]) for stack in fed)]
        arrays = dict(zip(names, values, strict=True))
        results = running.run(None, arrays)
        if not all(np.isfinite(y).all() for y in results):
            return model, arrays
        states = results[: len(states)]
    return None


def sample_step(setup: Setup, loop: Loop) -> Sample | None:
    """Return the step with the current states and a batch of the full size, while `fit` runs.

    It is one graph in the native form, also where the training runs it in parts. None without a
    step, and where processes share it.
    """
    if loop.sample is None or _is_shared(setup, loop):
        return None
    piece, rates, position = loop.sample
    runner, device = loop.runner, setup.trainer.device
    step = setup.step(setup.objective(), norms=False, in_place=False, blocks=not runner.in_place)
    work = step.work * piece.rows
    to_native(step.model.graph, Target.of(device, work, piece.rows))
    model = to_proto(step.model)
    states = [to_numpy(state) for state in runner.states(piece)]
    names = [x.name for x in model.graph.input]
    fed = runner.fed(piece, rates, position)[: len(names) - len(states)]
    values = [*states, *(np.asarray(stack[0]) for stack in fed)]
    return Sample(model, dict(zip(names, values, strict=True)), work, step.recomputes)


def _is_shared(setup: Setup, loop: Loop) -> bool:
    """Return whether this process lacks slots, or statistics of all rows."""
    return bool(loop.runner.step.owners) or setup.plan.across is not None
