"""What `Trainer` and `TrainerStack` have in common: their arguments, and the calls of `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto

from onnxgrad.autodiff.recompute import RECOMPUTE
from onnxgrad.checks import check_choice, check_count, check_positive
from onnxgrad.data.columns import read_names
from onnxgrad.estimator import NotFittedError
from onnxgrad.graph.emit import garbage_kept
from onnxgrad.losses.objectives import Loss
from onnxgrad.metrics.base import Metric
from onnxgrad.model import weights as constants
from onnxgrad.model.notes import ADAPTERS, HEAD, adapter_dropout, read_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.optimizers import Optimizer, select as select_optimizer
from onnxgrad.parallel import DataParallel
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate
from onnxgrad.training.arguments import refuse_unknown, select_rate
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.class_weights import weights_by_number
from onnxgrad.training.data import Dataset, as_dataset, held_out_data
from onnxgrad.training.diagnose import find_failed_step
from onnxgrad.training.equality import BuildCache
from onnxgrad.training.evaluate import evaluate, predict
from onnxgrad.training.fit import Fit
from onnxgrad.training.identity import without_weights
from onnxgrad.training.loop import Loop
from onnxgrad.training.mixing import Mix, check_mix
from onnxgrad.training.modes.ranges import with_ranges
from onnxgrad.training.modes.stored_integers import pairs
from onnxgrad.training.objective import TrainingLoss
from onnxgrad.training.output_metrics import select_metrics
from onnxgrad.training.parameters.choice import separated_choice
from onnxgrad.training.parameters.patterns import as_list
from onnxgrad.training.precision import PRECISIONS, narrow_dtypes, resolved, rounding_text
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.settings import RUNNING, Settings
from onnxgrad.training.sharing import in_group
from onnxgrad.training.state import TrainState, Values

# What a trainer takes: the page of the API on training says it in words.
OutputLossLike: TypeAlias = str | Loss | Callable[..., Any]
LossLike: TypeAlias = OutputLossLike | TrainingLoss | ModelLike | Mapping[str, OutputLossLike]
MetricLike: TypeAlias = str | Metric | Callable[..., Any]
RateLike: TypeAlias = float | LearningRate
ClassWeights: TypeAlias = str | Mapping[Any, float] | ArrayLike


class TrainerBase(Settings):
    """Trains one model, or the members of a stack; the arguments are those of `Trainer`."""

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
        self.loss, self.loss_options, self.loss_weights = loss, loss_options, loss_weights
        self.optimizer = select_optimizer(optimizer)
        self.learning_rate = select_rate(learning_rate, self.optimizer)
        if clip_norm is not None:
            check_positive("clip_norm", clip_norm, infinite=True)
        self.clip_norm, self.accumulate = clip_norm, check_count("accumulate", accumulate)
        self.batch_norm = check_choice("batch_norm", batch_norm, ("frozen", "train"))
        self.batch_axes, self.carry = dict(batch_axes or {}), dict(carry or {})
        self.recompute = check_choice("recompute", recompute, tuple(RECOMPUTE))
        self.metrics_by_output = select_metrics(metrics)
        self.metrics = [m for listed in self.metrics_by_output.values() for m in listed]
        self.callbacks, self.parallel, self.mix = Callbacks(callbacks), parallel, check_mix(mix)
        self.device, self.seed = Device.of(device).check(), check_count("seed", seed, 0)
        with garbage_kept():
            self.proto, self.trained = separated_choice(
                read(model), train, freeze, statistics=batch_norm == "train"
            )
        check_choice("precision", precision, PRECISIONS)
        self.precision = resolved(precision, self.proto, self.device)
        self.dropout = adapter_dropout(self.proto) | dict(dropout or {})
        self._take_names(classes, class_weight)
        # a user who asks for weights of a quantized model knows that the others stay
        tuned = read_note(self.proto, ADAPTERS) or read_note(self.proto, HEAD)
        rounded = {pair.weight for pair in pairs(self.proto)}
        named = train is not None or train_ranges or bool(tuned)
        self.straight_through = named or not rounded.isdisjoint(self.trained)
        if train_ranges:
            self.proto, changes = with_ranges(self.proto, as_list(freeze))
            self.trained = [*self.trained, *changes]
        self._take_weights()
        self.members, self.optimizers, self.learning_rates = None, [], []
        self.setup: Fit | None = None  # the last one that trained
        self.built = BuildCache()

    def _take_names(self, classes: Sequence[Any], class_weight: Any) -> None:
        """Keep the names of columns and classes, and weights of classes by their numbers."""
        self.names = read_names(self.proto)
        if classes:
            self.names.classes = list(classes)
        self.classes = list(self.names.classes)
        self.class_weight = weights_by_number(class_weight, self.names.classes)

    def _take_weights(self) -> None:
        """Let the state have the weights of the model, in the dtypes in which they train."""
        refs = {ref.name: ref for ref in constants.constant_refs(self.proto)}
        self.constants = set(refs)
        self.narrow = narrow_dtypes(refs)
        self.proto, self.digest = without_weights(self.proto, self.trained)
        begun = {name: refs[name].array() for name in self.trained}
        self.state = TrainState(seed=self.seed)
        self.state.values = Values({n: self._in_training(a) for n, a in begun.items()})

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
                be shorter. None: 32, or those of a model with a static
                batch of several; 1 where a file of one row carries a state.
            shuffle: whether the rows are ordered anew for every epoch, by the trainer's `seed`.
            resume: folder of a `Checkpoint`: go on where its newest one was written, with equal
                arguments and data; the result is the same bit for bit. `epochs` may be others
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
        with self._only_call(), in_group(self):
            held_out = held_out_data(validation)
            data = as_dataset(X, y, sample_weight)
            if batch_size is not None:
                check_count("batch_size", batch_size)
            call = Fit(self, data, batch_size, held_out, self.sharing)
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
        with self._only_call(), in_group(self):
            if batch_size is not None:
                check_count("batch_size", batch_size)
            data = as_dataset(X, y, sample_weight)
            call = Fit(self, data, batch_size, None, self.sharing, further=True)
            with garbage_kept():
                loop = call.begin(1, shuffle)
            return self._run(call, loop)

    @contextmanager
    def _only_call(self) -> Iterator[None]:
        """Refuse another call of `fit` or `partial_fit` until the block ends, of any thread."""
        own = object()
        if vars(self).setdefault(RUNNING, own) is not own:  # which is atomic
            raise RuntimeError("fit is running: no other call can begin before it ends")
        try:
            yield
        finally:
            del vars(self)[RUNNING]

    def _run(self, call: Fit, loop: Loop) -> Self:
        """Run a loop; its state becomes that of the trainer, unless it ends before a step."""
        before, self.state, self.setup = self.state, loop.state, call
        if loop.runner.holds_all and before is not loop.state and not self.averages:
            # in memory once: those are equal
            before.values = replace(before.values, weights={})
        try:
            loop.run()
        finally:
            loop.state.end()
            call.end()
            self.names = call.names if loop.moved or loop.state.step else self.names
            if loop.moved and not call.further and (text := rounding_text(self.rounding)):
                logger.info(text)
            if not loop.moved and not loop.state.step:
                self.state = before
                if not self.averages:
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

        The model returns the losses and the new weights and slots. None for a stack.
        """
        if self.setup is None or self.members is not None:
            return None
        step = find_failed_step(self.setup.recipe, self._loop)
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
