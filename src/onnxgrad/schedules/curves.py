"""Schedules: formulas of the step, and a rate that falls when a metric stops improving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import cos, pi, sqrt
from typing import Any

from onnxgrad.checks import check_choice, check_count, check_fraction, check_number, check_positive
from onnxgrad.schedules.base import (
    Schedule,
    checked_field,
    constant,
    count_or_share,
    resolve_share,
    steps_in,
    steps_or_none,
)
from onnxgrad.schedules.compose import Warmup

_zero_or_more = partial(check_count, least=0)


@dataclass(frozen=True)
class Exponential(Schedule):
    """start * factor^(step / every), the exponent rounded down if `staircase`."""

    start: float = checked_field(check_number, called="rate")
    factor: float = checked_field(check_positive)
    every: int = checked_field(check_count, 1)
    staircase: bool = False

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        exponent = step // self.every if self.staircase else step / self.every
        return self.start * self.factor**exponent


@dataclass(frozen=True)
class Polynomial(Schedule):
    """end + (start - end) (1 - step / steps)^power, then `end`."""

    start: float = checked_field(check_number)
    end: float = checked_field(check_number, 0.0)
    power: float = checked_field(check_positive, 1.0)
    steps: int | None = checked_field(steps_or_none, None)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        steps = steps_in(self, "steps")
        return self.end + (self.start - self.end) * (1 - min(step, steps) / steps) ** self.power


@dataclass(frozen=True)
class Cosine(Schedule):
    """end + (peak - end) (1 + cos(pi step / steps)) / 2, then `end`."""

    peak: float = checked_field(check_number)
    end: float = checked_field(check_number, 0.0)
    steps: int | None = checked_field(steps_or_none, None)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        steps = steps_in(self, "steps")
        return _half_cosine_rate(self.peak, self.end, min(step, steps) / steps)


@dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Half cosines from `peak` to `end` in sequence, each `factor` times as long as before."""

    peak: float = checked_field(check_number)
    period: int | float = checked_field(count_or_share)
    factor: int = checked_field(check_count, 1)
    end: float = checked_field(check_number, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period == 0:
            raise ValueError("period of CosineRestarts must be 1 or more, not 0")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        period = steps_in(self, "period")
        if self.factor == 1:
            step %= period
        while step >= period:
            step -= period
            period *= self.factor
        return _half_cosine_rate(self.peak, self.end, step / period)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """A rise from peak / div_factor to the peak, and a fall to the final rate: see `one_cycle`."""

    peak: float = checked_field(check_number)
    steps: int | None = checked_field(steps_or_none, None)
    pct_start: float = checked_field(check_fraction, 0.3)
    anneal_strategy: str = "cos"
    div_factor: float = checked_field(check_positive, 25.0)
    final_div_factor: float = checked_field(check_positive, 1e4)
    three_phase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("anneal_strategy", self.anneal_strategy, ("cos", "linear"))
        if self.three_phase and self.pct_start > 0.5:
            raise ValueError(
                "pct_start of OneCycle is the share of the rise, and of the equally long fall, of "
                f"three phases: it must be 0.5 or less, not {self.pct_start}"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        steps = steps_in(self, "steps")
        first = self.peak / self.div_factor
        up, last = self.pct_start * steps - 1, steps - 1  # ends of phases, not always integers
        phases = [(up, self.peak), (last, first / self.final_div_factor)]
        if self.three_phase:
            phases.insert(1, (2 * up, first))
        step, start, rate = min(step, last), 0.0, first
        for end, target in phases:
            if step <= end or end == last:
                done = (step - start) / (end - start) if end > start else 1.0
                if self.anneal_strategy == "cos":
                    return _half_cosine_rate(rate, target, done)
                return rate * (1 - done) + target * done
            start, rate = end, target
        raise AssertionError("the last phase ends with the last step")


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """peak * min(step / warmup, sqrt(warmup / step))."""

    peak: float = checked_field(check_number)
    warmup: int | float = checked_field(count_or_share)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup == 0:
            raise ValueError(
                "warmup of InverseSqrt is also the time scale of the decay: give 1 or more"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = steps_in(self, "warmup")
        return self.peak * (step / warmup if step < warmup else sqrt(warmup / step))


@dataclass(frozen=True)
class Plateau(Schedule):
    """A rate times `factor` after `patience` entries without an improvement: see `plateau`.

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
            raise ValueError(
                f"min_rate {self.min_rate} is above rate {self.initial}: give a lower one"
            )
        if not isinstance(self.monitor, str):
            raise ValueError(f"monitor of Plateau must be a metric's name, not {self.monitor!r}")

    def __call__(self, step: int) -> float:
        """Return the initial learning rate, which `observed` may lower later."""
        return self.initial

    def rate(self, step: int, state: Mapping[str, Any]) -> float:
        """Return the learning rate in the state of observed metrics."""
        return state.get("rate", self.initial)

    def observed(self, state: Mapping[str, Any], record: Mapping[str, float]) -> dict[str, Any]:
        """Return the state after an entry of the history, if the entry has a value of `monitor`."""
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


def _half_cosine_rate(start: float, end: float, done: float) -> float:
    """Return the rate on a half cosine from `start` to `end`, at the share `done` of its length."""
    return end + (start - end) * (1 + cos(pi * done)) / 2


def step_decay(rate: float, every: int, factor: float = 0.1) -> Schedule:
    """rate * factor^floor(step / every), as `torch.optim.lr_scheduler.StepLR`.

    Args:
        rate: the rate of step 0, of 0 or more.
        every: number of steps after which the rate is multiplied by `factor`.
        factor: above 0.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import step_decay
        >>> [step_decay(1.0, every=2, factor=0.5)(step) for step in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return Exponential(rate, factor, every, staircase=True)


def exponential(rate: float, factor: float, every: int = 1) -> Schedule:
    """rate * factor^(step / every), as `optax.exponential_decay`.

    With `every=1`, it is `torch.optim.lr_scheduler.ExponentialLR`.

    Args:
        rate: the rate of step 0, of 0 or more.
        factor: above 0; above 1, the rate grows.
        every: number of steps in which the rate is multiplied by `factor`.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import exponential
        >>> [exponential(1.0, factor=0.25, every=2)(step) for step in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """
    return Exponential(rate, factor, every)


def linear(start: float, end: float = 0.0, steps: int | None = None) -> Schedule:
    """start + (end - start) step / steps, then `end`, as `optax.linear_schedule`.

    Args:
        start: the rate of step 0, of 0 or more.
        end: the rate of step number `steps` and all later ones, of 0 or more.
        steps: number of steps; None: the whole run.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import linear
        >>> [linear(1.0, steps=4)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return Polynomial(start, end, 1.0, steps)


def polynomial(
    rate: float, power: float = 1.0, end: float = 0.0, steps: int | None = None
) -> Schedule:
    """end + (rate - end) (1 - step / steps)^power, then `end`, as `optax.polynomial_schedule`.

    Args:
        rate: the rate of step 0, of 0 or more.
        power: above 0.
        end: the rate of step number `steps` and all later ones, of 0 or more.
        steps: number of steps; None: the whole run.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import polynomial
        >>> [polynomial(1.0, power=2, steps=4)(step) for step in range(5)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    return Polynomial(rate, end, power, steps)


def cosine(
    peak: float,
    steps: int | None = None,
    warmup: int | float = 0,
    end: float = 0.0,
    *,
    period: int | float | None = None,
    factor: int = 1,
) -> Schedule:
    """end + (peak - end) (1 + cos(pi step / steps)) / 2, after a linear warm-up from 0.

    It is `optax.warmup_cosine_decay_schedule`; with `period`, the cosine starts again and again, as
    `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`. Loshchilov and Hutter 2017, "SGDR".

    Args:
        peak: the highest rate, of 0 or more.
        steps: number of steps including the warm-up, after which the rate is `end`; None: the whole
            run.
        warmup: number of steps of the warm-up, or its share of the steps, between 0 and 1.
        end: the lowest rate, of 0 or more.
        period: number of steps from one restart to the next, or their share of the steps after the
            warm-up. Restarts do not end: `steps` only says how many steps shares refer to.
        factor: how many times longer each period is than the last.

    Raises:
        ValueError: an argument outside of its bounds, or a warm-up that leaves no step.

    Examples:
        >>> from onnxgrad.schedules.curves import cosine
        >>> [round(cosine(1.0, steps=6, warmup=2)(step), 4) for step in range(7)]
        [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0]
        >>> cosine(1e-3, warmup=0.1).over(1000)
        Warmup(schedule=Cosine(peak=0.001, end=0.0, steps=900), warmup=100, start=0.0)
    """
    if period is None and factor != 1:
        raise ValueError(
            "factor of cosine multiplies the periods: pass the first period, too, by period="
        )
    curve: Schedule
    curve = Cosine(peak, end) if period is None else CosineRestarts(peak, period, factor, end)
    schedule = curve if warmup == 0 else Warmup(curve, warmup)
    if steps is None:
        return schedule
    steps = check_count("steps of cosine", steps)
    if isinstance(schedule, Warmup) and resolve_share(schedule.warmup, steps) >= steps:
        raise ValueError(
            f"warmup of cosine, {warmup}, leaves none of its {steps} steps for the cosine: give "
            "fewer steps or a smaller share"
        )
    return schedule.over(steps)


def one_cycle(
    peak: float,
    steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise from peak / div_factor to the peak, then fall to peak / (div_factor final_div_factor).

    Arguments and values are as in `torch.optim.lr_scheduler.OneCycleLR`, which also cycles the
    momentum; here only the rate changes. Smith and Topin 2018, "Super-Convergence".

    Args:
        peak: the highest rate, of 0 or more; PyTorch's `max_lr`.
        steps: number of steps, after which the rate is constant; None: the whole run.
        pct_start: share of the steps on the way up, from 0 to 1.
        anneal_strategy: "cos" or "linear".
        div_factor: the peak divided by the rate of step 0.
        final_div_factor: the rate of step 0 divided by the last one.
        three_phase: whether the way down to the rate of step 0 takes as long as the way up, and the
            rest goes on to the last rate.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import one_cycle
        >>> rate = one_cycle(1.0, 5, 0.6, "linear", div_factor=2, final_div_factor=10)
        >>> [round(rate(step), 3) for step in range(6)]
        [0.5, 0.75, 1.0, 0.525, 0.05, 0.05]
    """
    return OneCycle(
        peak, steps, pct_start, anneal_strategy, div_factor, final_div_factor, three_phase
    )


def inverse_sqrt(peak: float, warmup: int | float) -> Schedule:
    """peak * min(step / warmup, sqrt(warmup / step)).

    The schedule of Vaswani et al. 2017, "Attention is all you need", by its peak.

    Args:
        peak: the highest rate, in step number `warmup`, of 0 or more.
        warmup: number of steps of the linear warm-up, or its share of the run, between 0 and 1.

    Raises:
        ValueError: an argument outside of its bounds.

    Examples:
        >>> from onnxgrad.schedules.curves import inverse_sqrt
        >>> [inverse_sqrt(1.0, warmup=2)(step) for step in (0, 1, 2, 8)]
        [0.0, 0.5, 1.0, 0.5]
    """
    return InverseSqrt(peak, warmup)


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
        >>> from onnxgrad.schedules.curves import plateau
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


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        *(constant, step_decay, exponential, linear, cosine, polynomial, one_cycle, inverse_sqrt),
        plateau,
    )
}
