"""`Job`: the arguments of a trainer, and the values of its state that it evaluates and exports.

`ARGUMENTS` is the one table of arguments: how each is checked, and whether steps and resumes depend
on it.
"""

from __future__ import annotations

import gc
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.recompute import RECOMPUTE
from onnxgrad.checks import check_choice, check_count, check_mapping, check_positive
from onnxgrad.data.class_numbers import class_weights_by_index
from onnxgrad.data.columns import Names, read_names
from onnxgrad.data.field import Field
from onnxgrad.data.image_transforms import IMAGES
from onnxgrad.data.readers import Reader
from onnxgrad.errors import named, unknown
from onnxgrad.graph.precision import HALVES
from onnxgrad.metrics.base import Metric
from onnxgrad.model import weights as constants
from onnxgrad.model.notes import ADAPTERS, HEAD, read_metadata, trained_dropout
from onnxgrad.model.read import is_model_path, read
from onnxgrad.model.weights import without_large_weights
from onnxgrad.operators.shapes import Dims
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import select as select_optimizer, sgd
from onnxgrad.parallel.process_groups import DataParallel
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate, constant, select as select_schedule
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.equality import BuildCache, describe
from onnxgrad.training.mixing import Mix, check_mix
from onnxgrad.training.modes.ranges import with_trained_scales
from onnxgrad.training.modes.stored_integers import rounded_float_weights
from onnxgrad.training.output_metrics import MetricsByOutput, select_metrics
from onnxgrad.training.parameters.choice import choose_and_separate, list_patterns
from onnxgrad.training.precision import (
    PRECISIONS,
    Dtypes,
    cast_halves_to_float32,
    cast_to_dtypes,
    cast_within_range,
    rounding_errors,
    training_precision,
)
from onnxgrad.training.state import Arrays, TrainState
from onnxgrad.training.step.update import weights_to_evaluate

USUAL_BATCH_SIZE = 32  # rows of a step of `fit` without `batch_size`
Check = Callable[[str, Any], Any]  # name, value -> the value that a `Job` holds


def _check_mapping(form: str) -> Check:
    """Return a `Check` that copies a mapping like `form`, {} for None, and refuses other values."""
    return partial(check_mapping, form=form)


def _check_loss_options(name: str, value: Any) -> Any:
    """Return `value`, None or a mapping that the user may change later; refuse other values."""
    check_mapping(name, value, "{option: value}")
    return value


def _check_one_of(*choices: str) -> Check:
    """Return a `Check` that raises `ValueError` for values other than the texts `choices`."""
    return lambda name, value: check_choice(name, value, choices)


@dataclass(frozen=True)
class Argument:
    """The check of an argument of `Trainer`, `TrainerStack` or `fit`, and the `Job` fields it sets.

    Attributes:
        fields: the names of the fields of a `Job` that are set from the argument, separated by
            spaces. Empty where the argument belongs to the call of `fit`, or where `identity_of`
            reads it by other means.
        check: (name, value) -> the value that a `Job` holds. It raises a `ValueError` that names
            the argument. By default, any value is accepted.
        in_step: whether the compiled step or evaluation depends on the argument.
        free: why a resumed training may have another value of the argument; empty: the value must
            be equal in a resumed training, and in all processes of a group.
    """

    fields: str = ""
    check: Check = lambda name, value: value
    in_step: bool = False
    free: str = ""


