"""A learning rate that falls when a metric stops improving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from onnxgrad.checks import check_choice, check_count, check_number
from onnxgrad.schedules.base import Schedule, checked_field

_zero_or_more = partial(check_count, least=0)


@dataclass(frozen=True)
class Plateau(Schedule):
    """A rate multiplied by `factor` after `patience` entries without improvement: see `plateau`.

    The state has `rate`; `best`, the best value, absent before any improvement; `bad`, the number
    of entries since then that count as bad; and `cooldown`, the number of entries not to count.
    """

    initial: float = checked_field(check_number, called="rate")
    factor: float = checked_field(check_number, 0.1)
    patience: int = checked_field(_zero_or_more, 10)
    monitor: str = "validation_loss"
    mode: str = "min"
    threshold: float = checked_field(check_number, 1e-4)
    cooldown: int = checked_field(_zero_or_more, 0)
    min_rate: float = checked_field(check_number, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, ("min", "max"))
        if not 0 < self.factor < 1:
            raise ValueError(f"factor of Plateau must be between 0 and 1, not {self.factor}")
        if self.min_rate > self.initial:
            raise ValueError(f"min_rate {self.min_rate} is above the first rate {self.initial}")
        if not isinstance(self.monitor, str):
            raise ValueError(f"monitor of Plateau must be a name, not {self.monitor!r}")

    def __call__(self, step: int) -> float:
        """Return the initial learning rate, which `observed` may lower later."""
        return self.initial

    def rate(self, step: int, state: Mapping[str, Any]) -> float:
        """Return the learning rate in the state of observed metrics."""
        return state.get("rate", self.initial)

    def observed(self, state: Mapping[str, Any], record: Mapping[str, float]) -> dict[str, Any]:
        """Return the state after an entry of the history; one without `monitor` keeps the state."""
        if self.monitor not in record:
            return dict(state)
        value, best = float(record[self.monitor]), state.get("best")
        rate, cooldown = self.rate(0, state), state.get("cooldown", 0)
        better = self._is_better(value, best)
        bad = 0 if better or cooldown else state.get("bad", 0) + 1
        cooldown = max(cooldown - 1, 0)
        if bad > self.patience:
            rate, bad, cooldown = max(rate * self.factor, self.min_rate), 0, self.cooldown
        after = {"rate": rate, "best": value if better else best, "bad": bad, "cooldown": cooldown}
        return {key: v for key, v in after.items() if v is not None}

    def _is_better(self, value: float, best: float | None) -> bool:
        """Return whether a metric's value beats its best value by more than the threshold."""
        if self.mode == "min":
            return value < (float("inf") if best is None else best * (1 - self.threshold))
        return value > (float("-inf") if best is None else best * (1 + self.threshold))

    @property
    def monitors(self) -> tuple[str, ...]:
        """The name of the metric in the training history on which the rate depends."""
        return (self.monitor,)


def plateau(
    rate: float,
    factor: float = 0.1,
    patience: int = 10,
    monitor: str = "validation_loss",
    mode: str = "min",
    threshold: float = 1e-4,
    cooldown: int = 0,
    min_rate: float = 0.0,
) -> Schedule:
    """Return the schedule that multiplies the rate by `factor` whenever a metric stops improving.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau` with its relative threshold and `eps=0`.

    Args:
        rate: the first rate, of 0 or more.
        factor: factor of the rate, between 0 and 1.
        patience: number of entries of the history in a row without improvement after which the next
            one lowers the rate.
        monitor: name in an entry of the history: "loss", "validation_loss" or a metric. Entries
            without it do not count.
        mode: "min" if lower values are better, "max" if higher ones are.
        threshold: an improvement is below best * (1 - threshold), or above best * (1 + threshold).
        cooldown: number of entries after a reduction that do not count as bad.
        min_rate: the rate does not fall below it.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.plateaus import plateau
        >>> schedule, state = plateau(1.0, factor=0.5, patience=1), {}
        >>> for loss in (3.0, 2.0, 2.5, 2.5):
        ...     state = schedule.observed(state, {"validation_loss": loss})
        ...     print(schedule.rate(0, state))
        1.0
        1.0
        1.0
        0.5
    """
    return Plateau(rate, factor, patience, monitor, mode, threshold, cooldown, min_rate)
