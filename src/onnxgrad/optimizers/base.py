"""The interface of optimizers, and chains of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import join_first, printable

Slots = dict[str, ir.Value]
Arrays = Mapping[str, np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class UpdateInputs:
    """Values in the graph of a training step that the update of one weight may read.

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


class Optimizer:
    """Base of optimizers and transforms; your own transform overrides `update` and `slots`.

    Attributes:
        elementwise: whether each element of the step depends only on the same element of the
            gradient, the weight and the slots, and on slots of shape (). If True, small weights are
            updated together as one flat vector, and large ones in blocks; if False, `update` is
            called for each weight in its own shape, as an update with a norm, a mean or an axis
            requires. False for a class that overrides `update` without setting it.
        rate_first: whether `update` multiplies the gradient by the learning rate before all else,
            and does not read it again. False for a class that overrides `update` without setting
            it.
        joint: whether `across` changes the gradients. True for a class that overrides `across`
            without setting it.
        averages: whether `evaluated` may differ from the weight. True for a class that overrides
            `evaluated` without setting it.
        first_step: number of the first step, counted from 0, that may change a weight or a slot;
            until then, `across` gets gradients of zero.
        usual_rate: the learning rate of a training that sets none; None: the rate of another
            transform of a chain, or else 0.001.

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
    joint: bool = False
    averages: bool = False
    first_step: int = 0
    usual_rate: float | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if isinstance(own.get("members"), property):
            return  # a `Composite` has the properties of its members
        # the claims of a base class are about its `update`
        for claim in ("elementwise", "rate_first"):
            if "update" in own and claim not in own:
                setattr(cls, claim, False)
        for method, claim in (("across", "joint"), ("evaluated", "averages")):
            if method in own and claim not in own:
                setattr(cls, claim, True)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots (optimizer states) of a weight."""
        return ()

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return the shape of a slot for a weight of shape `shape`; by default `shape`.

        () is one number, which all weights share that are updated together.
        """
        return shape

    def slot_initial(self, slot: str, weight: np.ndarray) -> np.ndarray | float:
        """Return the value at which a slot of `weight` starts; by default 0."""
        return 0.0

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the optimizer for one weight; by default `self`.

        Weights with equal optimizers are updated together. Training calls `slots`, `slot_shape`,
        `slot_initial`, `update` and `evaluated` of the returned optimizer only.
        """
        return self

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern that matches none of the names of the trained weights."""

    def across(self, op: Any, gradients: list[ir.Value]) -> list[ir.Value]:
        """Write the nodes that need the gradients of all weights, and return the new gradients.

        This comes before all calls of `update`. The gradients of small weights may be one vector.
        """
        return gradients

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes that transform the step `u`; return the new step and the new slots."""
        if self.joint:
            return u, {}
        raise NotImplementedError

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the weight to evaluate and export after `steps` steps; by default `weight`."""
        return weight


class Composite(Optimizer):
    """Base of optimizers composed of other optimizers, `members`, whose properties it combines.

    A class that overrides `update` may have to state these properties itself.
    """

    members: tuple[Optimizer, ...]

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Return whether an element of a step depends on the same element of the gradient only."""
        return all(member.elementwise for member in self.members)

    @property
    def joint(self) -> bool:  # type: ignore[override]
        """Return whether a member needs the gradients of all weights at once."""
        return any(member.joint for member in self.members)

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """Return whether a member exports averages of weights, not the weights."""
        return any(member.averages for member in self.members)

    @property
    def first_step(self) -> int:  # type: ignore[override]
        """Return the step at which the last of the members begins to train."""
        return max(member.first_step for member in self.members)

    @property
    def usual_rate(self) -> float | None:  # type: ignore[override]
        """Return the usual learning rate of the first member that states a usual learning rate."""
        rates = (member.usual_rate for member in self.members)
        return next((rate for rate in rates if rate is not None), None)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern of weight names in a member matches none of the names."""
        names = list(names)
        for member in self.members:
            member.check_names(names)


@dataclass(frozen=True)
class Chain(Composite):
    """A chain of transforms, applied one after the other.

    Raises:
        ValueError: a part that needs all gradients at once (`clip_by_global_norm`) after one that
            does not, or a part that averages weights (`ema`) before another part.

    Examples:
        >>> from onnxgrad.optimizers import AddDecayedWeights, Chain, sgd
        >>> Chain((AddDecayedWeights(0.01), sgd())).slots
        ()
    """

    parts: tuple[Optimizer, ...]

    def __post_init__(self) -> None:
        for i, part in enumerate(self.parts):
            # `across` of all parts runs before `update` of any
            if part.joint and any(type(p).update is not Optimizer.update for p in self.parts[:i]):
                raise ValueError(f"{part} needs all gradients at once: put it first in the chain")
            if part.averages and i + 1 < len(self.parts):
                raise ValueError(
                    f"{part} averages the new weights: pass the transforms behind it as part of "
                    "its argument optimizer"
                )

    @property
    def members(self) -> tuple[Optimizer, ...]:  # type: ignore[override]
        """The transforms of the chain."""
        return self.parts

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of all transforms; equal names get the transform's index as suffix."""
        return tuple(name for names in self._slot_names() for name in names.values())

    @property
    def rate_first(self) -> bool:  # type: ignore[override]
        """Return whether the first transform alone multiplies by the learning rate."""
        return [i for i, part in enumerate(self.parts) if part.rate_first] == [0]

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return the shape of a slot, from the transform that has the slot."""
        part, own = self._transform_of_slot(slot)
        return part.slot_shape(own, shape)

    def slot_initial(self, slot: str, weight: np.ndarray) -> np.ndarray | float:
        """Return the initial value of a slot, from the transform that has the slot."""
        part, own = self._transform_of_slot(slot)
        return part.slot_initial(own, weight)

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the chain of the transforms' versions for one weight."""
        parts = tuple(part.for_weight(name, shape) for part in self.parts)
        return self if parts == self.parts else replace(self, parts=parts)

    def across(self, op: Any, gradients: list[ir.Value]) -> list[ir.Value]:
        """Write the nodes of transforms that need all gradients; return the new gradients."""
        for part in self.parts:
            gradients = part.across(op, gradients)
        return gradients

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of all transforms, in order; return the new step and slots."""
        new: Slots = {}
        for part, names in zip(self.parts, self._slot_names(), strict=True):
            own = {slot: slots[name] for slot, name in names.items()}
            u, updated = part.update(op, u, own, inputs)
            new |= {name: updated[slot] for slot, name in names.items()}
        return u, new

    def evaluated(self, weight: np.ndarray, slots: Arrays, steps: int) -> np.ndarray:
        """Return the weight to evaluate and export, from the last transform."""
        own = {slot: slots[name] for slot, name in self._slot_names()[-1].items() if name in slots}
        return self.parts[-1].evaluated(weight, own, steps)

    def _slot_names(self) -> list[dict[str, str]]:
        """Return for each transform `{name of a slot: name of the slot in the chain}`."""
        all_slots = [slot for part in self.parts for slot in part.slots]
        return [
            {slot: f"{slot}{i}" if all_slots.count(slot) > 1 else slot for slot in part.slots}
            for i, part in enumerate(self.parts)
        ]

    def _transform_of_slot(self, name: str) -> tuple[Optimizer, str]:
        """Return the transform of the slot `name` of the chain, and its name for the slot."""
        parts = zip(self.parts, self._slot_names(), strict=True)
        return {new: (part, old) for part, names in parts for old, new in names.items()}[name]


class Excluding(Optimizer):
    """Base of transforms that leave out weights whose names match patterns of `fnmatch`."""

    exclude: Iterable[str]

    def __post_init__(self) -> None:
        if isinstance(self.exclude, str):  # its letters would be the patterns
            raise ValueError(f"exclude is a list of patterns: write exclude=({self.exclude!r},)")
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern in `exclude` that matches none of the names."""
        names = list(names)
        check_patterns(self.exclude, names)
        super().check_names(names)

    def excludes(self, name: str) -> bool:
        """Return whether a pattern in `exclude` matches the name of a weight."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)


def to_float64(op: Any, scalar: ir.Value) -> ir.Value:
    """Write a Cast of a scalar to float64, in which 1 - b^t keeps its digits."""
    return op.Cast(scalar, to=ir.DataType.DOUBLE)


def write_power(op: Any, base: float, t: ir.Value) -> ir.Value:
    """Write the node that computes base^t, a scalar."""
    return op.Pow(op.const(base, t.dtype), t)


def write_norm(op: Any, x: ir.Value) -> ir.Value:
    """Write the nodes of the Euclidean norm of a tensor, a scalar."""
    return op.Sqrt(op.ReduceSumSquare(x, keepdims=0))


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise ValueError for a pattern that matches none of the weight names."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = join_first([*map(printable, names)], 10)
            raise ValueError(
                f"the pattern {pattern!r} matches none of the trained weights ({shown}): "
                "correct the pattern, or remove it from the groups"
            )


def check_range(low: float, high: float, **arguments: float) -> None:
    """Raise ValueError for a named argument that is not in [low, high)."""
    for name, value in arguments.items():
        if not low <= value < high:
            bounds = f"at least {low:g}" if high == np.inf else f"in [{low:g}, {high:g})"
            raise ValueError(f"{name} must be {bounds}, not {value!r}")
