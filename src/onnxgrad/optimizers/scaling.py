"""Transforms by the learning rate, momentum, and weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.optimizers.base import Excluding, Optimizer, Shape, Slots, UpdateInputs


@dataclass(frozen=True)
class ScaleByLearningRate(Optimizer):
    """u -> -lr u.

    Examples:
        >>> import onnxgrad as og
        >>> og.optimizers.sgd() == og.optimizers.ScaleByLearningRate()
        True
    """

    usual_rate = 1e-2
    rate_first = True
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the product."""
        return u * inputs.minus_learning_rate, {}


@dataclass(frozen=True)
class Trace(Optimizer):
    """v <- m v + u;  u -> m v + u if nesterov else v.

    The slot holds m v, which Nesterov's form computes anyway.

    Examples:
        >>> from onnxgrad.optimizers import Chain, ScaleByLearningRate, Trace, nesterov
        >>> nesterov(0.8) == Chain((Trace(0.8, nesterov=True), ScaleByLearningRate()))
        True
    """

    decay: float
    nesterov: bool = False
    slots = ("velocity",)
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the velocity."""
        velocity = slots["velocity"] + u
        decayed = self.decay * velocity
        return (decayed + u if self.nesterov else velocity), {"velocity": decayed}


@dataclass(frozen=True)
class AddDecayedWeights(Excluding):
    """u -> u + decay w.  Loshchilov & Hutter 2019, arXiv:1711.05101.

    Before a transform that scales by moments, this is an L2 penalty; behind it, the decay is
    decoupled.

    Args:
        decay: the factor of the weights.
        exclude: patterns of `fnmatch`, case-sensitive: weights that do not decay.

    Examples:
        >>> import onnxgrad as og
        >>> decay = og.optimizers.AddDecayedWeights(0.1, exclude=("*bias", "*norm*"))
        >>> decay.for_weight("conv.bias", (8,)).decay, decay.for_weight("conv.weight", (8, 3)).decay
        (0.0, 0.1)
    """

    decay: float
    exclude: Iterable[str] = ()
    elementwise = True

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the decay of one weight: zero if it is excluded."""
        decay = 0.0 if self.excludes(name) else self.decay
        return replace(self, decay=decay, exclude=())

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the sum."""
        return (u + self.decay * inputs.weight if self.decay else u), {}
