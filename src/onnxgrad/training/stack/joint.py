"""What optimizers do with all gradients of a member at once, for all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims
from onnxgrad.optimizers import Chain, Optimizer
from onnxgrad.optimizers.clipping import EPS, ClipByGlobalNorm


def row(op: Emit, x: ir.Value, k: int) -> ir.Value:
    """Return what member `k` has of a stacked value."""
    y = op.Gather(x, np.int64(k), axis=0)
    y.type, y.shape = x.type, ir.Shape((dims(x) or ())[1:])
    return y


def across(op: Emit, gradients: list[ir.Value], optimizers: Sequence[Optimizer]) -> list[ir.Value]:
    """Write what optimizers, one for each member, do with all gradients of a member at once."""
    if not any(optimizer.joint for optimizer in optimizers):
        return gradients
    limits = [_limit(optimizer) for optimizer in optimizers]
    if all(limit is not None for limit in limits):
        return _clipped(op, gradients, np.array(limits, np.float64))
    members = [
        optimizer.across(op, [row(op, g, k) for g in gradients])
        for k, optimizer in enumerate(optimizers)
    ]
    return [
        op.set_type_like(op.Concat(*[op.Unsqueeze(v, [0]) for v in column], axis=0), g)
        for g, column in zip(gradients, zip(*members, strict=True), strict=True)
    ]


def _limit(optimizer: Optimizer) -> float | None:
    """Return the norm to which an optimizer clips all gradients; None if it does more with them."""
    parts: list[Any] = [optimizer]
    while any(isinstance(part, Chain) for part in parts):
        parts = [p for part in parts for p in (part.parts if isinstance(part, Chain) else (part,))]
    joint = [part for part in parts if part.joint]
    if len(joint) == 1 and isinstance(joint[0], ClipByGlobalNorm):
        return joint[0].norm
    return None


def _clipped(op: Emit, gradients: list[ir.Value], limits: np.ndarray) -> list[ir.Value]:
    """Write `ClipByGlobalNorm.across` for all members."""
    widest = max((g.dtype for g in gradients if g.dtype), key=lambda dtype: dtype.bitwidth)
    count = len(limits)
    with op:
        squares = []
        for g in gradients:
            axes = list(range(1, len(dims(g) or ())))
            square = op.ReduceSumSquare(g, axes, keepdims=0) if axes else op.Mul(g, g)
            squares.append(op.Cast(square, to=widest))
        for square in squares:
            square.shape = ir.Shape([count])
        limit = op.const(limits.astype(widest.numpy()))
        factor = op.Min(limit / (op.Sqrt(op.total(squares)) + EPS), 1.0)
        clipped = []
        for g in gradients:
            shape = [count] + [1] * (len(dims(g) or ()) - 1)
            column = op.Reshape(op.Cast(factor, to=g.dtype), shape)
            clipped.append(op.set_type_like(op.Mul(g, column), g))
        return clipped
