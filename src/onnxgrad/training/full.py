"""`OrtGradientOptimizer`: trains a model whose graph computes the loss."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from onnxgrad.errors import ConvergenceError, unknown
from onnxgrad.graph import weights as constants
from onnxgrad.graph.read import ModelLike, read
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate, Trace, select, sgd
from onnxgrad.schedules import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.data import ArraySource, Fields, IterableSource, make_source
from onnxgrad.training.epoch import build_epoch
from onnxgrad.training.estimator import BaseEstimator
from onnxgrad.training.runner import Evaluation, Runner
from onnxgrad.training.step import build_step

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


class OrtGradientOptimizer(BaseEstimator):
    """Trains the weights of a model that computes its loss, on the ordinary onnxruntime.

    A batch is drawn, its gradient and the update of the weights are computed by one model, and one
    call of onnxruntime runs many batches. The learning rate applies to the mean gradient of a row:
    for a loss that is a sum over rows it is divided by the rows of the batch.

    Args:
        model_onnx: model, serialized model or path, with a loss output (`add_loss_output`).
        weights_to_train: names of the weights (`get_train_initializer`). None: all those of one
            axis or more, but for the running statistics of BatchNormalization.
        loss_output_name: the output that holds the loss, one number; a sum over rows where
            `add_loss_output` does not know better.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` brings its own
            momentum, and goes with "SGDOptimizer" only.
        device: "cpu" or "cuda".
        warm_start: `fit` goes on from the last `fit`, slots and step number included; the slots
            are empty again for another optimizer, and when weights are added.
        verbose: 1 reports every epoch through `logging`.
        validation_every: epochs between two validations, or below 1 a share of `max_iter`.
        saved_gradient: path to which the training model is saved.
        sample_weight_name: name of the input of row weights.
        random_state: seed of the order of rows and of `weight_init`; None draws a new one.
        weight_init: "model" starts from the model's weights. "glorot" (Glorot & Bengio 2010,
            uniform) and "normal" (standard normal) draw those of two axes or more anew.

    Attributes:
        train_losses_: mean loss of a row, per epoch.
        validation_losses_: the same for the validation rows, per validation.
        trained_coef_: `{name: array}`, the trained weights.
        n_iter_: epochs done.
        learning_rate_: the rate of the last epoch.
    """

    train_losses_: list[float]
    validation_losses_: list[float]
    trained_coef_: dict[str, np.ndarray]
    n_iter_: int
    learning_rate_: float | None
    _slots: dict[str, dict[str, np.ndarray]]
    _rng: np.random.Generator
    _optimizer: Optimizer | None

    def __init__(
        self,
        model_onnx: ModelLike,
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str | Optimizer = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: str | float | BaseLearningRate = "SGD",
        device: str = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: int | float = 0.1,
        saved_gradient: str | None = None,
        sample_weight_name: str = "weight",
        random_state: int | None = None,
        weight_init: str = "model",
    ) -> None:
        self.model_onnx = model_onnx
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.max_iter = max_iter
        self.training_optimizer_name = training_optimizer_name
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.device = device
        self.warm_start = warm_start
        self.verbose = verbose
        self.validation_every = validation_every
        self.saved_gradient = saved_gradient
        self.sample_weight_name = sample_weight_name
        self.random_state = random_state
        self.weight_init = weight_init

    # -- training -----------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        callback: Callable[[Progress], None] | None = None,
    ) -> OrtGradientOptimizer:
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
                kept.
            KeyboardInterrupt: Ctrl-C; the state so far is kept.
        """
        rate = self._check()
        proto = read(self.model_onnx)
        again = self.warm_start and hasattr(self, "trained_coef_")
        if again:
            proto = constants.replace(proto, self.trained_coef_)
        optimizer = self._select_optimizer(rate)
        asked = self.weights_to_train
        names = trainable(proto) if asked is None else list(dict.fromkeys(asked))
        step = build_step(proto, names, self.loss_output_name, optimizer)
        if step.unreached:
            warnings.warn(
                f"the loss does not depend on {step.unreached}: they stay as they are", stacklevel=2
            )
        fields = Fields(proto, step.data, self.sample_weight_name)
        rng = self._rng if again else np.random.default_rng(self.random_state)
        source = make_source(fields, X, y, sample_weight, self.batch_size, rng)
        validation = None
        if X_val is not None:
            held = fields.gathered(X_val, y_val)
            validation = Evaluation(proto, self.loss_output_name, step, fields, held, self.device)
        elif y_val is not None:
            raise ValueError("y_val is given without X_val")

        model = build_epoch(step)
        if self.saved_gradient is not None:
            onnx.save(model, self.saved_gradient)
        runner = Runner(model, step, fields.mean, self.device, step.work * self.batch_size)
        if not again:
            self._start(proto, [n for n in names if n not in step.unreached], rng)
        elif optimizer != self._optimizer or not self._slots.keys() >= set(step.weights):
            self._slots, self.n_steps_ = {}, 0
        self._rng, self._optimizer = rng, optimizer
        untrained = {site.name: site.array() for site in constants.sites(proto)}
        runner.load({**untrained, **self.trained_coef_}, self._slots)
        for t, loss in enumerate(self.train_losses_, 1):
            rate.update_learning_rate(t, loss)
        every = self.validation_every
        every = max(1, round(every if every >= 1 else every * self.max_iter))
        report = callback or (lambda progress: None)
        try:
            for epoch in range(self.max_iter):
                progress = self._epoch(runner, source, rate, epoch, report)
                self.train_losses_.append(progress.loss)
                self.n_iter_ += 1
                self.learning_rate_ = rate.value
                rate.update_learning_rate(self.n_iter_, progress.loss)
                if validation is not None and (epoch + 1) % every == 0:
                    value = validation.loss(runner.weights())
                    self.validation_losses_.append(value)
                    report(replace(progress, validation_loss=value))
                if self.verbose:
                    logger.info("epoch %d/%d loss %g", epoch + 1, self.max_iter, progress.loss)
        finally:
            self.trained_coef_ |= runner.weights()
            self._slots |= runner.slots()
        return self

    def _check(self) -> BaseLearningRate:
        """Return a copy of the learning rate, after checking the parameters."""
        for name in ("max_iter", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
        if isinstance(self.weights_to_train, str):
            raise ValueError(f"weights_to_train is a list of names, not {self.weights_to_train!r}")
        if not self.validation_every > 0:
            raise ValueError(f"validation_every must be above 0, not {self.validation_every!r}")
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

    def _start(self, proto: ModelProto, names: list[str], rng: np.random.Generator) -> None:
        found = {site.name: site.array() for site in constants.sites(proto)}
        initial = _INITS[self.weight_init]
        self.trained_coef_ = {name: initial(rng, found[name]) for name in names}
        self._forget()

    def _forget(self) -> None:
        self._slots, self._optimizer = {}, None
        self.train_losses_, self.validation_losses_ = [], []
        self.n_iter_ = self.n_steps_ = 0

    def _epoch(
        self,
        runner: Runner,
        source: ArraySource | IterableSource,
        rate: BaseLearningRate,
        epoch: int,
        report: Callable[[Progress], None],
    ) -> Progress:
        """Run one epoch; returns where it ended."""
        assert rate.value is not None
        total, rows, start = 0.0, 0, time.perf_counter()
        for piece in source.epoch(runner.budget):
            losses = runner.run(piece, rate.value, self.n_steps_)
            if losses is None:
                recent = ", ".join(f"{v:.6g}" for v in self.train_losses_[-5:]) or "none"
                raise ConvergenceError(
                    f"the loss or a weight became NaN or infinite in epoch {epoch + 1} at learning "
                    f"rate {rate.value:g} (losses of the epochs before: {recent}); the state "
                    "before it is kept. Lower the learning rate, or scale the data"
                )
            self.n_steps_ += piece.batches
            rows += piece.batches * piece.rows
            total = float(np.cumsum([total, *losses])[-1])  # however the epoch is cut
            speed = rows / max(time.perf_counter() - start, 1e-9)
            validated = self.validation_losses_[-1] if self.validation_losses_ else None
            progress = Progress(
                epoch, self.max_iter, rows, source.rows, total / rows, validated, speed
            )
            report(progress)
        return progress

    # -- results ------------------------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the weights, `{name: array}`, in the shapes and dtypes of the model.

        Raises:
            ValueError: nothing was trained.
        """
        return {name: array.copy() for name, array in self._trained().items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> OrtGradientOptimizer:
        """Set weights, `{name: array}`; with `warm_start` the next `fit` goes on from them.

        Raises:
            ValueError: a name that no float tensor of the model has, or an array of another shape.
        """
        sites = constants.sites(read(self.model_onnx))
        known = {s.name: s.array() for s in sites if s.read().data_type in constants.FLOATS}
        for name, array in state.items():
            if name not in known:
                raise unknown("weight", name, known)
            if np.shape(array) != known[name].shape:
                raise ValueError(
                    f"{name!r} has shape {known[name].shape}, the given one {np.shape(array)}"
                )
        new = {name: np.array(array, known[name].dtype) for name, array in state.items()}
        if not hasattr(self, "trained_coef_"):
            self.trained_coef_ = {}
            self._forget()
            self._rng = np.random.default_rng(self.random_state)
        self.trained_coef_.update(new)
        return self

    def get_trained_onnx(self, model: ModelLike | None = None) -> ModelProto:
        """Return the model with the trained weights, everything else of it unchanged.

        Args:
            model: another model with the same weights, such as the one without the loss; None for
                the one that was trained. It keeps its opset, names and metadata.

        Raises:
            ValueError: nothing was trained, or `model` lacks a trained weight.
        """
        trained = self._trained()
        return constants.replace(read(self.model_onnx if model is None else model), trained)

    def _trained(self) -> dict[str, np.ndarray]:
        if not hasattr(self, "trained_coef_"):
            raise ValueError("nothing was trained yet: call fit first")
        return self.trained_coef_


def trainable(proto: ModelProto) -> list[str]:
    """Return the names that are trained when none is given.

    They are the default ones of one axis or more: a scalar is part of a formula. The running
    statistics of BatchNormalization are no weights either.
    """
    statistics = {
        name
        for node in proto.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    }
    return [
        site.name
        for site in constants.sites(proto)
        if site.default and site.read().dims and site.name not in statistics
    ]


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
