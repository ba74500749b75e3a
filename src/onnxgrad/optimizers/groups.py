"""Several optimizers in one training, chosen by patterns of weight names or by weight shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.checks import check_count
from onnxgrad.errors import printable
from onnxgrad.optimizers.averages import OptimizerWrapper
from onnxgrad.optimizers.base import (
    Arrays,
    Composite,
    Excluding,
    Optimizer,
    Shape,
    Slots,
    UpdateInputs,
    check_patterns,
    check_range,
)
from onnxgrad.optimizers.matrix_updates import Adafactor
from onnxgrad.optimizers.scaling import AddDecayedWeights


@dataclass(frozen=True)
class ParamGroup:
    """The optimizer of a group of weights, a factor of the learning rate, and the first step.

    Args:
        optimizer: None is the `default` of `param_groups`.
        rate: factor of the learning rate.
        weight_decay: replaces the weight decay of the optimizer; None keeps it.
        start: number of steps before the group begins to train. Until then its weights do not
            change, not by weight decay either, nor do its slots; its gradients are computed, but
            do not count for a norm that is clipped. Then its optimizer counts steps from 1. It is
            as if its parameters had `requires_grad=False` in PyTorch until then.

    Raises:
        ValueError: a `start` that is not an integer of 0 or more.

    Examples:
        >>> from onnxgrad.optimizers import ParamGroup, adamw, param_groups
        >>> optimizer = param_groups({"head.*": ParamGroup(rate=10.0)}, default=adamw())
        >>> optimizer.for_weight("head.weight", (5, 512))
        WithRate(optimizer=..., rate=10.0)
    """

    optimizer: Optimizer | None = None
    rate: float = 1.0
    weight_decay: float | None = None
    start: int = 0

    def __post_init__(self) -> None:
        check_count("start", self.start, 0)

    def resolved(self, default: Optimizer | None) -> Optimizer:
        """Return the optimizer of the group, with its rate, weight decay and start applied.

        Raises:
            ValueError: there is no optimizer, or it has no weight decay.
        """
        optimizer = self.optimizer or default
        if optimizer is None:
            raise ValueError(
                f"{self} has no optimizer: pass optimizer= to it, or default= to param_groups"
            )
        if self.weight_decay is not None:
            changed = with_weight_decay(optimizer, self.weight_decay)
            if changed is None:
                raise ValueError(
                    f"{optimizer} has no weight decay: create it with weight_decay=..."
                )
            optimizer = changed
        optimizer = optimizer if self.rate == 1.0 else WithRate(optimizer, self.rate)
        return optimizer if self.start == 0 else Starting(optimizer, self.start)


@dataclass(frozen=True)
class WithRate(OptimizerWrapper):
    """An optimizer whose learning rate is multiplied by the factor `rate`."""

    rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(0.0, float("inf"), rate=self.rate)

    def inner_inputs(self, inputs: UpdateInputs) -> UpdateInputs:
        """Return the `UpdateInputs` with the learning rate multiplied by the factor."""
        return replace(inputs, minus_learning_rate=inputs.minus_learning_rate * self.rate)


@dataclass(frozen=True)
class Starting(OptimizerWrapper):
    """An optimizer that begins after `start` steps, and counts its own steps from then on."""

    start: int = 0
    rate_first = False

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped optimizer computes each element from the same element only."""
        return self.optimizer.elementwise

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped optimizer averages weights."""
        return self.optimizer.averages

    @property
    def first_step(self) -> int:  # type: ignore[override]
        """Return the number of the first step that changes a weight or a slot."""
        return self.start + self.optimizer.first_step

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the wrapped optimizer's nodes; before `start`, the step is 0 and slots are kept."""
        begun, number = op.Greater(inputs.step, float(self.start)), inputs.step - float(self.start)
        number = op.Max(number, op.const(1.0, number.dtype))
        step, new = super().update(op, u, slots, replace(inputs, step=number))
        step = op.set_type_like(op.Where(begun, step, op.const(0.0, step.dtype)), step)
        return step, {
            slot: op.set_type_like(op.Where(begun, new[slot], slots[slot]), slots[slot])
            for slot in new
        }

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the weight that the wrapped optimizer evaluates, for the steps since `start`."""
        return self.optimizer.evaluated(weight, slots, max(steps - self.start, 0))


class OptimizerChoice(Composite):
    """Base of optimizers that choose a member for each weight; `for_weight` returns that member."""

    def check_members(self) -> None:
        """Raise ValueError for a member that needs the gradients of all weights at once."""
        for member in self.members:
            if not isinstance(member, Optimizer):
                raise ValueError(
                    f"a group of weights needs an optimizer such as adam(), not {member!r}"
                )
            if member.joint:
                raise ValueError(
                    f"{member} needs all gradients at once: put it first in a Chain, before the "
                    "groups"
                )

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of all members; a weight has the slots of the member chosen for it."""
        return tuple(dict.fromkeys(slot for member in self.members for slot in member.slots))


