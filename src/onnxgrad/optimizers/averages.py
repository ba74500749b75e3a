"""Wrappers of an optimizer that average the weights after each step (EMA, SWA, Lookahead)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxgrad.optimizers.adaptive import ScaleByAdam
from onnxgrad.optimizers.base import (
    Arrays,
    Chain,
    Composite,
    Optimizer,
    Shape,
    Slots,
    UpdateInputs,
    check_range,
    to_float64,
)
from onnxgrad.optimizers.scaling import AddDecayedWeights, ScaleByLearningRate

StepAndSlots = tuple[ir.Value, Slots]


@dataclass(frozen=True)
class OptimizerWrapper(Composite):
    """Base of transforms that wrap a whole optimizer, with its learning rate.

    A subclass names the slots that it adds in `added_slots`, and overrides `write_average`.
    """

    optimizer: Optimizer
    added_slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        name, inner = type(self).__name__, self.optimizer
        if not isinstance(inner, Optimizer):
            raise ValueError(f"optimizer of {name} must be one such as adam(), not {inner!r}")
        if self.added_slots and inner.averages:
            raise ValueError(
                f"{inner} averages weights already: use this optimizer or {name}, not both"
            )
        if taken := set(self.added_slots) & set(inner.slots):
            raise ValueError(
                f"both {inner} and {name} have a slot {min(taken)!r}: rename the slot of the "
                "optimizer"
            )

    @property
    def members(self) -> tuple[Optimizer, ...]:  # type: ignore[override]
        """The wrapped optimizer, as a tuple."""
        return (self.optimizer,)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of the wrapped optimizer, and of the added slots."""
        return (*self.optimizer.slots, *self.added_slots)

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return the shape of the slot `slot` of a weight of shape `shape`."""
        return shape if slot in self.added_slots else self.optimizer.slot_shape(slot, shape)

    def slot_initial(self, slot: str, weight: np.ndarray) -> np.ndarray | float:
        """Return the weight for an added slot, else the initial value of the optimizer's slot."""
        return weight if slot in self.added_slots else self.optimizer.slot_initial(slot, weight)

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return this transform around the wrapped optimizer's version for one weight."""
        return replace(self, optimizer=self.optimizer.for_weight(name, shape))

    def across(self, op: Any, gradients: list[ir.Value]) -> list[ir.Value]:
        """Write the wrapped optimizer's nodes that need all gradients; return new gradients."""
        return self.optimizer.across(op, gradients)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the wrapped optimizer, then the nodes of `write_average`."""
        inner = {slot: slots[slot] for slot in self.optimizer.slots}
        u, new = self.optimizer.update(op, u, inner, self.inner_inputs(inputs))
        u, own = self.write_average(op, u, {slot: slots[slot] for slot in self.added_slots}, inputs)
        return u, new | own

    def inner_inputs(self, inputs: UpdateInputs) -> UpdateInputs:
        """Return the `UpdateInputs` that the wrapped optimizer gets."""
        return inputs

    def write_average(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> StepAndSlots:
        """Write the nodes that average weights after a step `u`; return new step and slots."""
        return u, {}

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the weight to evaluate and export, from the wrapped optimizer."""
        return self.optimizer.evaluated(weight, slots, steps)


