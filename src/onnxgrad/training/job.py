"""`Job`: the arguments of a trainer, and the values of its state that it evaluates and exports.

`ARGUMENTS` is the one table of arguments: how each is checked, and whether steps and resumes depend
on it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.recompute import RECOMPUTE
from onnxgrad.checks import check_choice, check_count, check_positive
from onnxgrad.data.class_numbers import weights_by_number
from onnxgrad.data.columns import Names, read_names
from onnxgrad.errors import named, unknown
from onnxgrad.graph.precision import HALVES
from onnxgrad.metrics.base import Metric
from onnxgrad.model import weights as constants
from onnxgrad.model.notes import ADAPTERS, HEAD, adapter_dropout, read_note
from onnxgrad.model.read import read
from onnxgrad.model.without_elements import emptied
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import select as select_optimizer, sgd
from onnxgrad.parallel.process_groups import DataParallel
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate, constant, select as select_schedule
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.equality import BuildCache, describe
from onnxgrad.training.mixing import Mix, check_mix
from onnxgrad.training.modes.ranges import with_ranges
from onnxgrad.training.modes.stored_integers import pairs
from onnxgrad.training.output_metrics import ByOutput, select_metrics
from onnxgrad.training.parameters.choice import as_list, separated_choice
from onnxgrad.training.precision import (
    PRECISIONS,
    Dtypes,
    for_file,
    resolved,
    rounded,
    rounding,
    widened,
)
from onnxgrad.training.state import Arrays, TrainState
from onnxgrad.training.step.update import evaluated

Check = Callable[[str, Any], Any]  # name, value -> the value that a `Job` holds


def _accept_any(name: str, value: Any) -> Any:
    return value


def _copied_dict(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(value or {})


def _one_of(*choices: str) -> Check:
    return lambda name, value: check_choice(name, value, choices)


@dataclass(frozen=True)
class Argument:
    """The check of an argument of `Trainer`, `TrainerStack` or `fit`, and its effects.

    Attributes:
        fields: the fields of a `Job` that follow from it. None where it belongs to the call of
            `fit`, or `identity_of` reads it by other means.
        check: (name, value) -> the value that a `Job` holds. It raises a `ValueError` that names
            the argument.
        in_step: whether the compiled step or evaluation depends on it.
        free: why a resumed training may have another value; empty: it must have an equal one, and
            so must all processes of a group.
    """

    fields: str = ""
    check: Check = _accept_any
    in_step: bool = False
    free: str = ""


_BEGINNING = "the checkpoint has the weights of all members"
ARGUMENTS: Mapping[str, Argument] = {
    "model": Argument(),
    "loss": Argument("loss", in_step=True),
    "loss_options": Argument("loss_options", in_step=True),
    "loss_weights": Argument("loss_weights", in_step=True),
    "class_weight": Argument("class_weight", in_step=True),
    "classes": Argument("classes"),
    "optimizer": Argument(
        "optimizer optimizers", lambda _, value: select_optimizer(value), in_step=True
    ),
    "learning_rate": Argument("learning_rate learning_rates"),
    "train": Argument("trained straight_through", in_step=True),
    "freeze": Argument("trained", in_step=True),
    "train_ranges": Argument("trained", in_step=True),
    "clip_norm": Argument(
        "clip_norm",
        lambda name, norm: norm if norm is None else check_positive(name, norm, infinite=True),
        in_step=True,
    ),
    "accumulate": Argument("accumulate", check_count, in_step=True),
    "batch_norm": Argument("batch_norm", _one_of("frozen", "train"), in_step=True),
    "dropout": Argument("dropout", _copied_dict, in_step=True),
    "mix": Argument("mix", lambda _, value: check_mix(value), in_step=True),
    "batch_axes": Argument("batch_axes", _copied_dict, in_step=True),
    "carry": Argument("carry", _copied_dict, in_step=True),
    "recompute": Argument("recompute", _one_of(*RECOMPUTE), in_step=True),
    "precision": Argument("precision", _one_of(*PRECISIONS), in_step=True),
    "seed": Argument("seed", lambda name, seed: check_count(name, seed, 0), in_step=True),
    "members": Argument("members", in_step=True),
    "weights": Argument(free=_BEGINNING),
    "init": Argument(free=_BEGINNING),
    "device": Argument(
        "device",
        lambda _, value: Device.of(value).check(),
        in_step=True,
        free="another device computes the same",
    ),
    "metrics": Argument(
        check=lambda _, value: select_metrics(value),
        free="metrics that no callback and no schedule monitors are only reported",
    ),
    "callbacks": Argument(
        check=lambda _, value: Callbacks(value),
        free="checkpoints compare the arguments on which kept values depend",
    ),
    "parallel": Argument(),
    "X": Argument(),
    "y": Argument(),
    "sample_weight": Argument(),
    "validation": Argument(),
    "batch_size": Argument(check=lambda n, size: size if size is None else check_count(n, size)),
    "shuffle": Argument(),
    "epochs": Argument(check=check_count, free="schedules that depend on it refuse another length"),
    "resume": Argument(free="it names the checkpoint"),
}


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of the arguments among `given`, by name.

    Raises:
        ValueError: a value that an argument does not take.
    """
    return {n: ARGUMENTS[n].check(n, value) for n, value in given.items() if n in ARGUMENTS}


