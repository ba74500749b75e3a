"""`SeedTrainer`: the base class of the `OrtGradient...Optimizer`s, and their calls of `fit`."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar

import numpy as np
from onnx import ModelProto

from onnxgrad.checks import check_choice, check_count
from onnxgrad.compat.forward_backward import OrtGradientForwardBackward
from onnxgrad.compat.learning_rates import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.data.columns import Names, read_names
from onnxgrad.errors import ConvergenceError, ConvergenceWarning, unknown
from onnxgrad.estimator import BaseEstimator, NotFittedError
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.model import weights as constants
from onnxgrad.model.read import ModelLike, read
from onnxgrad.native import Target
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.presets import select, sgd
from onnxgrad.optimizers.scaling import ScaleByLearningRate, Trace
from onnxgrad.reporting import logger, logging_level, reporting
from onnxgrad.runtime.device import Device
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.callbacks.base import Callback, Callbacks, TrainingControl
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.equality import BuildCache, model_fingerprint
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.fit import Fit
from onnxgrad.training.job import Job
from onnxgrad.training.loop import Loop
from onnxgrad.training.modes.inference_form import warn_of_stale_statistics
from onnxgrad.training.objective import Objective
from onnxgrad.training.parameters.choice import default_weights, expand_patterns
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.runner import Runner, StepCache
from onnxgrad.training.stack import draw_glorot
from onnxgrad.training.state import FitProgress, StateValues, TrainState, number_text
from onnxgrad.training.step.update import weights_to_evaluate

T = TypeVar("T")
ROWS_PER_CALL = 1024  # rows of a call of the session in evaluations and predictions


class FittedValue:
    """A descriptor for an attribute of a trainer, which the function `read` computes from the
    trained state.

    Before there is a state, it raises `NotFittedError`, which is an `AttributeError`.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        trainer._fitted_state()
        return self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"{self.name!r} is computed from the state: call set_state or fit")


class SelectedArgument:
    """A descriptor for an argument of `__init__`, which is stored as the object that `select`
    returns for it.

    `select` turns a name or a number into an object. A value that it rejects with TypeError or
    ValueError is stored unchanged, and `fit` raises the error.
    """

    def __init__(self, select: Callable[[Any], Any], default: Any) -> None:
        self.select, self.default = select, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.default if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        with suppress(TypeError, ValueError):
            value = self.select(value)
        instance.__dict__[self.name] = value


@dataclass(eq=False, repr=False)
class SharedArguments(BaseEstimator):
    """The arguments that `OrtGradientOptimizer` and `OrtGradientForwardBackwardOptimizer` share."""

    model_onnx: ModelLike
    weights_to_train: Sequence[str] | None = None
    loss_output_name: str = "loss"
    max_iter: int = 100
    training_optimizer_name: str | Optimizer = "SGDOptimizer"
    batch_size: int = 10
    learning_rate: str | float | BaseLearningRate = SelectedArgument(BaseLearningRate.select, "SGD")  # type: ignore[assignment]
    device: str = "cpu"
    warm_start: bool = False
    verbose: int = 0
    validation_every: int | float = 0.1


