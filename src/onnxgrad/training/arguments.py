"""The arguments of trainers: checked, and turned into a learning rate and an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import named, unknown
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate, Trace, select, sgd
from onnxgrad.runtime.values import to_numpy
from onnxgrad.schedules.base import Schedule, select as select_schedule
from onnxgrad.schedules.epochwise import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.starts import INITS


def check_arguments(trainer: Any) -> None:
    """Raise `ValueError` for an argument of a `Trainer` that is wrong for any model."""
    for name in ("max_iter", "batch_size"):
        check_count(name, getattr(trainer, name))
    names, every = trainer.weights_to_train, trainer.validation_every
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise ValueError(f"weights_to_train is a list of names, not {names!r}")
    if not isinstance(every, (int, float, np.number)) or not every > 0:
        raise ValueError(f"validation_every must be above 0, not {every!r}")
    if trainer.weight_init not in INITS:
        raise unknown("weight_init", trainer.weight_init, INITS)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return `value`, or raise `ValueError` if it is no whole number of at least 0 or 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        bound = "above 0" if least else "of 0 or more"
        raise ValueError(f"{named(name)} must be a whole number {bound}, not {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return `value`, or raise `ValueError` if it is none of the choices."""
    if value not in choices:
        raise unknown(named(name), value, choices)
    return value


def select_rate(rate: Any) -> Schedule | BaseLearningRate:
    """Return the schedule for a number or a schedule; a `BaseLearningRate` changes by the epoch."""
    return rate if isinstance(rate, BaseLearningRate) else select_schedule(rate)


def start_learning_rate(learning_rate: Any) -> BaseLearningRate:
    """Return a copy of the learning rate at its first epoch."""
    rate = copy.deepcopy(BaseLearningRate.select(learning_rate))
    rate.init_learning_rate()
    return rate


def select_optimizer(name: str | Optimizer, rate: BaseLearningRate) -> Optimizer:
    """Return the optimizer, with the momentum that the learning rate may define."""
    optimizer = select(name)
    if not isinstance(rate, LearningRateSGDNesterov):
        return optimizer
    if optimizer != sgd():
        raise ValueError(
            f"{type(rate).__name__} brings its own momentum: use it with 'SGDOptimizer', "
            f"not {name!r}"
        )
    return Chain((ScaleByLearningRate(), Trace(rate.momentum, rate.nesterov)))


def checked_slots(
    name: str, slots: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return the slots of a weight as arrays of its dtype.

    Args:
        name: of the weight.
        slots: arrays or OrtValues, by slot.
        shapes: of all slots that the optimizer keeps for this weight.
        dtype: that of the weight.

    Raises:
        ValueError: an unknown slot, or an array of another shape.
    """
    checked = {}
    for slot, value in slots.items():
        if slot not in shapes:
            raise unknown(f"slot of {name!r}", slot, shapes)
        array = to_numpy(value)
        if array.shape != shapes[slot]:
            raise ValueError(f"{name!r} has shape {shapes[slot]}, its new value {array.shape}")
        checked[slot] = np.array(array, dtype)
    return checked
