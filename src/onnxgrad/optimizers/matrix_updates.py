"""Transforms that need whole weight tensors, not single elements: LAMB, Adafactor, Muon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import unknown
from onnxgrad.operators import shapes
from onnxgrad.optimizers.base import (
    Excluding,
    Optimizer,
    Shape,
    Slots,
    UpdateInputs,
    check_range,
    to_float64,
    write_norm,
)


@dataclass(frozen=True)
class ScaleByTrustRatio(Optimizer):
    """u -> |w| / |u| u;  u if a norm is zero.  You et al. 2020, arXiv:1904.00962.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByTrustRatio
        >>> ScaleByTrustRatio().elementwise
        False
    """

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of both norms and of the scaled step."""
        of_w, of_u = write_norm(op, inputs.weight), write_norm(op, u)
        positive = op.And(op.Greater(of_w, 0.0), op.Greater(of_u, 0.0))
        return u * op.Where(positive, of_w / of_u, op.const(1.0, u.dtype)), {}


@dataclass(frozen=True)
class Adafactor(Excluding):
    """c = t^beta2_decay;  R <- R + c (rowmean(u^2) - R),  C <- C + c (columnmean(u^2) - C);
    V = R C / max(mean(R), eps1);  U = u / sqrt(max(V, eps1^2));
    u -> -a U / max(1, rms(U) / d) - lr weight_decay w,  a = max(eps2, rms(w)) min(lr, 1 / sqrt(t)).

    Shazeer & Stern 2018, arXiv:1804.04235, as `torch.optim.Adafactor`. Means are over the last two
    axes; a weight of fewer axes has V <- V + c (u^2 - V).
    """

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    exclude: Iterable[str] = ()
    factored: bool | None = None  # for one weight: whether V is a product of R and C

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(1.0, np.inf, d=self.d)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of means; before `for_weight`, all means that a weight may have."""
        factors = ("row", "column")
        return (*factors, "v") if self.factored is None else factors if self.factored else ("v",)

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return the shape of a slot: means over the weight's last axis, or the axis before it."""
        return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, *shape[-1:])}.get(slot, shape)

    def for_weight(self, name: str, shape: Shape) -> Optimizer:
        """Return the optimizer for one weight: matrices factor V, excluded names do not decay."""
        decay = 0.0 if self.excludes(name) else self.weight_decay
        return replace(self, weight_decay=decay, exclude=(), factored=len(shape) > 1)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the means and of the step, which is scaled and clipped."""
        t, w, shape = to_float64(op, inputs.step), inputs.weight, _static_shape(u)
        eps1 = self.eps[0] or float(np.finfo(u.dtype.numpy()).eps)
        share = op.Cast(op.Pow(t, op.const(self.beta2_decay, t.dtype)), to=u.dtype)

        def moving_mean(slot: str, x: Any) -> Any:
            return slots[slot] + (x - slots[slot]) * share

        if self.factored:
            row = moving_mean("row", op.ReduceSum(u * u, [-1], keepdims=1) / shape[-1])
            column = moving_mean("column", op.ReduceSum(u * u, [-2], keepdims=1) / shape[-2])
            average = op.ReduceSum(row, [-2], keepdims=1) / shape[-2]
            v, new = row * column / op.Max(average, eps1), {"row": row, "column": column}
        else:
            v = moving_mean("v", u * u)
            new = {"v": v}
        u = u / op.Sqrt(op.Max(v, eps1 * eps1))
        count = sqrt(prod(shape))
        rate = op.Neg(inputs.minus_learning_rate)
        limited = op.Min(rate, op.Cast(1.0 / op.Sqrt(t), to=u.dtype))
        size = op.Max(write_norm(op, w) / count, self.eps[1]) * limited
        u = u * op.Neg(size / op.Max(write_norm(op, u) / (count * self.d), 1.0))
        if self.weight_decay:
            u = u + w * (self.weight_decay * inputs.minus_learning_rate)
        return u, new


@dataclass(frozen=True)
class Orthogonalize(Optimizer):
    """B <- m B + (1 - m) u;  u -> r NS((1 - m) u + m B if nesterov else B), where NS repeats
    X <- a X + (b X XT + c (X XT)^2) X from X / |X|.  Jordan et al. 2024; as `torch.optim.Muon`.

    r = sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)) for "match_rms_adamw".
    PyTorch computes NS in bfloat16; here it has the dtype of the weight.

    Examples:
        >>> from onnxgrad.optimizers import Orthogonalize
        >>> Orthogonalize(ns_steps=3).slots
        ('momentum',)
    """

    usual_rate = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    slots = ("momentum",)

    def __post_init__(self) -> None:
        check_range(0.0, 1.0, momentum=self.momentum)
        if self.adjust_lr_fn not in (None, *_RATIOS):
            raise unknown("adjust_lr_fn", self.adjust_lr_fn, _RATIOS)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the mean and the Newton-Schulz iterations, with the smaller of X XT and XT X."""
        mean = self.momentum * slots["momentum"] + (1 - self.momentum) * u
        x = self.momentum * mean + (1 - self.momentum) * u if self.nesterov else mean
        (rows, columns), (a, b, c) = _static_shape(u), self.ns_coefficients
        tall = rows > columns
        # onnxruntime would fuse a number and a MatMul, and round the number to float32
        column = np.full((min(rows, columns), 1), c, u.dtype.numpy())
        x = x / op.Max(write_norm(op, x), self.eps)
        for _ in range(self.ns_steps):
            square = op.Gemm(x, x, transA=1) if tall else op.Gemm(x, x, transB=1)
            mixed = b * square + op.MatMul(square, square) * column
            x = a * x + (op.MatMul(x, mixed) if tall else op.MatMul(mixed, x))
        ratio = _RATIOS[self.adjust_lr_fn or "original"](rows, columns)
        return x * ratio, {"momentum": mean}


_RATIOS = {
    "original": lambda rows, columns: sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}


def _static_shape(u: ir.Value) -> Shape:
    """Return the static shape of the step `u` of a weight."""
    shape = shapes.static(shapes.dims(u))
    assert shape is not None
    return shape
