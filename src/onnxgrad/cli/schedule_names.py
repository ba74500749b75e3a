"""The schedules of learning rates by name."""

from __future__ import annotations

from collections.abc import Callable

from onnxgrad.schedules import curves
from onnxgrad.schedules.base import Schedule, constant
from onnxgrad.schedules.plateaus import plateau

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        *(constant, curves.step_decay, curves.exponential, curves.linear, curves.cosine),
        *(curves.polynomial, curves.one_cycle, curves.inverse_sqrt, plateau),
    )
}
