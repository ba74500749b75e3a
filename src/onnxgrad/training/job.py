"""`Job`: the arguments of a trainer, and the values of its state that it evaluates and exports."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.class_numbers import weights_by_number
from onnxgrad.data.columns import Names, read_names
from onnxgrad.metrics.base import Metric
from onnxgrad.model import weights as constants
from onnxgrad.model.notes import ADAPTERS, HEAD, adapter_dropout, read_note
from onnxgrad.model.read import read
from onnxgrad.model.without_elements import emptied
from onnxgrad.optimizers import Optimizer, sgd
from onnxgrad.parallel import DataParallel
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate, constant
from onnxgrad.training.arguments import ARGUMENTS, check_arguments, fields_where, select_rate
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.equality import BuildCache, describe
from onnxgrad.training.mixing import Mix
from onnxgrad.training.modes.ranges import with_ranges
from onnxgrad.training.modes.stored_integers import pairs
from onnxgrad.training.output_metrics import ByOutput
from onnxgrad.training.parameters.choice import separated_choice
from onnxgrad.training.parameters.patterns import as_list
from onnxgrad.training.precision import (
    Dtypes,
    for_file,
    narrow_dtypes,
    resolved,
    rounded,
    rounding,
    widened,
)
from onnxgrad.training.state import Arrays, TrainState
from onnxgrad.training.step.update import evaluated

_IN_STEP, _COMPARED = fields_where(in_step=True), fields_where(free=False)
_OF_MEMBERS = ("members", "optimizers", "learning_rates")


@dataclass(frozen=True, eq=False)
class Job:
    """A model, the weights of it that train, and the checked arguments of the training.

    With the defaults, a model is evaluated with the weights of its file: none is an input, and the
    model needs no trainable weight.

    Attributes:
        proto: the model, without the large weights that train: `digest` describes the whole one.
        trained: names of the weights that train.
        straight_through: whether gradients pass through the rounding of quantized layers.
        optimizers: one, or one for each member of a stack.
        learning_rates: one, or one for each member of a stack.
        metrics: by output.
        classes: the names of the classes, given or of the file.
        members: of a stack, the number of its models; None for one model.
        constants: names of the constants of the model.
        narrow: the dtypes of constants that have 16 bits in the file.
        digest: of the whole model, if `proto` lacks large weights.
        built: sessions and graphs of this job, until a loss or another argument is modified.
    """

    proto: ModelProto
    trained: Sequence[str] = ()
    loss: Any = None
    loss_options: Mapping[str, Any] | None = None
    loss_weights: Mapping[str, float] | None = None
    class_weight: Any = None
    optimizers: Sequence[Optimizer] = field(default_factory=lambda: [sgd()])
    learning_rates: Sequence[LearningRate] = field(default_factory=lambda: [constant(0.0)])
    clip_norm: float | None = None
    accumulate: int = 1
    batch_norm: str = "frozen"
    dropout: Mapping[str, float] = field(default_factory=dict)
    mix: Mix | None = None
    metrics: ByOutput = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    batch_axes: Mapping[str, int | None] = field(default_factory=dict)
    carry: Mapping[str, str] = field(default_factory=dict)
    recompute: str = "none"
    precision: str = "file"
    device: Device = field(default_factory=lambda: Device.of("cpu"))
    seed: int = 0
    parallel: DataParallel | bool | None = False
    straight_through: bool = False
    classes: Sequence[Any] = ()
    members: int | None = None
    constants: Set[str] = frozenset()
    narrow: Dtypes = field(default_factory=dict)
    digest: str | None = None
    built: BuildCache = field(default_factory=BuildCache)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; in a stack, of the first member."""
        return self.optimizers[0]

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate; in a stack, of the first member."""
        return self.learning_rates[0]

    @property
    def file(self) -> ModelProto | None:
        """The model with its own weights; None if only their trained values are in memory."""
        return self.proto if self.digest is None else None

    @property
    def moved(self) -> set[str]:
        """The inputs whose rows are not on their first axis."""
        return {name for name, axis in self.batch_axes.items() if axis != 0}

    @property
    def averages(self) -> bool:
        """Whether an optimizer averages weights."""
        return any(optimizer.averages for optimizer in self.optimizers)

    @property
    def every_metric(self) -> list[Metric]:
        """The metrics of all outputs."""
        return [metric for listed in self.metrics.values() for metric in listed]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that a reader of the training may see, by name."""
        values = {name: getattr(self, name) for name in ARGUMENTS if hasattr(self, name)}
        values["metrics"] = self.every_metric
        if self.members is not None:
            values |= {"optimizer": self.optimizers, "learning_rate": self.learning_rates}
        return values

    @property
    def compared(self) -> dict[str, Any]:
        """The arguments that must be equal in a resumed training, and in all processes, by name."""
        names = [n for n in _COMPARED if self.members is not None or n not in _OF_MEMBERS]
        return {name: getattr(self, name) for name in names}

    @property
    def step_key(self) -> Any:
        """The cache key of the compiled step: equal as long as the step stays the same."""
        values = {name: getattr(self, name) for name in _IN_STEP}
        return id(self.proto), self.built.fingerprint(values)

    def anew(self, **changes: Any) -> Job:
        """Return a job with other arguments and nothing built."""
        return replace(self, **changes, built=BuildCache())

    # -- the values of a state --------------------------------------------------------------

    def weights_to_begin(self, state: TrainState) -> Arrays:
        """Return the weights with which a new training begins: averages, but not rounded."""
        values = self._values_in_training(state)
        return {name: values[name] for name in state.weights}

    def values_to_evaluate(self, state: TrainState) -> Arrays:
        """Return the weights and statistics that are evaluated and exported, by name.

        The weights are from the last step, or averages if the optimizer averages weights. Arrays
        of a stack have an axis of members first. Where the file has 16 bits, values are rounded to
        these.
        """
        values = rounded(self._values_in_training(state), self.narrow)
        return {n: self.in_training(a) if n in self.narrow else a for n, a in values.items()}

    def values_for_file(self, state: TrainState) -> Arrays:
        """Return the weights and statistics to export, in the dtypes of the file.

        Raises:
            ValueError: a number beyond the range of its dtype.
        """
        return for_file(self._values_in_training(state), self.narrow)

    def rounding(self, state: TrainState) -> dict[str, float]:
        """Return the largest and the mean difference to the weights of a file of 16 bits."""
        if self.precision == "file":
            return {}
        return rounding(self._values_in_training(state), self.narrow)

    def in_training(self, array: np.ndarray) -> np.ndarray:
        """Return a constant in the dtype in which it trains and is evaluated."""
        return array if self.precision == "file" else widened(array)

    def _values_in_training(self, state: TrainState) -> Arrays:
        """Return weights and statistics as `values_to_evaluate`, before they are rounded."""
        values = state.values
        buffers = {n: a for n, a in values.buffers.items() if n in self.constants}
        if not self.averages:
            return values.weights | buffers
        if self.members is None:
            weights = evaluated(self.optimizer, values.weights, values.slots, values.steps)
            return weights | buffers
        members = ((optimizer, values[k]) for k, optimizer in enumerate(self.optimizers))
        every = [evaluated(o, own.weights, own.slots, own.steps) for o, own in members]
        return {n: np.stack([own[n] for own in every]) for n in values.weights} | buffers


