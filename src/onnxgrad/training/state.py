"""The state: what training carries from step to step, in one object."""

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
    """Weights and slots by name, and the steps that led to them: replaced, never changed."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    slots: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    steps: int = 0


class OnDevice(Protocol):
    """Weights and slots on a device, and how often they were replaced there: a `Runner`."""

    now: tuple[Any, int]

    def load(self, values: Values) -> None:
        """Put values on the device."""

    def unpacked(
        self, states: Any
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return weights and slots by name, of the first entry of `now`."""


class TrainState:
    """What training carries from step to step; the only object that holds it.

    While `fit` runs, the weights and slots are on the device. `values` reads them from there, so
    that they are those of the last slice of batches, whoever asks.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.optimizer: Optimizer | None = None  # whose slots these are
        self.trained: list[str] = []  # names of the weights that the last `fit` moved
        self.losses: list[float] = []
        self.validation_losses: list[float] = []
        self.learning_rate: float | None = None
        self.stop_reason: str | None = None
        self.flat = False  # whether the labels of `fit` had one axis
        self.columns: list[str] | None = None  # of the table that `fit` got
        self.names = Names()  # of the columns of all inputs and of the label
        self._values = Values()
        self._runner: OnDevice | None = None
        self._read: tuple[object, Values] | None = None  # from the runner, and when

    @property
    def values(self) -> Values:
        """The weights, slots and steps of this moment."""
        runner, old = self._runner, self._values
        if runner is None:
            return old
        now, read = runner.now, self._read
        if read is None or read[0] is not now:  # one object, as other threads may read, too
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
        """Tell whether `fit` is running."""
        return self._runner is not None

    def begin(self, runner: OnDevice) -> None:
        """Put the values on the device of `runner`, which changes them from now on."""
        runner.load(self._values)
        self._runner, self._read = runner, (runner.now, self._values)

    def end(self) -> None:
        """Take the values back from the device; if that fails, those read last are kept."""
        try:
            self._values = self.values
        except BaseException:
            assert self._read is not None
            self._values = self._read[1]
            raise
        finally:
            self._runner = self._read = None

    def copy(self) -> TrainState:
        """Return a state that goes its own way from here, and is not running."""
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