@dataclass(frozen=True)
class ParamGroups(OptimizerChoice):
    """A choice of optimizers by weight name: the first pattern that matches, else the default."""

    groups: tuple[tuple[str, Optimizer], ...]
    default: Optimizer | None = None

    def __post_init__(self) -> None:
        self.check_members()

    @property
    def members(self) -> tuple[Optimizer, ...]:  # type: ignore[override]
        """The optimizers of all groups, and the default."""
        default = () if self.default is None else (self.default,)
        return (*(optimizer for _, optimizer in self.groups), *default)

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the optimizer of one weight.

        Raises:
            ValueError: no pattern matches, and there is no default.
        """
        _, optimizer = self._group_of_weight(name)
        return optimizer.for_weight(name, shape)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern that is not the first match of any weight name."""
        names = list(names)
        first = {self._group_of_weight(name)[0] for name in names}
        patterns = [pattern for pattern, _ in self.groups]
        check_patterns(patterns, names)
        for pattern in patterns:
            if pattern not in first:
                raise ValueError(
                    f"earlier patterns match all weights that {pattern!r} matches: put {pattern!r} "
                    "first"
                )
        super().check_names(names)

    def _group_of_weight(self, name: str) -> tuple[str | None, Optimizer]:
        for pattern, optimizer in self.groups:
            if fnmatchcase(name, pattern):
                return pattern, optimizer
        if self.default is None:
            raise ValueError(
                f"no pattern of param_groups matches the weight {printable(name)}: "
                "add a pattern, or give a default"
            )
        return None, self.default


@dataclass(frozen=True)
class ByRank(Excluding, OptimizerChoice):
    """An optimizer for matrices, and an optimizer for all other weights and excluded names."""

    matrices: Optimizer
    other: Optimizer
    exclude: Iterable[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_members()

    @property
    def members(self) -> tuple[Optimizer, ...]:  # type: ignore[override]
        """The optimizer of matrices and the optimizer of other weights."""
        return self.matrices, self.other

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the optimizer chosen for one weight."""
        matrix = len(shape) == 2 and not self.excludes(name)
        return (self.matrices if matrix else self.other).for_weight(name, shape)


def param_groups(
    groups: Mapping[str, Optimizer | ParamGroup], default: Optimizer | ParamGroup | None = None
) -> Optimizer:
    """Train weights by several optimizers, `{pattern: optimizer or ParamGroup}`.

    Args:
        groups: patterns of `fnmatch`, case-sensitive; the first that matches a name counts.
        default: for names that no pattern matches; None makes these an error.

    Raises:
        ValueError: a group without an optimizer, or with one that needs all gradients at once, such
            as `clip_by_global_norm`: put that before, in a `Chain`. When training begins: a pattern
            that matches no weight, or weights that no pattern matches without a default.

    Examples:
        >>> from onnxgrad.optimizers import ParamGroup, adam, adamw, param_groups
        >>> optimizer = param_groups(
        ...     {"*bias": ParamGroup(weight_decay=0.0), "head.*": ParamGroup(adam(), rate=10.0)},
        ...     default=adamw())
        >>> optimizer.for_weight("conv.bias", (8,)) == adamw(weight_decay=0.0)
        True
    """
    default = default.resolved(None) if isinstance(default, ParamGroup) else default
    return ParamGroups(
        tuple(
            (pattern, group.resolved(default) if isinstance(group, ParamGroup) else group)
            for pattern, group in groups.items()
        ),
        default,
    )


def with_weight_decay(optimizer: Any, decay: float) -> Any | None:
    """Return a copy of an optimizer with another weight decay, or None if it has no decay."""
    if isinstance(optimizer, AddDecayedWeights):
        return replace(optimizer, decay=decay)
    if isinstance(optimizer, Adafactor):
        return replace(optimizer, weight_decay=decay)
    if isinstance(optimizer, tuple):
        changed = [with_weight_decay(part, decay) for part in optimizer]
        parts = zip(changed, optimizer, strict=True)
        kept = tuple(old if new is None else new for new, old in parts)
        return kept if any(new is not None for new in changed) else None
    if not isinstance(optimizer, Optimizer) or not is_dataclass(optimizer):
        return None
    changes = {
        f.name: with_weight_decay(getattr(optimizer, f.name), decay) for f in fields(optimizer)
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(optimizer, **changes) if changes else None
