"""The arguments of trainers: how each is checked, and whether steps and resumes depend on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from onnxgrad.autodiff.recompute import RECOMPUTE
from onnxgrad.checks import check_choice, check_count, check_positive
from onnxgrad.errors import named, unknown
from onnxgrad.optimizers import Optimizer, select as select_optimizer
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate, select as select_schedule
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.mixing import check_mix
from onnxgrad.training.output_metrics import select_metrics
from onnxgrad.training.precision import PRECISIONS

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


def fields_where(**wanted: bool) -> list[str]:
    """Return the fields of a `Job` whose arguments are `in_step`, or not `free`."""
    fields: dict[str, None] = {}
    for argument in ARGUMENTS.values():
        if all(bool(getattr(argument, name)) == value for name, value in wanted.items()):
            fields |= dict.fromkeys(argument.fields.split())
    return list(fields)


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
