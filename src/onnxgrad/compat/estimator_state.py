"""The state of the two estimators, and how their weights start."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from onnxgrad.data.columns import Names
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.starts import INITS
from onnxgrad.training.state import Arrays, TrainState, Values
from onnxgrad.training.step.update import evaluated


@dataclass(eq=False)
class EstimatorState(TrainState):
    """A `TrainState` that also keeps what an estimator reads after `fit`.

    Attributes:
        rng: orders the rows of all epochs.
        optimizer: to which the slots belong.
        trained: names of the weights that the last `fit` trained.
        flat: whether the labels of `fit` had one axis.
        columns: names of those of the table X of `fit`.
        names: of the columns for all inputs and the label.
    """

    rng: np.random.Generator | None = None
    optimizer: Optimizer | None = None
    trained: list[str] = field(default_factory=list)
    flat: bool = False
    columns: list[str] | None = None
    names: Names = field(default_factory=Names)

    def evaluated(self) -> Arrays:
        """Return the weights to evaluate: averages, if the optimizer keeps them."""
        now = self.values
        if self.optimizer is None:
            return now.weights
        return evaluated(self.optimizer, now.weights, now.slots, now.steps)

    def copy(self) -> Self:
        """Return an independent copy, which is not running."""
        new = super().copy()
        new.rng, new.names = copy.deepcopy(self.rng), self.names.copy()
        return new


def continued(
    state: EstimatorState, weights: Mapping[str, np.ndarray], optimizer: Optimizer
) -> EstimatorState:
    """Return a copy that trains `weights`; slots are kept if they exist for all of these."""
    new, old = state.copy(), state.values
    same = optimizer == state.optimizer and old.slots.keys() >= weights.keys()
    both = {**old.weights, **weights}
    new.values = Values(both, old.slots, old.steps) if same else Values(both)
    new.position, new.pending, new.running = 0, False, {}  # an unfinished epoch does not count
    return new


def initialized(weights: Arrays, weight_init: str, rng: np.random.Generator) -> Arrays:
    """Return initial weights by the rule `weight_init` of `INITS`."""
    return {name: INITS[weight_init](rng, array) for name, array in weights.items()}
