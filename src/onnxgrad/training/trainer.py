"""What training with the loss inside of the graph and outside have in common."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from onnx import ModelProto

from onnxgrad.data.columns import column_names
from onnxgrad.errors import ConvergenceError, ConvergenceWarning, unknown
from onnxgrad.estimator import BaseEstimator, NotFittedError, Selected
from onnxgrad.model import weights as constants
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import save
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate, Trace, select, sgd
from onnxgrad.reporting import level_of, reporting
from onnxgrad.schedules import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.data import (
    ArraySource,
    Fields,
    IterableSource,
    is_iterable_of_batches,
    make_source,
)
from onnxgrad.training.epoch import build_epoch
from onnxgrad.training.fitted import Built, Fitted, fingerprint, model_fingerprint
from onnxgrad.training.loop import ERROR, INTERRUPTED, NOT_FINITE, Loop, Progress
from onnxgrad.training.objective import Objective
from onnxgrad.training.parameters.defaults import default_weights as trainable
from onnxgrad.training.runner import Evaluation, Runner
from onnxgrad.training.state import INITS, TrainState, Values
from onnxgrad.training.step import Step, build_step

T = TypeVar("T")


class Trainer(BaseEstimator):
    """Trains weights of a model; the subclass says by which loss, and takes the arguments."""

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
    n_steps_ = Fitted(lambda self: self._state.values.steps)
    learning_rate_ = Fitted(lambda self: self._state.learning_rate)
    stop_reason_ = Fitted(lambda self: self._state.stop_reason)
    cls_type_ = Fitted(lambda self: type(self.train_function_))
    _state: TrainState

    def _objective(self, proto: ModelProto, weights: Sequence[str], weighted: bool) -> Objective:
        """Return what is minimized; `weighted` tells whether the data may bring row weights."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        callback: Callable[[Progress], bool | str | None] | None = None,
    ) -> Self:
        """Train for `max_iter` epochs.

        Args:
            X: array (rows, ...) of numbers that the input's dtype can hold; a table (DataFrame),
                of which each row is brought into the shape of the input; for several inputs a dict
                of these, or a table with columns of their names; or an iterable of batches
                `(X, y)`, `(X, y, sample_weight)` or dicts, read anew every epoch (a torch
                DataLoader), with `y=None`.
            y: labels in the shape of the label input, an axis of length one more or less.
            sample_weight: (rows,) or (rows, 1), for a loss with row weights.
            X_val: validation data, as X.
            y_val: validation labels, as y.
            callback: called with a `Progress` after every slice of batches, and every validation.
                Returning False or "stop" ends training at once, None or True goes on; an epoch that
                is cut short counts neither in `n_iter_` nor in `train_losses_`. It may read the
                trainer, whose weights, slots and counts are those of that moment, and set them.

        Raises:
            ValueError: parameters, names or data that do not fit; nothing is changed then, but
                for a batch of an iterable, which is looked at when its turn comes. Also a callback
                that returns something else.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ProviderError: the installed onnxruntime does not offer the device.
            ConvergenceError: the loss, a weight or the validation loss became NaN or infinite. With
                `exc=False`, where there is that argument, a `ConvergenceWarning`.
            KeyboardInterrupt: Ctrl-C.
            RuntimeError: called by its own callback.

        Whatever ends training, the state after the last slice of batches is kept; if none was
        finished, that of an earlier `fit`. `stop_reason_` tells what ended it.
        """
        if callback is not None and not callable(callback):
            raise ValueError(f"callback must be a function of a Progress, not {callback!r}")
        before = vars(self).get("_state")
        if before is not None and before.running:
            raise RuntimeError("fit is running: it cannot be called again before it ends")
        loop = self._prepare(X, y, sample_weight, X_val, y_val)
        ended = ERROR
        try:
            self._state, self._kept = loop.state, Built()
            with reporting(logging.DEBUG if self.enable_logging else level_of(self.verbose)):
                ended = loop.run(callback or (lambda progress: None))
        except KeyboardInterrupt:
            ended = INTERRUPTED
            raise
        except ConvergenceError as e:
            ended = NOT_FINITE
            if self.exc:
                raise
            warnings.warn(str(e), ConvergenceWarning, stacklevel=2)
        finally:
            self._state = loop.state if before is None or loop.moved else before
            self._state.stop_reason = ended
            loop.state.end()
        return self

    def _prepare(self, X: Any, y: Any, sample_weight: Any, X_val: Any, y_val: Any) -> Loop:
        """Check everything, and return the loop of the epochs; nothing of `self` is changed."""
        rate = self._check()
        optimizer = self._select_optimizer(rate)
        before = vars(self).get("_state") if self.warm_start else None
        proto = self._model(before)
        names = self._names(announce=True)
        self._check_names(names)
        batches = is_iterable_of_batches(X, y) or is_iterable_of_batches(X_val, y_val)
        weighted = sample_weight is not None or batches
        objective = self._objective(proto, names, weighted)
        step = build_step(objective, optimizer)
        fields = Fields(objective)
        if before is not None:
            fields.names = before.names.copy()
        state = self._first_state(proto, names, step, optimizer, before)
        state.flat = np.ndim(y) == 1  # so are predictions then, or y - f would be (rows, rows)
        state.names, state.columns = fields.names, column_names(X)
        source = make_source(fields, X, y, sample_weight, self.batch_size, state.rng)
        validation = None
        if X_val is not None:
            held = fields.gathered(X_val, y_val)
            objective = self._objective(proto, step.weights, weighted)
            validation = Evaluation(objective, fields, held, self.device, step.work)
        elif y_val is not None:
            raise ValueError("y_val is given without X_val")
        model = build_epoch(step)
        runner = Runner(model, step, fields.mean, self.device, step.work * self.batch_size)
        loop = self._loop(state, runner, rate, source, validation)
        if step.unreached:
            warnings.warn(
                f"the loss does not depend on {step.unreached}: they stay as they are", stacklevel=3
            )
        if self.saved_gradient is not None:
            save(self._gradient(proto, step.weights), self.saved_gradient)
            save(model, f"{os.fspath(self.saved_gradient)}.training.onnx")
        return loop

    def _loop(
        self,
        state: TrainState,
        runner: Runner,
        rate: BaseLearningRate,
        source: ArraySource | IterableSource,
        validation: Evaluation | None,
    ) -> Loop:
        """Return the loop, with the state on the device and the rate where the state left it."""
        state.begin(runner)
        for t, loss in enumerate(state.losses, 1):
            rate.update_learning_rate(t, loss)
        every = self.validation_every
        every = max(1, round(every if every >= 1 else every * self.max_iter))
        logs = self.enable_logging, bool(self.verbose or self.enable_logging)
        return Loop(state, runner, rate, source, validation, self.max_iter, every, *logs)

    def _gradient(self, proto: ModelProto, weights: Sequence[str]) -> ModelProto:
        """Return the model of the loss and of its gradient with respect to each weight."""
        raise NotImplementedError

    def _model(self, state: TrainState | None) -> ModelProto:
        """Return the model with the weights of `state`, if there is one."""
        proto = read(self.model_onnx)
        return proto if state is None else constants.replace(proto, state.values.weights)

    def _names(self, announce: bool = False) -> list[str]:
        """Return the names of the weights that are trained; `announce` tells what is left out.

        They are those of the model as it was, whatever values its weights have by now.
        """
        if self.weights_to_train is not None:
            return list(dict.fromkeys(self.weights_to_train))
        return trainable(read(self.model_onnx), announce)

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise if an argument is wrong for weights of these names."""

    def _check(self) -> BaseLearningRate:
        """Return a copy of the learning rate, after checking the parameters."""
        for name in ("max_iter", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
        names, every = self.weights_to_train, self.validation_every
        if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
            raise ValueError(f"weights_to_train is a list of names, not {names!r}")
        if not isinstance(every, (int, float, np.number)) or not every > 0:
            raise ValueError(f"validation_every must be above 0, not {every!r}")
        if self.weight_init not in INITS:
            raise unknown("weight_init", self.weight_init, INITS)
        rate = copy.deepcopy(BaseLearningRate.select(self.learning_rate))
        rate.init_learning_rate()
        return rate

    def _select_optimizer(self, rate: BaseLearningRate) -> Optimizer:
        optimizer = select(self.training_optimizer_name)
        if not isinstance(rate, LearningRateSGDNesterov):
            return optimizer
        if optimizer != sgd():
            raise ValueError(
                f"{type(rate).__name__} brings its own momentum: use it with 'SGDOptimizer', "
                f"not {self.training_optimizer_name!r}"
            )
        return Chain((ScaleByLearningRate(), Trace(rate.momentum, rate.nesterov)))

    def _first_state(
        self,
        proto: ModelProto,
        names: Sequence[str],
        step: Step,
        optimizer: Optimizer,
        before: TrainState | None,
    ) -> TrainState:
        """Return the state that training begins with: a new one, or a copy of the one `before`."""
        arrays = {site.name: site.array() for site in constants.constant_refs(proto)}
        if before is None:
            rng = np.random.default_rng(self.random_state)
            state, initial, kept = TrainState(rng), INITS[self.weight_init], set(step.weights)
            state.values = Values({n: initial(rng, arrays[n]) for n in names if n in kept})
        else:
            state, old = before.copy(), before.values
            weights = old.weights | {name: arrays[name] for name in step.weights}
            same = optimizer == before.optimizer and old.slots.keys() >= set(step.weights)
            state.values = Values(weights, old.slots, old.steps) if same else Values(weights)
        state.optimizer, state.trained, state.stop_reason = optimizer, step.weights, None
        return state

    # -- results ------------------------------------------------------------------------------

    def _fitted(self) -> TrainState:
        """Return the state.

        Raises:
            NotFittedError: there is none.
        """
        if "_state" not in vars(self):
            raise NotFittedError("nothing was trained yet: call fit first")
        return self._state

    def __sklearn_is_fitted__(self) -> bool:
        return "_state" in vars(self)

    @property
    def feature_names_in_(self) -> np.ndarray:
        """The names of the columns, if `fit` got a table that has them."""
        names = self._fitted().columns
        if names is None:
            raise AttributeError("feature_names_in_: fit got no table with names of columns")
        return np.array(names, dtype=object)

    def _check_weights(
        self, state: Mapping[str, Any], check_trained: bool = False
    ) -> dict[str, np.ndarray]:
        """Return copies of the arrays of `state`, in the dtypes of the model."""
        known = self._known()
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dict of arrays by name, not {type(state).__name__}")
        if check_trained:
            known = {name: known[name] for name in self._trained() if name in known}
        for name, array in state.items():
            if name not in known:
                raise unknown("trained weight" if check_trained else "weight", name, known)
            if np.shape(array) != known[name].shape:
                raise ValueError(
                    f"{name!r} has shape {known[name].shape}, the given one {np.shape(array)}"
                )
        return {name: np.array(array, known[name].dtype) for name, array in state.items()}

    def _start(self) -> TrainState:
        """Return the state, an empty one if there was none."""
        if "_state" not in vars(self):
            self._state = TrainState(np.random.default_rng(self.random_state))
        return self._state

    def _known(self) -> dict[str, np.ndarray]:
        """Return the float constants of the model, by name."""
        sites = constants.constant_refs(read(self.model_onnx))
        return {s.name: s.array() for s in sites if s.read().data_type in constants.FLOATS}

    def _trained(self) -> list[str]:
        """Return the names of the weights that the last `fit` moved.

        Raises:
            NotFittedError: there was no `fit`; `set_state` alone trains nothing.
        """
        names = self._fitted().trained
        if not names:
            raise NotFittedError("the state was set, but nothing was trained yet: call fit first")
        return names

    def get_trained_onnx(self, model: ModelLike | None = None) -> ModelProto:
        """Return the model with the trained weights, and all else of it as it is.

        If `fit` got tables, the names of their columns, in their order, are kept in the metadata:
        `onnxgrad.columns`, for the label `onnxgrad.target`. So tables of other columns are refused
        when the model is trained again. Arrays have no names, and add nothing.

        One of more than 1 GB refers to the files of what was not trained: `save` writes it.

        Args:
            model: another model with the same weights, such as the one without the loss; None for
                the one that was trained. It keeps its opset, names and metadata.

        Raises:
            ValueError: nothing was trained, or `model` lacks a trained weight.
        """
        state = self._fitted()
        trained = constants.replace(
            read(self.model_onnx if model is None else model), state.values.weights
        )
        state.names.keep(trained)
        return trained

    # -- what is built when it is asked for ---------------------------------------------------

    def _built(self, name: str, build: Callable[[], T], *depends: Any) -> T:
        """Return what `build` returns, built again when a parameter or `depends` changed."""

        def key() -> Any:
            params = self.get_params(deep=False)
            params.pop("random_state")
            return *depends, model_fingerprint(params.pop("model_onnx")), fingerprint(params)

        return self.__dict__.setdefault("_kept", Built()).get(name, key, build)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_kept"}
        return kept | ({"_state": self._state.copy()} if "_state" in kept else {})
