"""One call of `fit` of an estimator, as a `Fit` with another job and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from onnxgrad.compat.rows_and_penalty import rows_of
from onnxgrad.data.columns import Names, read_names
from onnxgrad.model import weights as constants
from onnxgrad.model.read import read
from onnxgrad.native import Target
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import sgd
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import Device
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.callbacks.base import Callback, Callbacks, TrainingControl
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import Fields
from onnxgrad.training.fit import Fit
from onnxgrad.training.job import Job
from onnxgrad.training.modes.inference_form import warn_of_stale_statistics
from onnxgrad.training.objective import Objective
from onnxgrad.training.progress import FitProgress, shown
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.run.selection import Compiled, new_runner
from onnxgrad.training.stack import glorot
from onnxgrad.training.state import Arrays, TrainState, Values
from onnxgrad.training.step.update import evaluated

INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}


@dataclass(eq=False)
class EstimatorState(TrainState):
    """A `TrainState` that also keeps what an estimator reads after `fit`."""

    rng: np.random.Generator | None = None  # orders the rows of all epochs
    optimizer: Optimizer = field(default_factory=sgd)  # to which the slots belong
    trained: list[str] = field(default_factory=list)  # names of the weights of the last `fit`
    flat: bool = False  # whether the labels of `fit` had one axis
    columns: list[str] | None = None  # their names in the table X of `fit`
    names: Names = field(default_factory=Names)  # of the columns for all inputs and the label

    def weights_to_evaluate(self) -> Arrays:
        """Return the weights to evaluate: averages, if the optimizer keeps them."""
        now = self.values
        return evaluated(self.optimizer, now.weights, now.slots, now.steps)

    def row_order(self) -> np.random.Generator:
        """Return the one generator of all epochs, also of the epochs of earlier calls."""
        assert self.rng is not None
        return self.rng

    def memento(self) -> Callable[[], None]:
        """Return a function that does nothing: no call resumes an epoch that broke off."""
        return lambda: None

    def copy(self) -> Self:
        """Return an independent copy, which is not running."""
        new = super().copy()
        new.rng, new.names = copy.deepcopy(self.rng), self.names.copy()
        return new


class EstimatorFit(Fit):
    """One call of `fit` of an estimator, of which nothing is changed.

    `estimator` is a `SeedTrainer`, `held_out` are validation data, `function` sees the progress.
    """

    state: EstimatorState

    def __init__(
        self, estimator: Any, data: Dataset, held_out: Dataset | None, function: Any = None
    ) -> None:
        self.estimator, file = estimator, read(estimator.model_onnx)
        rate, optimizer = estimator._rate_and_optimizer()
        self.before = vars(estimator).get("_state") if estimator.warm_start else None
        names = estimator._weight_names(announce=True)
        warn_of_stale_statistics(file)
        weighted = max(d.weight_axes for d in (data, held_out) if d is not None) > 0
        job = Job(
            estimator._model_to_train(self.before),
            names,
            estimator._loss_of_job(weighted, names),
            optimizers=[optimizer],
            learning_rates=[rate],
            callbacks=Callbacks(_wanted_callbacks(estimator, data, function)),
            device=Device.of(estimator.device),
        )
        if self.before is None:
            state, columns = EstimatorState(), read_names(job.proto)
            state.rng = np.random.default_rng(estimator.random_state)
        else:
            state, columns = self.before.copy(), self.before.names
        recipe, size = Recipe(job, state, weight_axes=int(weighted)), estimator.batch_size
        super().__init__(self, recipe, columns, data, size, held_out, further=True)
        self.file = file

    @property
    def progress(self) -> FitProgress:
        """The progress of the training."""
        assert self.loop is not None
        return self.loop.progress

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the model of the file, also where its nodes are in training mode."""
        return Evaluator(self.recipe.for_model(self.job.proto, self.step.weights))

    def _training_fields(self, objective: Objective) -> Fields:
        """Return the inputs that check the data, of a model of which a step can be built."""
        in_place = self.estimator.saved_gradient is None
        self.step = self.recipe.step(objective, in_place=in_place)
        fields = Fields(objective)
        fields.names = self.names
        return fields

    def _all_sources(self, fields: Fields, shuffle: bool) -> tuple[BatchSource, BatchSource | None]:
        assert self.batch_size is not None
        source = self.data.source(fields, self.batch_size)
        if not isinstance(self.held_out, Dataset):
            return source, None
        self.evaluator.fields.names = self.names
        return source, rows_of(self.held_out, self.evaluator.fields)

    def _build_runner(self, compiled: Compiled, source: BatchSource, fields: Fields) -> Runner:
        """Return the runner of a step for batches of any size; the state gets its weights."""
        job, state, trained, old = self.job, self.state, self.step.weights, self.state.values
        arrays = {ref.name: ref.array() for ref in constants.constant_refs(job.proto)}
        if self.before is None:
            draw = INITS[self.estimator.weight_init]
            names = [name for name in job.trained if name in {*trained}]
            state.values = Values({name: draw(state.row_order(), arrays[name]) for name in names})
        else:
            weights = old.weights | {name: arrays[name] for name in trained}
            same = job.optimizer == state.optimizer and old.slots.keys() >= {*trained}
            state.values = replace(old, weights=weights) if same else Values(weights)
        state.optimizer, state.trained = job.optimizer, trained
        state.flat = np.ndim(self.data.y) == 1  # as predictions are then: y - f is not (rows, rows)
        state.names, state.columns = self.names, self.data.columns
        work = self.step.work * source.batch_size
        return new_runner(self.step, Target.of(job.device, work, source.batch_size), work)

    def _validation_results(self) -> dict[str, Any]:
        """Return the entries of the history for validation data, none if it is not their epoch."""
        every = self.estimator.validation_every
        every = max(1, int(every if every >= 1 else every * self.estimator.max_iter))
        return {} if (self.progress.epoch + 1) % every else super()._validation_results()


