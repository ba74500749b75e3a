"""The state of the two estimators, and how their weights start."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from onnxgrad.data.columns import Names
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.glorot import glorot
from onnxgrad.training.state import Arrays, TrainState
from onnxgrad.training.step.update import evaluated

INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}


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

    def weights_to_evaluate(self) -> Arrays:
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
