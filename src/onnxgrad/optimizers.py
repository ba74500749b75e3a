"""Optimizers: transforms that turn a gradient into a step, chained, and written as ONNX.

A transform says which slots it keeps for a weight, all of the weight's shape and zero at first,
and writes the nodes that turn one proposed step into another. The first one is given the gradient;
what the last one returns is added to the weight. They are plain values: compared, printed and
pickled by their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import unknown


@dataclass(frozen=True)
class Inputs:
    """What the update of one weight may read, as values of the step's graph."""

    weight: ir.Value
    minus_learning_rate: ir.Value  # scalar
    step: ir.Value  # scalar: 1 in the first step


Slots = dict[str, ir.Value]


class Optimizer:
    """Slots, and the nodes that turn a gradient into the step that is added to the weight.

    Attributes:
        elementwise: whether each element of the step depends on the same element of the gradient,
            the weight and the slots only. Small weights are then updated as one flat vector.
            False, the default of a class that writes its own `update`, means that `update` gets
            each weight in its own shape, as whatever reads a norm, a mean or an axis needs.
        rate_first: whether the learning rate is read once, to multiply the gradient before all
            else. False, too, for a class that writes its own `update`.
    """

    elementwise: bool = False
    rate_first: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for claim in ("elementwise", "rate_first"):  # a base class makes them for its own `update`
            if "update" in vars(cls) and claim not in vars(cls):
                setattr(cls, claim, False)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of what is kept for a weight."""
        return ()

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the nodes that turn the step `u` into another; return it, and the new slots."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chain(Optimizer):
    """What one part proposes is passed to the next."""

    parts: tuple[Optimizer, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of all parts; a name that several have is numbered."""
        return tuple(name for names in self._names() for name in names.values())

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Tell whether all parts are."""
        return all(part.elementwise for part in self.parts)

    @property
    def rate_first(self) -> bool:  # type: ignore[override]
        """Tell whether the first part, and no other, multiplies by the learning rate."""
        return [i for i, part in enumerate(self.parts) if part.rate_first] == [0]

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of all parts."""
        made: Slots = {}
        for part, names in zip(self.parts, self._names(), strict=True):
            u, new = part.update(op, u, {slot: slots[n] for slot, n in names.items()}, inputs)
            made |= {n: new[slot] for slot, n in names.items()}
        return u, made

    def _names(self) -> list[dict[str, str]]:
        """Return for every part `{its slot: name of the slot in the chain}`."""
        every = [slot for part in self.parts for slot in part.slots]
        return [
            {slot: f"{slot}{i}" if every.count(slot) > 1 else slot for slot in part.slots}
            for i, part in enumerate(self.parts)
        ]


@dataclass(frozen=True)
class ScaleByLearningRate(Optimizer):
    """u -> -lr u."""

    rate_first = True
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the product."""
        return u * inputs.minus_learning_rate, {}


@dataclass(frozen=True)
class Trace(Optimizer):
    """v <- m v + u;  u -> m v + u if nesterov else v.

    The slot holds m v, decayed for the next step already: Nesterov's form needs it anyway.
    """

    decay: float
    nesterov: bool = False
    slots = ("velocity",)
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the velocity."""
        velocity = slots["velocity"] + u
        decayed = self.decay * velocity
        return (decayed + u if self.nesterov else velocity), {"velocity": decayed}


@dataclass(frozen=True)
class ScaleByAdam(Optimizer):
    """m <- b1 m + (1 - b1) u;  v <- b2 v + (1 - b2) u^2;  u -> m' / (sqrt(v') + eps),
    m' = m / (1 - b1^t), v' = v / (1 - b2^t).  Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    slots = ("m", "v")
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the moments and their quotient."""
        b1, b2, t = self.b1, self.b2, inputs.step
        m = b1 * slots["m"] + (1 - b1) * u
        v = b2 * slots["v"] + (1 - b2) * (u * u)
        # the corrections are scalars: one of them is moved to the other side of the fraction
        root = op.Sqrt(1.0 - op.Pow(op.const(b2, t.dtype), t))
        scale = root / (1.0 - op.Pow(op.const(b1, t.dtype), t))
        return m * scale / (op.Sqrt(v) + self.eps * root), {"m": m, "v": v}


@dataclass(frozen=True)
class AddDecayedWeights(Optimizer):
    """u -> u + decay w.  Loshchilov & Hutter 2019, arXiv:1711.05101."""

    decay: float
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the sum."""
        return u + self.decay * inputs.weight, {}


def sgd() -> Optimizer:
    """w <- w - lr g."""
    return ScaleByLearningRate()


def momentum(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr v, as `torch.optim.SGD(momentum=m)`."""
    return Chain((Trace(decay), ScaleByLearningRate()))


def nesterov(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr (m v + g), as `torch.optim.SGD(momentum=m, nesterov=True)`."""
    return Chain((Trace(decay, nesterov=True), ScaleByLearningRate()))


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam, as `torch.optim.Adam`: see `ScaleByAdam`."""
    return Chain((ScaleByAdam(b1, b2, eps), ScaleByLearningRate()))


def adamw(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""
    adam = ScaleByAdam(b1, b2, eps)
    return Chain((adam, AddDecayedWeights(weight_decay), ScaleByLearningRate()))


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
}


def select(choice: str | Optimizer) -> Optimizer:
    """Return the optimizer for a name or an instance; `SGDOptimizer` is `sgd`, and so on.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(choice, Optimizer):
        return choice
    name = str(choice).removesuffix("Optimizer").lower()
    if name not in OPTIMIZERS:
        raise unknown("optimizer", choice, OPTIMIZERS)
    return OPTIMIZERS[name]()
