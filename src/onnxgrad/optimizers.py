"""Optimizers: transforms that turn a gradient into a step, chained, and written as ONNX.

A transform says which slots it keeps for a weight, all of the weight's shape and zero at first,
and writes the nodes that turn one proposed step into another. The first one is given the gradient;
what the last one returns is added to the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit


@dataclass(frozen=True)
class Inputs:
    """What the update of one weight may read, as values of the step's graph."""

    weight: ir.Value
    minus_learning_rate: ir.Value  # scalar
    step: ir.Value  # scalar: 1 in the first step


Slots = dict[str, ir.Value]
Update = Callable[[Emit, ir.Value, Slots, Inputs], tuple[ir.Value, Slots]]


@dataclass(frozen=True)
class Optimizer:
    """Slots, and the nodes that turn a gradient into the step that is added to the weight."""

    slots: tuple[str, ...]
    update: Update
    description: str
    rate_first: bool = False  # the gradient is multiplied by the learning rate before all else

    def __repr__(self) -> str:
        return self.description


def chain(*parts: Optimizer, description: str) -> Optimizer:
    """Return the optimizer that passes what one part proposes to the next."""
    names = [[f"{slot}{i}" if _repeated(slot, parts) else slot for slot in part.slots]
             for i, part in enumerate(parts)]  # fmt: skip

    def update(op: Emit, u: ir.Value, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        made: Slots = {}
        for part, mine in zip(parts, names, strict=True):
            old = {slot: slots[name] for slot, name in zip(part.slots, mine, strict=True)}
            u, new = part.update(op, u, old, inputs)
            made.update({name: new[slot] for slot, name in zip(part.slots, mine, strict=True)})
        return u, made

    slots = tuple(name for mine in names for name in mine)
    return Optimizer(slots, update, description, parts[0].rate_first)


def _repeated(slot: str, parts: tuple[Optimizer, ...]) -> bool:
    return sum(slot in part.slots for part in parts) > 1


def scale_by_learning_rate() -> Optimizer:
    """u -> -lr u."""

    def update(op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        return u * inputs.minus_learning_rate, {}

    return Optimizer((), update, "scale_by_learning_rate()", rate_first=True)


def trace(decay: float, nesterov: bool = False) -> Optimizer:
    """v <- m v + u;  u -> m v + u if nesterov else v.

    The slot holds m v, decayed for the next step already: Nesterov's form needs it anyway.
    """

    def update(op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        velocity = slots["velocity"] + u
        decayed = decay * velocity
        return (decayed + u if nesterov else velocity), {"velocity": decayed}

    return Optimizer(("velocity",), update, f"trace({decay}, nesterov={nesterov})")


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """m <- b1 m + (1 - b1) u;  v <- b2 v + (1 - b2) u^2;  u -> m' / (sqrt(v') + eps),
    m' = m / (1 - b1^t), v' = v / (1 - b2^t).  Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    def update(op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        m = b1 * slots["m"] + (1 - b1) * u
        v = b2 * slots["v"] + (1 - b2) * (u * u)
        # the corrections are scalars: one of them is moved to the other side of the fraction
        root = op.Sqrt(1.0 - op.Pow(op.value(b2, inputs.step.dtype), inputs.step))
        scale = root / (1.0 - op.Pow(op.value(b1, inputs.step.dtype), inputs.step))
        return m * scale / (op.Sqrt(v) + eps * root), {"m": m, "v": v}

    return Optimizer(("m", "v"), update, f"scale_by_adam({b1}, {b2}, {eps})")


def add_decayed_weights(decay: float) -> Optimizer:
    """u -> u + decay w.  Loshchilov & Hutter 2019, arXiv:1711.05101."""

    def update(op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        return u + decay * inputs.weight, {}

    return Optimizer((), update, f"add_decayed_weights({decay})")


def sgd() -> Optimizer:
    """w <- w - lr g."""
    return chain(scale_by_learning_rate(), description="sgd()")


def momentum(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr v, as `torch.optim.SGD(momentum=m)`."""
    parts = trace(decay), scale_by_learning_rate()
    return chain(*parts, description=f"momentum({decay})")


def nesterov(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr (m v + g), as `torch.optim.SGD(momentum=m, nesterov=True)`."""
    parts = trace(decay, nesterov=True), scale_by_learning_rate()
    return chain(*parts, description=f"nesterov({decay})")


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam, as `torch.optim.Adam`: see `scale_by_adam`."""
    parts = scale_by_adam(b1, b2, eps), scale_by_learning_rate()
    return chain(*parts, description=f"adam({b1}, {b2}, {eps})")


def adamw(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""
    parts = scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate()
    return chain(*parts, description=f"adamw({b1}, {b2}, {eps}, {weight_decay})")


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
}


def select(choice: str | Optimizer) -> Optimizer:
    """Return the optimizer for a name or an instance; `SGDOptimizer` is `sgd`, and so on."""
    if isinstance(choice, Optimizer):
        return choice
    name = str(choice).removesuffix("Optimizer").lower()
    if name not in OPTIMIZERS:
        raise unknown("optimizer", choice, OPTIMIZERS)
    return OPTIMIZERS[name]()
