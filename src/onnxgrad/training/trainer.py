"""`Trainer`: trains a model of any file on any data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from onnx import ModelProto

from onnxgrad.autodiff.recomputable import RECOMPUTE
from onnxgrad.data.columns import read_names
from onnxgrad.estimator import NotFittedError
from onnxgrad.graph.garbage import garbage_kept
from onnxgrad.model import weights as constants
from onnxgrad.model.notes import ADAPTERS, HEAD, adapter_dropout, read_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.without_elements import filled
from onnxgrad.model.write import save_filled
from onnxgrad.optimizers import Optimizer, select as select_optimizer
from onnxgrad.parallel import DataParallel
from onnxgrad.runtime.device import Device
from onnxgrad.training.arguments import check_choice, check_count, select_rate
from onnxgrad.training.batches import Split
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.equality import BuildCache
from onnxgrad.training.evaluate import evaluate, predict
from onnxgrad.training.failure import failed_step
from onnxgrad.training.fit import Fit
from onnxgrad.training.identity import without_weights
from onnxgrad.training.judges import select_metrics
from onnxgrad.training.loop import Loop
from onnxgrad.training.modes import exported
from onnxgrad.training.parameters.choice import separated_choice
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.settings import Settings
from onnxgrad.training.sharing import in_group
from onnxgrad.training.state import TrainState, Values


class Trainer(Settings):
    """Trains a model.

    The loss is the mean over a batch of its terms, as PyTorch's `reduction="mean"`: of the elements
    of a regression, of the labels of a classification that are not ignored. Sample and class
    weights make it a weighted mean. The learning rate is constant, or a schedule by step.

    What trains by default are the tensors that play the role of a weight: see `trainable`.

    Args:
        model: model, serialized model or path; never modified.
        loss: name of a loss (`onnxgrad.LOSSES`), a `LossSpec` or `BaseLearningLoss`, a function
            `(op, prediction, label)` that writes the loss with the emitter, a second model
            (`LossModel`), or `{output: loss}` for several outputs. None: the model has an output
            that is the loss, called "loss" or the only one with a single number.
        optimizer: name or optimizer, such as `adamw(weight_decay=0.01)`.
        learning_rate: number, a constant rate; or a schedule such as `cosine(1e-3, warmup=100)`.
        train: names of float tensors of the model, and patterns as "layer4.*", that train; they
            match aliases, too, and patterns choose among weights: see `trainable`, which shows what
            they do. None: those that train by default.
        freeze: names and patterns of tensors that do not train.
        clip_norm: largest 2-norm of all gradients together; larger ones are scaled down to it.
        accumulate: number of micro-batches into which a batch is split, to save memory. The result
            is that of the whole batch, up to rounding; `batch_norm="train"` normalizes by the
            statistics of each micro-batch. These have equal numbers of rows, so that there may be
            more; with `batch_norm="train"`, a short or prime batch is not cut into single rows.
        batch_norm: "frozen" normalizes by the stored statistics, "train" by those of the batch,
            and updates the stored ones.
        dropout: `{pattern: p}`, zeroes elements with probability p behind the nodes whose name or
            output matches, in training only.
        class_weight: `{class: weight}` or an array, for a loss with class indices; "balanced":
            inversely proportional to their frequencies in the labels of the last `fit`, also in
            `evaluate` and `partial_fit`, which need one before.
        loss_options: of a loss given by name: `{"ignore_index": 0}`, `{"ignore_nan": True}`.
        loss_weights: `{output: factor}` for a loss of several outputs.
        metrics: names, objects of `onnxgrad.metrics`, functions `(prediction, label)`, or metrics
            of torchmetrics; `{output: list}` for a loss of several outputs.
        callbacks: `EarlyStopping(...)`, `Checkpoint(...)` and others, see `Callback`.
        batch_axes: `{input: axis}`, the axis of an array along which its rows are; None: it has
            none, and goes into every batch whole. Otherwise read from the declared shapes.
        carry: `{input: output}`: the input gets the value of the output of the batch before, and
            that of the data in the first batch of an epoch. The gradient does not pass: truncated
            backpropagation through time. Needs `shuffle=False`, or an iterable of batches.
        recompute: what the backward pass computes again instead of keeping it, to save memory; the
            weights are the same up to rounding. "none": nothing. "cheap": normalizations, and
            what `partition` calls cheap. "all": the forward pass in segments, also products and
            convolutions, as `torch.utils.checkpoint`. A deep transformer gains most; where the
            gradient of one convolution needs more memory than all activations, "all" needs more.
        device: "cpu", "cuda" or "cuda:1".
        seed: of the order of the rows, dropout and the split of validation data.
        parallel: how several processes train this model together, each of which calls `fit`: see
            `DataParallel`. None: as it does by default, in an initialised group of
            `torch.distributed` or MPI. False: each trains a model of its own.

    Attributes:
        state: the `TrainState`: weights, slots, buffers, step, epoch and history.
        history: an entry an epoch: `step`, `epoch`, `loss`, `learning_rate`, and with validation
            data `validation_loss` and metrics, as `validation_accuracy`.
        progress: the `FitProgress` of the training that runs or ran last.
        gradient_norms: 2-norm of the gradient of each weight in the last step, if a callback needs
            them.

    Raises:
        ValueError: an invalid argument.
        ModelError: the model cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.Trainer(model, "squared_error", optimizer="adam", learning_rate=0.1)
        >>> trainer.fit(X, y, epochs=50).predict(np.float32([[1, 1]])).round(2).tolist()
        [[5.0]]
    """

    def __init__(
        self,
        model: ModelLike,
        loss: Any = None,
        *,
        optimizer: str | Optimizer = "adamw",
        learning_rate: Any = 1e-3,
        train: str | Iterable[str] | None = None,
        freeze: str | Iterable[str] = (),
        clip_norm: float | None = None,
        accumulate: int = 1,
        batch_norm: str = "frozen",
        dropout: Mapping[str, float] | None = None,
        class_weight: Any = None,
        loss_options: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Iterable[Any] | Mapping[str, Iterable[Any]] = (),
        callbacks: Iterable[Any] = (),
        batch_axes: Mapping[str, int | None] | None = None,
        carry: Mapping[str, str] | None = None,
        recompute: str = "none",
        device: str = "cpu",
        seed: int = 0,
        parallel: DataParallel | bool | None = None,
    ) -> None:
        self.loss, self.loss_options, self.loss_weights = loss, loss_options, loss_weights
        self.optimizer, self.learning_rate = select_optimizer(optimizer), select_rate(learning_rate)
        self.clip_norm, self.accumulate = clip_norm, check_count("accumulate", accumulate)
        self.batch_norm = check_choice("batch_norm", batch_norm, ("frozen", "train"))
        self.class_weight = class_weight
        self.batch_axes, self.carry = dict(batch_axes or {}), dict(carry or {})
        self.recompute = check_choice("recompute", recompute, tuple(RECOMPUTE))
        self.metrics_by_output = select_metrics(metrics)
        self.metrics = [m for listed in self.metrics_by_output.values() for m in listed]
        self.callbacks = Callbacks(callbacks)
        self.parallel = parallel
        self.device, self.seed = Device.of(device).check(), check_count("seed", seed, 0)
        with garbage_kept():
            self.proto, self.trained = separated_choice(
                read(model), train, freeze, statistics=batch_norm == "train"
            )
        self.dropout = adapter_dropout(self.proto) | dict(dropout or {})
        self.names = read_names(self.proto)  # of the columns of tables
        # a user who asks for weights of a quantized model knows that the others stay
        tuned = read_note(self.proto, ADAPTERS) or read_note(self.proto, HEAD)
        self.straight_through = train is not None or bool(tuned)
        self.state = TrainState(seed=seed)
        refs = {ref.name: ref for ref in constants.constant_refs(self.proto)}
        self.constants = set(refs)
        self.proto, self.digest = without_weights(self.proto, self.trained)
        self.state.values = Values({name: refs[name].array() for name in self.trained})
        self.setup: Fit | None = None  # the last one that trained
        self.built = BuildCache()

    # -- training -----------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        validation: Any = None,
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: bool = True,
        resume: str | os.PathLike | None = None,
    ) -> Self:
        """Train for `epochs` epochs, beginning with the current weights.

        A second call begins another training with the weights of the first: the slots of the
        optimizer, the step number, the schedule and the history begin anew.

        Args:
            X: array (rows, ...), a table, a dict of these by input; a path of Parquet files, a
                dataset; or an iterable of batches, `(X, y)`, `(X, y, sample_weight)` or dicts.
            y: labels in the shape of the label input; for several a dict, by output.
            sample_weight: (rows,); or one for each term of the loss, in the shape of the labels.
            validation: `(X, y)` or `(X, y, sample_weight)`, or an iterable of batches; or a share
                of the rows, above 0 and below 1, that is held out.
            epochs: number of passes over the data, of the whole training if it is resumed.
            batch_size: rows of a step, for data that are not batches already; the last batch may
                be shorter. None: 32, or those of a model with a static batch.
            shuffle: whether the rows are ordered anew for every epoch, by the trainer's `seed`.
            resume: folder of a `Checkpoint`: go on where its newest one was written, with equal
                arguments and data; the result is the same bit for bit. Without any, training begins
                anew if a `Checkpoint` callback writes to that folder.

        Raises:
            ValueError: invalid arguments or data, before anything is trained; a checkpoint of
                another model, optimizer or data, which the message compares.
            FileNotFoundError: `resume` has no checkpoint.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ConvergenceError: the loss, a weight or the validation loss became NaN or infinite; the
                state before is kept.
            KeyboardInterrupt: Ctrl-C, between two steps; the state is kept.
            RuntimeError: called by its own callback.
        """
        if self.state.is_running:
            raise RuntimeError("fit is running: it cannot be called again before it ends")
        with in_group(self):
            if validation is not None and not isinstance(validation, (float, Split)):
                validation = as_dataset(validation)
            data = as_dataset(X, y, sample_weight)
            if batch_size is not None:
                check_count("batch_size", batch_size)
            call = Fit(self, data, batch_size, validation, self.sharing)
            with garbage_kept():
                loop = call.begin(check_count("epochs", epochs), shuffle, resume)
            return self._run(call, loop)

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> Self:
        """Train for one more epoch, on data that may differ from those of the calls before.

        Unlike `fit`, it goes on with the slots of the optimizer, the step number, the schedule and
        the history. The session is kept from call to call, so that calls with a few rows are fast.
        A schedule needs its number of steps, as `cosine(1e-3, steps=1000)`.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            sample_weight: as in `fit`.
            batch_size: as in `fit`.
            shuffle: as in `fit`.

        Raises:
            ValueError: as `fit`.
            ConvergenceError: as `fit`.
        """
        if self.state.is_running:
            raise RuntimeError("fit is running: partial_fit cannot be called before it ends")
        with in_group(self):
            if batch_size is not None:
                check_count("batch_size", batch_size)
            data = as_dataset(X, y, sample_weight)
            call = Fit(self, data, batch_size, None, self.sharing, further=True)
            with garbage_kept():
                loop = call.begin(1, shuffle)
            return self._run(call, loop)

    def _run(self, call: Fit, loop: Loop) -> Self:
        """Run a loop; its state becomes that of the trainer, unless it ends before a step."""
        before, self.state, self.setup = self.state, loop.state, call
        if loop.runner.in_place and before is not loop.state:  # in memory once: those are equal
            before.values = replace(before.values, weights={})
        try:
            loop.run()
        finally:
            loop.state.end()
            call.end()
            self.names = call.names if loop.moved else self.names
            if not loop.moved and not loop.state.step:
                self.state = before
                before.values = replace(before.values, weights=loop.state.weights)
        return self

    @property
    def _loop(self) -> Loop:
        if self.setup is None or self.setup.loop is None:
            raise NotFittedError("nothing was trained yet by this object: call fit first")
        return self.setup.loop

    @property
    def progress(self) -> FitProgress:
        """The progress of the training that runs or ran last."""
        return self._loop.progress

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of the history: one an epoch, and one for each other evaluation."""
        return self.state.history

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The 2-norm of the gradient of each weight in the last step."""
        return dict(self._loop.runner.norms)

    def failed_step(self) -> tuple[ModelProto, dict[str, np.ndarray]] | None:
        """Return the model of the step that gave NaN or infinity, and its inputs; None if none did.

        The model returns the losses and the new weights and slots.
        """
        return None if self.setup is None else failed_step(self.setup.recipe, self._loop)

    def step_models(self, X: Any, y: Any = None) -> tuple[ModelProto, ModelProto]:
        """Return a step of training as two models, for a loop of your own.

        The first computes gradients: from weights, buffers and a batch to `<weight>_grad`,
        `<buffer>.new`, and the sums and counts of the loss. The second updates the weights, and
        clips gradients if the trainer does: from weights, slots `<weight>.<slot>`, gradients,
        `minus_learning_rate` and `step` (int64, 1 in the first step), to `<weight>.new` and
        `<weight>.<slot>.new`. In between, gradients of several batches or machines can be added.

        Args:
            X: as in `fit`, a few rows are enough.
            y: as in `fit`.

        Raises:
            ValueError: as `fit`.
            NoGradientRule: an operator between the weights and the loss has no rule.
        """
        facts = Facts.of(self, as_dataset(X, y), fits=True)
        return Recipe(self, facts).step_models()

    # -- results ------------------------------------------------------------------------------

    def evaluate(
        self, X: Any, y: Any = None, *, sample_weight: Any = None, batch_size: int | None = None
    ) -> dict[str, Any]:
        """Return the loss and the metrics for data: `{"loss": ..., "accuracy": ...}`.

        The model is in its inference form: without dropout, with the stored statistics.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            sample_weight: as in `fit`.
            batch_size: rows of one call of the runtime; the result does not depend on it.

        Raises:
            ValueError: data that the model or the loss does not accept.
        """
        data = as_dataset(X, y, sample_weight)
        return evaluate(self, data, batch_size, self._shown("evaluating"))

    def predict(self, X: Any, *, batch_size: int | None = None) -> Any:
        """Return the output that the loss reads, an array; a dict by output if it reads several.

        Args:
            X: as in `fit`; labels in it are not read: y of batches (X, y), and columns of the
                names of labels in `fit`.
            batch_size: rows of one call of the runtime.

        Raises:
            ValueError: data that the inputs do not accept.
        """
        data = Dataset(as_dataset(X).X)
        predictions = predict(self, data, batch_size, self._shown("predicting"))
        return predictions if len(predictions) > 1 else next(iter(predictions.values()))

    def _shown(self, title: str) -> str | None:
        """Return the title of a progress bar, if a `Progress` callback asks for it."""
        return title if any(isinstance(c, Progress) for c in self.callbacks.callbacks) else None

    @property
    def model(self) -> ModelProto:
        """The model with the current weights and statistics, in its inference form."""
        values = self.evaluated()
        return filled(exported(self.proto, values, self.names), values)

    def save(self, path: str | os.PathLike) -> None:
        """Write `model` to a file; large weights go there one by one.

        Raises:
            OSError: the file cannot be written; one that exists stays as it is.
        """
        values = self.evaluated()
        save_filled(exported(self.proto, values, self.names), values, path)
