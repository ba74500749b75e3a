"""The state of a stack: weights, slots and steps of every member, and the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.optimizers import Optimizer
from onnxgrad.training.state import Values
from onnxgrad.training.step.update import evaluated

Arrays = dict[str, np.ndarray]


@dataclass(eq=False)
class StackState:
    """The state of a `TrainerStack`.

    Attributes:
        values: the `Values` of each member: `weights`, `slots` and `steps`.
        epoch: number of finished epochs of the last `fit`.
        frozen: `{member: step}`, the members whose loss or weights became NaN or infinite, and how
            many steps they made before.
        history: an entry for each epoch: `step`, `epoch`, and arrays of a number for each member.
    """

    values: list[Values]
    epoch: int = 0
    frozen: dict[int, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def weights(self) -> Arrays:
        """The weights of all members by name, (members, ...)."""
        return stacked([v.weights for v in self.values])

    def evaluated(self, optimizers: Sequence[Optimizer]) -> list[Arrays]:
        """Return the weights to evaluate of each member: averages, if the optimizer keeps them."""
        return evaluated_members(self.values, optimizers)


def evaluated_members(values: Sequence[Values], optimizers: Sequence[Optimizer]) -> list[Arrays]:
    """Return the weights to evaluate of each member."""
    pairs = zip(values, optimizers, strict=True)
    return [evaluated(optimizer, v.weights, v.slots, v.steps) for v, optimizer in pairs]


def stacked(weights: Sequence[Arrays]) -> Arrays:
    """Return arrays by name, (members, ...)."""
    return {name: np.stack([own[name] for own in weights]) for name in weights[0]}
