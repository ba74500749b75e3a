"""What one call of a `Trainer` sets up: its data, its loss, the step and the loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.autodiff.quantized import straight_through_warning
from onnxgrad.data.torch_data import draws_its_order
from onnxgrad.errors import argument, named
from onnxgrad.graph.shapes import dims
from onnxgrad.losses.objectives import TrainingLoss as OutputLosses, training_loss
from onnxgrad.losses.other_models import LossModel
from onnxgrad.model import weights as constants
from onnxgrad.model.emptied import read_elsewhere
from onnxgrad.optimizers import Chain, Optimizer, clip_by_global_norm
from onnxgrad.schedules.epochwise import BaseLearningRate
from onnxgrad.training.arguments import check_choice, start_learning_rate
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.callbacks.checkpoint import newest
from onnxgrad.training.causes import cause_in_fit
from onnxgrad.training.compiled import Compiled, compiled_step
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluation import Evaluator
from onnxgrad.training.failed import find_failed_step
from onnxgrad.training.fields import Fields
from onnxgrad.training.holdout import Split, balanced, held_out_share, label_shapes
from onnxgrad.training.identity import Identity, identity_of, require_equal
from onnxgrad.training.loop import Loop
from onnxgrad.training.model_loss import loss_output
from onnxgrad.training.modes import inference_form
from onnxgrad.training.objective import Objective, Plan, TrainingLoss, build_objective
from onnxgrad.training.rates import ByEpoch, ByStep, Rates
from onnxgrad.training.settings import Settings
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.state import TrainState, Values
from onnxgrad.training.step.accumulate import build_accumulating_step
from onnxgrad.training.step.build import Step, StepOptions, build_gradients, build_step
from onnxgrad.training.step.exchange import Across
from onnxgrad.training.step.update import build_update


class Setup:
    """The data of one call, and what is built for them.

    Args:
        trainer: the trainer.
        data: those to train on or to evaluate.
        batch_size: rows of a step, or of a call of an evaluation; None: those of a model with a
            static batch, or else `default_size`.
        held_out: validation data, or the share of the rows that are held out; None for none.
        default_size: see `batch_size`.
        shown: the title of a progress bar of evaluations and predictions; None for none.
        sharing: the group of processes that train together; None: this process alone.
        fits: whether a training begins, whose labels say which weights of classes are balanced.
    """

    evaluates: Callable[..., Evaluator] = Evaluator

    def __init__(
        self,
        trainer: Settings,
        data: Dataset,
        batch_size: int | None,
        held_out: Dataset | float | Split | None = None,
        default_size: int = 32,
        shown: str | None = None,
        sharing: Sharing | None = None,
        fits: bool = False,
    ) -> None:
        self.trainer, self.data, self.held_out, self.sharing = trainer, data, held_out, sharing
        self.batch_size, self.default_size, self.shown = batch_size, default_size, shown
        self.names = trainer.names.copy()
        self.compiled: Compiled | None = None  # of the loop
        self.current_loop: Loop | None = None
        self.validated: BatchSource | None = None  # validation data of the loop
        self.buffers: dict[str, np.ndarray] = {}  # initial ones of the loop
        self.fits = fits
        both = (data, held_out) if isinstance(held_out, Dataset) else (data,)
        moved, axes = trainer.moved, max(d.weight_axes for d in both)
        self.weight_axes = 2 if axes and moved else axes  # of sample weights; 0 for none
        self.weighted = self.weight_axes > 0
        loss = self._loss()
        self.plan = Plan(
            loss,
            "" if loss is not None else loss_output(trainer.proto),
            batch_norm=trainer.batch_norm,
            dropout=trainer.dropout,
            carry=trainer.carry,
            seed=trainer.seed,
            exempt=frozenset(moved),
            straight_through=trainer.straight_through,
            across=None if sharing is None else sharing.normalized,
        )

    def _loss(self) -> TrainingLoss | None:
        """Return what writes the loss; None: the model has an output that is one."""
        trainer, loss = self.trainer, self.trainer.loss
        whole = loss is None or hasattr(loss, "write") or _is_model(loss)
        for name in ("class_weight", "loss_options", "loss_weights"):
            if whole and getattr(trainer, name) is not None:
                kind = "computed by a model" if loss is None else f"a {type(loss).__name__}"
                raise ValueError(
                    f"{named(name)} has no effect on a loss that is {kind}: leave it out"
                )
        if loss is None or hasattr(loss, "write"):
            return loss
        if _is_model(loss):
            return LossModel(loss)
        return training_loss(
            loss,
            options=trainer.loss_options,
            loss_weights=trainer.loss_weights,
            class_weight=self._class_weight(),
            label_shapes=self.label_shapes,
            weight_shape=(0,) * self.weight_axes or None,
        )

    @cached_property
    def label_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of labels, as far as they are known before batches are read."""
        return label_shapes(self.data, self.trainer.proto)

    @cached_property
    def balanced(self) -> dict[int, float] | None:
        """The weights that balance the classes of `fit`, if they are asked for and known."""
        trainer = self.trainer
        if not isinstance(trainer.class_weight, str):
            return None
        check_choice("class_weight", trainer.class_weight, ["balanced"])
        if not self.fits:
            return trainer.state.balanced
        return balanced(self.data.y, (trainer.loss_options or {}).get("ignore_index"))

    def _class_weight(self) -> Any:
        weight = self.trainer.class_weight
        return self.balanced if isinstance(weight, str) else weight

    # -- training -----------------------------------------------------------------------------

    def objective(self) -> Objective:
        """Return the objective of a step."""
        trainer = self.trainer
        objective = build_objective(trainer.proto, trainer.trained, self.plan, self.weighted)
        if trainer.digest is not None:  # those that the loss does not reach stay constants
            read_elsewhere(objective.weights, lambda name: trainer.state.weights[name])
        return objective

    def _optimizer(self) -> Optimizer:
        """Return the optimizer, behind the clipping of the norm of all gradients."""
        own, norm = self.trainer.optimizer, self.trainer.clip_norm
        return own if norm is None else Chain((clip_by_global_norm(norm), own))

    def step_models(self) -> tuple[ModelProto, ModelProto]:
        """Return the two halves of a step as models: the gradients, and the update."""
        gradients = build_gradients(self.objective().require_labels())
        outputs = {y.name for y in gradients.graph.output}
        weights = {
            name: (w.shape, w.dtype)
            for name, w in self.trainer.state.weights.items()
            if f"{name}_grad" in outputs
        }
        return gradients, build_update(weights, self._optimizer())

    def step(
        self,
        objective: Objective,
        norms: bool | None = None,
        in_place: bool = True,
        blocks: bool = True,
        across: Across | None = None,
    ) -> Step:
        """Return the step, written into the graph of the objective.

        It returns the norms of gradients if `norms`; None: if a callback asks for them. With
        `in_place`, it may be only its first half: see `Step.updates`. `across` is how others share
        it; None: it is that of the rows of this process.
        """
        trainer, optimizer = self.trainer, self._optimizer()
        norms = trainer.callbacks.gradient_norms if norms is None else norms
        on_cpu = trainer.device.kind == "cpu"
        in_place = in_place and on_cpu and (self.sharing is None or across is not None)
        options = StepOptions(norms, blocks and on_cpu, trainer.recompute, in_place, across)
        if trainer.accumulate == 1:
            return build_step(objective, optimizer, options)
        if trainer.carry:
            raise ValueError("carry and accumulate: micro-batches have no state to carry")
        return build_accumulating_step(self.objective, optimizer, trainer.accumulate, options)

    def named_step(self, objective: Objective) -> Step:
        """Return the step whose inputs are the weights and slots themselves, none joined."""
        return build_step(objective, self._optimizer(), StepOptions(blocks=False, packed=0))

    def loop(
        self, epochs: int, shuffle: bool, resume: str | os.PathLike | None, further: bool = False
    ) -> Loop:
        """Return the loop of a training; its state is on the device.

        With `further`, it is the trainer's own state, and the epochs follow those before.
        """
        trainer, shared = self.trainer, self.sharing
        if shared is not None:
            shared.check_call(self, epochs, shuffle, resume is not None, further)
        weight = self._class_weight() if isinstance(self.plan.loss, OutputLosses) else None
        compiled = self.compiled = compiled_step(self, self.label_shapes, weight)
        objective = compiled.objective
        buffers = [(str(b.name), b.const_value) for b in objective.buffers]
        self.buffers = {name: np.array(v.numpy()) for name, v in buffers if v is not None}
        fields = Fields(objective, trainer.batch_axes)
        self._check_weighted(objective, fields)
        source, held_out = self._sources(fields, shuffle)
        if held_out is not None:
            values = self.buffers | trainer.evaluated()
            self.evaluator.check_metrics(values, held_out, trainer.metrics_by_output)
        if further:
            state = trainer.state
        else:
            begun = partial(self._state, identity_of(trainer, source, shuffle), resume)
            state = begun() if shared is None or resume is None else shared.from_first(begun)
        first, callbacks = state.epoch if further else 0, trainer.callbacks
        if shared is not None:
            shared.check(trainer, state, identity_of(trainer, source, shuffle), source, held_out)
            source = shared.source(source, fields.axes)
            callbacks = shared.callbacks(callbacks)
            if held_out is not None:
                held_out = shared.source(held_out, self.evaluator.fields.axes)
        self.validated = held_out
        fixed = not further or source.batch_size == (self.batch_size or self.default_size)
        runner = compiled.runner(self, source, fields, fixed)
        step = runner.step
        rates = self._rates(state, None if further else source.batches, epochs)
        step.warn(stacklevel=3)
        if step.rounding:
            warnings.warn(straight_through_warning(step.rounding), stacklevel=3)
        if further:  # nothing is refused from here on
            state.begin_epoch(self.buffers)
        state.begin(runner, further)
        self.current_loop = Loop(
            trainer,
            state,
            runner,
            rates,
            source,
            callbacks,
            order=lambda s: np.random.default_rng([s.seed, s.epoch]) if shuffle else None,
            last_epoch=first + epochs,
            resumable=True,
            evaluate=None if held_out is None else lambda: self._validate(held_out),
            explain=self._explain,
        )
        return self.current_loop

    def _explain(self, loop: Loop) -> str:
        """Return why the loop ended."""
        trainer, failed = self.trainer, partial(find_failed_step, self, loop)
        read, values = self.plan.read_outputs(trainer.proto), trainer.evaluated()
        return cause_in_fit(loop, trainer.file, read, failed, self.evaluator, values)

    def _sources(self, fields: Fields, shuffle: bool) -> tuple[BatchSource, BatchSource | None]:
        """Return the batches to train on, and those that are held out."""
        source, trainer = self._source(self.data, fields), self.trainer
        if trainer.carry and shuffle and source.shuffles:
            raise ValueError(
                f"carry passes a state from batch to batch, and {argument('shuffle', True)} "
                f"reorders the rows: pass {argument('shuffle', False)}, or an iterable of batches"
            )
        if isinstance(self.held_out, Dataset):
            return source, self._source(self.held_out, self.evaluator.fields)
        if self.held_out is None:
            return source, None
        if trainer.carry:
            raise ValueError("carry needs the order of the rows: pass validation data, not a share")
        both = held_out_share(source, self.held_out, trainer.seed)
        for part in both:
            fields.check_rows(part.rows)
        return both

    def _check_weighted(self, objective: Objective, fields: Fields) -> None:
        """Raise `ValueError` for weights that are unknown, or of rows that are not first."""
        if isinstance(self.trainer.class_weight, str) and self.balanced is None:
            raise ValueError(
                f"{argument('class_weight', 'balanced')} is computed from the labels of fit: call "
                "it first, or pass the weights of the classes"
            )
        symbol = fields.row_axes.symbol
        for name, prediction in objective.predictions.items():
            shape = dims(prediction) or ()
            elsewhere = symbol in shape[1:] and shape[0] != symbol
            if elsewhere and self.data.sample_weight is not None and self.weight_axes == 1:
                raise ValueError(
                    f"{named('sample_weight')}: the rows of the output {name!r}, {shape}, are not "
                    "on its first axis: pass a weight for each label, in its shape, or batch_axes"
                )

    def _source(self, data: Dataset, fields: Fields) -> BatchSource:
        """Return the source of batches; one batch for all rows, if they are fewer than its size."""
        fields.names = self.names
        return data.source(fields, self.batch_size or fields.fixed_rows or self.default_size)

    def _validate(self, held_out: BatchSource) -> dict[str, Any]:
        """Return the entries of the history for validation data."""
        trainer = self.trainer
        shared = None if self.sharing is None else self.sharing.group
        results = self.evaluator.evaluate(
            trainer.evaluated(), held_out, trainer.metrics_by_output, shared
        )
        return {f"validation_{name}": value for name, value in results.items()}

    def _rates(self, state: TrainState, batches: int | None, epochs: int) -> Rates:
        rate = self.trainer.learning_rate
        if isinstance(rate, BaseLearningRate):
            return ByEpoch(start_learning_rate(rate), state.losses)
        unseen = [m for m in rate.monitors if m.startswith("validation_")]
        if unseen and self.held_out is None:
            given = argument("validation")
            remedy = f"pass {given} data" if self.fits else "partial_fit has none, call fit"
            raise ValueError(f"the learning rate depends on {unseen}: {remedy}")
        if batches is not None:
            rate = rate.over(batches * epochs)
        rate.rate(0, state.schedule)  # raises if it needs the number of steps
        return ByStep(rate, state)

    def _state(self, identity: Identity, resume: str | os.PathLike | None) -> TrainState:
        """Return a new state with the current weights, or that of a checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is of another training.
        """
        old = self.trainer.state
        found = None if resume is None else newest(resume, TrainState.load)
        if found is not None:
            path, state = found
            require_equal(state.identity, identity, path)
            if draws_its_order(self.data.X):
                warnings.warn(
                    "the DataLoader draws an order of its own, which a checkpoint cannot restore: "
                    "the resumed training sees other batches than an uninterrupted one. Pass its "
                    f"dataset, or {argument('shuffle', False)}",
                    stacklevel=4,
                )
            state.stop_reason, state.balanced = None, self.balanced
            return state
        if resume is not None and not self.trainer.callbacks.writes_to(resume):
            raise FileNotFoundError(
                f"{argument('resume', os.fspath(resume))} holds no checkpoint: leave it out to "
                "begin anew, or pass Checkpoint of that folder among the callbacks"
            )
        state = TrainState(seed=self.trainer.seed, identity=identity, balanced=self.balanced)
        now = {name: old.buffers.get(name, array) for name, array in self.buffers.items()}
        state.values = Values(old.weights, buffers=now)
        return state

    # -- evaluation ---------------------------------------------------------------------------

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the model in its inference form."""
        trainer = self.trainer
        proto = inference_form(trainer.proto)
        # statistics that train for the first time are not in the state yet
        changing = {*trainer.evaluated(), *self.buffers}
        names = {ref.name for ref in constants.constant_refs(proto)} & changing
        return self.evaluates(
            proto,
            sorted(names),
            self.plan,
            self.weighted,
            trainer.device,
            trainer.batch_axes,
            self.shown,
        )

    def evaluate(self) -> dict[str, Any]:
        """Return the loss and the metrics of the data."""
        self._check_weighted(self.evaluator.described, self.evaluator.fields)
        source, values = self._source(self.data, self.evaluator.fields), self.trainer.evaluated()
        results = self.evaluator.evaluate(values, source, self.trainer.metrics_by_output)
        if not np.isfinite(results["loss"]):
            cause = self.evaluator.cause(values)
            warnings.warn(f"the loss is {results['loss']}: {cause}", stacklevel=3)
        return results

    def predict(self) -> Any:
        """Return the predictions for the data."""
        source = self._source(self.data, self.evaluator.fields.without_labels())
        return self.evaluator.predict(self.trainer.evaluated(), source)


def _is_model(loss: Any) -> bool:
    """Return whether a loss is an ONNX model, or the path of one."""
    path = isinstance(loss, str) and loss.endswith(".onnx")
    return path or isinstance(loss, (ModelProto, bytes, os.PathLike))
