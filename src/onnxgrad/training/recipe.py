"""The recipe of a training: what its step computes, by the arguments of a trainer and its data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from onnxgrad.losses.objectives import training_loss
from onnxgrad.losses.other_models import LossModel
from onnxgrad.model.emptied import read_elsewhere
from onnxgrad.optimizers import Chain, Optimizer, clip_by_global_norm
from onnxgrad.training.arguments import check_choice
from onnxgrad.training.data import Dataset
from onnxgrad.training.equality import fingerprint
from onnxgrad.training.holdout import balanced, label_shapes
from onnxgrad.training.model_loss import loss_output
from onnxgrad.training.objective import Objective, Plan, TrainingLoss, build_objective
from onnxgrad.training.settings import Settings
from onnxgrad.training.step.accumulate import build_accumulating_step
from onnxgrad.training.step.build import Step, StepOptions, build_gradients, build_step
from onnxgrad.training.step.exchange import Across
from onnxgrad.training.step.update import build_update

_ARGUMENTS = (  # of a trainer, that decide what a step or an evaluation computes
    *("loss", "loss_options", "loss_weights", "optimizer", "clip_norm", "accumulate"),
    *("batch_norm", "dropout", "batch_axes", "carry", "recompute", "seed", "trained"),
)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Facts:
    """What the loss depends on of the data.

    - `labels`: the shapes of labels, as far as they are known before batches are read.
    - `weight_axes`: how many axes sample weights may have, 0 for none.
    - `balanced`: the weights that balance the classes of `fit`, if they are asked for and known.
    """

    labels: Shapes
    weight_axes: int
    balanced: dict[int, float] | None = None

    @classmethod
    def of(
        cls, trainer: Settings, data: Dataset, held_out: Any = None, fits: bool = False
    ) -> Facts:
        """Return those of data to train on or to evaluate, and of `held_out` validation data.

        `fits`: whether a training begins, whose labels say which weights of classes are balanced.
        """
        both = (data, held_out) if isinstance(held_out, Dataset) else (data,)
        axes = max(d.weight_axes for d in both)
        axes = 2 if axes and trainer.moved else axes
        weights = trainer.state.balanced
        if isinstance(trainer.class_weight, str):
            check_choice("class_weight", trainer.class_weight, ["balanced"])
            if fits:
                weights = balanced(data.y, (trainer.loss_options or {}).get("ignore_index"))
        else:
            weights = None
        return cls(label_shapes(data, trainer.proto), axes, weights)


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the step of a training computes, before it is built.

    - `plan`: what is minimized.
    - `optimizer`: behind the clipping of the norm of all gradients.
    - `norms`: whether a callback asks for the norms of gradients.
    - `shared`: whether processes share the training.
    - `key`: equal for recipes of one trainer that compute the same.
    """

    trainer: Settings
    plan: Plan
    facts: Facts
    optimizer: Optimizer
    norms: bool
    shared: bool
    key: Any

    @classmethod
    def of(cls, trainer: Settings, facts: Facts, sharing: Any = None) -> Recipe:
        """Return the recipe of a trainer for data, and for the processes that share a training.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        loss = _loss(trainer, facts)
        plan = Plan(
            loss,
            "" if loss is not None else loss_output(trainer.proto),
            batch_norm=trainer.batch_norm,
            dropout=trainer.dropout,
            carry=trainer.carry,
            seed=trainer.seed,
            exempt=frozenset(trainer.moved),
            straight_through=trainer.straight_through,
            across=None if sharing is None else sharing.normalized,
        )
        optimizer, norm = trainer.optimizer, trainer.clip_norm
        if norm is not None:
            optimizer = Chain((clip_by_global_norm(norm), optimizer))
        norms = trainer.callbacks.gradient_norms
        # of the number of rows only matters whether it is 1
        shapes = {name: [shape[:1] == (1,), *shape[1:]] for name, shape in facts.labels.items()}
        arguments = [getattr(trainer, name) for name in _ARGUMENTS]
        weight = facts.balanced or trainer.class_weight
        own = [*arguments, weight, repr(trainer.device), shapes, facts.weight_axes, norms]
        key = id(trainer.proto), fingerprint(own), None if sharing is None else sharing.key
        return cls(trainer, plan, facts, optimizer, norms, sharing is not None, key)

    @property
    def weighted(self) -> bool:
        """Whether the data may have sample weights."""
        return self.facts.weight_axes > 0

    def objective(self) -> Objective:
        """Return the objective of a step."""
        trainer = self.trainer
        objective = build_objective(trainer.proto, trainer.trained, self.plan, self.weighted)
        if trainer.digest is not None:  # those that the loss does not reach stay constants
            read_elsewhere(objective.weights, lambda name: trainer.state.weights[name])
        return objective

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

        Raises:
            ValueError: the loss depends on none of the weights; arguments that do not fit.
            NoGradientRule: an operator on the way has no rule.
        """
        trainer, on_cpu = self.trainer, self.trainer.device.kind == "cpu"
        in_place &= on_cpu and (not self.shared or across is not None)
        norms = self.norms if norms is None else norms
        options = StepOptions(norms, blocks and on_cpu, trainer.recompute, in_place, across)
        if trainer.accumulate == 1:
            return build_step(objective, self.optimizer, options)
        if trainer.carry:
            raise ValueError("carry and accumulate: micro-batches have no state to carry")
        return build_accumulating_step(self.objective, self.optimizer, trainer.accumulate, options)

    def named_step(self, objective: Objective) -> Step:
        """Return the step whose inputs are the weights and slots themselves, none joined."""
        return build_step(objective, self.optimizer, StepOptions(blocks=False, packed=0))

    def step_models(self) -> tuple[ModelProto, ModelProto]:
        """Return the two halves of a step as models: the gradients, and the update."""
        gradients = build_gradients(self.objective().require_labels())
        outputs = {y.name for y in gradients.graph.output}
        weights = {
            name: (w.shape, w.dtype)
            for name, w in self.trainer.state.weights.items()
            if f"{name}_grad" in outputs
        }
        return gradients, build_update(weights, self.optimizer)


def _loss(trainer: Settings, facts: Facts) -> TrainingLoss | None:
    """Return what writes the loss; None: the model has an output that is one."""
    loss = trainer.loss
    whole = loss is None or hasattr(loss, "write") or _is_model(loss)
    for name in ("class_weight", "loss_options", "loss_weights"):
        if whole and getattr(trainer, name) is not None:
            kind = "computed by a model" if loss is None else f"a {type(loss).__name__}"
            raise ValueError(f"{name} has no effect on a loss that is {kind}: leave it out")
    if loss is None or hasattr(loss, "write"):
        return loss
    if _is_model(loss):
        return LossModel(loss)
    weight = trainer.class_weight
    return training_loss(
        loss,
        options=trainer.loss_options,
        loss_weights=trainer.loss_weights,
        class_weight=facts.balanced if isinstance(weight, str) else weight,
        label_shapes=facts.labels,
        weight_shape=(0,) * facts.weight_axes or None,
    )


def _is_model(loss: Any) -> bool:
    """Return whether a loss is an ONNX model, or the path of one."""
    path = isinstance(loss, str) and loss.endswith(".onnx")
    return path or isinstance(loss, (ModelProto, bytes, os.PathLike))
