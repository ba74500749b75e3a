"""The interface of learning rates, and schedules, which compute the rate from the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from onnxgrad.checks import check_count, check_number
from onnxgrad.errors import named

if TYPE_CHECKING:
    import numpy as np

Check = Callable[[str, Any], Any]


def checked_field(check: Check, default: Any = MISSING, called: str = "") -> Any:
    """Return a dataclass field of a schedule, which `check(name, value)` validates and converts.

    `called`: name of the argument of the function that returns the schedule, if it is another name.
    """
    return field(default=default, metadata={"check": check, "called": called})


class Rates(Protocol):
    """Interface of the learning rates of all steps of one training."""

    @property
    def steady(self) -> bool:
        """Whether no metric in the history changes a later learning rate."""

    def rates_from(self, step: int, count: int) -> np.ndarray:
        """Return the learning rates of `count` steps from the step `step` on, counted from 0."""

    def observe(self, entry: dict[str, Any]) -> None:
        """Keep the metrics in an entry of the history, on which later learning rates may depend."""


class LearningRate:
    """Base of the objects that trainers take as the learning rate."""

    @property
    def monitors(self) -> tuple[str, ...]:
        """The names of the metrics in the training history on which the rate depends."""
        return ()

    def rates_of_training(self, state: Any, steps: int | None, member: int | None = None) -> Rates:
        """Return the learning rates of the steps of one training.

        Args:
            state: the `TrainState` with which the training begins.
            steps: number of steps of the whole training; None if it is not known.
            member: index of a model in a stack, whose rates are returned; None: there is one model.

        Raises:
            ValueError: the rate needs the number of steps.
        """
        raise NotImplementedError


class Schedule(LearningRate):
    """Base of the learning rates by step; a schedule of your own overrides `__call__`.

    Schedules are frozen dataclasses: compared, printed and pickled by their arguments. Steps count
    from 0, as in optax and PyTorch. A schedule does not change during training: if it follows
    metrics, as `plateau` does, it overrides `rate` and `observed`, and trainers keep its state.

    Examples:
        >>> from dataclasses import dataclass
        >>> from onnxgrad.schedules.base import Schedule
        >>> @dataclass(frozen=True)
        ... class InverseTime(Schedule):
        ...     first: float
        ...     def __call__(self, step):
        ...         return self.first / (1 + step)
        >>> [InverseTime(0.5)(step) for step in range(3)]
        [0.5, 0.25, 0.16666666666666666]
    """

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            if check := f.metadata.get("check"):
                name = f.metadata.get("called") or f.name
                checked = check(f"{name} of {type(self).__name__}", getattr(self, f.name))
                object.__setattr__(self, f.name, checked)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Raises:
            ValueError: the schedule needs the number of steps of the run: see `over`.
        """
        raise NotImplementedError

    def over(self, steps: int) -> Self:
        """Return a copy of the schedule for a training of `steps` steps.

        It fills in `steps=None`, and counts that are shares of the run.

        Raises:
            ValueError: `steps` is no integer of 1 or more.
        """
        steps, own = check_count("steps", steps), vars(self)
        arguments: Any = fields(self) if is_dataclass(type(self)) else ()  # type: ignore[arg-type]
        shares = [f.name for f in arguments if f.metadata.get("check") is count_or_share]
        filled: dict[str, Any] = {name: resolve_share(own[name], steps) for name in shares}
        if own.get("steps", steps) is None:
            filled["steps"] = steps
        return replace(self, **filled) if filled else self  # type: ignore[type-var]

    def rate(self, step: int, state: Mapping[str, Any]) -> float:
        """Return the learning rate of a step for a `state` of observed metrics, {} at the start."""
        return self(step)

    def rates(self, step: int, count: int, state: Mapping[str, Any]) -> list[float]:
        """Return the learning rates of `count` steps from `step` on, each as `rate` returns it."""
        return [self.rate(step + i, state) for i in range(count)]

    def observed(self, state: Mapping[str, Any], record: Mapping[str, float]) -> dict[str, Any]:
        """Return the state of observed metrics, for JSON, after one more entry of the history.

        Args:
            state: the last result of `observed`; {} at the beginning.
            record: the entry: `step` (the number of steps so far), `loss`, `validation_loss` and
                metrics by name. An entry without the monitored value changes nothing.
        """
        return dict(state)

    def rates_of_training(self, state: Any, steps: int | None, member: int | None = None) -> Rates:
        """Return the rates of one training, whose `state` keeps what the schedule observed."""
        schedule = self if steps is None else self.over(steps)
        rates = ScheduleRates(schedule, state, member)
        rates.rates_from(0, 1)  # raises if the schedule needs the number of steps
        return rates

    @property
    def length(self) -> int | None:
        """The count of steps until the rate is constant; None if the rate never gets constant."""
        return vars(self).get("steps")

    def plot(self, steps: int | None = None, ax: Any = None) -> Any:
        """Draw the rate over the steps with matplotlib, and return the axes.

        A rate that depends on metrics is drawn as before any observation.

        Args:
            steps: number of steps to draw, which also fills in `steps=None` of the schedule. None:
                the length of the schedule.
            ax: axes to draw on; None creates a figure.

        Raises:
            ValueError: the schedule has no number of steps, and `steps` is None.
        """
        steps = self.length if steps is None else steps
        if steps is None:
            raise ValueError(f"{self!r} has no end: pass steps=, the number of steps to plot")
        filled = self.over(steps)
        rates = [filled(step) for step in range(steps)]
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(layout="constrained")[1]
        ax.plot(range(steps), rates)
        before = f", before any observation of {', '.join(self.monitors)}" if self.monitors else ""
        ax.set(xlabel="step", ylabel="learning rate", title=type(self).__name__ + before)
        return ax


