"""Penalties on weights, a |w| + b w^2, in the graph of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit


def weight_penalty(
    op: Emit, w: ir.Value, l1: float | None, l2: float | None, zeros: bool = False
) -> ir.Value:
    """Write `l1 |w| + l2 w^2`, summed, of shape (1, 1); terms of a coefficient 0 if `zeros`."""
    if not l1 and not l2:
        raise ValueError(f"the penalty of {w.name!r} is zero: give l1 or l2 a value")
    flat = op.Reshape(w, [1, -1])
    if flat.shape is None:
        flat.shape = ir.Shape([1, f"elements of {w.name}"])
    terms = []
    for coefficient, v, total in ((l1, op.Abs(flat), op.ReduceSum), (l2, flat, op.ReduceSumSquare)):
        if coefficient or (zeros and coefficient is not None):
            summed = total(v, keepdims=1)
            summed.shape = ir.Shape([1, 1])
            terms.append(coefficient * summed)
    return op.total(terms)


def add_penalties(
    op: Emit, loss: ir.Value, penalties: Mapping[str, Any], values: Mapping[str, ir.Value]
) -> ir.Value:
    """Write `loss` plus the penalties of the named `values`, `{name: b}` or `{name: {l1, l2}}`."""
    floats = {n: v for n, v in values.items() if v.dtype and v.dtype.is_floating_point()}
    for name, setting in penalties.items():
        if name not in floats:
            raise unknown("weight in penalty", name, floats)
        term = weight_penalty(op, floats[name], **coefficients(name, setting))
        loss = loss + op.Cast(term, to=loss.dtype)
    return loss


def coefficients(name: str, setting: Any) -> dict[str, Any]:
    """Return `{"l1": a, "l2": b}` for the penalty of a weight: that, or a number, its l2."""
    given = dict(setting) if isinstance(setting, Mapping) else {"l2": setting}
    for key in given:
        if key not in ("l1", "l2"):
            raise unknown(f"penalty of {name!r}", key, ["l1", "l2"])
    return {"l1": 0.0, "l2": 0.0} | given
