"""Weight decay that differs between members, in one update of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import rank
from onnxgrad.optimizers import AddDecayedWeights, Inputs, Optimizer


@dataclass(frozen=True)
class DecayByMember(Optimizer):
    """u -> u + decay_k w for the row k of stacked weights."""

    decays: tuple[float, ...]
    elementwise = True

    def update(
        self, op: Any, u: Any, slots: dict[str, ir.Value], inputs: Inputs
    ) -> tuple[ir.Value, dict[str, ir.Value]]:
        """Write the sum."""
        w = inputs.weight
        assert w.dtype is not None
        column = np.array(self.decays, w.dtype.numpy()).reshape(-1, *[1] * ((rank(w) or 1) - 1))
        return u + op.const(column) * w, {}


def merged(own: Sequence[Any]) -> Any | None:
    """Return one optimizer for the rows of all members, or None if they differ otherwise.

    Only the factors of `AddDecayedWeights` may differ.
    """
    first = own[0]
    if all(o == first for o in own):
        return first
    if any(type(o) is not type(first) for o in own):
        return None
    if isinstance(first, AddDecayedWeights):
        return DecayByMember(tuple(o.decay for o in own))  # `for_weight` has resolved `exclude`
    if isinstance(first, tuple):
        if any(len(o) != len(first) for o in own):
            return None
        parts = [merged(column) for column in zip(*own, strict=True)]
        return None if any(part is None for part in parts) else tuple(parts)
    if not isinstance(first, Optimizer) or not is_dataclass(first) or not first.elementwise:
        return None
    changes = {}
    for f in fields(first):
        values = [getattr(o, f.name) for o in own]
        if any(v != values[0] for v in values):
            changes[f.name] = merged(values)
            if changes[f.name] is None:
                return None
    return replace(first, **changes)
