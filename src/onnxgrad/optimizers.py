"""Optimizers: chained transforms that turn a gradient into a step, written as ONNX nodes.

The input of the first transform is the gradient; the output of the last one is added to the weight.
A transform may keep slots from step to step, all of the weight's shape and initially zero.
Optimizers are frozen dataclasses: compared, printed and pickled by their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import unknown


@dataclass(frozen=True)
class Inputs:
    """Values of the step's graph that the update of one weight may read.

    Attributes:
        weight: the weight before the step.
        minus_learning_rate: the negative learning rate, a scalar of the weight's dtype.
        step: number of the step, a scalar of the weight's dtype, 1 in the first step.

    Examples:
        >>> from dataclasses import dataclass
        >>> from onnxgrad.optimizers import Chain, Optimizer, sgd
        >>> @dataclass(frozen=True)
        ... class InverseTime(Optimizer):
        ...     elementwise = True
        ...     def update(self, op, u, slots, inputs):
        ...         return u / inputs.step, {}
        >>> Chain((InverseTime(), sgd()))
        Chain(parts=(InverseTime(), ScaleByLearningRate()))
    """

    weight: ir.Value
    minus_learning_rate: ir.Value
    step: ir.Value


Slots = dict[str, ir.Value]


class Optimizer:
    """Base of the transforms of a step; a transform of your own overrides `update` and `slots`.

    Attributes:
        elementwise: whether each element of the step depends only on the same element of the
            gradient, the weight and the slots. If True, small weights are updated together as one
            flat vector; if False, `update` is called for each weight in its own shape, as an update
            with a norm, a mean or an axis requires. False for a class that overrides `update`
            without setting it.
        rate_first: whether `update` multiplies the gradient by the learning rate before all else,
            and does not read it again. False for a class that overrides `update` without setting
            it.

    Examples:
        >>> from dataclasses import dataclass
        >>> from onnxgrad.optimizers import Chain, Optimizer, sgd
        >>> @dataclass(frozen=True)
        ... class SignOfMean(Optimizer):  # m <- d m + (1 - d) u;  u -> sign(m)
        ...     decay: float = 0.9
        ...     slots = ("m",)
        ...     elementwise = True
        ...     def update(self, op, u, slots, inputs):
        ...         m = self.decay * slots["m"] + (1 - self.decay) * u
        ...         return op.Sign(m), {"m": m}
        >>> Chain((SignOfMean(), sgd())).slots
        ('m',)
    """

    elementwise: bool = False
    rate_first: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for claim in ("elementwise", "rate_first"):  # those of a base class are about its `update`
            if "update" in vars(cls) and claim not in vars(cls):
                setattr(cls, claim, False)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of a weight."""
        return ()

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the nodes that transform the step `u`; return the new step and the new slots."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chain(Optimizer):
    """Transforms applied one after the other.

    Examples:
        >>> from onnxgrad.optimizers import AddDecayedWeights, Chain, sgd
        >>> Chain((AddDecayedWeights(0.01), sgd()))
        Chain(parts=(AddDecayedWeights(decay=0.01), ScaleByLearningRate()))
    """

    parts: tuple[Optimizer, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of all parts; a name of several parts gets the index of the part."""
        return tuple(name for names in self._names() for name in names.values())

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Return whether all parts are elementwise."""
        return all(part.elementwise for part in self.parts)

    @property
    def rate_first(self) -> bool:  # type: ignore[override]
        """Return whether the first part, and no other, multiplies by the learning rate."""
        return [i for i, part in enumerate(self.parts) if part.rate_first] == [0]

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of all parts."""
        new: Slots = {}
        for part, names in zip(self.parts, self._names(), strict=True):
            own = {slot: slots[name] for slot, name in names.items()}
            u, updated = part.update(op, u, own, inputs)
            new |= {name: updated[slot] for slot, name in names.items()}
        return u, new

    def _names(self) -> list[dict[str, str]]:
        """Return for every part `{its slot: name of the slot in the chain}`."""
        all_slots = [slot for part in self.parts for slot in part.slots]
        return [
            {slot: f"{slot}{i}" if all_slots.count(slot) > 1 else slot for slot in part.slots}
            for i, part in enumerate(self.parts)
        ]


@dataclass(frozen=True)
class ScaleByLearningRate(Optimizer):
    """u -> -lr u.

    Examples:
        >>> import onnxgrad as og
        >>> og.sgd() == og.ScaleByLearningRate()
        True
    """

    rate_first = True
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the product."""
        return u * inputs.minus_learning_rate, {}


@dataclass(frozen=True)
class Trace(Optimizer):
    """v <- m v + u;  u -> m v + u if nesterov else v.

    The slot holds m v, which Nesterov's form computes anyway.

    Examples:
        >>> import onnxgrad as og
        >>> og.nesterov(0.8) == og.Chain((og.Trace(0.8, nesterov=True), og.ScaleByLearningRate()))
        True
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

    Examples:
        >>> import onnxgrad as og
        >>> og.Chain((og.ScaleByAdam(b1=0.8), og.ScaleByLearningRate())).slots
        ('m', 'v')
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
        # sqrt(v / (1 - b2^t)) = sqrt(v) / root, so that all corrections are scalars
        root = op.Sqrt(1.0 - op.Pow(op.const(b2, t.dtype), t))
        scale = root / (1.0 - op.Pow(op.const(b1, t.dtype), t))
        return m * scale / (op.Sqrt(v) + self.eps * root), {"m": m, "v": v}


@dataclass(frozen=True)
class AddDecayedWeights(Optimizer):
    """u -> u + decay w.  Loshchilov & Hutter 2019, arXiv:1711.05101.

    Examples:
        >>> import onnxgrad as og
        >>> decayed = og.Chain((og.AddDecayedWeights(0.1), og.ScaleByLearningRate()))
        >>> decayed.elementwise
        True
    """

    decay: float
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: Inputs) -> tuple[ir.Value, Slots]:
        """Write the sum."""
        return u + self.decay * inputs.weight, {}


def sgd() -> Optimizer:
    """w <- w - lr g.

    Examples:
        >>> import onnxgrad as og
        >>> og.sgd()
        ScaleByLearningRate()
    """
    return ScaleByLearningRate()


def momentum(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr v, as `torch.optim.SGD(momentum=m)`.

    Examples:
        >>> import onnxgrad as og
        >>> og.momentum(0.8).slots
        ('velocity',)
    """
    return Chain((Trace(decay), ScaleByLearningRate()))


def nesterov(decay: float = 0.9) -> Optimizer:
    """v <- m v + g;  w <- w - lr (m v + g), as `torch.optim.SGD(momentum=m, nesterov=True)`.

    Examples:
        >>> import onnxgrad as og
        >>> og.nesterov(0.8)
        Chain(parts=(Trace(decay=0.8, nesterov=True), ScaleByLearningRate()))
    """
    return Chain((Trace(decay, nesterov=True), ScaleByLearningRate()))


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam, as `torch.optim.Adam`; for the formula, see `ScaleByAdam`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> loss = og.add_loss_output(model)
        >>> trainer = og.OrtGradientOptimizer(
        ...     loss, ["w"], training_optimizer_name=og.adam(b1=0.8), learning_rate=1.0,
        ...     max_iter=1, batch_size=2)
        >>> trainer = trainer.fit([[1, 1], [1, 1]], [[0, 9], [0, 9]])
        >>> print(trainer.trained_coef_["w"].round(3))  # the first step of Adam is lr sign(g)
        [1. 4.]
    """
    return Chain((ScaleByAdam(b1, b2, eps), ScaleByLearningRate()))


def adamw(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Examples:
        >>> import onnxgrad as og
        >>> optimizer = og.adamw(weight_decay=0.1)
        >>> optimizer.parts[1], optimizer.slots
        (AddDecayedWeights(decay=0.1), ('m', 'v'))
    """
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