class SeedTrainer(SharedArguments):
    """Trains weights of a model; subclasses define the loss by `_training_loss`."""

    random_state: int | None
    weight_init: str
    # arguments of one of the trainers only
    saved_gradient: str | os.PathLike | None = None
    enable_logging: bool = False
    exc: bool = True

    train_losses_ = FittedValue(lambda self: self._state.losses)
    validation_losses_ = FittedValue(lambda self: self._state.validation_losses)
    n_iter_ = FittedValue(lambda self: len(self._state.losses))
    n_steps_ = FittedValue(lambda self: self._state.step)
    learning_rate_ = FittedValue(lambda self: self._state.learning_rate)
    stop_reason_ = FittedValue(lambda self: self._state.stop_reason)
    cls_type_ = FittedValue(lambda self: type(self.train_function_))
    _state: EstimatorState

    # -- training -----------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        callback: Callable[[FitProgress], bool | str | None] | None = None,
    ) -> Self:
        """Train the weights on the data for `max_iter` epochs.

        Args:
            X: array (rows, ...) of numbers that the input's dtype can represent; a table
                (DataFrame), each row of which is reshaped to the shape of the input; for several
                inputs a dict of these, or a table whose columns have their names; or an iterable of
                batches `(X, y)`, `(X, y, sample_weight)` or dicts, iterated once per epoch (a
                torch DataLoader), with `y=None`.
            y: labels in the shape of the label input, up to one axis of length one.
            sample_weight: (rows,) or (rows, 1), for a loss with sample weights.
            X_val: validation data, in the form of X.
            y_val: validation labels, in the form of y.
            callback: called with a `FitProgress` after every slice of batches and every validation.
                Returning False or "stop" ends training at once, None or True continues. An
                unfinished epoch counts neither in `n_iter_` nor in `train_losses_`. The callback
                may read the current weights, slots and counts of the trainer, and set weights.

        Raises:
            ValueError: invalid parameters, names or data, in which case nothing changed; only
                batches of an iterable are checked later, one at a time. Also a callback that
                returns anything else.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ProviderError: the installed onnxruntime does not offer the device.
            ConvergenceError: the loss, a weight or the validation loss became NaN or infinite;
                with `exc=False`, where that argument exists, a `ConvergenceWarning` instead.
            KeyboardInterrupt: Ctrl-C.
            RuntimeError: called by its own callback.

        However training ends, the state after the last finished slice of batches is kept, or else
        the state of an earlier `fit`. `stop_reason_` says why it ended.
        """
        if (before := vars(self).get("_state")) is not None and before.is_running:
            raise RuntimeError("fit is running: it cannot be called again before it ends")
        if X_val is None and y_val is not None:
            raise ValueError("y_val is given without X_val: pass both, or neither")
        validation = None if X_val is None else as_dataset(X_val, y_val)
        with pause_garbage_collection():
            call = EstimatorFit(self, as_dataset(X, y, sample_weight), validation, callback)
            loop = call.begin(self.max_iter, shuffle=True)
            self._save_gradient_model(call)
        self._run_epochs(call, loop, before)
        return self

    def _save_gradient_model(self, call: EstimatorFit) -> None:
        """Save the gradient model of the call of `fit` if the argument `saved_gradient`
        is a path.
        """

    def _run_epochs(self, call: EstimatorFit, loop: Loop, before: EstimatorState | None) -> None:
        """Run the epochs of `loop`; keep the new state, or the state `before` if no step
        was run.
        """
        state = call.state
        try:
            self._state, self._cache = state, BuildCache()
            with reporting(logging.DEBUG if self.enable_logging else logging_level(self.verbose)):
                if self.enable_logging:
                    logger.info("fit: %s on %s", state.optimizer, loop.runner.device)
                loop.run()
        except ConvergenceError as e:
            if self.exc:
                raise
            warnings.warn(str(e), ConvergenceWarning, stacklevel=3)
        finally:
            self._state = state if before is None or loop.has_trained else before
            self._state.stop_reason = state.stop_reason
            if isinstance(self.learning_rate, BaseLearningRate):
                self.learning_rate.value = self._state.learning_rate
            state.end()
            call.end()

    def _model_to_train(self, state: EstimatorState | None) -> ModelProto:
        """Return the model to train, with the weights of `state` unless `state` is None."""
        proto = read(self.model_onnx)
        return proto if state is None else constants.replace_constants(proto, state.weights)

    def _weight_names(self, announce: bool = False) -> list[str]:
        """Return the names of the weights to train; with `announce`, log the weights that are left
        out.

        Whether a constant is a weight follows from its value in the model, not its trained value.
        """
        if self.weights_to_train is not None:
            return expand_patterns(read(self.model_onnx), self.weights_to_train, "weight")
        return default_weights(read(self.model_onnx), announce)

    def _training_loss(self, weighted: bool, weights: Sequence[str] | None = None) -> Any:
        """Return the loss of a `Job` that trains `weights`, or, if `weights` is None, of a `Job`
        that only evaluates.
        """
        raise NotImplementedError

    def _learning_rate_and_optimizer(self) -> tuple[BaseLearningRate, Optimizer]:
        """Check the arguments; return (copy of the learning rate at its first epoch, optimizer)."""
        for name in ("max_iter", "batch_size"):
            check_count(name, getattr(self, name))
        names, every = self.weights_to_train, self.validation_every
        if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
            raise ValueError(f"weights_to_train must be a list of names, not {names!r}")
        if not isinstance(every, (int, float, np.number)) or not every > 0:
            raise ValueError(f"validation_every must be above 0, not {every!r}")
        check_choice("weight_init", self.weight_init, list(WEIGHT_INITS))
        rate = BaseLearningRate.select(self.learning_rate).at_start()
        optimizer = select(self.training_optimizer_name)
        if not isinstance(rate, LearningRateSGDNesterov):
            return rate, optimizer
        if optimizer != sgd():
            raise ValueError(
                f"{type(rate).__name__} has momentum: use it with 'SGDOptimizer', not "
                f"{self.training_optimizer_name!r}"
            )
        return rate, Chain((ScaleByLearningRate(), Trace(rate.momentum, rate.nesterov)))

    # -- results ------------------------------------------------------------------------------

    def _fitted_state(self) -> EstimatorState:
        """Return the state of the last `fit`, or raise `NotFittedError`."""
        if "_state" not in vars(self):
            raise NotFittedError("nothing was trained yet: call fit first")
        return self._state

    def __sklearn_is_fitted__(self) -> bool:
        return "_state" in vars(self)

    @property
    def feature_names_in_(self) -> np.ndarray:
        """The names of the columns of `X`; only if `fit` was called with a table."""
        names = self._fitted_state().columns
        if names is None:
            raise AttributeError(
                "feature_names_in_ is not set: pass fit a table with named columns"
            )
        return np.array(names, dtype=object)

    def _weight_arrays(
        self, state: Mapping[str, Any], check_trained: bool = False
    ) -> dict[str, np.ndarray]:
        """Return {weight: array} of `state`, copied in the dtypes and checked against the shapes of
        the model.
        """
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the state must be a dict {{weight: array}}, not {type(state).__name__}"
            )
        known = self._float_constants(state, check_trained)
        return {
            name: check_state_array(name, a, known[name].shape, known[name].dtype)
            for name, a in state.items()
        }

    def _state_for_set_state(self) -> EstimatorState:
        """Return the state that `set_state` changes, which is new and empty before the
        first `fit`.
        """
        if "_state" not in vars(self):
            self._state = EstimatorState(rng=np.random.default_rng(self.random_state))
        return self._state

    def _float_constants(
        self, names: Iterable[str], check_trained: bool = False
    ) -> dict[str, np.ndarray]:
        """Return {name: array} of the model's float constants, or with `check_trained` of the
        trained weights.

        Raises `ValueError` if one of `names` is not among them.
        """
        refs = constants.constant_refs(read(self.model_onnx))
        known = {s.name: s.array() for s in refs if s.read().data_type in constants.FLOATS}
        if check_trained:
            known = {name: known[name] for name in self._trained_weight_names() if name in known}
        for name in names:
            if name not in known:
                raise unknown("trained weight" if check_trained else "weight", name, known)
        return known

    def _trained_weight_names(self) -> list[str]:
        """Return the names of the weights that the last `fit` trained, or raise
        `NotFittedError`.
        """
        names = self._fitted_state().trained
        if not names:
            raise NotFittedError("the state was set, but nothing was trained yet: call fit first")
        return names

    def get_trained_onnx(self, model: ModelLike | None = None) -> ModelProto:
        """Return the model with the trained weights, otherwise unchanged.

        If `fit` was called with tables, the metadata store the names of their columns in order,
        as `onnxgrad.columns`, and the columns of the label as `onnxgrad.target`; tables with other
        columns are then refused when the model is trained again.

        A model of more than 1 GB refers to the external data files of constants that were not
        trained; write it with `save`.

        Args:
            model: another model with the same weights, such as the one without the loss; None for
                the model that was trained. Its opset, names and metadata are kept.

        Raises:
            ValueError: nothing was trained, or `model` lacks a trained weight.
        """
        state = self._fitted_state()
        proto = read(self.model_onnx if model is None else model)
        now = state.values
        weights = weights_to_evaluate(state.optimizer, now.weights, now.slots, now.steps)
        trained = constants.replace_constants(proto, weights)
        state.names.write_metadata(trained)
        return trained

    # -- sessions and graphs, built on demand -------------------------------------------------

    def _trained_forward_backward(
        self, output_names: list[str] | None = None
    ) -> OrtGradientForwardBackward:
        """Return an `OrtGradientForwardBackward` whose weights are the trained weights, with the
        given outputs.
        """
        build = partial(
            OrtGradientForwardBackward,
            self.model_onnx,
            self._trained_weight_names(),
            output_names=output_names,
            providers=self.device,
            enable_logging=self.enable_logging,
        )
        return self._cache_result("passes", build)

    def _cache_result(self, name: str, build: Callable[[], T], *depends: Any) -> T:
        """Return the result of `build()`, cached until an argument of the trainer or one of
        `depends` changes.
        """

        cache = self.__dict__.setdefault("_cache", BuildCache())

        def cache_key() -> Any:
            params = self.get_params(deep=False)
            params.pop("random_state")
            model = model_fingerprint(params.pop("model_onnx"))
            return *depends, model, cache.fingerprint(params)

        return cache.get(name, cache_key, build)

    def __getstate__(self) -> dict[str, Any]:
        state = {"_state": self._state.copy()} if "_state" in vars(self) else {}
        return vars(self) | state | {"_cache": BuildCache()}


