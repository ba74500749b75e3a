"""The arguments of trainers: what depends on each; a learning rate and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from onnxgrad.errors import named, unknown
from onnxgrad.optimizers import Optimizer
from onnxgrad.schedules.base import LearningRate, select as select_schedule


@dataclass(frozen=True)
class Argument:
    """What depends on an argument of `Trainer`, `TrainerStack` or `fit`.

    Args:
        attributes: the attributes of `Settings` that follow from it. None where it belongs to the
            call of `fit`, or `identity_of` reads it by other means.
        in_step: whether the compiled step or evaluation depends on it.
        free: why a resumed training may have another value; empty: it must have an equal one, and
            so must all processes of a group.
    """

    attributes: str = ""
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
    "optimizer": Argument("optimizer optimizers", in_step=True),
    "learning_rate": Argument("learning_rate learning_rates"),
    "train": Argument("trained straight_through", in_step=True),
    "freeze": Argument("trained", in_step=True),
    "train_ranges": Argument("trained", in_step=True),
    "clip_norm": Argument("clip_norm", in_step=True),
    "accumulate": Argument("accumulate", in_step=True),
    "batch_norm": Argument("batch_norm", in_step=True),
    "dropout": Argument("dropout", in_step=True),
    "mix": Argument("mix", in_step=True),
    "batch_axes": Argument("batch_axes", in_step=True),
    "carry": Argument("carry", in_step=True),
    "recompute": Argument("recompute", in_step=True),
    "precision": Argument("precision", in_step=True),
    "seed": Argument("seed", in_step=True),
    "members": Argument("members", in_step=True),
    "weights": Argument(free=_BEGINNING),
    "init": Argument(free=_BEGINNING),
    "device": Argument("device", in_step=True, free="another device computes the same"),
    "metrics": Argument(free="those that no callback and no schedule monitors are only reported"),
    "callbacks": Argument(free="what they keep in checkpoints is compared by their own arguments"),
    "parallel": Argument(),
    "X": Argument(),
    "y": Argument(),
    "sample_weight": Argument(),
    "validation": Argument(),
    "batch_size": Argument(),
    "shuffle": Argument(),
    "epochs": Argument(free="schedules that depend on it refuse another length"),
    "resume": Argument(free="it names the checkpoint"),
}


def attributes_where(**wanted: bool) -> list[str]:
    """Return the attributes of `Settings` whose arguments are `in_step`, or not `free`."""
    chosen = (
        of for of in ARGUMENTS.values() if all(bool(getattr(of, n)) == v for n, v in wanted.items())
    )
    return list(dict.fromkeys(name for of in chosen for name in of.attributes.split()))


def usual_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of a training that is given none."""
    return 1e-3 if optimizer.usual_rate is None else optimizer.usual_rate


def select_rate(rate: Any, optimizer: Optimizer) -> LearningRate:
    """Return the learning rate for a number, which is a constant one, for an object, or None.

    None is the usual rate of the optimizer.
    """
    rate = usual_rate(optimizer) if rate is None else rate
    return rate if isinstance(rate, LearningRate) else select_schedule(rate)


P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function name its arguments where users pass arguments of other libraries."""
    known = [name for name in signature(function).parameters if name != "self"]
    of_fit = ("batch_size", "epochs", "shuffle", "validation")
    meant = {
        "criterion": f"pass {named('loss')}",
        "lr": f"pass {named('learning_rate')}",
        "weight_decay": "it is an argument of an optimizer, as adamw",
    } | dict.fromkeys(of_fit, "it is an argument of fit")

    @wraps(function)
    def checked(*values: P.args, **named_values: P.kwargs) -> R:
        for name in (name for name in named_values if name not in known):
            if name in meant:
                raise TypeError(f"unknown argument {name!r}: {meant[name]}")
            raise TypeError(str(unknown("argument", name, known)))
        return function(*values, **named_values)

    return checked
