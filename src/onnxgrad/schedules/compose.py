"""Schedules composed of schedules: a warm-up before a schedule, and several in sequence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from onnxgrad.checks import check_count, check_number
from onnxgrad.schedules.base import (
    Schedule,
    checked_field,
    count_or_share,
    resolve_share,
    select,
    steps_in,
)


@dataclass(frozen=True)
class Warmup(Schedule):
    """A rise from `start` to the first rate of `schedule`, followed by `schedule`: see `warmup`."""

    schedule: Schedule = checked_field(lambda name, value: select(value))  # noqa: RUF009 (a field)
    warmup: int | float = checked_field(count_or_share)
    start: float = checked_field(check_number, 0.0)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.rate(step, {})

    def rate(self, step: int, state: Mapping[str, Any]) -> float:
        """Return the learning rate of a step; `state` belongs to the schedule after the warm-up."""
        warmup = steps_in(self, "warmup")
        if step >= warmup:
            return self.schedule.rate(step - warmup, state)
        return self.start + (self.schedule.rate(0, state) - self.start) * step / warmup

    def observed(self, state: Mapping[str, Any], record: Mapping[str, float]) -> dict[str, Any]:
        """Return the state after an entry of the history; entries of the warm-up do not count."""
        warmup = steps_in(self, "warmup")
        if not self.monitors or _step_count_of_entry(self, record) <= warmup:
            return dict(state)
        return self.schedule.observed(state, _shift_step_count(record, warmup))

    def over(self, steps: int) -> Self:
        """Return a copy of the schedule for a training of `steps` steps, the warm-up included."""
        warmup = resolve_share(self.warmup, check_count("steps", steps))
        return replace(self, schedule=self.schedule.over(max(steps - warmup, 1)), warmup=warmup)

    @property
    def monitors(self) -> tuple[str, ...]:
        """The names of the metrics in the training history on which the rate depends."""
        return self.schedule.monitors

    @property
    def length(self) -> int | None:
        """The count of steps until the rate is constant; None if the rate never gets constant."""
        length = self.schedule.length
        return None if length is None or isinstance(self.warmup, float) else self.warmup + length


def _check_schedules(name: str, value: Any) -> tuple[Schedule, ...]:
    """Return schedules as a tuple, numbers as `Constant`; raise `ValueError` if there are none."""
    schedules = tuple(map(select, value))
    if not schedules:
        raise ValueError(f"{name} is empty: give one schedule or more")
    return schedules


def _check_boundaries(name: str, value: Any) -> tuple[int | float, ...]:
    """Return step counts or shares of the training; raise `ValueError` if they decrease."""
    boundaries = tuple(count_or_share(f"each of {name}", v) for v in value)
    for kind in (int, float):  # shares and numbers of steps can be compared once the run is known
        chosen = [b for b in boundaries if isinstance(b, kind)]
        if sorted(chosen) != chosen or 0 in chosen:
            raise ValueError(f"{name} must be 1 or more and not decrease, unlike {[*boundaries]}")
    return boundaries


@dataclass(frozen=True)
class Join(Schedule):
    """Schedules in sequence, each of which counts steps from its boundary: see `join`.

    The state has the state of each schedule under its index, as a string.
    """

    schedules: tuple[Schedule, ...] = checked_field(_check_schedules)
    boundaries: tuple[int | float, ...] = checked_field(_check_boundaries)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"boundaries has {len(self.boundaries)} steps, and {len(self.schedules)} schedules "
                f"need {len(self.schedules) - 1}: give the first step of each schedule after the "
                "first schedule"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.rate(step, {})

    def rate(self, step: int, state: Mapping[str, Any]) -> float:
        """Return the learning rate of a step for a `state` of observed metrics."""
        starts = self._start_steps()
        i = bisect_right(starts, step) - 1
        return self.schedules[i].rate(step - starts[i], state.get(str(i), {}))

    def observed(self, state: Mapping[str, Any], record: Mapping[str, float]) -> dict[str, Any]:
        """Return the state after an entry of the history, which the current schedule observes."""
        if not self.monitors:
            return dict(state)
        starts = self._start_steps()
        i = max(bisect_left(starts, _step_count_of_entry(self, record)) - 1, 0)
        own = self.schedules[i].observed(
            state.get(str(i), {}), _shift_step_count(record, starts[i])
        )
        return {**state, str(i): own} if own else dict(state)

    def over(self, steps: int) -> Self:
        """Return a copy for a training of `steps` steps, which end with the last schedule."""
        boundaries = tuple(resolve_share(b, check_count("steps", steps)) for b in self.boundaries)
        edges = [0, *boundaries, max(steps, (boundaries or (0,))[-1] + 1)]
        lengths = [end - start for start, end in pairwise(edges)]
        filled = (s.over(max(n, 1)) for s, n in zip(self.schedules, lengths, strict=True))
        return replace(self, schedules=tuple(filled), boundaries=boundaries)

    @property
    def monitors(self) -> tuple[str, ...]:
        """The names of the metrics in the training history on which the rate depends."""
        return tuple(dict.fromkeys(name for s in self.schedules for name in s.monitors))

    @property
    def length(self) -> int | None:
        """The count of steps until the rate is constant; None if the rate never gets constant."""
        last = self.schedules[-1].length
        shares = any(isinstance(b, float) for b in self.boundaries)
        return None if last is None or shares else int((0, *self.boundaries)[-1]) + last

    def _start_steps(self) -> list[int]:
        """Return the step at which each schedule begins."""
        if any(isinstance(b, float) for b in self.boundaries):
            steps_in(self, "boundaries")
        return [0, *map(int, self.boundaries)]


def _step_count_of_entry(schedule: Schedule, record: Mapping[str, float]) -> float:
    """Return the step count in an entry of the history; raise `ValueError` without 'step'."""
    if "step" not in record:
        raise ValueError(
            f"{schedule!r} depends on {schedule.monitors} from a certain step on: the entry of the "
            "history must have a 'step', the count of steps so far"
        )
    return record["step"]


def _shift_step_count(record: Mapping[str, float], start: int) -> dict[str, float]:
    """Return an entry of the history whose `step` counts from the step `start`."""
    return {**record, "step": record["step"] - start}


def warmup(schedule: Schedule | float, steps: int | float, start: float = 0.0) -> Schedule:
    """start + (schedule(0) - start) step / steps, then schedule(step - steps).

    Args:
        schedule: the schedule after the warm-up, or a number, a constant rate. Its `steps=None` is
            the rest of the run, and metrics during the warm-up do not count for it.
        steps: number of steps of the warm-up, or its share of the run, between 0 and 1. A shorter
            run ends within the warm-up, with a warning.
        start: the rate of step 0, of 0 or more.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.compose import warmup
        >>> [warmup(0.5, steps=2)(step) for step in range(4)]
        [0.0, 0.25, 0.5, 0.5]
    """
    return Warmup(select(schedule), steps, start)


def join(schedules: Sequence[Schedule | float], boundaries: Sequence[int | float]) -> Schedule:
    """Return the schedule that runs schedules in sequence, as `optax.join_schedules`.

    Args:
        schedules: schedules, or numbers, constant rates. Each counts its steps from 0, and its
            `steps=None` are the steps up to the next boundary, or the end of the run.
        boundaries: the first step of each schedule but the first one, in increasing order, as a
            number or as a share of the run, between 0 and 1.

    Raises:
        ValueError: boundaries that are not one fewer than the schedules, or that decrease.

    Examples:
        >>> from onnxgrad.schedules.compose import join
        >>> from onnxgrad.schedules.curves import linear
        >>> [join([0.5, linear(1.0)], [2]).over(6)(step) for step in range(7)]
        [0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return Join(tuple(map(select, schedules)), tuple(boundaries))
