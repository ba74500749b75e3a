"""The arguments of trainers: checked, and turned into a learning rate and an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import named, unknown
from onnxgrad.schedules.base import Schedule, select as select_schedule
from onnxgrad.schedules.epochwise import BaseLearningRate


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
