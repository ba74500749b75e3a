"""One call of `fit` of a stack, and what all members predict."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from onnxgrad.autodiff.quantized import straight_through_warning
from onnxgrad.data.columns import Names
from onnxgrad.errors import ConvergenceError
from onnxgrad.optimizers import Chain, Optimizer, clip_by_global_norm
from onnxgrad.schedules.epochwise import BaseLearningRate
from onnxgrad.training.arguments import start_learning_rate
from onnxgrad.training.batches import ArraySource, Batch, BatchSource, hold_out
from onnxgrad.training.causes import cause_in_training
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluate import SIZE, check_weights, evaluator_of
from onnxgrad.training.fields import Fields
from onnxgrad.training.fit import Fit
from onnxgrad.training.rates import ByEpoch, ByStep, Rates
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.settings import Settings
from onnxgrad.training.stack.evaluator import StackedEvaluator
from onnxgrad.training.stack.loop import StackLoop
from onnxgrad.training.stack.objective import stacked_objective
from onnxgrad.training.stack.runner import StackRunner, build_stacked_step
from onnxgrad.training.stack.state import StackState
from onnxgrad.training.state import TrainState, Values

Arrays = dict[str, np.ndarray]


class StackFit(Fit):
    """One call of `fit` of a stack.

    Args:
        members: their number.
        trainer: what they have in common, and others: see `Fit`.
    """

    def __init__(self, members: int, *args: Any, **options: Any) -> None:
        self.members = members
        super().__init__(*args, **options)

    @cached_property
    def evaluator(self) -> StackedEvaluator:
        """Evaluates all members in their inference form."""
        return stacked_evaluator(self.recipe, self.names, self.members)

    def begin_stack(
        self,
        state: StackState,
        optimizers: Sequence[Optimizer],
        rates: Sequence[Any],
        epochs: int,
        shuffle: bool,
    ) -> StackLoop:
        """Return the loop of a training that begins with the weights of `state`."""
        trainer = self.trainer
        if trainer.clip_norm is not None:
            clip = clip_by_global_norm(trainer.clip_norm)
            optimizers = [Chain((clip, optimizer)) for optimizer in optimizers]
        objective = self.recipe.objective()
        fields = Fields(objective, trainer.batch_axes)
        check_weights(self.recipe, self.data, objective, fields)
        source = self._source(self.data, fields)
        held_out = None
        if isinstance(self.held_out, Dataset):
            held_out = self._source(self.held_out, self.evaluator.fields)
        elif self.held_out is not None:
            source, held_out = hold_out(source, self.held_out, trainer.seed)
        if held_out is not None:
            self.evaluator.check_metrics(state.weights, held_out, trainer.metrics_by_output)
        schedules = [self._schedule(rate, source, epochs) for rate in rates]
        if objective.buffers:
            names = [str(b.name) for b in objective.buffers]
            raise ValueError(f"a stack does not carry {names}: train each member by a Trainer")
        stacked = stacked_objective(objective, state.weights, self.members)
        step = build_stacked_step(stacked, optimizers)
        step.step.warn(3, step.groups)
        if step.step.rounding:
            warnings.warn(straight_through_warning(step.step.rounding), stacklevel=3)
        runner = StackRunner(step, trainer.device, source.batch_size, fields, self.members)
        fixed = isinstance(source, ArraySource)
        runner.expect(source.batch_shapes() if fixed else {}, {})  # type: ignore[attr-defined]
        runner.load_members([Values(v.weights) for v in state.values])
        return StackLoop(
            state,
            runner,
            schedules,
            source,
            optimizers=list(optimizers),
            factors=np.array(objective.written.factors),
            epochs=epochs,
            shuffle=shuffle,
            seed=trainer.seed,
            evaluate=None if held_out is None else lambda now: self._validated(now, held_out),
            explain=self._explain_batches,
        )

    def _explain_batches(self, batches: Iterable[Batch]) -> str:
        """Return why no member has a finite loss and finite weights."""
        outputs = self.recipe.plan.read_outputs(self.trainer.proto)
        return cause_in_training(self.trainer.file, outputs, batches, lambda: None)

    def _schedule(self, rate: Any, source: BatchSource, epochs: int) -> Rates:
        """Return the learning rates of one member."""
        if isinstance(rate, BaseLearningRate):
            return ByEpoch(start_learning_rate(rate), [])
        unseen = [m for m in rate.monitors if m.startswith("validation_")]
        if unseen and self.held_out is None:
            raise ValueError(f"the learning rate depends on {unseen}: pass validation= data")
        if source.batches is not None:
            rate = rate.over(source.batches * epochs)
        own = TrainState()
        rate.rate(0, own.schedule)  # raises if it needs the number of steps
        return ByStep(rate, own)

    def _validated(self, weights: Arrays, held_out: BatchSource) -> dict[str, np.ndarray]:
        """Return the entries of the history for validation data."""
        results = self.evaluator.evaluate_members(weights, held_out, self.trainer.metrics_by_output)
        if self.evaluator.failed is None and np.isnan(results["loss"]).any():
            cause = self.evaluator.cause({n: w[0] for n, w in weights.items()})
            raise ConvergenceError(f"the validation loss of all members is NaN: {cause}")
        return {f"validation_{name}": value for name, value in results.items()}


def stacked_evaluator(recipe: Recipe, names: Names, members: int) -> StackedEvaluator:
    """Return what evaluates all members: see `evaluator_of`."""
    evaluator = evaluator_of(recipe, names, kind=partial(StackedEvaluator, members))
    assert isinstance(evaluator, StackedEvaluator)
    return evaluator


def evaluate_members(
    members: int, trainer: Settings, data: Dataset, batch_size: int | None, weights: Arrays
) -> dict[str, np.ndarray]:
    """Return the loss and the metrics of the data, (members, ...)."""
    recipe = Recipe(trainer, Facts.of(trainer, data))
    evaluator = stacked_evaluator(recipe, trainer.names.copy(), members)
    check_weights(recipe, data, evaluator.described, evaluator.fields)
    source = data.source(evaluator.fields, batch_size or evaluator.fields.fixed_rows or SIZE)
    results = evaluator.evaluate_members(weights, source, trainer.metrics_by_output)
    if bad := np.flatnonzero(~np.isfinite(results["loss"])).tolist():
        cause = evaluator.cause({name: array[bad[0]] for name, array in weights.items()})
        warnings.warn(f"the loss of the members {bad} is not finite: {cause}", stacklevel=3)
    return results


def predict_members(
    members: int, trainer: Settings, data: Dataset, batch_size: int | None, weights: Arrays
) -> Arrays:
    """Return the predictions for the data by output, (members, ...)."""
    recipe = Recipe(trainer, Facts.of(trainer, data))
    evaluator = stacked_evaluator(recipe, trainer.names.copy(), members)
    fields = evaluator.fields.without_labels()
    return evaluator.predict(weights, data.source(fields, batch_size or fields.fixed_rows or SIZE))
