"""What one call of a `Trainer` reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.columns import Names
from onnxgrad.optimizers import Optimizer, sgd
from onnxgrad.parallel import DataParallel
from onnxgrad.reporting import html_table
from onnxgrad.runtime.device import Device
from onnxgrad.schedules.base import LearningRate, constant
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.equality import BuildCache
from onnxgrad.training.mixing import Mix
from onnxgrad.training.output_metrics import ByOutput
from onnxgrad.training.precision import Dtypes, for_file, rounded, rounding, widened
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.update import evaluated

RUNNING = "_running_call"  # attribute of a trainer while a call of it trains
_EPOCHS = 10  # of the history that a notebook shows


@dataclass(eq=False, repr=False)
class Settings:
    """The arguments of a `Trainer`, checked, and its state.

    The defaults are those of a model that is evaluated as its file is: no weight is an input, so
    that nothing of it needs to be trainable.
    """

    proto: ModelProto
    trained: list[str] = field(default_factory=list)
    loss: Any = None
    loss_options: Mapping[str, Any] | None = None
    loss_weights: Mapping[str, float] | None = None
    class_weight: Any = None
    optimizer: Optimizer = field(default_factory=sgd)
    learning_rate: LearningRate = field(default_factory=lambda: constant(0.0))
    clip_norm: float | None = None
    accumulate: int = 1
    batch_norm: str = "frozen"
    dropout: dict[str, float] = field(default_factory=dict)
    mix: Mix | None = None
    metrics_by_output: ByOutput = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    batch_axes: dict[str, int | None] = field(default_factory=dict)
    carry: dict[str, str] = field(default_factory=dict)
    recompute: str = "none"
    precision: str = "file"
    device: Device = field(default_factory=lambda: Device.of("cpu"))
    seed: int = 0
    parallel: DataParallel | bool | None = False
    straight_through: bool = False
    classes: list[Any] = field(default_factory=list)  # given, or of the file
    names: Names = field(default_factory=Names)
    state: TrainState = field(default_factory=TrainState)
    built: BuildCache = field(default_factory=BuildCache)
    sharing: Any = None  # how processes share the call that runs; None: this one trains alone
    setup: Any = None  # the last one that trained
    constants: Set[str] = frozenset()  # of the model
    narrow: Dtypes = field(default_factory=dict)  # of constants of 16 bits in the file
    digest: str | None = None  # of the whole model, if `proto` lacks large weights
    members: int | None = None  # of a stack; None for one model
    optimizers: list[Optimizer] = field(default_factory=list)  # of the members
    learning_rates: list[Any] = field(default_factory=list)

    @property
    def file(self) -> ModelProto | None:
        """The model with its own weights; None if only their trained values are in memory."""
        return self.proto if self.digest is None else None

    @property
    def moved(self) -> set[str]:
        """The inputs whose rows are not on their first axis."""
        return {name for name, axis in self.batch_axes.items() if axis != 0}

    @property
    def averages(self) -> bool:
        """Whether the optimizer averages weights, or that of a member."""
        return any(optimizer.averages for optimizer in self.optimizers or [self.optimizer])

    def begun(self) -> dict[str, np.ndarray]:
        """Return the weights with which a new training begins, as `evaluated`, but not rounded."""
        values = self._unrounded()
        return {name: values[name] for name in self.state.weights}

    def evaluated(self) -> dict[str, np.ndarray]:
        """Return the weights and statistics that are evaluated and exported, by name.

        They are those of the last step, unless the optimizer averages weights. Those of a stack
        have an axis of members first. Where the file has 16 bits, they are rounded to these.
        """
        values = rounded(self._unrounded(), self.narrow)
        return {n: self._in_training(a) if n in self.narrow else a for n, a in values.items()}

    def _in_training(self, array: np.ndarray) -> np.ndarray:
        """Return a constant in the dtype in which it trains and is evaluated."""
        return array if self.precision == "file" else widened(array)

    def _for_file(self) -> dict[str, np.ndarray]:
        """Return what is exported, in the dtypes of the file; refuse what these cannot hold."""
        return for_file(self._unrounded(), self.narrow)

    @property
    def rounding(self) -> dict[str, float]:
        """How far the weights are from those of a file of 16 bits, `{"largest": ..., "mean": ...}`.

        The absolute differences of elements; empty for a model without weights of 16 bits, or
        whose weights do not train in float32.
        """
        return {} if self.precision == "file" else rounding(self._unrounded(), self.narrow)

    def _unrounded(self) -> dict[str, np.ndarray]:
        """Return weights and statistics as `evaluated`, before they are rounded."""
        values = self.state.values
        buffers = {n: a for n, a in values.buffers.items() if n in self.constants}
        if not self.averages:
            return values.weights | buffers
        if self.members is None:
            weights = evaluated(self.optimizer, values.weights, values.slots, values.steps)
            return weights | buffers
        members = ((optimizer, values[k]) for k, optimizer in enumerate(self.optimizers))
        every = [evaluated(o, own.weights, own.slots, own.steps) for o, own in members]
        return {n: np.stack([own[n] for own in every]) for n in values.weights} | buffers

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have: no data and sessions of a call, and a state of their own."""
        own = {"state": self.state.copy(), "built": BuildCache(), "setup": None, "sharing": None}
        return {name: value for name, value in (vars(self) | own).items() if name != RUNNING}

    def _repr_html_(self) -> str:
        last = self.state.history[-_EPOCHS:]
        names = list(dict.fromkeys(name for entry in last for name in entry))
        rows = [[_shown(entry.get(name, "")) for name in names] for entry in last]
        trained = f"{len(self.trained)} weights train; {self.state.step} steps were made"
        return html_table(names, rows, [trained])


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