_BEGINNING = "the checkpoint has the weights of all members"
ARGUMENTS: Mapping[str, Argument] = {
    "model": Argument(),
    "loss": Argument("loss", in_step=True),
    "loss_options": Argument("loss_options", _check_loss_options, in_step=True),
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
    "batch_norm": Argument("batch_norm", _check_one_of("frozen", "train"), in_step=True),
    "dropout": Argument("dropout", _check_mapping("{pattern: probability}"), in_step=True),
    "mix": Argument("mix", lambda _, value: check_mix(value), in_step=True),
    "batch_axes": Argument("batch_axes", _check_mapping("{input: axis}"), in_step=True),
    "carry": Argument("carry", _check_mapping("{input: output}"), in_step=True),
    "recompute": Argument("recompute", _check_one_of(*RECOMPUTE), in_step=True),
    "precision": Argument("precision", _check_one_of(*PRECISIONS), in_step=True),
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
    "cache": Argument(free="frozen layers give the same results"),
}


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of the arguments of a trainer or of `fit` in `given`, by name.

    Raises:
        ValueError: a value that an argument does not take.
    """
    return {n: ARGUMENTS[n].check(n, value) for n, value in given.items() if n in ARGUMENTS}


def _field_names(arguments: Iterable[Argument]) -> list[str]:
    """Return the names of the fields of a `Job` that are set from `arguments`, each once."""
    names = (name for argument in arguments for name in argument.fields.split())
    return list(dict.fromkeys(names))


_STEP_FIELDS = _field_names(argument for argument in ARGUMENTS.values() if argument.in_step)
_COMPARED_FIELDS = _field_names(argument for argument in ARGUMENTS.values() if not argument.free)
_STACK_FIELDS = ("members", "optimizers", "learning_rates")


def usual_rate(optimizer: Optimizer) -> float:
    """Return the learning rate with which an optimizer trains if `learning_rate` is not passed."""
    return 1e-3 if optimizer.usual_rate is None else optimizer.usual_rate


def select_rate(rate: Any, optimizer: Optimizer) -> LearningRate:
    """Return the argument `learning_rate` as a schedule; None means `usual_rate(optimizer)`."""
    rate = usual_rate(optimizer) if rate is None else rate
    return rate if isinstance(rate, LearningRate) else select_schedule(rate)


P = ParamSpec("P")
R = TypeVar("R")

_REMEDIES = {  # by the names that other libraries give to arguments
    "criterion": f"pass {named('loss')}",
    "lr": f"pass {named('learning_rate')}",
    "weight_decay": "it is an argument of an optimizer, as adamw",
    **dict.fromkeys("batch_size epochs shuffle validation".split(), "it is an argument of fit"),
}


def require_known_arguments(given: Iterable[str], known: Collection[str]) -> None:
    """Raise `TypeError` for the first name in `given` that is not among the `known` arguments.

    For names of other libraries, such as `lr`, the message says which argument to pass instead.
    """
    for name in (name for name in given if name not in known):
        if name in _REMEDIES:
            raise TypeError(f"unknown argument {name!r}: {_REMEDIES[name]}")
        raise TypeError(str(unknown("argument", name, known)))


def refuse_unknown_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, changed to say what to pass in place of an argument that it lacks.

    The errors are those of `require_known_arguments`.
    """
    known = [name for name in signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*values: P.args, **named_values: P.kwargs) -> R:
        require_known_arguments(named_values, known)
        return function(*values, **named_values)

    return checked