def begin_job(given: Mapping[str, Any]) -> tuple[Job, Names, Arrays]:
    """Return the job of a trainer, the names of columns and classes, and the first weights.

    Args:
        given: the arguments of a `Trainer`, by name; other entries are not read.

    Raises:
        ValueError: an invalid argument.
        ModelError: the model cannot be read.
    """
    checked = check_arguments(given)
    train, freeze = checked.pop("train"), checked.pop("freeze")
    train_ranges, classes = checked.pop("train_ranges"), checked.pop("classes")
    optimizer, rate = checked.pop("optimizer"), checked.pop("learning_rate")
    statistics = checked["batch_norm"] == "train"
    proto, trained = separated_choice(read(checked.pop("model")), train, freeze, statistics)
    # a user who names weights of a quantized model knows that its stored integers stay
    tuned = read_note(proto, ADAPTERS) or read_note(proto, HEAD)
    rounded_weights = {pair.weight for pair in pairs(proto)}
    named = train is not None or train_ranges or bool(tuned)
    checked |= {
        "precision": resolved(checked["precision"], proto, checked["device"]),
        "dropout": adapter_dropout(proto) | checked["dropout"],
        "straight_through": named or not rounded_weights.isdisjoint(trained),
    }
    names = read_names(proto)
    names.classes = list(classes) or names.classes
    checked["class_weight"] = weights_by_number(checked["class_weight"], names.classes)
    if train_ranges:
        proto, changes = with_ranges(proto, as_list(freeze))
        trained = [*trained, *changes]
    refs = {ref.name: ref for ref in constants.constant_refs(proto)}
    proto, digest = _without_weights(proto, trained)
    job = Job(
        proto,
        trained,
        optimizers=[optimizer],
        learning_rates=[select_rate(rate, optimizer)],
        classes=list(names.classes),
        constants=frozenset(refs),
        narrow=narrow_dtypes(refs),
        digest=digest,
        **checked,
    )
    return job, names, {name: job.in_training(refs[name].array()) for name in trained}


def _without_weights(proto: ModelProto, names: Sequence[str]) -> tuple[ModelProto, str | None]:
    """Return a model without large weights, and the digest of the whole model.

    Without any large weight, it is the model itself, and the digest is None.
    """
    new = emptied(proto, names)
    if new is proto:
        return proto, None
    gc.collect()  # graphs, which are cyclic, refer to the whole model
    return new, describe(proto)