class ScheduleRates:
    """The learning rates of a `Schedule`, whose state is kept in the `TrainState` of the training.

    `member` is the index of the model in a stack; None: there is one model.
    """

    def __init__(self, schedule: Any, state: Any, member: int | None = None) -> None:
        self.schedule, self.state = schedule, state
        self.member = None if member is None else str(member)

    @property
    def steady(self) -> bool:
        """Whether the schedule reads no entry of the history."""
        return not self.schedule.monitors

    def rates_from(self, step: int, count: int) -> np.ndarray:
        """Return the learning rates of `count` steps from the step `step` on, counted from 0."""
        state = self._schedule_state
        import numpy as np  # imported here, so that the help of commands prints without numpy

        return np.array(self.schedule.rates(step, count, state))

    def observe(self, entry: dict[str, Any]) -> None:
        """Let the schedule observe an entry of the history."""
        new = self.schedule.observed(self._schedule_state, entry)
        if self.member is not None:
            new = {**self.state.schedule, self.member: new}
        self.state.schedule = new

    @property
    def _schedule_state(self) -> dict[str, Any]:
        """The state of the schedule for this model, in the `TrainState` of the training."""
        every = self.state.schedule
        return every if self.member is None else every.get(self.member, {})


class MemberRates:
    """The learning rates of the models that train together in a stack."""

    def __init__(self, members: list[Rates], state: Any) -> None:
        self.members, self.state = members, state

    @property
    def steady(self) -> bool:
        """Whether no metric in the history changes a learning rate of a model."""
        return all(rates.steady for rates in self.members)

    def rates_from(self, step: int, count: int) -> np.ndarray:
        """Return learning rates (steps, models) of `count` steps from the step `step` on."""
        import numpy as np

        return np.stack([rates.rates_from(step, count) for rates in self.members], axis=1)

    def observe(self, entry: dict[str, Any]) -> None:
        """Pass an entry of the history to the rates of each model that still trains."""
        import numpy as np

        frozen = self.state.frozen
        for k, rates in enumerate(self.members):
            if k not in frozen:
                own = {n: v[k] if isinstance(v, np.ndarray) else v for n, v in entry.items()}
                rates.observe(
                    {n: v.item() if isinstance(v, np.generic) else v for n, v in own.items()}
                )


def steps_or_none(name: str, value: Any) -> int | None:
    """Return a step count after checking it, or None for the steps of the whole training."""
    return None if value is None else check_count(name, value)


def count_or_share(name: str, value: Any) -> int | float:
    """Return a step count after checking it: an integer, or a share of the training as a float."""
    try:
        return check_count(name, value, 0)
    except ValueError:
        if isinstance(value, float) and 0 < value < 1:
            return float(value)
        raise ValueError(
            f"{named(name)} must be a whole number, 0 or more, or a share of the run, a float "
            f"between 0 and 1, not {value!r}"
        ) from None


def resolve_share(value: int | float, steps: int) -> int:
    """Return `value`, a step count, or `value` times `steps` if it is a share of the training."""
    return max(round(value * steps), 1) if isinstance(value, float) else value


def steps_in(schedule: Schedule, name: str) -> int:
    """Return a step count from a schedule's field; raise ValueError for None or a share."""
    value = vars(schedule)[name]
    if value is None:
        raise ValueError(
            f"{schedule!r} ends with the run, whose number of steps is unknown: pass steps=..., or "
            "call over(steps) first, as trainers do"
        )
    if isinstance(value, (float, tuple)):
        raise ValueError(
            f"{name} of {schedule!r} is a share of the run, whose number of steps is unknown: pass "
            "a number of steps, or call over(steps) first, as trainers do"
        )
    return value


@dataclass(frozen=True)
class Constant(Schedule):
    """A schedule with the same rate in every step: see `constant`."""

    value: float = checked_field(check_number, called="rate")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.value

    def rates(self, step: int, count: int, state: Mapping[str, Any]) -> list[float]:
        """Return the rate `count` times, without a call for each step."""
        return [self.value] * count


def constant(rate: float) -> Schedule:
    """Return the schedule with the same rate in every step.

    Args:
        rate: a finite number of 0 or more.

    Raises:
        ValueError: another rate.

    Examples:
        >>> from onnxgrad.schedules.base import constant
        >>> constant(0.1)
        Constant(value=0.1)
    """
    return Constant(rate)


def select(schedule: Any) -> Schedule:
    """Return a `Schedule` unchanged, or the constant schedule of a number.

    Raises:
        ValueError: anything else, or a negative or infinite number or NaN.
    """
    if isinstance(schedule, Schedule):
        return schedule
    try:
        if isinstance(schedule, (bool, str)):
            raise TypeError
        rate = float(schedule)
    except (TypeError, ValueError):
        raise ValueError(
            f"a learning rate is a number or a schedule such as cosine(1e-3), not {schedule!r}; "
            "a function of the step is the method __call__ of a subclass of Schedule"
        ) from None
    return Constant(check_number("learning_rate", rate))