@dataclass(frozen=True, eq=False)
class Job:
    """A model, the names of the weights that train, and the checked arguments of the training.

    With the defaults, a model is evaluated with the weights of its file: no weight is an input of
    the graph, and the model needs no trainable weight.

    Attributes:
        proto: the model, without the elements of the weights that train if these are large.
        trained: names of the weights that train.
        straight_through: whether gradients pass through the rounding of quantized layers.
        optimizers: a list of one optimizer; of a stack, the optimizer of each member.
        learning_rates: a list of one schedule; of a stack, the schedule of each member.
        metrics: the metrics by output.
        classes: the names of the classes: the argument `classes`, or else the names in the file.
        members: the count of members of a stack, the copies of the model that it trains; None for
            one model.
        digest: the digest of the whole model, if `proto` lacks large weights; otherwise None.
        built: sessions and graphs of this job, kept until a loss or another argument is modified.
        usual_batch_size: rows of a step of `fit` without `batch_size`; a task may state another.
        shows_progress: whether `fit` shows a progress bar, if a person watches the terminal.
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
    metrics: MetricsByOutput = field(default_factory=dict)
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
    usual_batch_size: int = USUAL_BATCH_SIZE
    shows_progress: bool = True

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; of a stack, the optimizer of the first member."""
        return self.optimizers[0]

    @property
    def learning_rate(self) -> LearningRate:
        """The schedule of the learning rate; of a stack, the schedule of the first member."""
        return self.learning_rates[0]

    @property
    def constant_dtypes(self) -> dict[str, ir.DataType]:
        """The dtypes of the constants of the model, by name."""

        def read_dtypes() -> dict[str, ir.DataType]:
            refs = constants.constant_refs(self.proto)
            return {ref.name: ir.DataType(ref.read().data_type) for ref in refs}

        return self.built.get("constant_dtypes", lambda: id(self.proto), read_dtypes)

    @property
    def half_dtypes(self) -> Dtypes:
        """The dtypes of the constants that are float16 or bfloat16 in the file, by name."""
        return {name: d.numpy() for name, d in self.constant_dtypes.items() if d in HALVES}

    @property
    def inputs_with_moved_rows(self) -> set[str]:
        """The names of the inputs whose rows are not on their first axis, by `batch_axes`."""
        return {name for name, axis in self.batch_axes.items() if axis != 0}

    @property
    def averages_weights(self) -> bool:
        """Whether an optimizer of this job also keeps averages of the weights."""
        return any(optimizer.averages for optimizer in self.optimizers)

    @property
    def all_metrics(self) -> list[Metric]:
        """The metrics of all outputs."""
        return [metric for listed in self.metrics.values() for metric in listed]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the trainer that trackers and reports show, by name."""
        values = {name: getattr(self, name) for name in ARGUMENTS if hasattr(self, name)}
        values["metrics"] = self.all_metrics
        if self.members is not None:
            values |= {"optimizer": self.optimizers, "learning_rate": self.learning_rates}
        return values

    @property
    def compared_fields(self) -> dict[str, Any]:
        """The fields that must be equal in a resumed training, and in all processes, by name."""
        of_stack = self.members is not None
        names = [n for n in _COMPARED_FIELDS if of_stack or n not in _STACK_FIELDS]
        return {name: getattr(self, name) for name in names}

    @property
    def step_key(self) -> Any:
        """The cache key of the compiled step: equal as long as the step stays the same."""
        values = {name: getattr(self, name) for name in _STEP_FIELDS}
        return id(self.proto), self.built.fingerprint(values)

    def without_built(self, **changes: Any) -> Job:
        """Return this job with other fields, and with nothing built.

        What `built` keeps refers to such a job: with `built` itself, it would be part of a cycle of
        references, and sessions and arrays would stay until the garbage is collected.
        """
        return replace(self, built=BuildCache(), **changes)

    # -- the values of a state --------------------------------------------------------------

    def weights_to_begin(self, state: TrainState) -> Arrays:
        """Return the weights from which the next `fit` starts: averages if an optimizer averages.

        They are not rounded to the 16 bits of a file.
        """
        values = self._unrounded_weights_and_statistics(state)
        return {name: values[name] for name in state.weights}

    def values_to_evaluate(self, state: TrainState) -> Arrays:
        """Return the weights and statistics that are evaluated and exported, by name.

        The weights are from the last step, or averages if the optimizer averages weights. Arrays
        of a stack have the axis of members first. Values of constants that have 16 bits in the file
        are rounded to 16 bits.
        """
        values, dtypes = self._unrounded_weights_and_statistics(state), self.half_dtypes
        if not dtypes:
            return values
        values = cast_to_dtypes(values, dtypes)
        return {n: self.cast_for_training(a) if n in dtypes else a for n, a in values.items()}

    def values_for_file(self, state: TrainState) -> Arrays:
        """Return the weights and statistics to export, in the dtypes of the file.

        Raises:
            ValueError: an element beyond the range of the dtype.
        """
        return cast_within_range(self._unrounded_weights_and_statistics(state), self.half_dtypes)

    def rounding_errors(self, state: TrainState) -> dict[str, float]:
        """Return the largest and the mean error of rounding weights to the 16 bits of the file."""
        if self.precision == "file":
            return {}
        return rounding_errors(self._unrounded_weights_and_statistics(state), self.half_dtypes)

    def cast_for_training(self, array: np.ndarray) -> np.ndarray:
        """Return the elements of a constant in the dtype in which it trains and is evaluated."""
        return array if self.precision == "file" else cast_halves_to_float32(array)

    def _unrounded_weights_and_statistics(self, state: TrainState) -> Arrays:
        """Return the weights or their averages, and running statistics, by name, without rounding.

        `values_to_evaluate` rounds these values.
        """
        values = state.values
        buffers = {n: a for n, a in values.buffers.items() if n in self.constant_dtypes}
        if not self.averages_weights:
            return values.weights | buffers
        members = [values] if self.members is None else map(values.__getitem__, range(self.members))
        pairs = zip(self.optimizers, members, strict=True)
        every = [weights_to_evaluate(o, own.weights, own.slots, own.steps) for o, own in pairs]
        if self.members is None:
            return every[0] | buffers
        return {n: np.stack([own[n] for own in every]) for n in values.weights} | buffers


# arguments that are no fields of a `Job`
_DERIVED_FROM = "model train freeze train_ranges classes optimizer learning_rate".split()


def create_job(given: Mapping[str, Any]) -> tuple[Job, Names, Arrays]:
    """Return the job of a trainer, the names of columns and classes, and the first weights.

    Args:
        given: the arguments of a `Trainer`, by name; other entries are not read.

    Raises:
        ValueError: an invalid argument.
        ModelError: the model cannot be read.
    """
    checked = check_arguments(given)
    proto, train, freeze, train_ranges, classes, optimizer, rate = map(checked.pop, _DERIVED_FROM)
    statistics = checked["batch_norm"] == "train"
    proto, trained = choose_and_separate(read(proto), train, freeze, statistics)
    # a user who names weights of a quantized model knows that its stored integers stay
    tuned = read_metadata(proto, ADAPTERS) or read_metadata(proto, HEAD)
    rounded_weights = {pair.weight for pair in rounded_float_weights(proto)}
    is_chosen = train is not None or train_ranges or bool(tuned)
    checked |= {
        "precision": training_precision(checked["precision"], proto, checked["device"]),
        "dropout": trained_dropout(proto) | checked["dropout"],
        "straight_through": is_chosen or not rounded_weights.isdisjoint(trained),
    }
    names = read_names(proto)
    names.classes = list(classes) or names.classes
    checked["class_weight"] = class_weights_by_index(checked["class_weight"], names.classes)
    if train_ranges:
        proto, changes = with_trained_scales(proto, list_patterns(freeze))
        trained = [*trained, *changes]
    refs = {ref.name: ref for ref in constants.constant_refs(proto)}
    small, digest = without_large_weights(proto, trained), None
    if small is not proto:
        gc.collect()  # frees the whole model, to which cyclic graphs refer
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
    return job, names, {name: job.cast_for_training(refs[name].array()) for name in trained}


# -- the metadata of a trained file ------------------------------------------------------------

LOSS = "onnxgrad.training_loss"  # metadata: a list of one dict, arguments of a `Trainer`

_CHANNELS = frozenset((1, 3, 4))  # lengths of the axis of channels of images


def training_notes(
    job: Job, kept: Mapping[str, list[Any]], reader: Reader | None, features: Iterable[Field]
) -> dict[str, list[Any]]:
    """Return the notes that a training adds to the metadata of its model file, by key.

    Args:
        job: the arguments of the training.
        kept: the notes of earlier trainings.
        reader: the reader of the rows; None for arrays.
        features: the data inputs other than labels.
    """
    notes = {LOSS: _loss_arguments_note(job), **({} if reader is None else reader.remembered)}
    known = read_metadata(job.proto, IMAGES) or kept.get(IMAGES)
    shapes: list[Dims] = [x.shape or () for x in features if x.dtype.kind == "f"]
    may_take_images = any(len(s) == 4 and not _CHANNELS.isdisjoint(s[1::2]) for s in shapes)
    if IMAGES not in notes and not known and may_take_images:
        notes[IMAGES] = [{"arrays": True}]  # arrays do not tell how images became numbers
    return dict(kept) | notes


def _loss_arguments_note(job: Job) -> list[dict[str, Any]]:
    """Return a list of one dict: the arguments of a `Trainer` that describe the loss.

    The list is empty if JSON cannot hold them.
    """
    by_output = job.loss if isinstance(job.loss, Mapping) else {None: job.loss}
    if not all(isinstance(name, str) and not is_model_path(name) for name in by_output.values()):
        return []
    stated = {"loss": job.loss, "loss_options": job.loss_options, "loss_weights": job.loss_weights}
    try:
        # arrays and numbers of numpy have `tolist`; other objects raise `AttributeError`
        text = json.dumps(
            {name: v for name, v in stated.items() if v}, default=operator.methodcaller("tolist")
        )
    except (TypeError, AttributeError):
        return []
    return [json.loads(text)]