def _fields_of(arguments: Iterable[Argument]) -> list[str]:
    """Return the fields of a `Job` that follow from some arguments."""
    return list(dict.fromkeys(name for one in arguments for name in one.fields.split()))


_IN_STEP = _fields_of(argument for argument in ARGUMENTS.values() if argument.in_step)
_COMPARED = _fields_of(argument for argument in ARGUMENTS.values() if not argument.free)
_OF_MEMBERS = ("members", "optimizers", "learning_rates")


def usual_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of a training without the argument `learning_rate`."""
    return 1e-3 if optimizer.usual_rate is None else optimizer.usual_rate


def select_rate(rate: Any, optimizer: Optimizer) -> LearningRate:
    """Return a learning rate as an object: a number is constant, None the optimizer's usual one."""
    rate = usual_rate(optimizer) if rate is None else rate
    return rate if isinstance(rate, LearningRate) else select_schedule(rate)


P = ParamSpec("P")
R = TypeVar("R")

_MEANT = {
    "criterion": f"pass {named('loss')}",
    "lr": f"pass {named('learning_rate')}",
    "weight_decay": "it is an argument of an optimizer, as adamw",
    **dict.fromkeys("batch_size epochs shuffle validation".split(), "it is an argument of fit"),
}


def require_known(given: Iterable[str], known: Collection[str]) -> None:
    """Raise `TypeError` for an unknown argument, with our name for one of other libraries."""
    for name in (name for name in given if name not in known):
        if name in _MEANT:
            raise TypeError(f"unknown argument {name!r}: {_MEANT[name]}")
        raise TypeError(str(unknown("argument", name, known)))


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises the error of `require_known` for unknown arguments."""
    known = [name for name in signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*values: P.args, **named_values: P.kwargs) -> R:
        require_known(named_values, known)
        return function(*values, **named_values)

    return checked


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
    def constants(self) -> dict[str, ir.DataType]:
        """The dtypes of the constants of the model, by name."""
        return self.built.get("constants", lambda: id(self.proto), self._read_constants)

    def _read_constants(self) -> dict[str, ir.DataType]:
        refs = constants.constant_refs(self.proto)
        return {ref.name: ir.DataType(ref.read().data_type) for ref in refs}

    @property
    def narrow(self) -> Dtypes:
        """The dtypes of the constants that have 16 bits in the file."""
        return self.built.get("narrow", lambda: id(self.proto), self._read_narrow)

    def _read_narrow(self) -> Dtypes:
        return {name: kind.numpy() for name, kind in self.constants.items() if kind in HALVES}

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

    def anew(self) -> Job:
        """Return an equal job with nothing built."""
        return replace(self, built=BuildCache())

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
        values, narrow = self._values_in_training(state), self.narrow
        if not narrow:
            return values
        values = rounded(values, narrow)
        return {n: self.in_training(a) if n in narrow else a for n, a in values.items()}

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
        members = [values] if self.members is None else map(values.__getitem__, range(self.members))
        pairs = zip(self.optimizers, members, strict=True)
        every = [evaluated(o, own.weights, own.slots, own.steps) for o, own in pairs]
        if self.members is None:
            return every[0] | buffers
        return {n: np.stack([own[n] for own in every]) for n in values.weights} | buffers


_PREPARED = "model train freeze train_ranges classes optimizer learning_rate".split()


def begin_job(given: Mapping[str, Any]) -> tuple[Job, Names, Arrays]:
    """Return the job of a trainer, the names of columns and classes, and the first weights.

    Args:
        given: the arguments of a `Trainer`, by name; other entries are not read.

    Raises:
        ValueError: an invalid argument.
        ModelError: the model cannot be read.
    """
    checked = check_arguments(given)
    proto, train, freeze, train_ranges, classes, optimizer, rate = map(checked.pop, _PREPARED)
    statistics = checked["batch_norm"] == "train"
    proto, trained = separated_choice(read(proto), train, freeze, statistics)
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
    small, digest = emptied(proto, trained), None
    if small is not proto:
        gc.collect()  # graphs, which are cyclic, refer to the whole model
        digest = describe(proto)
    job = Job(
        small,
        trained,
        optimizers=[optimizer],
        learning_rates=[select_rate(rate, optimizer)],
        classes=list(names.classes),
        digest=digest,
        **checked,
    )
    return job, names, {name: job.in_training(refs[name].array()) for name in trained}
