"""Transforms by learning rate, momentum and weight decay, and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.checks import check_positive
from onnxgrad.optimizers.base import Excluding, Optimizer, Shape, Slots, UpdateInputs, write_norm

_EPS = 1e-6  # added to norms, as `torch.nn.utils.clip_grad_norm_` does


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
        """Write the nodes of the step -lr u."""
        return u * inputs.minus_learning_rate, {}


@dataclass(frozen=True)
class Trace(Optimizer):
    """Momentum m: v <- m v + u;  u -> m v + u if nesterov else v.

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
        """Write the nodes of the velocity and of the step."""
        velocity = u + self.decay * slots["velocity"]
        step = u + self.decay * velocity if self.nesterov else velocity
        return step, {"velocity": velocity}


@dataclass(frozen=True)
class AddDecayedWeights(Excluding):
    """u -> u + decay w.  Loshchilov & Hutter 2019, arXiv:1711.05101.

    Before a transform that scales by moments, this is an L2 penalty; after it, the decay is
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
        """Return the transform for one weight, with a decay of 0 if its name is excluded."""
        decay = 0.0 if self.excludes(name) else self.decay
        return replace(self, decay=decay, exclude=())

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the step u + decay w."""
        return (u + self.decay * inputs.weight if self.decay else u), {}


@dataclass(frozen=True)
class Clip(Optimizer):
    """u -> min(max(u, -value), value), as `torch.nn.utils.clip_grad_value_`."""

    value: float
    elementwise = True

    def __post_init__(self) -> None:
        check_positive("value", self.value, infinite=True)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the clipped step."""
        return op.Min(op.Max(u, -self.value), self.value), {}


@dataclass(frozen=True)
class ClipByNorm(Optimizer):
    """u -> u min(1, norm / (|u| + 1e-6)), where |u| is the norm of the tensor of one weight."""

    norm: float

    def __post_init__(self) -> None:
        check_positive("norm", self.norm, infinite=True)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the norm and of the scaled step."""
        return u * op.Min(self.norm / (write_norm(op, u) + _EPS), 1.0), {}


@dataclass(frozen=True)
class ClipByGlobalNorm(Optimizer):
    """g -> g min(1, norm / (|g| + 1e-6)), where |g| is the norm of all gradients together."""

    norm: float
    elementwise = True

    def __post_init__(self) -> None:
        check_positive("norm", self.norm, infinite=True)

    def across(self, op: Any, gradients: list[ir.Value]) -> list[ir.Value]:
        """Write the norm of all gradients, in their widest dtype, and the scaled gradients."""
        widest = max((g.dtype for g in gradients if g.dtype), key=lambda dtype: dtype.bitwidth)
        squares = [op.Cast(op.ReduceSumSquare(g, keepdims=0), to=widest) for g in gradients]
        with op:
            factor = op.Min(self.norm / (op.Sqrt(op.total(squares)) + _EPS), 1.0)
            return [op.Mul(g, op.Cast(factor, to=g.dtype)) for g in gradients]


def clip(value: float) -> Optimizer:
    """u -> min(max(u, -value), value), as `torch.nn.utils.clip_grad_value_`.

    It stands before an optimizer in a `Chain`.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import clip
        >>> og.optimizers.Chain((clip(0.5), og.optimizers.adam())).slots
        ('m', 'v')
    """
    return Clip(value)


def clip_by_norm(norm: float) -> Optimizer:
    """u -> u min(1, norm / (|u| + 1e-6)), with the norm of each tensor alone.

    It stands before an optimizer in a `Chain`.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import clip_by_norm
        >>> og.optimizers.Chain((clip_by_norm(1.0), og.optimizers.momentum())).elementwise
        False
    """
    return ClipByNorm(norm)


def clip_by_global_norm(norm: float) -> Optimizer:
    """g -> g min(1, norm / (|g| + 1e-6)), with the norm of all gradients, as
    `torch.nn.utils.clip_grad_norm_`.

    It stands before an optimizer in a `Chain`, and before `param_groups`.

    Examples:
        >>> import onnxgrad as og
        >>> from onnxgrad.optimizers import clip_by_global_norm
        >>> og.optimizers.Chain((clip_by_global_norm(1.0), og.optimizers.adam())).joint
        True
    """
    return ClipByGlobalNorm(norm)
