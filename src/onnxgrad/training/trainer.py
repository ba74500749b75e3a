"""What training with the loss inside of the graph and outside have in common: the fit loop."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import ConvergenceError, ConvergenceWarning, unknown
from onnxgrad.graph import weights as constants
from onnxgrad.graph.read import ModelLike, read
from onnxgrad.graph.write import save
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate, Trace, select, sgd
from onnxgrad.schedules import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.data import (
    ArraySource,
    Fields,
    IterableSource,
    columns,
    is_iterable_of_batches,
    make_source,
    same_columns,
)
from onnxgrad.training.epoch import build_epoch
from onnxgrad.training.estimator import BaseEstimator, NotFittedError, Selected
from onnxgrad.training.objective import Objective
from onnxgrad.training.parameters import default_weights
from onnxgrad.training.runner import Evaluation, Runner
from onnxgrad.training.step import Step, build_step

logger = logging.getLogger("onnxgrad")


@dataclass
class Progress:
    """Where training stands, after a slice of batches."""

    epoch: int
    epochs: int
    rows: int
    total_rows: int | None
    loss: float  # mean loss of a row so far in this epoch
    validation_loss: float | None
    rows_per_second: float


@dataclass
class _Run:
    """One call of `fit`, after all that can be checked beforehand."""

    rate: BaseLearningRate
    source: ArraySource | IterableSource
    runner: Runner
    validation: Evaluation | None


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
    saved_gradient: str | None = None
    enable_logging: bool = False
    exc: bool = True

    train_losses_: list[float]
    validation_losses_: list[float]
    n_iter_: int
    learning_rate_: float | None
    _coef: dict[str, np.ndarray]
    _slots: dict[str, dict[str, np.ndarray]]
    _rng: np.random.Generator
    _optimizer: Optimizer | None
    _flat: bool = False

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
        callback: Callable[[Progress], None] | None = None,
    ) -> Self:
        """Train for `max_iter` epochs.

        Args:
            X: array (rows, ...) of numbers that the input's dtype can hold; a dict of arrays for
                several inputs; or an iterable of batches `(X, y)`, `(X, y, sample_weight)` or
                dicts, read anew every epoch (a torch DataLoader), with `y=None`.
            y: labels in the shape of the label input, an axis of length one more or less.
            sample_weight: (rows,) or (rows, 1), for a loss with row weights.
            X_val: validation data, as X.
            y_val: validation labels, as y.
            callback: called with a `Progress` after every slice of batches, and every validation.

        Raises:
            ValueError: parameters, names or data that do not fit; nothing is changed then, but
                for a batch of an iterable, which is looked at when its turn comes.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ProviderError: the installed onnxruntime does not offer the device.
            ConvergenceError: the loss or a weight became NaN or infinite; the state before it is
                kept. With `exc=False`, where there is that argument, a `ConvergenceWarning`.
            KeyboardInterrupt: Ctrl-C; the state so far is kept.
        """
        if callback is not None and not callable(callback):
            raise ValueError(f"callback must be a function of a Progress, not {callback!r}")
        run = self._prepare(X, y, sample_weight, X_val, y_val)
        try:
            self._epochs(run, callback or (lambda progress: None))
        except ConvergenceError as e:
            if self.exc:
                raise
            warnings.warn(str(e), ConvergenceWarning, stacklevel=2)
        finally:
            self._coef |= run.runner.weights()
            self._slots |= run.runner.slots()
        return self

    def _prepare(self, X: Any, y: Any, sample_weight: Any, X_val: Any, y_val: Any) -> _Run:
        """Check everything, and only then begin anew, or where the last `fit` ended."""
        rate = self._check()
        optimizer = self._select_optimizer(rate)
        again = self.warm_start and hasattr(self, "_coef")
        proto = read(self.model_onnx)
        if again:
            proto = constants.replace(proto, self._coef)
        names = self._names(announce=True)
        self._check_names(names)
        batches = is_iterable_of_batches(X, y) or is_iterable_of_batches(X_val, y_val)
        weighted = sample_weight is not None or batches
        objective = self._objective(proto, names, weighted)
        step = build_step(objective, optimizer)
        fields = Fields(objective.data, objective.row_weight, objective.facts)
        rng = self._rng if again else np.random.default_rng(self.random_state)
        source = make_source(fields, X, y, sample_weight, self.batch_size, rng)
        validation = None
        if X_val is not None:
            same_columns(columns(X_val), columns(X))
            held = fields.gathered(X_val, y_val)
            objective = self._objective(proto, step.weights, weighted)
            validation = Evaluation(objective, fields, held, self.device, step.work)
        elif y_val is not None:
            raise ValueError("y_val is given without X_val")
        model = build_epoch(step)
        runner = Runner(model, step, fields.mean, self.device, step.work * self.batch_size)
        if step.unreached:
            warnings.warn(
                f"the loss does not depend on {step.unreached}: they stay as they are", stacklevel=3
            )
        if self.saved_gradient is not None:
            save(model, self.saved_gradient)
        self._begin(proto, names, step, optimizer, rng, again)
        self._flat = np.ndim(y) == 1  # so are predictions then, or y - f would be (rows, rows)
        self.__dict__.pop("feature_names_in_", None)
        if (names_in := columns(X)) is not None:
            self.feature_names_in_ = np.array(names_in, dtype=object)
        untrained = {site.name: site.array() for site in constants.sites(proto)}
        runner.load({**untrained, **self._coef}, self._slots)
        for t, loss in enumerate(self.train_losses_, 1):
            rate.update_learning_rate(t, loss)
        return _Run(rate, source, runner, validation)

    def _names(self, announce: bool = False) -> list[str]:
        """Return the names of the weights that are trained; `announce` tells what is left out.

        They are those of the model as it was, whatever values its weights have by now.
        """
        if self.weights_to_train is not None:
            return list(dict.fromkeys(self.weights_to_train))
        return default_weights(read(self.model_onnx), announce)

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
        if self.weight_init not in _INITS:
            raise unknown("weight_init", self.weight_init, _INITS)
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

    def _begin(
        self,
        proto: ModelProto,
        names: Sequence[str],
        step: Step,
        optimizer: Optimizer,
        rng: np.random.Generator,
        again: bool,
    ) -> None:
        """Set the state that training begins with."""
        if not again:
            found = {site.name: site.array() for site in constants.sites(proto)}
            initial, kept = _INITS[self.weight_init], set(step.weights)
            self._coef = {n: initial(rng, found[n]) for n in names if n in kept}
            self._forget()
        elif optimizer != self._optimizer or not self._slots.keys() >= set(step.weights):
            self._slots, self.n_steps_ = {}, 0
        self._rng, self._optimizer = rng, optimizer

    def _forget(self) -> None:
        self._slots, self._optimizer = {}, None
        self.train_losses_, self.validation_losses_ = [], []
        self.n_iter_ = self.n_steps_ = 0

    def _epochs(self, run: _Run, report: Callable[[Progress], None]) -> None:
        rate, every = run.rate, self.validation_every
        every = max(1, round(every if every >= 1 else every * self.max_iter))
        self._log(logging.INFO, "fit: %s on %s", self._optimizer, self.device)
        for epoch in range(self.max_iter):
            progress = self._epoch(run, epoch, report)
            self.train_losses_.append(progress.loss)
            self.n_iter_ += 1
            self.learning_rate_ = rate.value
            rate.update_learning_rate(self.n_iter_, progress.loss)
            if run.validation is not None and (epoch + 1) % every == 0:
                value = run.validation.loss(run.runner.weights())
                self.validation_losses_.append(value)
                report(replace(progress, validation_loss=value))
            if self.verbose or self.enable_logging:
                logger.info("epoch %d/%d loss %g", epoch + 1, self.max_iter, progress.loss)

    def _epoch(self, run: _Run, epoch: int, report: Callable[[Progress], None]) -> Progress:
        """Run one epoch; returns where it ended."""
        rate = run.rate.value
        assert rate is not None
        total, rows, start = 0.0, 0, time.perf_counter()
        for piece in run.source.epoch(run.runner.budget):
            losses = run.runner.run(piece, rate, self.n_steps_)
            if losses is None:
                recent = ", ".join(f"{v:.6g}" for v in self.train_losses_[-5:]) or "none"
                raise ConvergenceError(
                    f"the loss or a weight became NaN or infinite in epoch {epoch + 1} at learning "
                    f"rate {rate:g} (losses of the epochs before: {recent}); the state "
                    "before it is kept. Lower the learning rate, or scale the data"
                )
            self.n_steps_ += piece.batches
            rows += piece.batches * piece.rows
            total = float(np.cumsum([total, *losses])[-1])  # however the epoch is cut
            speed = rows / max(time.perf_counter() - start, 1e-9)
            validated = self.validation_losses_[-1] if self.validation_losses_ else None
            progress = Progress(
                epoch, self.max_iter, rows, run.source.rows, total / rows, validated, speed
            )
            self._log(logging.DEBUG, "step %d loss %g", self.n_steps_, progress.loss)
            report(progress)
        return progress

    def _log(self, level: int, message: str, *arguments: Any) -> None:
        if self.enable_logging:
            logger.log(level, message, *arguments)

    # -- results ------------------------------------------------------------------------------

    def _check_weights(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return copies of the arrays of `state`, in the dtypes of the model."""
        known = self._known()
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dict of arrays by name, not {type(state).__name__}")
        for name, array in state.items():
            if name not in known:
                raise unknown("weight", name, known)
            if np.shape(array) != known[name].shape:
                raise ValueError(
                    f"{name!r} has shape {known[name].shape}, the given one {np.shape(array)}"
                )
        return {name: np.array(array, known[name].dtype) for name, array in state.items()}

    def _start(self) -> None:
        """Begin with an empty state, unless there is one."""
        if not hasattr(self, "_coef"):
            self._coef = {}
            self._forget()
            self._rng = np.random.default_rng(self.random_state)

    def _check_columns(self, X: Any) -> None:
        """Raise if `X` is a table whose columns are not those of the table in `fit`."""
        same_columns(columns(X), getattr(self, "feature_names_in_", None))

    def _known(self) -> dict[str, np.ndarray]:
        """Return the float constants of the model, by name."""
        sites = constants.sites(read(self.model_onnx))
        return {s.name: s.array() for s in sites if s.read().data_type in constants.FLOATS}

    def get_trained_onnx(self, model: ModelLike | None = None) -> ModelProto:
        """Return the model with the trained weights, everything else of it unchanged.

        One of more than 1 GB refers to the files of what was not trained: `save` writes it.

        Args:
            model: another model with the same weights, such as the one without the loss; None for
                the one that was trained. It keeps its opset, names and metadata.

        Raises:
            ValueError: nothing was trained, or `model` lacks a trained weight.
        """
        trained = self._trained()
        return constants.replace(read(self.model_onnx if model is None else model), trained)

    def _trained(self) -> dict[str, np.ndarray]:
        if not hasattr(self, "_coef"):
            raise NotFittedError("nothing was trained yet: call fit first")
        return self._coef


def _glorot(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    if w.ndim < 2:
        return w
    receptive = prod(w.shape[2:])
    limit = np.sqrt(6 / ((w.shape[0] + w.shape[1]) * receptive))
    return rng.uniform(-limit, limit, w.shape).astype(w.dtype)


_INITS: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": _glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}
