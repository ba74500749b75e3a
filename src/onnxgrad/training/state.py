"""The state of training: weights, slots, losses, random numbers, in one object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np

from onnxgrad.data.columns import Names
from onnxgrad.optimizers import Optimizer


@dataclass(frozen=True, eq=False)
class Values:
    """Weights and slots by name, and the number of steps done; replaced, never modified."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    slots: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    steps: int = 0


class OnDevice(Protocol):
    """Weights and slots on a device, and the number of steps done there: a `Runner`."""

    now: tuple[Any, int]

    def load(self, values: Values) -> None:
        """Put values on the device."""

    def unpacked(
        self, states: Any
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return weights and slots by name, from `states`, the first entry of `now`."""


class TrainState:
    """The state of training; no other object stores any part of it.

    While `fit` runs, the weights and slots are on the device, and `values` reads them from there:
    a callback sees those after the last slice of batches.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.optimizer: Optimizer | None = None  # to which the slots belong
        self.trained: list[str] = []  # names of the weights that the last `fit` trained
        self.losses: list[float] = []
        self.validation_losses: list[float] = []
        self.learning_rate: float | None = None
        self.stop_reason: str | None = None
        self.flat = False  # whether the labels of `fit` had one axis
        self.columns: list[str] | None = None  # of the table X of `fit`
        self.names = Names()  # of the columns for all inputs and the label
        self._values = Values()
        self._runner: OnDevice | None = None
        self._read: tuple[object, Values] | None = None  # runner.now, and its values

    @classmethod
    def drawn(
        cls, weights: dict[str, np.ndarray], weight_init: str, random_state: int | None
    ) -> TrainState:
        """Return a state in which the weights are initialized, with empty slots."""
        rng = np.random.default_rng(random_state)
        state, initial = cls(rng), INITS[weight_init]
        state.values = Values({name: initial(rng, array) for name, array in weights.items()})
        return state

    def resumed(self, weights: dict[str, np.ndarray], optimizer: Optimizer) -> TrainState:
        """Return a copy that trains `weights`; slots are kept if they exist for all of these."""
        state, old = self.copy(), self.values
        same = optimizer == self.optimizer and old.slots.keys() >= weights.keys()
        weights = old.weights | weights
        state.values = Values(weights, old.slots, old.steps) if same else Values(weights)
        return state

    @property
    def values(self) -> Values:
        """The current weights, slots and steps."""
        runner, old = self._runner, self._values
        if runner is None:
            return old
        now, read = runner.now, self._read
        if (
            read is None or read[0] is not now
        ):  # compared by identity, assigned at once: other threads read it, too
            weights, slots = runner.unpacked(now[0])
            self._read = read = now, Values(old.weights | weights, old.slots | slots, now[1])
        return read[1]

    @values.setter
    def values(self, new: Values) -> None:
        if self._runner is not None:
            self._runner.load(new)
            self._read = self._runner.now, new
        self._values = new

    @property
    def running(self) -> bool:
        """Return whether `fit` is running."""
        return self._runner is not None

    def begin(self, runner: OnDevice) -> None:
        """Copy the values to the device of `runner`, where training changes them until `end`."""
        runner.load(self._values)
        self._runner, self._read = runner, (runner.now, self._values)

    def end(self) -> None:
        """Copy the values back from the device; if that fails, keep those that were read last."""
        try:
            self._values = self.values
        except BaseException:
            assert self._read is not None
            self._values = self._read[1]
            raise
        finally:
            self._runner = self._read = None

    def copy(self) -> TrainState:
        """Return an independent copy, which is not running."""
        new = copy.copy(self)
        new.losses, new.validation_losses = list(self.losses), list(self.validation_losses)
        new.rng, new.names = copy.deepcopy(self.rng), self.names.copy()
        return new

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_values": self.values, "_runner": None, "_read": None}


def _glorot(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    if w.ndim < 2:
        return w
    receptive = prod(w.shape[2:])
    limit = np.sqrt(6 / ((w.shape[0] + w.shape[1]) * receptive))
    return rng.uniform(-limit, limit, w.shape).astype(w.dtype)


INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": _glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}