def _wanted_callbacks(estimator: Any, data: Dataset, function: Any) -> list[Callback]:
    """Return the callbacks of a call of `fit`."""
    wanted: list[tuple[type[Callback], bool]] = [
        (StepLog, estimator.enable_logging),
        (EpochLog, bool(estimator.verbose or estimator.enable_logging)),
        (SingleBatches, data.stream is not None or data.reader is not None),
    ]
    callbacks = [kind() for kind, is_wanted in wanted if is_wanted]
    return callbacks if function is None else [*callbacks, ProgressFunction(function)]


class StepLog(Callback):
    """Logs the loss of the epoch so far after each call of the runtime."""

    def on_step_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Log the loss of the epoch so far."""
        logger.debug("step %d loss %s", state.step, shown(trainer.progress.loss, "g"))


class EpochLog(Callback):
    """Logs the loss of each epoch."""

    def on_epoch_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Log the loss of the epoch."""
        now = trainer.progress
        logger.info("epoch %d/%d loss %s", now.epoch + 1, now.epochs, shown(now.loss, "g"))


class SingleBatches(Callback):
    """Lets each call of the runtime run one batch."""

    every_steps = 1


class ProgressFunction(Callback):
    """Calls a function of the progress after calls of the runtime and after evaluations."""

    def __init__(self, function: Callable[[FitProgress], bool | str | None]) -> None:
        if not callable(function):
            raise ValueError(
                f"callback must be a function of a Progress, not {function!r}: see FitProgress"
            )
        self.function = function

    def on_step_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Call the function, and end training if it says so."""
        answer: Any = self.function(trainer.progress)
        if isinstance(answer, (bool, np.bool_)):
            control.stop |= not answer
        elif isinstance(answer, str) and answer == "stop":
            control.stop = True
        elif answer is not None:
            raise ValueError(
                f"the callback returned {answer!r}: return None or True to continue, "
                "False or 'stop' to end training"
            )

    on_evaluate = on_step_end
