"""Learning rates of the steps of a stack of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.schedules.rates import Rates
from onnxgrad.training.state import TrainState


class OfMembers:
    """The rates of the members of a stack, (steps, members)."""

    def __init__(self, members: list[Rates], state: TrainState) -> None:
        self.members, self.state = members, state

    def at(self, step: int, count: int) -> np.ndarray:
        """Return the rates of `count` steps."""
        return np.stack([rates.at(step, count) for rates in self.members], axis=1)

    def observe(self, entry: dict[str, Any]) -> None:
        """Let the members that train see their numbers in an entry of the history."""
        frozen = self.state.frozen
        for k, rates in enumerate(self.members):
            if k not in frozen:
                own = {n: v[k] if isinstance(v, np.ndarray) else v for n, v in entry.items()}
                rates.observe(
                    {n: v.item() if isinstance(v, np.generic) else v for n, v in own.items()}
                )
