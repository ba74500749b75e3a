"""`TrainerBase`: the arguments, calls and results that `Trainer` and `TrainerStack` share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto

from onnxgrad.errors import named
from onnxgrad.estimator import NotFittedError
from onnxgrad.graph.emit import garbage_kept
from onnxgrad.losses.objectives import Loss
from onnxgrad.metrics.base import Metric
from onnxgrad.model.read import ModelLike
from onnxgrad.optimizers import Optimizer
from onnxgrad.parallel import DataParallel
from onnxgrad.reporting import html_table, logger
from onnxgrad.schedules.base import LearningRate
from onnxgrad.training.arguments import ARGUMENTS, check_arguments, refuse_unknown, select_rate
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.data import Dataset, as_dataset, held_out_data
from onnxgrad.training.diagnose import find_failed_step
from onnxgrad.training.evaluate import evaluate, predict
from onnxgrad.training.fit import Fit
from onnxgrad.training.job import begin_job
from onnxgrad.training.loop import Loop
from onnxgrad.training.mixing import Mix
from onnxgrad.training.objective import TrainingLoss
from onnxgrad.training.precision import rounding_text
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.sharing import shared_call
from onnxgrad.training.state import TrainState, Values

# types of arguments of a trainer, explained on the page of the API on training
OutputLossLike: TypeAlias = str | Loss | Callable[..., Any]
LossLike: TypeAlias = OutputLossLike | TrainingLoss | ModelLike | Mapping[str, OutputLossLike]
MetricLike: TypeAlias = str | Metric | Callable[..., Any]
RateLike: TypeAlias = float | LearningRate
ClassWeights: TypeAlias = str | Mapping[Any, float] | ArrayLike

_RUNNING = "_running_call"  # attribute of a trainer while a call of it trains
_SHOWN_RECORDS = 10  # of the history, in a notebook


class TrainerBase:
    """Trains one model, or the members of a stack; `Trainer` explains the arguments."""

    state: TrainState

    @refuse_unknown
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
        device: str = "cpu",
        seed: int = 0,
        parallel: DataParallel | bool | None = None,
    ) -> None:
        with garbage_kept():
            self._job, self._names, weights = begin_job(locals())
        self.state = TrainState(seed=self._job.seed)
        self.state.values = Values(weights)
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
        """Replace these fields of the job, for the next calls."""
        self._job = replace(self._job, **fields)

    def _change_rate(self, rate: RateLike | None) -> None:
        """Replace the learning rate, for the next calls; None: the usual one of the optimizer."""
        self._change_job(learning_rates=[select_rate(rate, self._job.optimizer)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy: another state and job, without a call and its data."""
        new = {"state": self.state.copy(), "_job": self._job.anew(), "_call": None}
        return {name: value for name, value in (vars(self) | new).items() if name != _RUNNING}

    @property
    def trained(self) -> list[str]:
        """The names of the weights that train."""
        return list(self._job.trained)

    @property
    def precision(self) -> str:
        """The precision in which the model trains: "float32", "mixed" or "file"."""
        return self._job.precision

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, of all outputs."""
        return self._job.every_metric

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

        A second call begins another training with the weights of the first, the averages if its
        optimizer averages weights: slots, the step number, the schedule and the history begin anew.

        Args:
            X: array (rows, ...), a table, a dict of these by input; a path of Parquet files, a
                dataset; or an iterable of batches, `(X, y)`, `(X, y, sample_weight)` or dicts.
            y: labels in the shape of the label input; for several a dict, by output. Names of
                columns of `X`, also where its batches are tables or dicts.
            sample_weight: (rows,); or one for each term of the loss, in the shape of the labels; or
                the name of a column of `X`.
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
        with self._only_call(), shared_call(self._job.parallel) as sharing:
            held_out = held_out_data(validation)
            data = as_dataset(X, y, sample_weight)
            check_arguments({"batch_size": batch_size, "epochs": epochs})
            recipe = Recipe.of(self._job, self.state, data, held_out, sharing)
            call = Fit(self, recipe, self._names, data, batch_size, held_out)
            with garbage_kept():
                loop = call.begin(index(epochs), shuffle, resume)
            return self._run_loop(call, loop)

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
        with self._only_call(), shared_call(self._job.parallel) as sharing:
            check_arguments({"batch_size": batch_size})
            data = as_dataset(X, y, sample_weight)
            recipe = Recipe.of(self._job, self.state, data, None, sharing)
            call = Fit(self, recipe, self._names, data, batch_size, further=True)
            with garbage_kept():
                loop = call.begin(1, shuffle)
            return self._run_loop(call, loop)

    @contextmanager
    def _only_call(self) -> Iterator[None]:
        """Refuse another call of `fit` or `partial_fit` until the block ends, of any thread."""
        own = object()
        if vars(self).setdefault(_RUNNING, own) is not own:  # which is atomic
            raise RuntimeError("fit is running: no other call can begin before it ends")
        try:
            yield
        finally:
            del vars(self)[_RUNNING]

    def _run_loop(self, call: Fit, loop: Loop) -> Self:
        """Run a loop; the trainer gets its state, unless the loop ends before a step."""
        before, self.state, self._call = self.state, loop.state, call
        averages = self._job.averages
        if loop.runner.holds_all and before is not loop.state and not averages:
            # both states have equal weights, of which memory holds one copy
            before.values = replace(before.values, weights={})
        try:
            loop.run()
        finally:
            loop.state.end()
            call.end()
            self._names = call.names if loop.moved or loop.state.step else self._names
            if loop.moved and not call.further and (text := rounding_text(self.rounding)):
                logger.info(text)
            if not loop.moved and not loop.state.step:
                self.state = before
                if not averages:
                    before.values = replace(before.values, weights=loop.state.weights)
        return self

    @property
    def _last_loop(self) -> Loop:
        """The loop of the last call.

        Raises:
            NotFittedError: nothing was trained yet.
        """
        if self._call is None or self._call.loop is None:
            raise NotFittedError("nothing was trained yet by this object: call fit first")
        return self._call.loop

    @property
    def progress(self) -> FitProgress:
        """The progress of the training that runs or ran last."""
        return self._last_loop.progress

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of the history: one an epoch, and one for each other evaluation."""
        return self.state.history

    @property
    def rounding(self) -> dict[str, float]:
        """The errors of rounding weights to the file's 16 bits, `{"largest": ..., "mean": ...}`.

        They are absolute differences of elements; empty for a model without weights of 16 bits, or
        whose weights do not train in float32.
        """
        return self._job.rounding(self.state)

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The 2-norm of the gradient of each weight in the last step."""
        return dict(self._last_loop.runner.norms)

    def failed_step(self) -> tuple[ModelProto, dict[str, np.ndarray]] | None:
        """Return the model of the step that gave NaN or infinity, and its inputs; None if none did.

        The model returns the losses and the new weights and slots. None for a stack.
        """
        if self._call is None or self._job.members is not None:
            return None
        step = find_failed_step(self._call.recipe, self._last_loop, self._call.file)
        return None if step is None else (step.model, step.inputs)

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
        return evaluate(self._job, self.state, self._names, data, batch_size, title)

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
        title = self._progress_title("predicting")
        predictions = predict(self._job, self.state, self._names, data, batch_size, title)
        return predictions if len(predictions) > 1 else next(iter(predictions.values()))

    def _progress_title(self, title: str) -> str | None:
        """Return `title` for a progress bar, None if no callback is a `Progress`."""
        callbacks = self._job.callbacks.callbacks
        return title if any(isinstance(c, Progress) for c in callbacks) else None

    def _repr_html_(self) -> str:
        last = self.state.history[-_SHOWN_RECORDS:]
        names = list(dict.fromkeys(name for entry in last for name in entry))
        rows = [[_cell_text(entry.get(name, "")) for name in names] for entry in last]
        trained = f"{len(self.trained)} weights train; {self.state.step} steps were made"
        return html_table(names, rows, [trained])


def _cell_text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
