"""The learning rates of the steps of one training."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Rates(Protocol):
    """Interface of the learning rates of all steps of one training."""

    @property
    def steady(self) -> bool:
        """Whether no metric in the history changes a later learning rate."""

    def at(self, step: int, count: int) -> np.ndarray:
        """Return the learning rates of `count` steps from the step `step` on, counted from 0."""

    def observe(self, entry: dict[str, Any]) -> None:
        """Take note of an entry of the history, on which later learning rates may depend."""


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

    def at(self, step: int, count: int) -> np.ndarray:
        """Return the learning rates of `count` steps from the step `step` on."""
        state = self._schedule_state
        return np.array([self.schedule.rate(step + i, state) for i in range(count)])

    def observe(self, entry: dict[str, Any]) -> None:
        """Let the schedule observe an entry of the history."""
        new = self.schedule.observed(self._schedule_state, entry)
        if self.member is not None:
            new = {**self.state.schedule, self.member: new}
        self.state.schedule = new

    @property
    def _schedule_state(self) -> dict[str, Any]:
        """The schedule's state of this model, from the `TrainState`."""
        every = self.state.schedule
        return every if self.member is None else every.get(self.member, {})


class MemberRates:
    """The learning rates of models that train together in a stack, (steps, models)."""

    def __init__(self, members: list[Rates], state: Any) -> None:
        self.members, self.state = members, state

    @property
    def steady(self) -> bool:
        """Whether no metric in the history changes a learning rate of a model."""
        return all(rates.steady for rates in self.members)

    def at(self, step: int, count: int) -> np.ndarray:
        """Return the learning rates of `count` steps from the step `step` on."""
        return np.stack([rates.at(step, count) for rates in self.members], axis=1)

    def observe(self, entry: dict[str, Any]) -> None:
        """Let each model's rates observe its metrics in an entry of the history, while training."""
        frozen = self.state.frozen
        for k, rates in enumerate(self.members):
            if k not in frozen:
                own = {n: v[k] if isinstance(v, np.ndarray) else v for n, v in entry.items()}
                rates.observe(
                    {n: v.item() if isinstance(v, np.generic) else v for n, v in own.items()}
                )
