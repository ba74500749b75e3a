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
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import RATE, Batch
from onnxgrad.training.step.weight_groups import numpy_dtype

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


def failed_step(recipe: Any, loop: Any) -> tuple[ModelProto, Arrays] | None:
    """Return the model of the step that failed, and its inputs: see `find_failed_step`."""
    step = find_failed_step(recipe, loop)
    return None if step is None else (step.model, step.inputs)


def find_failed_step(recipe: Any, loop: Any) -> FailedStep | None:
    """Return the step of a `Recipe` in which its `Loop` failed; None if none did.

    Of several processes that share the step, each returns that of its own rows; None if it does not
    have all slots, if its statistics are those of all rows, or if its own step is finite.
    """
    if loop.failed is None or _is_shared(recipe, loop):
        return None
    blocks, trainer = not loop.runner.in_place, recipe.trainer
    step = recipe.step(recipe.objective(), norms=False, in_place=False, blocks=blocks)
    return run_again(step, loop, trainer.device, trainer.file)


def run_again(step: Step, loop: Any, device: Any, file: ModelProto | None) -> FailedStep | None:
    """Run the steps of the call that failed; return the one that is not finite, None if none is."""
    (piece, rates, position), runner = loop.failed, loop.runner
    model = to_proto(step.model)
    running = session(model, device, step.work, step.recomputes)
    states, fed = _states_and_feeds(step, runner, piece, rates, position)
    for number, batch in enumerate(piece.each(position)):
        inputs = states | {name: np.asarray(stack[number]) for name, stack in fed.items()}
        results = running.run(None, inputs)
        if not all(np.isfinite(y).all() for y in results):
            losses = [y.name for y in model.graph.output[len(states) :]]
            at_start = None if file is None else inputs | _at_start(step, file)
            return FailedStep(model, inputs, batch, losses, at_start)
        states = dict(zip(states, results, strict=False))
    return None


def _states_and_feeds(
    step: Step, runner: Any, piece: Any, rates: np.ndarray, position: int
) -> tuple[Arrays, Arrays]:
    """Return the states of a runner, and data and scalars of a call, for the inputs of `step`."""
    call = runner.call(piece, rates, position)
    names = [str(v.name) for v in step.inputs.carried]
    states = dict(zip(names, map(to_numpy, runner.states(piece).values()), strict=True))
    return states, step.inputs.fed(call, runner.data(call))


def _at_start(step: Step, file: ModelProto) -> Arrays:
    """Return states of the weights of a file, and a learning rate of zero."""
    trained = {*step.weights}
    refs = (ref for ref in constants.constant_refs(file) if ref.name in trained)
    weights = {ref.name: ref.array() for ref in refs}
    states = [array for group in step.groups for array in group.initial(weights, {})]
    rate = step.inputs.feeds[RATE.name]
    fed = {str(rate.name): np.zeros((), numpy_dtype(rate))}
    return dict(zip((str(v.name) for v in step.states), states, strict=True)) | fed


def sample_step(recipe: Any, loop: Any) -> Sample | None:
    """Return the step of a `Recipe` with the states and a full batch of its `Loop`, while it runs.

    It is one graph in the native form, also where the training runs it in parts. None without a
    step, and where processes share it.
    """
    if loop.sample is None or _is_shared(recipe, loop):
        return None
    piece, rates, position = loop.sample
    runner, device = loop.runner, recipe.trainer.device
    step = recipe.step(recipe.objective(), norms=False, in_place=False, blocks=not runner.in_place)
    work = step.work * piece.rows
    to_native(step.model.graph, Target.of(device, work, piece.rows))
    model = to_proto(step.model)
    states, fed = _states_and_feeds(step, runner, piece, rates, position)
    inputs = states | {name: np.asarray(stack[0]) for name, stack in fed.items()}
    return Sample(model, inputs, work, step.recomputes)


def _is_shared(recipe: Any, loop: Any) -> bool:
    """Return whether this process lacks slots, or statistics of all rows."""
    return bool(loop.runner.step.owners) or recipe.plan.across is not None
