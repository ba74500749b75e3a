"""One call of `fit`: from data and arguments to objective, step, runner and loop."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from onnxgrad.autodiff.straight_through import straight_through_warning
from onnxgrad.data.columns import Names
from onnxgrad.data.torch_data import has_random_sampler
from onnxgrad.errors import argument, named
from onnxgrad.losses.info import LossInfo
from onnxgrad.parallel.process_groups import SingleProcess
from onnxgrad.reporting import frames_inside, logger
from onnxgrad.schedules.base import MemberRates, Rates, Schedule
from onnxgrad.schedules.compose import Warmup
from onnxgrad.schedules.curves import InverseSqrt
from onnxgrad.training.batches import BatchSource, Split, hold_out
from onnxgrad.training.callbacks.checkpoint import newest_checkpoint
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.class_weights import balanced_class_weights, balanced_outputs
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import Evaluator, cached_evaluator, check_class_and_sample_weights
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.frozen_cache import CachePlace, cache_frozen_values, cut_for_source
from onnxgrad.training.identity import Identity, identity_of, require_same_training
from onnxgrad.training.job import training_notes
from onnxgrad.training.loop import Loop
from onnxgrad.training.loss_gradient import ALL_ROWS, LossGradient
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.run.runner import Runner, StepCache, micro_batches
from onnxgrad.training.state import StateValues, TrainState
from onnxgrad.training.step.gradients import INITIAL
from onnxgrad.training.step.inputs import Batch


class Fit:
    """One call of `fit` or `partial_fit`, which keeps no reference to the data after its end.

    Args:
        trainer: the trainer that callbacks get.
        recipe: the job and the state of the trainer, and facts of the data.
        names: the names of columns and classes in earlier calls.
        data: the rows to train on.
        batch_size: rows of a step; None: the rows of a static batch of several rows, if the model
            has one, else 32; 1 where a state is carried from row to row.
        held_out: validation data, or the share of the rows that is held out; None: no validation.
        further: whether the call goes on where the call before ended, as `partial_fit`.
        cache: where the results of frozen layers are kept; None: they are computed in each step.

    Attributes:
        recipe: the job, and facts of the data.
        state: the state before the call, and from `begin` on the state that the call trains.
        file: the model with the weights of the file; None if only trained values are in memory.
        names: the names of columns and classes.
        labels: the facts of the loss, such as the count of classes, by label input.
        shuffle: whether the rows are ordered anew for every epoch.
        loop: the loop over epochs; None before `begin`.
        resumed: whether this process read the state from a checkpoint.
        source: the batches to train on; None after the call.
        validated: the batches of validation data; None without validation, and after the call.
        step_source: the batches that steps read: of `source`, or with kept values of `cache`.
        evaluated_source: the batches of validation data, in the same form.
    """

    source: BatchSource
    step_source: BatchSource
    evaluated_source: BatchSource | None
    runner: Runner
    rates: Rates
    shuffle: bool

    def __init__(
        self,
        trainer: Any,
        recipe: Recipe,
        names: Names,
        data: Dataset,
        batch_size: int | None = None,
        held_out: Dataset | float | Split | None = None,
        further: bool = False,
        cache: CachePlace | None = None,
    ) -> None:
        self.trainer, self.recipe, self.further, self.cache = trainer, recipe, further, cache
        self.job, self.sharing = recipe.job, recipe.sharing
        self.file = self.job.proto if self.job.digest is None else None
        self.state, self.callbacks = recipe.state, recipe.job.callbacks
        self.data, self.held_out, self.batch_size = data, held_out, batch_size
        self.names = names.copy()
        self.labels: dict[str, LossInfo] = {}
        self.buffers: dict[str, np.ndarray] = {}  # initial values of buffers
        self._kept_evaluator: Evaluator | None = None
        self.loop: Loop | None = None
        self.resumed = False
        self.validated: BatchSource | None = None

    def balance_classes(self) -> None:
        """Set `recipe.balanced`, the weights that balance the classes of the rows to train on."""
        outputs = balanced_outputs(self.job.class_weight, self.job.loss)
        if outputs is None or self.further:
            return
        plain = replace(self.recipe, balanced=None)
        evaluator = cached_evaluator(plain, self.names)
        source = self._batch_source(self.data, evaluator.fields)
        if self.held_out is not None and not isinstance(self.held_out, Dataset):
            unit = evaluator.fields.fixed_rows or 1
            source, _ = hold_out(source, source, self.held_out, self.job.seed, unit)
        weights = balanced_class_weights(source, evaluator.member_objective.labels, outputs)
        self.recipe = replace(self.recipe, balanced=weights)
        vars(self).pop("evaluator", None)  # an evaluator of the recipe before has other weights

    @cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator of the model in its inference form."""
        return cached_evaluator(self.recipe, self.names, self.buffers)

    @property
    def step_evaluator(self) -> Evaluator:
        """The evaluator for batches of `step_source`."""
        return self._kept_evaluator or self.evaluator

    def begin(self, epochs: int, shuffle: bool, resume: str | os.PathLike | None = None) -> Loop:
        """Build all that the training needs, copy the state to the device, and return the loop."""
        job, shared = self.job, self.sharing
        if shared is not None:
            shared.check_equal_arguments(self, epochs, shuffle, resume is not None)
        self.balance_classes()
        compiled = job.built.get(
            "step", lambda: self.recipe.step_key, lambda: StepCache(self.recipe)
        )
        objective = compiled.objective
        self.buffers = self._initial_buffers(objective)
        self.labels, fields = objective.labels, self._training_data_fields(objective)
        source, held_out = self._training_and_validation_sources(fields, shuffle)
        self._check_batch_sizes(source, fields)
        if held_out is not None and job.all_metrics:
            values = self.buffers | job.values_to_evaluate(self.state)
            self.evaluator.check_metrics(values, held_out, job.metrics)
        identity = partial(identity_of, job, source, held_out, shuffle, shared)
        state = self.state
        if not self.further:
            begun = partial(self._initial_state, identity(), resume)
            state = begun() if shared is None or resume is None else shared.load_in_first(begun)
        self.recipe.state = state  # so that memory of the weights before can be freed
        self._check_frozen_members(state)
        first = state.epoch if self.further else 0
        if shared is not None:
            shared.check_equal_beginnings(job, state, identity(), source, held_out)
        self.source, self.validated = source, held_out
        self.step_source, self.evaluated_source = source, held_out
        if self.cache is not None:
            # a step has taken the graph of its objective
            whole = objective if compiled.step is None else self.recipe.objective()
            compiled = self._keep_frozen_values(self.cache, whole, source, held_out)
        if shared is not None:
            self.step_source = shared.own_source(self.step_source)
            if self.evaluated_source is not None:
                self.evaluated_source = shared.own_source(self.evaluated_source)
            if self.cache is None:
                self.source, self.validated = self.step_source, self.evaluated_source
            self.callbacks = shared.own_callbacks(self.callbacks)
        self.state, self.shuffle = state, shuffle
        self.runner = runner = self._step_runner(compiled, self.step_source, fields)
        if not self.further:
            _log_fixed_batch_size(objective, fields, compiled.adds_losses)
        self.rates = self._training_rates(None if self.further else source.batches, epochs)
        runner.step.warn_of_weights()
        if runner.step.rounding:
            text = straight_through_warning(runner.step.rounding)
            warnings.warn(text, stacklevel=frames_inside() + 1)
        if self.further:  # no error is raised from here on, so that the state may change
            state.begin_epoch(self.buffers)
        state.begin(runner, self.further, owned=self.resumed)
        self.loop = Loop(self, first, first + epochs)
        return self.loop

    def loss_and_gradients(self) -> tuple[Any, dict[str, np.ndarray]]:
        """Return the loss of all rows and the gradient of each weight, at the present state."""
        job, shared, state = self.job, self.sharing, self.state
        self.balance_classes()
        compiled = job.built.get(
            "gradient", lambda: self.recipe.step_key, lambda: LossGradient(self.recipe)
        )
        objective = compiled.objective
        fields = self._training_data_fields(objective)
        fields.accumulates, fields.divides = False, True
        if not job.carry and self.data.reader is None and self.data.stream is None:
            self.batch_size = ALL_ROWS
        source = self._batch_source(self.data, fields)
        self._check_batch_sizes(source, fields)
        source = compiled.cut_large_arrays(source)
        if shared is not None:
            shared.refuse_unshared_arguments(job, self.recipe.balanced is not None)
            if fields.fixed_rows or (shared.statistics_part and objective.buffers):
                raise ValueError(
                    "value_and_grad adds up gradients that each process computes from its rows, "
                    "and statistics or a fixed batch need the rows of all processes: pass "
                    f"{argument('parallel', False)}, and all rows in each process"
                )
            shared.warn_of_mixed_rows(objective, source)
            source = shared.own_source(source)
        self.buffers = self._initial_buffers(objective)
        values = replace(state.values, buffers=self.buffers | state.buffers)
        group = SingleProcess() if shared is None else shared.group
        return compiled.loss_and_gradients(self.recipe, values, source, group, self.label_misfit)

    def _initial_buffers(self, objective: Objective) -> dict[str, np.ndarray]:
        """Return the initial values of buffers by name; in a stack, of all members."""
        axis = [] if self.job.members is None else [self.job.members]
        starts = objective.initial_buffers | (INITIAL if objective.scales_loss else {})
        return {n: np.array(np.broadcast_to(a, (*axis, *a.shape))) for n, a in starts.items()}

    def _check_frozen_members(self, state: TrainState) -> None:
        """Warn of frozen members of a stack, which do not train.

        Raises:
            ValueError: all members are frozen.
        """
        stops = any(isinstance(c, EarlyStopping) for c in self.job.callbacks.callbacks)
        if not state.frozen or (stops and not self.further):  # `EarlyStopping` tells of them
            return
        remedy = f"call fit, without {argument('resume')}, to begin another training"
        if len(state.frozen) == self.job.members:
            raise ValueError(f"all members of the stack are frozen: {remedy}")
        text = f"the members {sorted(state.frozen)} are frozen and do not train: {remedy}"
        warnings.warn(text, stacklevel=frames_inside() + 1)

    def end(self) -> None:
        """Drop the references to the data, and to the trainer, which may refer to this call."""
        self.data = Dataset(None)
        data = "held_out", "source", "validated", "step_source", "evaluated_source"
        vars(self).update(dict.fromkeys(("trainer", *data)))

    def label_misfit(self, batch: Batch) -> str | None:
        """Return a text that names a label of a batch that does not fit; None if all labels fit."""
        evaluator = self.step_evaluator
        if not evaluator.has_computed_labels:  # data are checked against declared shapes
            return None
        values = self.buffers | self.job.values_to_evaluate(self.state)
        return evaluator.label_misfit({**values, **batch.arrays})

    def validation_results(self) -> dict[str, Any]:
        """Return the entries of the history for validation data, such as `validation_loss`."""
        assert self.evaluated_source is not None
        shared = None if self.sharing is None else self.sharing.group
        values, source = self.job.values_to_evaluate(self.state), self.evaluated_source
        results = self.step_evaluator.evaluate(values, source, self.job.metrics, shared)
        return {f"validation_{name}": value for name, value in results.items()}

    def _training_data_fields(self, objective: Objective) -> DataSpec:
        """Return the `DataSpec` that checks the data to train on.

        `names` gets the notes that the trained file will have in its metadata.
        """
        job, fields = self.job, DataSpec(objective, self.job.batch_axes)
        fields.accumulates = not job.carry
        features = (fields.fields[name] for name in fields.features)
        self.names.notes = training_notes(job, self.names.notes, self.data.reader, features)
        check_class_and_sample_weights(self.recipe, self.data, objective, fields)
        fields.parts_of = partial(self._count_batch_parts, statistics=True)
        return fields

    def _keep_frozen_values(
        self,
        place: CachePlace,
        objective: Objective,
        source: BatchSource,
        held_out: BatchSource | None,
    ) -> StepCache:
        """Return the step behind the frozen layers of the model, whose results are kept.

        `step_source` and `evaluated_source` become sources of kept values, which `step_evaluator`
        evaluates from then on.

        Raises:
            ValueError: no results of frozen layers can be kept, see `find_frozen_cut`; data that
                change from epoch to epoch.
        """
        job, recipe, evaluated = self.job, self.recipe, self.evaluator.recipe
        if job.carry:
            raise ValueError(
                f"carry passes a state from batch to batch, and {named('cache')} keeps the results "
                "of single rows: leave out one of them"
            )
        cut = cut_for_source(objective, source)
        frozen = cut.frozen_model(recipe.objective(), job.device, source.batch_size)
        self.step_source = cache_frozen_values(source, frozen, cut, place, job.device)
        self.recipe = recipe = replace(recipe, cut=cut)
        own = cut_for_source(build_objective(evaluated, training=False), held_out or source)
        self._kept_evaluator = Evaluator(replace(evaluated, cut=own))
        if held_out is not None:
            objective = build_objective(evaluated, training=False)
            frozen = own.frozen_model(objective, job.device, held_out.batch_size)
            self.evaluated_source = cache_frozen_values(held_out, frozen, own, place, job.device)
        key = recipe.step_key, cut
        return job.built.get("cached step", lambda: key, lambda: StepCache(recipe))

    def _step_runner(self, compiled: StepCache, source: BatchSource, fields: DataSpec) -> Runner:
        """Return the runner of the step for the batches of `source`."""
        usual = self.batch_size or self.job.usual_batch_size
        fixed = not self.further or source.batch_size == usual
        return compiled.runner(self.recipe, source, fields, fixed)

    def _training_and_validation_sources(
        self, fields: DataSpec, shuffle: bool
    ) -> tuple[BatchSource, BatchSource | None]:
        """Return the source of training batches, and the source of validation batches or None."""
        source, job = self._batch_source(self.data, fields), self.job
        X, y, weight = self.data.first_batch
        # the first table names the columns: these must be the training data, not validation data
        if X is not None and self.data.stream is not None:
            try:
                fields.data_by_input(X, y, weight)
            except ValueError as e:
                raise ValueError(f"batch 0: {e}") from e
        if job.carry and shuffle and source.shuffles:
            raise ValueError(
                f"carry passes a state from batch to batch, and {argument('shuffle', True)} "
                f"reorders the rows: pass {argument('shuffle', False)}, or an iterable of batches"
            )
        if isinstance(self.held_out, Dataset):
            return source, self._batch_source(self.held_out, self.evaluator.fields)
        if self.held_out is None:
            return source, None
        if job.carry:
            raise ValueError(
                "carry needs the rows in their order, and a share of the rows for validation is "
                f"drawn at random: pass data as {named('validation')}"
            )
        every = (
            self._batch_source(self.data, self.evaluator.fields) if fields.fixed_rows else source
        )
        both = hold_out(source, every, self.held_out, job.seed, fields.fixed_rows or 1)
        for part in both:
            fields.check_row_count(part.rows or 0)
        return both

    def _check_batch_sizes(self, source: BatchSource, fields: DataSpec) -> None:
        """Raise `ValueError` if a batch of known size has too few rows, before training.

        `mix` needs two rows in each part of a batch, and statistics of a batch more than one value.
        """
        rows = min(source.batch_size, source.rows or source.batch_size)
        if self.job.mix is not None and rows < 2 * self._count_batch_parts(rows):
            processes = 1 if self.sharing is None else self.sharing.part.size
            raise ValueError(
                f"mix has nothing to mix: batches of {source.batch_size} rows are cut into single "
                f"rows, by {argument('accumulate', self.job.accumulate)} and {processes} "
                "processes. Pass a larger batch_size, or leave mix out"
            )
        if fields.one_value is None:
            return
        if source.cuts and source.rows is not None:
            sizes = {min(source.batch_size, source.rows), source.rows % source.batch_size} - {0}
            for rows in sorted(sizes):
                fields.check_batch_size(rows)
        elif source.in_memory:
            for _ in source.epoch(None, 0, lambda batch: 1):
                pass  # reading a batch checks it

    def _count_batch_parts(self, rows: int, statistics: bool = False) -> int:
        """Return the count of parts into which processes and micro-batches cut a batch.

        With `statistics`, a part has the rows over which BatchNormalization computes statistics.
        """
        shared = self.sharing
        processes = (
            1 if shared is None or (statistics and shared.statistics_part) else shared.part.size
        )
        own = max(rows // processes, 1)
        return processes * micro_batches(own, self.job.accumulate, statistics)

    def _batch_source(self, data: Dataset, fields: DataSpec) -> BatchSource:
        """Return the source of the batches of `data`, of `batch_size` or the usual size."""
        fields.names, size = self.names, self.batch_size
        if not size:  # the fixed batch of the file, unless that is one row without a state
            own = fields.fixed_rows or self.evaluator.member_objective.freed
            takes_any = own in (0, 1) and not (own and self.job.carry)
            size = self.job.usual_batch_size if takes_any else own
        return data.source(fields, size)

    def _training_rates(self, batches: int | None, epochs: int) -> Rates:
        """Return the learning rates by step; in a stack, by step and model.

        Raises:
            ValueError: a rate depends on validation data, and there are none; or a resumed training
                would continue at another rate.
        """
        job, state, rates = self.job, self.state, list[Rates]()
        steps = None if batches is None else batches * epochs
        for k, rate in enumerate(job.learning_rates):
            monitored = [m for m in rate.monitors if m.startswith("validation_")]
            if monitored and self.held_out is None:
                remedy = f"pass {argument('validation')} data"
                if self.further:
                    remedy = "partial_fit evaluates no validation data, call fit"
                raise ValueError(f"the learning rate depends on {monitored}: {remedy}")
            if batches is not None:
                _check_schedule_length(rate, state, batches, epochs)
            rates.append(rate.rates_of_training(state, steps, None if job.members is None else k))
        state.epochs = None if self.further else epochs
        return rates[0] if job.members is None else MemberRates(rates, state)

    def _initial_state(self, identity: Identity, resume: str | os.PathLike | None) -> TrainState:
        """Return a new state with the current weights, or the state of a checkpoint.

        Raises:
            FileNotFoundError: the folder `resume` holds no checkpoint.
            ValueError: the checkpoint is of another training.
        """
        old, balanced = self.state, self.recipe.balanced
        found = None if resume is None else newest_checkpoint(resume, TrainState.load)
        if found is not None:
            (path, state), self.resumed = found, True
            require_same_training(state.identity, identity, path)
            if has_random_sampler(self.data.X):
                warnings.warn(
                    "the DataLoader draws the order of rows, which a checkpoint cannot restore: "
                    "the resumed training sees other batches than an uninterrupted one. Pass its "
                    f"dataset, or {argument('shuffle', False)}",
                    stacklevel=frames_inside() + 1,
                )
            state.stop_reason, state.balanced = None, balanced
            return state
        if resume is not None and not self.job.callbacks.writes_to(resume):
            raise FileNotFoundError(
                f"{argument('resume', os.fspath(resume))} holds no checkpoint: leave out resume to "
                "start from the beginning, or pass a Checkpoint of this folder in callbacks"
            )
        state = TrainState(
            seed=self.job.seed,
            identity=identity,
            balanced=balanced,
            members=self.job.members,
        )
        now = {name: old.buffers.get(name, array) for name, array in self.buffers.items()}
        state.values = StateValues(self.job.weights_to_begin(old), buffers=now)
        return state


def _check_schedule_length(rate: Any, state: TrainState, batches: int, epochs: int) -> None:
    """Raise an error if a resumed training has another count of steps, and its rates depend on it.

    Warn if the warm-up is longer than the training.

    Args:
        rate: the learning rate of the job.
        state: the state with which training begins, of a checkpoint if it resumes.
        batches: the count of batches of an epoch.
        epochs: the count of epochs of the whole training.

    Raises:
        ValueError: the rates would jump, as they depend on the length of the training.
    """
    if not isinstance(rate, Schedule):
        return
    steps, before = batches * epochs, state.epochs
    schedule = rate.over(steps)
    if before is not None and rate.over(batches * before) != schedule:
        raise ValueError(
            f"the checkpoint is of a training of {before} epochs ({batches * before} steps), and "
            f"{argument('epochs', epochs)} makes {steps} steps: the learning rates depend on the "
            f"length of the training, and would jump. Pass {argument('epochs', before)}; to train "
            f"for longer, {named('start anew without resume')}, with the trained model"
        )
    warmup = schedule.warmup if isinstance(schedule, (Warmup, InverseSqrt)) else 0
    if steps <= warmup:
        warnings.warn(
            f"the warm-up of {warmup} steps does not end in this training, which has {steps} "
            f"steps ({epochs} epochs of {batches} batches): the learning rate rises to "
            f"{schedule(steps - 1):.3g} only. Pass a shorter warm-up, such as a tenth of all "
            f"steps: {argument('warmup', 0.1)}",
            stacklevel=frames_inside() + 1,
        )


def _log_fixed_batch_size(objective: Objective, fields: DataSpec, adds_losses: bool) -> None:
    """Log how a model whose file takes a fixed batch trains on larger batches."""
    if objective.freed:
        taken = "one row" if objective.freed == 1 else f"{objective.freed} rows"
        logger.warning(
            f"the file takes {taken}: it trains on batches of any size, as its rows are proven to "
            f"be independent; the file that comes out takes {taken} again"
        )
    elif fields.fixed_rows and fields.accumulates:
        logger.warning(
            f"the file has a fixed batch of {fields.fixed_rows} rows: a larger batch is cut into "
            "micro-batches of this size, and its loss is the "
            f"{'sum' if adds_losses else 'mean'} of their losses"
        )
