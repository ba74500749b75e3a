"""The arguments of trainers: checked, and turned into a learning rate and an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate, Trace, select, sgd
from onnxgrad.schedules import BaseLearningRate, LearningRateSGDNesterov
from onnxgrad.training.state import INITS


def check_arguments(trainer: Any) -> None:
    """Raise `ValueError` for an argument of a `Trainer` that is wrong for any model."""
    for name in ("max_iter", "batch_size"):
        value = getattr(trainer, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
    names, every = trainer.weights_to_train, trainer.validation_every
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise ValueError(f"weights_to_train is a list of names, not {names!r}")
    if not isinstance(every, (int, float, np.number)) or not every > 0:
        raise ValueError(f"validation_every must be above 0, not {every!r}")
    if trainer.weight_init not in INITS:
        raise unknown("weight_init", trainer.weight_init, INITS)


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
