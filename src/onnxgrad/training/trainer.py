"""`Trainer`, which trains a model on any data, and the base class that it shares with stacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto

from onnxgrad.errors import named
from onnxgrad.estimator import NotFittedError
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.losses.objectives import Loss
from onnxgrad.metrics.base import Metric
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import fill_weights
from onnxgrad.model.write import save_filled
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.parallel.process_groups import DataParallel
from onnxgrad.reporting import html_table, logger
from onnxgrad.schedules.base import LearningRate
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.callbacks.progress import Progress, with_usual_progress
from onnxgrad.training.data import Dataset, as_dataset, held_out_data
from onnxgrad.training.diagnose import find_failed_step
from onnxgrad.training.evaluator import evaluate, predict
from onnxgrad.training.fit import Fit
from onnxgrad.training.frozen_cache import CachePlace
from onnxgrad.training.job import (
    ARGUMENTS,
    check_arguments,
    create_job,
    refuse_unknown_arguments,
    select_rate,
)
from onnxgrad.training.loop import Loop
from onnxgrad.training.mixing import Mix
from onnxgrad.training.modes.inference_form import export_model
from onnxgrad.training.objective import TrainingLoss
from onnxgrad.training.precision import rounding_text
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.sharing import shared_call
from onnxgrad.training.state import FitProgress, StateValues, TrainState

# types of arguments of a trainer, explained on the page of the API on training
OutputLossLike: TypeAlias = str | Loss | Callable[..., Any]
LossLike: TypeAlias = OutputLossLike | TrainingLoss | ModelLike | Mapping[str, OutputLossLike]
MetricLike: TypeAlias = str | Metric | Callable[..., Any]
RateLike: TypeAlias = float | LearningRate
ClassWeights: TypeAlias = str | Mapping[Any, float] | ArrayLike

_RUNNING = "_running_call"  # attribute of a trainer while a call of it trains
_SHOWN_RECORDS = 10  # the records of the history that a notebook shows


class TrainerBase:
    """Trains one model, or the copies of a model in a stack; `Trainer` explains the arguments."""

    state: TrainState

    @refuse_unknown_arguments
    def __init__(
        self,
        model: ModelLike,
        loss: LossLike | None = None,
        *,
        optimizer: str | Optimizer = "adamw",
        learning_rate: RateLike | None = None,
        train: str | Iterable[str] | None = None,
        freeze: str | Iterable[str] = (),
        train_ranges: bool = False,
        clip_norm: float | None = None,
        accumulate: int = 1,
        batch_norm: str = "frozen",
        dropout: Mapping[str, float] | None = None,
        mix: Mix | None = None,
        class_weight: ClassWeights | None = None,
        classes: Sequence[str] | Sequence[int] = (),
        loss_options: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Iterable[MetricLike] | Mapping[str, Iterable[MetricLike]] = (),
        callbacks: Iterable[Callback] = (),
        batch_axes: Mapping[str, int | None] | None = None,
        carry: Mapping[str, str] | None = None,
        recompute: str = "none",
        precision: str = "auto",
        device: str | tuple[str, Mapping[str, Any]] = "cpu",
        seed: int = 0,
        parallel: DataParallel | bool | None = None,
    ) -> None:
        with pause_garbage_collection():
            self._job, self._names, weights = create_job(locals())
        self.state = TrainState(seed=self._job.seed)
        self.state.values = StateValues(weights)
        self._call: Fit | None = None  # the last call of fit or partial_fit

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            kind = type(self).__name__
            raise AttributeError(
                f"the arguments of a {kind} cannot change: create another one with "
                f"{named(name)}, or pass a schedule where a learning rate is to change"
            )
        super().__setattr__(name, value)

    def _change_job(self, **fields: Any) -> None:
        """Replace the given fields of the job for the next calls."""
        self._job = replace(self._job, **fields)

    def _change_learning_rate(self, rate: RateLike | None) -> None:
        """Replace the learning rate for the next calls; None means the optimizer's usual rate."""
        self._change_job(learning_rates=[select_rate(rate, self._job.optimizer)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy of this trainer, which has its own state and no data."""
        job = self._job.without_built()
        new = {"state": self.state.copy(), "_job": job, "_call": None}
        return {name: value for name, value in (vars(self) | new).items() if name != _RUNNING}

    @property
    def trained(self) -> list[str]:
        """The names of the weights that train."""
        return list(self._job.trained)

    @property
    def precision(self) -> str:
        """The precision in which the model trains, "float32", "mixed" or "file"."""
        return self._job.precision

    @property
    def metrics(self) -> list[Metric]:
        """The `Metric` objects of all outputs."""
        return self._job.all_metrics

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
        cache: bool | str | os.PathLike = False,
    ) -> Self:
        """Train for `epochs` epochs, beginning with the current weights.

        A second call begins another training with the weights of the first, the averages if its
        optimizer averages weights: slots, the step number, the schedule and the history begin anew.

        Args:
            X: array (rows, ...), a table, a dict of these by input; a path of Parquet files, a
                dataset; or an iterable of batches, `(X, y)`, `(X, y, sample_weight)` or dicts.
            y: labels in the shape of the label input; for several a dict, by output. Names of
                columns of `X`, also where its batches are tables or dicts.
            sample_weight: (rows,); or one for each term of the loss, in the shape of the labels; or
                the name of a column of `X`. They are 0 or more where the loss is divided by their
                sum; with `loss_options={"weighted_mean": False}`, and for a loss that
                `add_loss_output` wrote into the model, they may be negative, as advantages are.
            validation: `(X, y)` or `(X, y, sample_weight)`, or an iterable of batches; or a share
                of the rows, above 0 and below 1, that is held out.
            epochs: number of passes over the data, of the whole training if it is resumed.
            batch_size: rows of a step, for data that are not batches already; the last batch may
                be shorter. None: 32; the rows of a static batch of several, if the model has
                one; 1 where a file of one row carries a state.
            shuffle: whether the rows are ordered anew for every epoch, by the trainer's `seed`.
            resume: folder of a `Checkpoint`: go on where its newest one was written, with equal
                arguments and data; the result is the same bit for bit. `epochs` may differ
                where learning rates do not depend on it. Without any, training begins anew if a
                `Checkpoint` callback writes to that folder.
            cache: True: compute the frozen layers in front of all weights that train once, and
                keep their results for each row: in memory if they take at most a quarter of the
                free memory, else in a temporary file. A folder keeps them for later trainings on
                the same data. For data whose rows do not change from epoch to epoch.

        Raises:
            ValueError: invalid arguments or data, before anything is trained; a checkpoint of
                another model, optimizer or data, which the message compares.
            FileNotFoundError: `resume` has no checkpoint.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ConvergenceError: the loss, a weight or the validation loss became NaN or infinite; the
                state before is kept.
            KeyboardInterrupt: Ctrl-C, between two steps; the state is kept.
            RuntimeError: called by its own callback, or while another thread calls it.
        """
        columns = X, y, sample_weight
        place = CachePlace.of(cache)
        return self._run_call(columns, batch_size, shuffle, validation, epochs, resume, place)

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> Self:
        """Train for one more epoch, on data that may differ from call to call.

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
        return self._run_call((X, y, sample_weight), batch_size, shuffle, further=True)

    def _run_call(
        self,
        columns: tuple[Any, Any, Any],
        batch_size: int | None,
        shuffle: bool,
        validation: Any = None,
        epochs: int = 1,
        resume: str | os.PathLike | None = None,
        cache: CachePlace | None = None,
        further: bool = False,
    ) -> Self:
        """Run a call of `fit` or `partial_fit`, and return this trainer.

        With `further`, it is a call of `partial_fit`. Until it ends, other calls are refused in all
        threads. `columns` are the features, labels and sample weights.
        """
        own = object()
        if vars(self).setdefault(_RUNNING, own) is not own:  # `setdefault` is atomic
            raise RuntimeError("fit is running: call this trainer after its end, not in a callback")
        try:
            with shared_call(self._job.parallel) as sharing:
                held_out, data = held_out_data(validation), as_dataset(*columns)
                check_arguments({"batch_size": batch_size, "epochs": epochs})
                recipe = Recipe.for_data(self._job, self.state, data, held_out, sharing)
                call = Fit(self, recipe, self._names, data, batch_size, held_out, further, cache)
                with pause_garbage_collection():
                    loop = call.begin(index(epochs), shuffle, resume)
                if self._job.shows_progress and not further:
                    call.callbacks = with_usual_progress(call.callbacks)
                return self._run_loop(call, loop)
        finally:
            del vars(self)[_RUNNING]

    def _run_loop(self, call: Fit, loop: Loop) -> Self:
        """Run a loop, whose state becomes the state of this trainer.

        If the loop ends before its first step, this trainer gets its earlier state back.
        """
        before, self.state, self._call = self.state, loop.state, call
        averages = self._job.averages_weights
        if loop.runner.unpacks_cheaply and before is not loop.state and not averages:
            # both states have equal weights, of which memory holds one copy
            before.values = replace(before.values, weights={})
        try:
            loop.run()
        finally:
            loop.state.end()
            call.end()
            self._names = call.names if loop.has_trained or loop.state.step else self._names
            if loop.has_trained and not call.further and (text := rounding_text(self.rounding)):
                logger.info(text)
            if not loop.has_trained and not loop.state.step:
                self.state = before
                if not averages:
                    before.values = replace(before.values, weights=loop.state.weights)
        return self

    @property
    def _last_loop(self) -> Loop:
        """The `Loop` of the last call of `fit` or `partial_fit`.

        Raises:
            NotFittedError: nothing was trained yet.
        """
        if self._call is None or self._call.loop is None:
            raise NotFittedError("this trainer has not trained yet: call fit first")
        return self._call.loop

    @property
    def progress(self) -> FitProgress:
        """The progress of the training that runs or ran last."""
        return self._last_loop.progress

    @property
    def history(self) -> list[dict[str, Any]]:
        """The history of training, a dict for each epoch and each evaluation within an epoch."""
        return self.state.history

    def evaluated(self) -> dict[str, np.ndarray]:
        """Return the weights and running statistics that are evaluated and exported, by name.

        They are the last ones, or the averages of an optimizer that averages weights; rounded to
        16 bits where the file has these, in the dtypes in which the model trains. In a stack, they
        have the shape (members, ...).
        """
        return self._job.values_to_evaluate(self.state)

    @property
    def rounding(self) -> dict[str, float]:
        """The errors of rounding weights to the 16 bits of the file.

        A dict of `largest` and `mean`, both absolute differences of elements; empty for a model
        without weights of 16 bits, or whose weights do not train in float32.
        """
        return self._job.rounding_errors(self.state)

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The 2-norm of the gradient of each weight in the last step."""
        return dict(self._last_loop.runner.norms)

    def failed_step(self) -> tuple[ModelProto, dict[str, np.ndarray]] | None:
        """Return the model of the step whose results were NaN or infinite, and its inputs.

        None: all steps of the last training had finite results. The model returns the losses and
        the new weights and slots. None for a stack.
        """
        if self._call is None or self._job.members is not None:
            return None
        step = find_failed_step(self._call)
        return None if step is None else (step.model, step.inputs)

    def value_and_grad(
        self, X: Any, y: Any = None, *, sample_weight: Any = None
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Return the training loss of all rows, and its gradient w.r.t. the current weights.

        For optimizers outside of a trainer, such as L-BFGS of SciPy, and for checks. Assigning to
        `state.weights` sets the weights. The loss is the mean over the terms of all rows, whether
        they come in one array or in batches of any size; nothing changes but the names of columns
        and classes, as in `fit`. The model is in its training form: dropout and `mix` draw the
        numbers of the next step, the same in every call, and `batch_norm="train"` normalizes arrays
        by the statistics of all rows, an iterable by the statistics of each batch. Where rows are
        compared with each other, each batch of an iterable is a loss by itself. `clip_norm`, and
        other options of the update, have no effect.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            sample_weight: as in `fit`.

        Returns:
            The loss, a float, and `{name: gradient}`, an array of the shape and dtype of each
            weight, zeros for weights that do not influence the loss. In a stack, the loss is an
            array (members,), and gradients have the axis of members first. In a group of processes,
            they are of the rows of all processes.

        Raises:
            ValueError: as `fit`; no label counts; a fixed batch, or statistics of the rows of all
                processes, in a group of processes.
            NoGradientRule: an operator between the weights and the loss has no rule.

        Examples:
            >>> import numpy as np, onnx, onnxgrad as og
            >>> model = onnx.parser.parse_model('''
            ...     <ir_version: 9, opset_import: ["": 20]>
            ...     f (float[N,1] x) => (float[N,1] y) <float[1,1] w = {0.0}> { y = MatMul(x, w) }
            ... ''')
            >>> X = np.float32([[-1], [1]])
            >>> trainer = og.Trainer(model, "squared_error")
            >>> loss, gradients = trainer.value_and_grad(X, 3 * X)
            >>> loss, gradients["w"].tolist()
            (9.0, [[-6.0]])
            >>> trainer.state.weights = {"w": -gradients["w"] / 2}  # Newton's step
            >>> trainer.value_and_grad(X, 3 * X)[0]
            0.0
        """
        with shared_call(self._job.parallel) as sharing:
            data = as_dataset(X, y, sample_weight)
            recipe = Recipe.for_data(self._job, self.state, data, sharing=sharing)
            call = Fit(self, recipe, self._names, data)
            with pause_garbage_collection():
                result = call.loss_and_gradients()
            self._names = call.names
            return result

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
            batch_size: rows of one call of the runtime; the result does not depend on it, but for
                a loss that the file sums over the rows of a batch.

        Raises:
            ValueError: data that the model or the loss does not accept.
        """
        data = as_dataset(X, y, sample_weight)
        title = self._progress_title("evaluating")
        recipe = Recipe.for_data(self._job, self.state, data)
        return evaluate(recipe, self._names, data, batch_size, title)

    def predict(self, X: Any, *, batch_size: int | None = None) -> Any:
        """Return the predictions: the output that the loss reads, or a dict of several outputs.

        Args:
            X: as in `fit`; labels in it are not read: y of batches (X, y), and columns of the
                names of labels in `fit`.
            batch_size: rows of one call of the runtime.

        Raises:
            ValueError: data that the inputs do not accept.
        """
        data = Dataset(as_dataset(X).X)
        title = self._progress_title("predicting")
        recipe = Recipe.for_data(self._job, self.state, data)
        predictions = predict(recipe, self._names, data, batch_size, title)
        return predictions if len(predictions) > 1 else next(iter(predictions.values()))

    def _progress_title(self, title: str) -> str | None:
        """Return `title` for a progress bar; None if this trainer has no callback `Progress`."""
        callbacks = self._job.callbacks.callbacks
        return title if any(isinstance(c, Progress) for c in callbacks) else None

    def _repr_html_(self) -> str:
        last = self.state.history[-_SHOWN_RECORDS:]
        names = list(dict.fromkeys(name for entry in last for name in entry))
        cells = [[entry.get(name, "") for name in names] for entry in last]
        rows = [[f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in cells]
        trained = f"{len(self.trained)} weights train; {self.state.step} steps were made"
        return html_table(names, rows, [trained])


class Trainer(TrainerBase):
    """Trains a model.

    The loss is the mean over a batch of its terms, as PyTorch's `reduction="mean"`: of the elements
    of a regression, of the labels of a classification that are not ignored. Sample and class
    weights make it a weighted mean. The learning rate is constant, or a schedule by step.

    By default, tensors train that play the role of a weight: see `trainable`.

    Args:
        model: model, serialized model or path; never modified.
        loss: name of one of `onnxgrad.losses`, a `LossSpec` or `BaseLearningLoss`, a function
            `(op, prediction, label)` that writes the loss with the emitter, a second model
            (`LossModel`), or `{output: loss}` for several outputs. None: the model has an output
            that is the loss, called "loss" or the only one with a single number.
        optimizer: name of one of `onnxgrad.optimizers`, or one with options, such as
            `adamw(weight_decay=0.01)`.
        learning_rate: number, a constant rate; or one of `onnxgrad.schedules`, such as
            `cosine(1e-3, warmup=100)`. None: 0.001 for Adam and its kin, 0.01 for SGD and its kin,
            1 for Adadelta, 0.0001 for Lion.
        train: names of float tensors of the model, and patterns as "layer4.*", that train; they
            match aliases, too, and patterns choose among weights: see `trainable`, which shows
            the result. "last": the weights of the last layer. None: the weights that train by
            default.
        freeze: names and patterns of tensors that do not train.
        train_ranges: whether the scales of QuantizeLinear train, too: learned step size
            quantization (Esser et al. 2020). They begin with the values of the file, and stay
            positive.
        clip_norm: largest 2-norm of all gradients together; larger ones are scaled down to it.
        accumulate: number of micro-batches into which a batch is split, to save memory. The step
            equals the step of the whole batch, up to rounding, if the loss is a mean or a sum over
            rows, also a sum in the file. Where rows are compared with each other or a model
            normalizes over them, the step differs, and `fit` warns, naming the node. Micro-batches
            have equal numbers of rows, so that there may be more; with `batch_norm="train"`, a
            short or prime batch is not cut into single rows. A fixed batch of the file, whose rows
            are not proven to be independent, is a micro-batch. With 1, large batches of arrays are
            computed in parts on a CPU, where the gradient is proven to be the sum over rows.
        batch_norm: "frozen" normalizes by the stored statistics, "train" by the statistics of the
            batch, and updates the stored ones.
        dropout: `{pattern: p}`, zeroes elements with probability p behind the nodes whose name or
            output matches, in training only. Nodes that `insert_dropout` and `add_lora` inserted
            have the rates that were given there, unless a pattern matches them.
        mix: `mixup(alpha=0.2)` or `cutmix(alpha=1.0)`: rows of each batch are mixed with each
            other, in training only.
        class_weight: `{class: weight}` or an array, for a loss with class indices; "balanced":
            inversely proportional to their frequencies in the rows that the last `fit` trained
            on, also in `evaluate` and `partial_fit`, which need one before. Several losses: by
            output, "balanced" for some or all.
        classes: the names of all classes in the order of the model's output, if labels and
            `class_weight` are names: texts, or numbers such as 3, 5, 8; empty: the names in
            the file, if they are texts. The trained model stores them.
        loss_options: of a loss given by name: `{"ignore_index": 0}`, `{"ignore_nan": True}`. Each
            loss that is a name or a function has `{"weighted_mean": False}`: the sum of the losses
            times sample weights is divided by the same number as without them (the count of labels,
            or the sum of their class weights), not by the sum of the sample weights. Sample weights
            may then be negative, and a weight below 0 makes the loss of its row larger. Metrics
            refuse negative weights.
        loss_weights: `{output: factor}` for a loss of several outputs.
        metrics: names and objects of `onnxgrad.metrics`, functions `(prediction, label)`, metrics
            of torchmetrics; `{output: list}` for a loss of several outputs.
        callbacks: objects such as `EarlyStopping(...)` and `Checkpoint(...)`, see `Callback`.
        batch_axes: `{input: axis}`, the axis of an array along which its rows are; None: it has
            none, and goes into every batch whole. Otherwise read from the declared shapes.
        carry: `{input: output}`: the input gets the value of the output in the batch before. In
            the first batch of an epoch, and in a batch after None in an iterable or `Reader`, it
            gets the value in the data. The gradient does not pass: truncated backpropagation
            through time, over the steps of a batch, which `unroll` adds to a model of one. Needs
            `shuffle=False`, an iterable of batches, or a reader of sequences.
        recompute: the values that the backward pass computes again instead of keeping them, to
            save memory; the weights are the same up to rounding. "none": no value. "cheap": results
            of normalizations, and of nodes that `partition` calls cheap. "all": the forward pass in
            segments, also products and convolutions, as `torch.utils.checkpoint`, and attention
            over long sequences by blocks of queries. A deep transformer gains most; where the
            gradient of one convolution needs more memory than all activations, "all" needs more.
        precision: of a model with floats of 16 bits, float16 or bfloat16. "auto": "float32" on the
            CPU, whose kernels for them convert each operand, and "mixed" on a GPU. In both, weights
            and optimizer slots are float32 while they train; "float32" computes all else in it,
            too, and "mixed" computes gradients in the dtypes of the model, with a loss scale that
            adapts: a step whose gradients are not finite is skipped, and counted in the history.
            The trained model has the dtypes of the given one, and evaluations and predictions use
            its rounded weights: `rounding` gives the errors. "file": weights and slots have the
            dtypes of the model; small updates are rounded to zero. Models without floats of
            16 bits compute in their dtypes, float64 in float64.
        device: "cpu", "cuda", "cuda:1", or another execution provider of onnxruntime by its name,
            such as "webgpu"; a pair (name, options) has options of the provider. Some runs on other
            providers than CPU, CUDA and TensorRT are compared with the CPU, and nodes that fail or
            differ are computed by the CPU.
        seed: of the order of the rows, dropout and the split of validation data.
        parallel: how several processes train this model together, each of which calls `fit`: see
            `DataParallel`. None: with the defaults of `DataParallel`, in an initialized group of
            `torch.distributed` or MPI. False: each process trains a separate model.

    Attributes:
        state: the `TrainState`: weights, slots, buffers, step, epoch and history.
        model: the trained model, in its inference form.
        trained: the names of the weights that train.
        precision: "float32", "mixed" or "file", in which the model trains.
        metrics: the metrics, of all outputs.
        history: an entry an epoch: `step`, `epoch`, `loss`, `learning_rate`, and with validation
            data `validation_loss` and metrics, as `validation_accuracy`.
        rounding: the errors of rounding the weights to the 16 bits of the file.
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
        data = as_dataset(X, y)
        call = Fit(self, Recipe.for_data(self._job, self.state, data), self._names, data)
        call.balance_classes()
        return call.recipe.step_models()

    # -- results ------------------------------------------------------------------------------

    @property
    def model(self) -> ModelProto:
        """The model with the current weights and statistics, in its inference form.

        Raises:
            ValueError: a weight beyond the range of the 16 bits that it has in the file.
        """
        values = self._job.values_for_file(self.state)
        return fill_weights(export_model(self._job.proto, values, self._names), values)

    def save(self, path: str | os.PathLike) -> None:
        """Write the trained model, in its inference form, to a file.

        Large weights are written one by one, so that memory need not hold the whole file.

        Raises:
            ValueError: as `model`; an existing file is unchanged.
            OSError: the file cannot be written; an existing file is unchanged.
        """
        values = self._job.values_for_file(self.state)
        save_filled(export_model(self._job.proto, values, self._names), values, path)