@dataclass(frozen=True)
class Ema(OptimizerWrapper):
    """a <- d a + (1 - d) (w + u): an exponential moving average of the new weights."""

    decay: float = 0.999
    debias: bool = False
    added_slots = ("average",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(0.0, 1.0, decay=self.decay)

    def slot_initial(self, slot: str, weight: np.ndarray) -> np.ndarray | float:
        """Return the initial average: the weight, or zero with bias correction."""
        return 0.0 if self.debias and slot == "average" else super().slot_initial(slot, weight)

    def write_average(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> StepAndSlots:
        """Write the nodes of the moving average."""
        new = inputs.weight + u
        return u, {"average": self.decay * slots["average"] + (1 - self.decay) * new}

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the average as the weight to evaluate; before the first step, the weight."""
        if not steps or "average" not in slots:
            return weight
        correction = 1 - self.decay**steps if self.debias else 1.0
        return slots["average"] / correction


@dataclass(frozen=True)
class Swa(OptimizerWrapper):
    """a <- a + (w + u - a) / n at the steps `start`, `start + every`, ..., the n-th of them.
    Izmailov et al. 2018, arXiv:1803.05407.
    """

    start: int = 1
    every: int = 1
    added_slots = ("average",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(1, np.inf, start=self.start, every=self.every)

    def write_average(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> StepAndSlots:
        """Write the nodes of the average, which only changes at steps that enter the average."""
        since = to_float64(op, inputs.step) - float(self.start)
        counts = op.And(
            op.GreaterOrEqual(since, 0.0), op.Equal(op.Mod(since, float(self.every), fmod=1), 0.0)
        )
        number = op.Max(since / float(self.every) + 1.0, 1.0)
        share = op.Cast(op.Where(counts, 1.0 / number, 0.0), to=u.dtype)
        average = slots["average"]
        return u, {"average": average + (inputs.weight + u - average) * share}

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the average as the weight to evaluate; before step `start`, the weight."""
        return slots["average"] if steps >= self.start and "average" in slots else weight


@dataclass(frozen=True)
class Lookahead(OptimizerWrapper):
    """Every k steps, s <- s + alpha (w + u - s), and w <- s.  Zhang et al. 2019, 1907.08610."""

    every: int = 5
    alpha: float = 0.5
    added_slots = ("slow",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(1, np.inf, every=self.every)

    def write_average(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> StepAndSlots:
        """Write the nodes of the slow weights, which change at every k-th step only."""
        t = to_float64(op, inputs.step)
        syncs = op.Cast(op.Equal(op.Mod(t, float(self.every), fmod=1), 0.0), to=u.dtype)
        ahead = inputs.weight + u - slots["slow"]
        slow = slots["slow"] + ahead * (syncs * self.alpha)
        return u - ahead * (syncs * (1 - self.alpha)), {"slow": slow}

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the slow weights as the weights to evaluate."""
        return slots.get("slow", weight)


@dataclass(frozen=True)
class ScheduleFree(OptimizerWrapper):
    """z <- z + u;  x <- (1 - c) x + c z;  w <- (1 - b1) z + b1 x, where c is the share of this step
    in the sum of max(lr)^power.  Defazio et al. 2024, arXiv:2405.15682.

    x, the weights to evaluate, follows from w and z.
    """

    b1: float = 0.9
    weight_lr_power: float = 2.0
    added_slots = ("z", "weight_sum", "largest_rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.b1 < 1:
            raise ValueError(f"b1 must be between 0 and 1, not {self.b1!r}")

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return () for slots of learning rates, which are scalars, else the weight's shape."""
        return () if slot in self.added_slots[1:] else super().slot_shape(slot, shape)

    def slot_initial(self, slot: str, weight: np.ndarray) -> np.ndarray | float:
        """Return the initial value of a slot: the weight for z, 0 for scalars."""
        return 0.0 if slot in self.added_slots[1:] else super().slot_initial(slot, weight)

    def write_average(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> StepAndSlots:
        """Write the slot z, and the step of w from the old z: c (z - w) + (1 - b1 + b1 c) u."""
        rate = op.Max(slots["largest_rate"], op.Neg(inputs.minus_learning_rate))
        weight = op.Pow(to_float64(op, rate), op.const(self.weight_lr_power, ir.DataType.DOUBLE))
        total = to_float64(op, slots["weight_sum"]) + weight
        share = op.Where(op.Greater(total, 0.0), weight / total, 0.0)
        c, of_u = (op.Cast(s, to=u.dtype) for s in (share, 1 - self.b1 + self.b1 * share))
        step = (slots["z"] - inputs.weight) * c + u * of_u
        total = op.Cast(total, to=u.dtype)
        return step, {"z": slots["z"] + u, "weight_sum": total, "largest_rate": rate}

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return x = w + (1 / b1 - 1) (w - z), the weight to evaluate."""
        if "z" not in slots:
            return weight
        return weight + (1 / self.b1 - 1) * (weight - slots["z"])


def ema(optimizer: Optimizer, decay: float = 0.999, debias: bool = False) -> Optimizer:
    """a <- decay a + (1 - decay) w after every step; a is evaluated and exported.

    Args:
        optimizer: the optimizer that takes the steps.
        decay: in [0, 1).
        debias: False starts a at the weights before training. True starts it at zero, and divides
            it by 1 - decay^t.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import ema
        >>> ema(og.optimizers.adam(), decay=0.99).averages
        True
    """
    return Ema(optimizer, decay, debias)


def swa(optimizer: Optimizer, start: int, every: int = 1) -> Optimizer:
    """a = mean of w after the steps `start`, `start + every`, ...; a is evaluated and exported.

    Stochastic weight averaging, as `torch.optim.swa_utils.AveragedModel`. Steps count from 1.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import swa
        >>> swa(og.optimizers.momentum(), start=1000, every=50).averages
        True
    """
    return Swa(optimizer, start, every)


def lookahead(optimizer: Optimizer, every: int = 5, alpha: float = 0.5) -> Optimizer:
    """s <- s + alpha (w - s), w <- s after every `every` steps; s is evaluated and exported.

    As `optax.lookahead`; the slots of the optimizer go on after a synchronization.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import lookahead
        >>> lookahead(og.optimizers.adam(), every=6).averages
        True
    """
    return Lookahead(optimizer, every, alpha)


def schedule_free(
    optimizer: Optimizer | None = None, b1: float = 0.9, weight_lr_power: float = 2.0
) -> Optimizer:
    """z <- z + u;  x <- (1 - c) x + c z;  w <- (1 - b1) z + b1 x;  x is evaluated and exported.

    As `optax.contrib.schedule_free`: use a constant learning rate, at most with a warm-up.

    Args:
        optimizer: takes the steps u of z; without momentum, which b1 replaces. None is
            `adamw(b1=0.0, weight_decay=0.0)`; `sgd()` gives Schedule-Free SGD.
        b1: in (0, 1).
        weight_lr_power: c is the share of this step in the sum of max(lr so far)^weight_lr_power.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import schedule_free
        >>> schedule_free(og.optimizers.sgd()).slots
        ('z', 'weight_sum', 'largest_rate')
    """
    if optimizer is None:
        parts = ScaleByAdam(b1=0.0), AddDecayedWeights(0.0), ScaleByLearningRate()
        optimizer = Chain(parts)
    return ScheduleFree(optimizer, b1, weight_lr_power)
