"""`OrtGradientOptimizer`: trains a model whose graph computes the loss."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.errors import ConvergenceError, unknown
from onnxgrad.graph import weights as constants
from onnxgrad.graph.prepare import prepare, to_proto
from onnxgrad.graph.read import ModelLike, read
from onnxgrad.optimizers import Optimizer, chain, scale_by_learning_rate, select, trace
from onnxgrad.schedules import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.data import ArraySource, Fields, IterableSource, Slice
from onnxgrad.training.data import is_iterable_of_batches
from onnxgrad.training.epoch import build_epoch
from onnxgrad.training.estimator import BaseEstimator
from onnxgrad.training.session import session
from onnxgrad.training.step import BATCH, Step, build_step

logger = logging.getLogger("onnxgrad")
SECONDS_PER_CALL = 0.2  # so that progress, callbacks and Ctrl-C stay alive


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
        loss_output_name: the output that holds the loss, one number.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` brings its own
            momentum, and goes with "SGDOptimizer" only.
        device: "cpu" or "cuda".
        warm_start: `fit` goes on from the last `fit`, slots and step number included.
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
    """

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
            X: array (rows, ...); a dict of arrays for several inputs; or an iterable of batches
                `(X, y)`, `(X, y, sample_weight)` or dicts, read anew every epoch (a torch
                DataLoader), with `y=None`.
            y: labels, one entry per row.
            sample_weight: (rows,) or (rows, 1), for a loss with row weights.
            X_val: validation data, as X.
            y_val: validation labels.
            callback: called with a `Progress` after every slice of batches.

        Raises:
            ValueError: parameters, names or data that do not fit; nothing is changed then.
            ConvergenceError: the loss or a weight became NaN or infinite; the state before it is
                kept.
            KeyboardInterrupt: Ctrl-C; the state so far is kept.
        """
        rate = self._check()
        proto = read(self.model_onnx)
        optimizer = self._optimizer(rate)
        names = trainable(proto) if self.weights_to_train is None else list(self.weights_to_train)
        step = build_step(proto, names, self.loss_output_name, optimizer)
        if step.unreached:
            warnings.warn(
                f"the loss does not depend on {step.unreached}: they stay as they are", stacklevel=2
            )
        fields = Fields(proto, step.data, self.sample_weight_name)
        again = self.warm_start and hasattr(self, "trained_coef_")
        rng = self._rng if again else np.random.default_rng(self.random_state)
        source = self._source(fields, X, y, sample_weight, rng)
        validation = None
        if X_val is not None:
            validation = _Evaluation(proto, names, self.loss_output_name, self.device, step.work)
            checked = fields.arrays(X_val, y_val)

        model = build_epoch(step)
        if self.saved_gradient is not None:
            onnx.save(model, self.saved_gradient)
        runner = _Runner(model, step, fields.mean, self.device, step.work * self.batch_size)
        if not again:
            self._start(proto, step, rng)
        self._rng = rng
        runner.load(self.trained_coef_, self._slots)
        rate.init_learning_rate()
        for t in range(1, self.n_iter_ + 1):
            rate.update_learning_rate(t)
        every = self.validation_every
        every = max(1, int(every if every >= 1 else every * self.max_iter))
        try:
            for epoch in range(self.max_iter):
                loss = self._epoch(runner, source, rate, epoch, callback)
                self.train_losses_.append(loss)
                self.n_iter_ += 1
                self.learning_rate_ = rate.value
                rate.update_learning_rate(self.n_iter_, loss)
                if validation is not None and (epoch + 1) % every == 0:
                    value = validation.loss(runner.weights(), checked, fields.mean)
                    self.validation_losses_.append(value)
                if self.verbose:
                    logger.info("epoch %d/%d loss %g", epoch + 1, self.max_iter, loss)
        finally:
            self.trained_coef_, self._slots = runner.weights(), runner.slots()
        return self

    def _check(self) -> BaseLearningRate:
        """Return a copy of the learning rate, after checking the parameters."""
        for name in ("max_iter", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
        if not self.validation_every > 0:
            raise ValueError(f"validation_every must be above 0, not {self.validation_every!r}")
        if self.weight_init not in _INITS:
            raise unknown("weight_init", self.weight_init, _INITS)
        rate = copy.deepcopy(BaseLearningRate.select(self.learning_rate))
        rate.init_learning_rate()
        return rate

    def _optimizer(self, rate: BaseLearningRate) -> Optimizer:
        optimizer = select(self.training_optimizer_name)
        if not isinstance(rate, LearningRateSGDNesterov):
            return optimizer
        if repr(optimizer) != "sgd()":
            raise ValueError(
                f"{type(rate).__name__} brings its own momentum: use it with 'SGDOptimizer', "
                f"not {self.training_optimizer_name!r}"
            )
        parts = scale_by_learning_rate(), trace(rate.momentum, rate.nesterov)
        return chain(*parts, description=repr(rate))

    def _source(
        self, fields: Fields, X: Any, y: Any, sample_weight: Any, rng: np.random.Generator
    ) -> ArraySource | IterableSource:
        if is_iterable_of_batches(X, y):
            return IterableSource(X, fields)
        arrays = fields.arrays(X, y, sample_weight)
        rows = len(next(iter(arrays.values())))
        if self.batch_size > rows:
            raise ValueError(f"batch_size={self.batch_size} is more than the {rows} rows given")
        for field in fields.fields.values():
            fixed = field.shape[0] if field.shape else None
            if isinstance(fixed, int) and (fixed != self.batch_size or rows % fixed):
                raise ValueError(
                    f"input {field.name!r} has a fixed batch of {fixed}: train with "
                    f"batch_size={fixed} on a multiple of it, not {rows} rows, or export the "
                    "model with a symbolic batch"
                )
        return ArraySource(arrays, self.batch_size, rng)

    def _start(self, proto: ModelProto, step: Step, rng: np.random.Generator) -> None:
        trained = {name for group in step.groups for name in group.shapes}
        initial = _INITS[self.weight_init]
        self.trained_coef_ = {
            site.name: initial(rng, site.array())
            for site in constants.sites(proto)
            if site.name in trained
        }
        self._slots: dict[str, dict[str, np.ndarray]] = {}
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] = []
        self.n_iter_ = self.n_steps_ = 0

    def _epoch(
        self,
        runner: _Runner,
        source: ArraySource | IterableSource,
        rate: BaseLearningRate,
        epoch: int,
        callback: Callable[[Progress], None] | None,
    ) -> float:
        """Run one epoch; returns the mean loss of a row."""
        assert rate.value is not None
        total, rows, start = 0.0, 0, time.perf_counter()
        for piece in source.epoch(runner.budget):
            losses = runner.run(piece, rate.value, self.n_steps_)
            if losses is None:
                recent = ", ".join(f"{v:.6g}" for v in [*self.train_losses_, total / max(rows, 1)][-5:])
                raise ConvergenceError(
                    f"the loss or a weight became NaN or infinite in epoch {epoch + 1} at learning "
                    f"rate {rate.value:g} (losses before: {recent}); the state before it is kept. "
                    "Lower the learning rate, or scale the data"
                )
            self.n_steps_ += piece.batches
            rows += piece.batches * piece.rows
            total += losses
            if callback is not None:
                seconds = max(time.perf_counter() - start, 1e-9)
                validated = self.validation_losses_[-1] if self.validation_losses_ else None
                callback(
                    Progress(
                        epoch, self.max_iter, rows, source.rows, total / rows, validated,
                        rows / seconds,
                    )
                )  # fmt: skip
        return total / rows

    # -- results ------------------------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Return the weights, `{name: array}`."""
        return {name: array.copy() for name, array in self.trained_coef_.items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> OrtGradientOptimizer:
        """Set weights, `{name: array}`; with `warm_start` the next `fit` goes on from them.

        Raises:
            ValueError: an unknown name, or an array of another shape.
        """
        known = {site.name: site.array() for site in constants.sites(read(self.model_onnx))}
        for name, array in state.items():
            if name not in known:
                raise unknown("weight", name, known)
            if np.shape(array) != known[name].shape:
                raise ValueError(
                    f"{name!r} has shape {known[name].shape}, the given one {np.shape(array)}"
                )
        new = {name: np.array(array, known[name].dtype) for name, array in state.items()}
        if not hasattr(self, "trained_coef_"):
            self.trained_coef_, self._slots = {}, {}
            self.train_losses_, self.validation_losses_ = [], []
            self.n_iter_ = self.n_steps_ = 0
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
        if not hasattr(self, "trained_coef_"):
            raise ValueError("nothing was trained yet: call fit first")
        return constants.replace(read(self.model_onnx if model is None else model), self.trained_coef_)


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


class _Runner:
    """Runs slices of batches; keeps the states on the device between calls."""

    def __init__(
        self, model: ModelProto, step: Step, mean: bool, device: str, work: float
    ) -> None:
        self.step, self.mean, self.device = step, mean, device.partition(":")[0]
        self.session = session(model, device, work)
        self.names = [x.name for x in self.session.get_inputs()]
        self.outputs = [y.name for y in self.session.get_outputs()]
        self.states: list[ort.OrtValue] = []
        self.seconds_per_batch = SECONDS_PER_CALL
        self.last = 1

    def load(
        self, weights: Mapping[str, np.ndarray], slots: Mapping[str, Mapping[str, np.ndarray]]
    ) -> None:
        """Set the states; a slot that is not given starts at zero."""
        self.states = []
        for group in self.step.groups:
            arrays = [weights]
            for slot in group.slots:
                zero = {name: np.zeros(shape) for name, shape in group.shapes.items()}
                arrays.append(zero | {n: s[slot] for n, s in slots.items() if slot in s and n in zero})
            self.states += [
                ort.OrtValue.ortvalue_from_numpy(group.pack(a), self.device) for a in arrays
            ]

    def budget(self) -> int:
        """Return how many batches the next call may run."""
        return max(1, min(8 * self.last, int(SECONDS_PER_CALL / self.seconds_per_batch)))

    def run(self, piece: Slice, rate: float, done: int) -> float | None:
        """Train on the batches of `piece`; returns the sum of the row losses.

        None where the loss or a weight is not finite: the states are then left as they were.
        """
        start = time.perf_counter()
        binding = self.session.io_binding()
        step, inverse = self.step, 1.0 if self.mean else 1 / piece.rows
        kind = step.minus_learning_rate.dtype.numpy()  # type: ignore[union-attr]
        fed = list(piece.arrays.values())
        if step.inverse_rows is None:
            fed.append(np.full(piece.batches, -rate * inverse, kind))
        else:
            fed.append(np.full(piece.batches, -rate, kind))
        if step.step in step.model.graph.inputs:
            fed.append(np.arange(done + 1, done + 1 + piece.batches).astype(kind))
        if step.inverse_rows is not None:
            shape, dtype = tuple(step.inverse_rows.shape), step.inverse_rows.dtype.numpy()
            fed.append(np.full(shape, inverse, dtype))
        for name, state in zip(self.names, self.states, strict=False):
            binding.bind_ortvalue_input(name, state)
        for name, array in zip(self.names[len(self.states) :], fed, strict=True):
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in self.outputs:
            binding.bind_output(name, self.device)
        self.session.run_with_iobinding(binding)
        *states, losses = binding.get_outputs()
        values = losses.numpy().astype(np.float64)
        if not np.isfinite(values).all() or not all(np.isfinite(s.numpy()).all() for s in states):
            return None
        self.states = states
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return float(values.sum()) * (piece.rows if self.mean else 1)

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights, by name."""
        return {name: a for arrays in self._unpacked() for name, a in arrays[0].items()}

    def slots(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the slots of every weight, by name."""
        made: dict[str, dict[str, np.ndarray]] = {}
        for group, (_, *slots) in zip(self.step.groups, self._unpacked(), strict=True):
            for slot, arrays in zip(group.slots, slots, strict=True):
                for name, array in arrays.items():
                    made.setdefault(name, {})[slot] = array
        return made

    def _unpacked(self) -> list[list[dict[str, np.ndarray]]]:
        made, states = [], iter(self.states)
        for group in self.step.groups:
            made.append([group.unpack(next(states).numpy()) for _ in group.inputs])
        return made


class _Evaluation:
    """The loss of given rows under given weights."""

    def __init__(
        self, proto: ModelProto, weights: Sequence[str], loss: str, device: str, work: float
    ) -> None:
        model = prepare(proto, batch=BATCH)
        as_inputs(proto, model.graph, weights)
        self.session = session(to_proto(model), device, work * _ROWS)
        self.loss_name = loss

    def loss(self, weights: dict[str, np.ndarray], data: dict[str, np.ndarray], mean: bool) -> float:
        """Return the mean loss of a row."""
        rows, total = len(next(iter(data.values()))), 0.0
        for start in range(0, rows, _ROWS):
            part = {name: array[start : start + _ROWS] for name, array in data.items()}
            (value,) = self.session.run([self.loss_name], {**part, **weights})
            total += float(np.sum(value)) * (min(_ROWS, rows - start) if mean else 1)
        return total / rows


_ROWS = 1024  # rows of one validation call