def check_state_array(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a copy of `value`, the new value of a weight or slot `name`, in `dtype`; check its
    shape.
    """
    if np.shape(value) != shape:
        raise ValueError(
            f"the new value of {name!r} must have the shape {shape}, not {np.shape(value)}"
        )
    return np.array(value, dtype)


# -- one call of `fit`: a `Fit` with another job and state -----------------------------------------

WEIGHT_INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": draw_glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}


@dataclass(eq=False)
class EstimatorState(TrainState):
    """A `TrainState` with the random generator, optimizer and column names of a trainer.

    Attributes:
        rng: draws the order of the rows of all epochs.
        optimizer: the optimizer of the slots.
        trained: names of the weights of the last `fit`.
        flat: whether the labels of `fit` had one axis.
        columns: names of the columns of X, if `fit` was called with a table.
        names: names of the columns of all inputs and of the label.
    """

    rng: np.random.Generator | None = None
    optimizer: Optimizer = field(default_factory=sgd)
    trained: list[str] = field(default_factory=list)
    flat: bool = False
    columns: list[str] | None = None
    names: Names = field(default_factory=Names)

    def row_order(self) -> np.random.Generator:
        """Return the random generator that orders the rows of all epochs of all calls."""
        assert self.rng is not None
        return self.rng

    def memento(self) -> Callable[[], None]:
        """Return a function that does nothing: unlike in a `Trainer`, no call resumes an unfinished
        epoch.
        """
        return lambda: None

    def copy(self) -> Self:
        """Return an independent copy of the state, not marked as running."""
        new = super().copy()
        new.rng, new.names = copy.deepcopy(self.rng), self.names.copy()
        return new


class EstimatorFit(Fit):
    """One call of `SeedTrainer.fit`: a `Fit` that leaves the trainer unchanged.

    Args:
        estimator: a `SeedTrainer`.
        data: the data of `fit`.
        held_out: validation data, or None.
        function: the `callback` of `fit`, or None.
    """

    state: EstimatorState

    def __init__(
        self, estimator: Any, data: Dataset, held_out: Dataset | None, function: Any = None
    ) -> None:
        self.estimator, file = estimator, read(estimator.model_onnx)
        rate, optimizer = estimator._learning_rate_and_optimizer()
        self.before = vars(estimator).get("_state") if estimator.warm_start else None
        names = estimator._weight_names(announce=True)
        warn_of_stale_statistics(file)
        weighted = max(d.weight_axes for d in (data, held_out) if d is not None) > 0
        job = Job(
            estimator._model_to_train(self.before),
            names,
            estimator._training_loss(weighted, names),
            optimizers=[optimizer],
            learning_rates=[rate],
            callbacks=Callbacks(_callbacks_of_fit(estimator, data, function)),
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
        """The `FitProgress` of this call: epoch, step and loss."""
        assert self.loop is not None
        return self.loop.progress

    @cached_property
    def evaluator(self) -> Evaluator:
        """The `Evaluator` of validation data, by the model with its current weights."""
        return Evaluator(self.recipe.for_model(self.job.proto, self.step.weights))

    def _training_data_fields(self, objective: Objective) -> DataSpec:
        """Build the training step; return the `DataSpec` that checks the data."""
        in_place = self.estimator.saved_gradient is None
        self.step = self.recipe.step(objective, in_place=in_place)
        fields = DataSpec(objective)
        fields.names = self.names
        return fields

    def _training_and_validation_sources(
        self, fields: DataSpec, shuffle: bool
    ) -> tuple[BatchSource, BatchSource | None]:
        """Return (source of training batches, source of validation batches or None)."""
        assert self.batch_size is not None
        source = self.data.source(fields, self.batch_size)
        if not isinstance(self.held_out, Dataset):
            return source, None
        self.evaluator.fields.names = self.names
        return source, source_in_row_order(self.held_out, self.evaluator.fields)

    def _step_runner(self, compiled: StepCache, source: BatchSource, fields: DataSpec) -> Runner:
        """Return the `Runner` of the training step; set the initial weights of the state."""
        job, state, trained, old = self.job, self.state, self.step.weights, self.state.values
        arrays = {ref.name: ref.array() for ref in constants.constant_refs(job.proto)}
        if self.before is None:
            draw = WEIGHT_INITS[self.estimator.weight_init]
            names = [name for name in job.trained if name in {*trained}]
            state.values = StateValues({n: draw(state.row_order(), arrays[n]) for n in names})
        else:
            weights = old.weights | {name: arrays[name] for name in trained}
            same = job.optimizer == state.optimizer and old.slots.keys() >= {*trained}
            state.values = replace(old, weights=weights) if same else StateValues(weights)
        state.optimizer, state.trained = job.optimizer, trained
        state.flat = np.ndim(self.data.y) == 1  # predictions are flat, too: y - f is (rows,)
        state.names, state.columns = self.names, self.data.columns
        work = self.step.work * source.batch_size
        return Runner(self.step, Target.for_step(job.device, work, source.batch_size), work)

    def validation_results(self) -> dict[str, Any]:
        """Return history entries of the validation data; {} in epochs without validation."""
        every = self.estimator.validation_every
        every = max(1, int(every if every >= 1 else every * self.estimator.max_iter))
        return {} if (self.progress.epoch + 1) % every else super().validation_results()


def _callbacks_of_fit(estimator: Any, data: Dataset, function: Any) -> list[Callback]:
    """Return the callbacks that `verbose`, `enable_logging`, streamed data and the user's
    `function` need.
    """
    wanted: list[tuple[type[Callback], bool]] = [
        (StepLog, estimator.enable_logging),
        (EpochLog, bool(estimator.verbose or estimator.enable_logging)),
        (SingleBatches, data.stream is not None or data.reader is not None),
    ]
    callbacks = [kind() for kind, is_wanted in wanted if is_wanted]
    return callbacks if function is None else [*callbacks, ProgressFunction(function)]


class StepLog(Callback):
    """Logs the loss of the epoch so far after each call of onnxruntime."""

    def on_step_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Log the step number, and the loss of the epoch so far."""
        logger.debug("step %d loss %s", state.step, number_text(trainer.progress.loss, "g"))


class EpochLog(Callback):
    """Logs the loss of each epoch."""

    def on_epoch_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Log the epoch number and the epoch's loss."""
        now = trainer.progress
        logger.info("epoch %d/%d loss %s", now.epoch + 1, now.epochs, number_text(now.loss, "g"))


class SingleBatches(Callback):
    """Lets each call of onnxruntime run one batch only, for data that are read batch by batch."""

    every_steps = 1


class ProgressFunction(Callback):
    """Calls a user's function with the `FitProgress` after steps and evaluations."""

    def __init__(self, function: Callable[[FitProgress], bool | str | None]) -> None:
        if not callable(function):
            raise ValueError(
                f"callback must be a function of a Progress, not {function!r}: see FitProgress"
            )
        self.function = function

    def on_step_end(self, trainer: Any, state: TrainState, control: TrainingControl) -> None:
        """Call the user's function, and end the training if it returns False or "stop"."""
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


def source_in_row_order(data: Dataset, fields: DataSpec) -> BatchSource:
    """Return a source of batches that reads the rows of `data` once, in order."""
    return data.source(fields, fields.fixed_rows or ROWS_PER_CALL)
