"""The recipe of a training: what its step computes, by the arguments of a trainer and its data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onnx import ModelProto

from onnxgrad.data.columns import column_names
from onnxgrad.errors import named
from onnxgrad.losses.causal import is_causal
from onnxgrad.losses.objectives import LABEL, training_loss
from onnxgrad.losses.other_models import LossModel
from onnxgrad.model.read import names_model
from onnxgrad.model.without_elements import read_elsewhere
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.clipping import clip_by_global_norm
from onnxgrad.training.class_weights import WeightedClasses
from onnxgrad.training.data import Dataset, array_shape
from onnxgrad.training.filled import fillable, is_cache
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import ComputedLoss, loss_output
from onnxgrad.training.modes import inference_form
from onnxgrad.training.objective import Objective, Plan, TrainingLoss, build_objective
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.accumulate import build_accumulating_step
from onnxgrad.training.step.build import Step, StepOptions, build_step
from onnxgrad.training.step.exchange import Across
from onnxgrad.training.step.gradients import build_gradients
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import build_update

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Recipe:
    """What the step of a training computes, before it is built: a job, and facts of its data.

    Attributes:
        job: the arguments of a trainer.
        state: with weights of the shapes that train.
        labels: the shapes of labels, if they are known before batches are read.
        weight_axes: how many axes sample weights may have, 0 for none.
        balanced: the weights that balance the classes of `fit` by output, if they are asked for
            and known.
        filled: the inputs that nodes compute, as the data lack them.
        labeled: whether the data have labels; asked of losses that may do without.
        sharing: how processes share the training; None: this one trains alone.
    """

    job: Job
    state: TrainState
    labels: Shapes
    weight_axes: int
    balanced: dict[str, dict[int, float]] | None = None
    filled: frozenset[str] = frozenset()
    labeled: bool = True
    sharing: Sharing | None = None

    @classmethod
    def of(
        cls,
        job: Job,
        state: TrainState,
        data: Dataset,
        held_out: Any = None,
        sharing: Sharing | None = None,
    ) -> Recipe:
        """Return the recipe for data to train on or to evaluate, and for validation data.

        `state` has the weights of balanced classes.
        """
        both = (data, held_out) if isinstance(held_out, Dataset) else (data,)
        axes = max(d.weight_axes for d in both)
        axes = 2 if axes and job.moved else axes
        weighted = WeightedClasses.of(job.class_weight, job.loss)
        weights = None if weighted.balanced is None else state.balanced
        labeled = True
        if is_causal(job.loss):  # else not asked: it may read a batch, and so draw from a seed
            labeled = any(d.given is None or d.given.labeled for d in both)
        shapes = label_shapes(data, job.proto)
        return cls(job, state, shapes, axes, weights, _filled_inputs(job, both), labeled, sharing)

    def balanced_by(self, balanced: dict[str, dict[int, float]] | None) -> Recipe:
        """Return this recipe with other weights that balance classes, by output."""
        return replace(self, balanced=balanced)

    @property
    def norms(self) -> bool:
        """Whether a callback asks for the norms of gradients."""
        return self.job.callbacks.gradient_norms

    @property
    def key(self) -> Any:
        """What is equal for two recipes of one job that compute the same."""
        # of the number of rows only matters whether it is 1
        shapes = {name: [shape[:1] == (1,), *shape[1:]] for name, shape in self.labels.items()}
        of_data = shapes, self.weight_axes, self.balanced, self.filled, self.labeled
        shared = None if self.sharing is None else self.sharing.key
        return self.job.step_key, of_data, self.norms, shared

    @cached_property
    def plan(self) -> Plan:
        """What is minimized.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        return Plan(
            self.job,
            self._training_loss(),
            self.weight_axes > 0,
            across=None if self.sharing is None else self.sharing.normalized,
            filled=self.filled,
        )

    def _training_loss(self) -> TrainingLoss | ComputedLoss:
        """Return what writes the loss, or the output of the model that is one."""
        job, loss = self.job, self.job.loss
        written = isinstance(loss, ComputedLoss) or hasattr(loss, "write")
        whole = loss is None or written or _is_model(loss)
        for name in ("class_weight", "loss_options", "loss_weights"):
            if whole and getattr(job, name) is not None:
                kind = "computed by a model" if loss is None else f"a {type(loss).__name__}"
                raise ValueError(
                    f"{named(name)} has no effect on a loss that is {kind}: leave it out"
                )
        if loss is None:
            return ComputedLoss(loss_output(job.proto))
        if written:
            return loss
        if _is_model(loss):
            return LossModel(loss)
        return training_loss(
            loss,
            options=job.loss_options,
            loss_weights=job.loss_weights,
            class_weight=WeightedClasses.of(job.class_weight, loss).with_balanced(self.balanced),
            label_shapes=self.labels,
            weight_shape=(0,) * self.weight_axes or None,
            labeled=self.labeled,
            in_chunks=job.members is None,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, behind the clipping of the norm of all gradients."""
        return self._with_clipping(self.job.optimizer)

    @property
    def members(self) -> Members | None:
        """The members of a stack."""
        if self.job.members is None:
            return None
        return Members([*map(self._with_clipping, self.job.optimizers)], self.state.weights)

    def _with_clipping(self, optimizer: Optimizer) -> Optimizer:
        norm = self.job.clip_norm
        return optimizer if norm is None else Chain((clip_by_global_norm(norm), optimizer))

    def objective(self, training: bool = True) -> Objective:
        """Return the objective of a step; unless `training`, without dropout and statistics."""
        job, plan = self.job, self.plan
        if not training:
            plan = replace(plan, job=replace(job, proto=inference_form(job.proto), dropout={}))
        objective = build_objective(plan, training)
        if job.digest is not None:  # weights that the loss does not reach stay constants
            one = () if job.members is None else 0  # the arrays of a member
            read_elsewhere(objective.weights, lambda name: self.state.weights[name][one])
        return objective

    def step(
        self,
        objective: Objective,
        norms: bool | None = None,
        in_place: bool = True,
        blocks: bool = True,
        across: Across | None = None,
        members: Members | None = None,
        fixed_rows: int | None = None,
        rows: int = 1,
        adds_losses: bool = False,
    ) -> Step:
        """Return the step, written into the graph of the objective.

        It returns the norms of gradients if `norms`; None: if a callback asks for them. With
        `in_place`, it may be only its first half: see `Step.updates`. `across` is how others share
        it; None: it is for the rows of this process. `members`: the members of a stack.

        `fixed_rows`: how many of the `rows` of a batch the model takes, if not all;
        `adds_losses`: whether the loss of a batch is the sum of the losses of its micro-batches.

        Raises:
            ValueError: the loss depends on none of the weights; arguments that do not fit.
            NoGradientRule: an operator on the way has no rule.
        """
        job, on_cpu = self.job, self.job.device.kind == "cpu"
        in_place &= on_cpu and members is None
        norms = self.norms if norms is None else norms
        options = StepOptions(
            norms, blocks and on_cpu, job.recompute, in_place, across, members=members
        )
        parts = job.accumulate if fixed_rows is None else max(1, rows // fixed_rows)
        if parts == 1 and fixed_rows is None:
            return build_step(objective, self.optimizer, options)
        if job.carry:
            raise ValueError("carry and accumulate: micro-batches have no state to carry")
        step = build_accumulating_step(self.objective, self.optimizer, parts, options, adds_losses)
        step.fixed_rows = fixed_rows
        return step

    def named_step(self, objective: Objective) -> Step:
        """Return the step whose inputs are the weights and slots themselves, none joined."""
        return build_step(objective, self.optimizer, StepOptions(blocks=False, packed=0))

    def step_models(self) -> tuple[ModelProto, ModelProto]:
        """Return the two halves of a step as models: the gradients, and the update."""
        gradients = build_gradients(self.objective().require_labels())
        outputs = {y.name for y in gradients.graph.output}
        weights = {
            name: (w.shape, w.dtype)
            for name, w in self.state.weights.items()
            if f"{name}_grad" in outputs
        }
        return gradients, build_update(weights, self.optimizer)


def _filled_inputs(job: Job, data: Sequence[Dataset]) -> frozenset[str]:
    """Return the inputs that the data lack, and that follow from others.

    Data of which nothing is known before they are read have all inputs.
    """
    every = fillable(job.proto, is_causal(job.loss))
    known = [one.given for one in data] if every else []
    if not every or None in known:
        return frozenset()
    given = frozenset(job.carry).union(*(one.names for one in known if one is not None))
    none_is_given = not any(map(is_cache, every & given))
    return frozenset(name for name in every - given if none_is_given or is_cache(name))


def label_shapes(data: Dataset, proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the known shapes of labels, by input or output.

    Labels in batches have the shapes of the first batch. Among features, labels are called "label",
    or as an output of the model.
    """
    X, y, _ = data.first
    outputs = [output.name for output in proto.graph.output]
    names = {LABEL, *outputs, *(f"{LABEL}_{name}" for name in outputs)}
    if y is None:
        names -= {x.name for x in proto.graph.input}
        y = {name: X[name] for name in _names_in(X) if name in names}
    elif (columns := _names_in(y)) and (isinstance(y, Mapping) or {*columns} <= names):
        y = {name: y[name] for name in columns}
    labels = y if isinstance(y, Mapping) else {LABEL: y}
    shapes = {str(name): array_shape(array) for name, array in labels.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _names_in(X: Any) -> list[Any]:
    """Return the names in a dict or in a table; none in an array."""
    return [*X] if isinstance(X, Mapping) else column_names(X) or []


def _is_model(loss: Any) -> bool:
    """Return whether a loss is an ONNX model, or the path of one."""
    return names_model(loss) or isinstance(loss, (ModelProto, bytes, os.PathLike))
