"""`SeedTrainer`: the base of the two estimators."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

import numpy as np
from onnx import ModelProto

from onnxgrad.compat.attributes import Fitted
from onnxgrad.compat.estimator_state import EstimatorState, continued, initialized
from onnxgrad.compat.progress_function import Called
from onnxgrad.compat.rows_and_penalty import rows_of
from onnxgrad.errors import ConvergenceError, ConvergenceWarning, unknown
from onnxgrad.estimator import BaseEstimator, NotFittedError, Selected
from onnxgrad.graph.garbage import garbage_kept
from onnxgrad.model import weights as constants
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import save
from onnxgrad.native import Target
from onnxgrad.optimizers import Optimizer
from onnxgrad.reporting import level_of, logger, reporting
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.epochwise import BaseLearningRate
from onnxgrad.training.arguments import check_arguments, select_optimizer, start_learning_rate
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.causes import cause_in_fit
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.equality import BuildCache, fingerprint, model_fingerprint
from onnxgrad.training.evaluate import Evaluator
from onnxgrad.training.failure import run_again
from onnxgrad.training.fields import Fields
from onnxgrad.training.loop import Loop
from onnxgrad.training.modes import forget_head, warn_of_stale_statistics
from onnxgrad.training.objective import Plan, build_objective
from onnxgrad.training.parameters.choice import expand
from onnxgrad.training.parameters.defaults import default_weights
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.rates import ByEpoch
from onnxgrad.training.run.in_place import new_runner
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.state import Values
from onnxgrad.training.step.build import Step, StepOptions, build_step

T = TypeVar("T")


class SeedTrainer(BaseEstimator):
    """Trains weights of a model; subclasses define the loss and the constructor's arguments."""

    model_onnx: ModelLike
    weights_to_train: Sequence[str] | None
    max_iter: int
    training_optimizer_name: str | Optimizer
    batch_size: int
    learning_rate = Selected(BaseLearningRate.select)
    device: str
    warm_start: bool
    verbose: int
    validation_every: int | float
    random_state: int | None
    weight_init: str
    # arguments of some subclasses only
    saved_gradient: str | os.PathLike | None = None
    enable_logging: bool = False
    exc: bool = True

    train_losses_ = Fitted(lambda self: self._state.losses)
    validation_losses_ = Fitted(lambda self: self._state.validation_losses)
    n_iter_ = Fitted(lambda self: len(self._state.losses))
    n_steps_ = Fitted(lambda self: self._state.step)
    learning_rate_ = Fitted(lambda self: self._state.learning_rate)
    stop_reason_ = Fitted(lambda self: self._state.stop_reason)
    cls_type_ = Fitted(lambda self: type(self.train_function_))
    _state: EstimatorState

    def _plan(self, weights: Sequence[str], weighted: bool) -> Plan:
        """Return what is minimized; `weighted`: the data may contain sample weights."""
        raise NotImplementedError

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
        """Train for `max_iter` epochs.

        Args:
            X: array (rows, ...) of numbers that the input's dtype can represent; a table
                (DataFrame), each row of which is reshaped to the shape of the input; for several
                inputs a dict of these, or a table with columns of their names; or an iterable of
                batches `(X, y)`, `(X, y, sample_weight)` or dicts, iterated once per epoch (a
                torch DataLoader), with `y=None`.
            y: labels in the shape of the label input, up to one axis of length one.
            sample_weight: (rows,) or (rows, 1), for a loss with sample weights.
            X_val: validation data, as X.
            y_val: validation labels, as y.
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
        that of an earlier `fit`. `stop_reason_` says why it ended.
        """
        callbacks = Callbacks([] if callback is None else [Called(callback)])
        if (before := vars(self).get("_state")) is not None and before.is_running:
            raise RuntimeError("fit is running: it cannot be called again before it ends")
        if X_val is None and y_val is not None:
            raise ValueError("y_val is given without X_val")
        validation = None if X_val is None else as_dataset(X_val, y_val)
        with garbage_kept():
            loop = self._prepare(as_dataset(X, y, sample_weight), validation, callbacks)
        self._run(loop, before)
        return self

    def _run(self, loop: Loop, before: EstimatorState | None) -> None:
        """Run the epochs; keep their state, or the one `before` if no slice was finished."""
        state: Any = loop.state
        try:
            self._state, self._cache = state, BuildCache()
            with reporting(logging.DEBUG if self.enable_logging else level_of(self.verbose)):
                if self.enable_logging:
                    logger.info("fit: %s on %s", state.optimizer, loop.runner.device)
                loop.run()
        except ConvergenceError as e:
            if self.exc:
                raise
            warnings.warn(str(e), ConvergenceWarning, stacklevel=3)
        finally:
            self._state = state if before is None or loop.moved else before
            self._state.stop_reason = state.stop_reason
            state.end()

    def _prepare(self, data: Dataset, held_out: Dataset | None, callbacks: Callbacks) -> Loop:
        """Check everything, and return the loop of the epochs; nothing of `self` is changed."""
        rate, optimizer = self._rate_and_optimizer()
        before = vars(self).get("_state") if self.warm_start else None
        proto, names = self._model(before), self._names(announce=True)
        self._check_names(names)
        warn_of_stale_statistics(read(self.model_onnx))
        weighted = data.weighted or (held_out is not None and held_out.weighted)
        build = partial(self._build_step, proto, names, optimizer, weighted, before)
        step, fields = build()
        state = self._first_state(proto, names, step, optimizer, before)
        state.flat = np.ndim(data.y) == 1  # as predictions are then: y - f is not (rows, rows)
        state.names, state.columns = fields.names, data.columns
        source = data.source(fields, self.batch_size)
        plan = self._plan(step.weights, weighted)
        evaluator = Evaluator(proto, step.weights, plan, weighted, self.device, {})
        validation = None
        if held_out is not None:
            evaluator.fields.names = fields.names
            validation = rows_of(held_out, evaluator.fields)
        target = Target.of(self.device, work := step.work * source.batch_size, source.batch_size)
        runner = new_runner(step, target, work)
        loop = self._loop(state, runner, rate, source, evaluator, validation, callbacks)
        loop.explain = partial(self._explain, evaluator, build)
        step.warn(stacklevel=3)
        self._save_gradient(proto, step, runner.model)
        return loop

    def _explain(
        self, evaluator: Evaluator, build: Callable[[], tuple[Step, Fields]], loop: Loop
    ) -> str:
        """Return why the loop ended; `build` returns the step and its fields."""
        file, state = read(self.model_onnx), cast(EstimatorState, loop.state)
        outputs, values = evaluator.plan.read_outputs(file), state.evaluated()
        failed = lambda: run_again(build()[0], loop, Device.of(self.device), file)  # noqa: E731
        return cause_in_fit(loop, file, outputs, failed, evaluator, values)

    def _build_step(
        self,
        proto: ModelProto,
        names: Sequence[str],
        optimizer: Optimizer,
        weighted: bool,
        before: EstimatorState | None,
    ) -> tuple[Step, Fields]:
        """Return the step, and what checks its data against the columns of an earlier `fit`."""
        objective = build_objective(proto, names, self._plan(names, weighted), weighted)
        on_cpu = Device.of(self.device).kind == "cpu"
        options = StepOptions(blocks=on_cpu, in_place=on_cpu and self.saved_gradient is None)
        step = build_step(objective, optimizer, options)
        fields = Fields(objective)
        if before is not None:
            fields.names = before.names.copy()
        return step, fields

    def _save_gradient(self, proto: ModelProto, step: Step, epoch: ModelProto) -> None:
        if self.saved_gradient is not None:
            save(self._gradient(proto, step.weights), self.saved_gradient)
            save(epoch, f"{os.fspath(self.saved_gradient)}.training.onnx")

    def _loop(
        self,
        state: EstimatorState,
        runner: Runner,
        rate: BaseLearningRate,
        source: BatchSource,
        evaluator: Evaluator,
        validation: BatchSource | None,
        callbacks: Callbacks,
    ) -> Loop:
        """Return the loop; move the state to the device, the rate to the end of its last epoch."""
        state.begin(runner)
        every = self.validation_every

        def evaluate() -> dict[str, float]:
            assert validation is not None
            return {"validation_loss": evaluator.evaluate(state.evaluated(), validation)["loss"]}

        loop = Loop(
            self,
            state,
            runner,
            ByEpoch(rate, state.losses),
            source,
            callbacks,
            lambda _: state.rng,
            last_epoch=state.epoch + self.max_iter,
            evaluate=None if validation is None else evaluate,
            evaluate_every=max(1, round(every if every >= 1 else every * self.max_iter)),
            singly=not isinstance(source, ArraySource),
            log_steps=self.enable_logging,
            log_epochs=bool(self.verbose or self.enable_logging),
        )
        for called in (c for c in callbacks.callbacks if isinstance(c, Called)):
            called.loop = loop
        return loop

    def _gradient(self, proto: ModelProto, weights: Sequence[str]) -> ModelProto:
        """Return the model of the loss and of its gradient with respect to each weight."""
        raise NotImplementedError

    def _model(self, state: EstimatorState | None) -> ModelProto:
        """Return the model with the weights of `state`, if there is one."""
        proto = read(self.model_onnx)
        return proto if state is None else constants.replace(proto, state.weights)

    def _names(self, announce: bool = False) -> list[str]:
        """Return the names of the weights to train; `announce` reports those that are left out.

        Roles are judged by the values in the model, not by the trained ones.
        """
        if self.weights_to_train is not None:
            return expand(read(self.model_onnx), self.weights_to_train, "weight")
        return default_weights(read(self.model_onnx), announce)

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise if an argument does not fit weights of these names."""

    def _rate_and_optimizer(self) -> tuple[BaseLearningRate, Optimizer]:
        """Return a copy of the learning rate and the optimizer, after checking the arguments."""
        check_arguments(self)
        rate = start_learning_rate(self.learning_rate)
        return rate, select_optimizer(self.training_optimizer_name, rate)

    def _first_state(
        self,
        proto: ModelProto,
        names: Sequence[str],
        step: Step,
        optimizer: Optimizer,
        before: EstimatorState | None,
    ) -> EstimatorState:
        """Return the state that training begins with: a new one, or a copy of the one `before`."""
        arrays = {ref.name: ref.array() for ref in constants.constant_refs(proto)}
        if before is None:
            reached = set(step.weights)
            weights = {name: arrays[name] for name in names if name in reached}
            rng = np.random.default_rng(self.random_state)
            state = EstimatorState(rng=rng)
            state.values = Values(initialized(weights, self.weight_init, rng))
        else:
            state = continued(before, {name: arrays[name] for name in step.weights}, optimizer)
        state.optimizer, state.trained, state.stop_reason = optimizer, step.weights, None
        return state

    # -- results ------------------------------------------------------------------------------

    def _fitted(self) -> EstimatorState:
        """Return the state, or raise `NotFittedError`."""
        if "_state" not in vars(self):
            raise NotFittedError("nothing was trained yet: call fit first")
        return self._state

    def __sklearn_is_fitted__(self) -> bool:
        return "_state" in vars(self)

    @property
    def feature_names_in_(self) -> np.ndarray:
        """The names of the columns of `X`, if `fit` was called with a table."""
        names = self._fitted().columns
        if names is None:
            raise AttributeError("feature_names_in_: fit got no table with names of columns")
        return np.array(names, dtype=object)

    def _check_weights(
        self, state: Mapping[str, Any], check_trained: bool = False
    ) -> dict[str, np.ndarray]:
        """Return copies of the arrays of `state`, in the dtypes of the model."""
        weights = self._float_constants()
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dict of arrays by name, not {type(state).__name__}")
        if check_trained:
            weights = {name: weights[name] for name in self._trained() if name in weights}
        for name, array in state.items():
            if name not in weights:
                raise unknown("trained weight" if check_trained else "weight", name, weights)
            if np.shape(array) != weights[name].shape:
                raise ValueError(
                    f"{name!r} has shape {weights[name].shape}, its new value {np.shape(array)}"
                )
        return {name: np.array(array, weights[name].dtype) for name, array in state.items()}

    def _state_to_set(self) -> EstimatorState:
        """Return the state, a new empty one if there is none."""
        if "_state" not in vars(self):
            self._state = EstimatorState(rng=np.random.default_rng(self.random_state))
        return self._state

    def _float_constants(self) -> dict[str, np.ndarray]:
        """Return the float constants of the model, by name."""
        refs = constants.constant_refs(read(self.model_onnx))
        return {s.name: s.array() for s in refs if s.read().data_type in constants.FLOATS}

    def _trained(self) -> list[str]:
        """Return the names of the weights that the last `fit` trained.

        Raises:
            NotFittedError: there was no `fit`; `set_state` alone trains nothing.
        """
        names = self._fitted().trained
        if not names:
            raise NotFittedError("the state was set, but nothing was trained yet: call fit first")
        return names

    def get_trained_onnx(self, model: ModelLike | None = None) -> ModelProto:
        """Return the model with the trained weights, otherwise unchanged.

        If `fit` was called with tables, the metadata store the names of their columns in order,
        as `onnxgrad.columns`, and those of the label as `onnxgrad.target`; tables with other
        columns are then refused when the model is trained again.

        A model of more than 1 GB refers to the external data files of constants that were not
        trained; write it with `save`.

        Args:
            model: another model with the same weights, such as the one without the loss; None for
                the model that was trained. Its opset, names and metadata are kept.

        Raises:
            ValueError: nothing was trained, or `model` lacks a trained weight.
        """
        state = self._fitted()
        proto = read(self.model_onnx if model is None else model)
        trained = constants.replace(proto, state.evaluated())
        state.names.keep(trained)
        return forget_head(trained)

    # -- sessions and graphs, built on demand -------------------------------------------------

    def _built(self, name: str, build: Callable[[], T], *depends: Any) -> T:
        """Return the cached result of `build`, built again if a parameter or `depends` changed."""

        def key() -> Any:
            params = self.get_params(deep=False)
            params.pop("random_state")
            return *depends, model_fingerprint(params.pop("model_onnx")), fingerprint(params)

        return self.__dict__.setdefault("_cache", BuildCache()).get(name, key, build)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_state": self._state.copy()} if "_state" in vars(self) else {}
        return vars(self) | own | {"_cache": BuildCache()}
