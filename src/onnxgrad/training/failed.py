"""A step of a training alone: the one that gave NaN or infinity, or the last one as a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.batches import Batch
from onnxgrad.training.step.build import Step

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sample:
    """The model of one step, its inputs, and the arguments of `session` for it."""

    model: ModelProto
    inputs: Arrays
    work: float
    in_order: bool


@dataclass(frozen=True)
class FailedStep:
    """The model of a step that was not finite, its inputs, its batch, and names of its losses.

    `at_start` are the inputs with the weights of the file, first slots and a learning rate of zero;
    None if the weights of the file are not in memory.
    """

    model: ModelProto
    inputs: Arrays
    batch: Batch
    losses: Sequence[str]
    at_start: Arrays | None


def failed_step(setup: Any, loop: Any) -> tuple[ModelProto, Arrays] | None:
    """Return the model of the step that failed, and its inputs: see `find_failed_step`."""
    step = find_failed_step(setup, loop)
    return None if step is None else (step.model, step.inputs)


def find_failed_step(setup: Any, loop: Any) -> FailedStep | None:
    """Return the step of a `Setup` in which its `Loop` failed; None if none did.

    Of several processes that share the step, each returns that of its own rows; None if it does not
    have all slots, if its statistics are those of all rows, or if its own step is finite.
    """
    if loop.failed is None or _is_shared(setup, loop):
        return None
    blocks, trainer = not loop.runner.in_place, setup.trainer
    step = setup.step(setup.objective(), norms=False, in_place=False, blocks=blocks)
    return run_again(step, loop, trainer.device, None if trainer.digest else trainer.proto)


def run_again(step: Step, loop: Any, device: Any, file: ModelProto | None) -> FailedStep | None:
    """Run the steps of the call that failed; return the one that is not finite, None if none is."""
    (piece, rates, position), runner = loop.failed, loop.runner
    model = to_proto(step.model)
    running = session(model, device, step.work, step.recomputes)
    names = [x.name for x in running.get_inputs()]
    states = [to_numpy(state) for state in runner.states(piece)]
    fed = runner.fed(piece, rates, position)[: len(names) - len(states)]  # without the share
    for number, batch in enumerate(piece.each(position)):
        values = [*states, *(np.asarray(stack[number]) for stack in fed)]
        inputs = dict(zip(names, values, strict=True))
        results = running.run(None, inputs)
        if not all(np.isfinite(y).all() for y in results):
            losses = [y.name for y in model.graph.output[len(states) :]]
            at_start = None if file is None else inputs | _at_start(step, names, file)
            return FailedStep(model, inputs, batch, losses, at_start)
        states = results[: len(states)]
    return None


def _at_start(step: Step, names: Sequence[str], file: ModelProto) -> Arrays:
    """Return states of the weights of a file, and a learning rate of zero."""
    trained = {*step.weights}
    refs = (ref for ref in constants.constant_refs(file) if ref.name in trained)
    weights = {ref.name: ref.array() for ref in refs}
    states = [array for group in step.groups for array in group.initial(weights, {})]
    rate = {str(step.minus_learning_rate.name): np.zeros((), step.rate_dtype)}
    return dict(zip(names, states, strict=False)) | rate


def sample_step(setup: Any, loop: Any) -> Sample | None:
    """Return the step of a `Setup` with the states and a full batch of its `Loop`, while it runs.

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


def _is_shared(setup: Any, loop: Any) -> bool:
    """Return whether this process lacks slots, or statistics of all rows."""
    return bool(loop.runner.step.owners) or setup.plan.across is not None
