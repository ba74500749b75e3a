"""The arguments of trainers: checked, and turned into a learning rate and an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import named, unknown
from onnxgrad.optimizers import Optimizer
from onnxgrad.schedules.base import LearningRate, select as select_schedule


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


def usual_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of a training that is given none."""
    return 1e-3 if optimizer.usual_rate is None else optimizer.usual_rate


def select_rate(rate: Any, optimizer: Optimizer) -> LearningRate:
    """Return the learning rate for a number, which is a constant one, for an object, or None.

    None is the usual rate of the optimizer.
    """
    rate = usual_rate(optimizer) if rate is None else rate
    return rate if isinstance(rate, LearningRate) else select_schedule(rate)
