"""Transforms that scale gradients elementwise by averages of earlier gradients (Adam, RMSprop)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.optimizers.base import (
    Optimizer,
    Shape,
    Slots,
    UpdateInputs,
    check_range,
    to_float64,
    write_power,
)


@dataclass(frozen=True)
class _AdamMoments(Optimizer):
    """Slots m <- b1 m + u and v <- b2 v + u^2: the means of Adam divided by 1 - b1 and 1 - b2.

    This saves one node for each slot, and squares of small gradients do not vanish.
    """

    usual_rate = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_range(0.0, 1.0, b1=self.b1, b2=self.b2)

    def _updated_mean(self, slots: Slots, u: Any) -> Any:
        return self.b1 * slots["m"] + u

    def _updated_mean_square(self, slots: Slots, u: Any) -> Any:
        return self.b2 * slots["v"] + u * u

    def _bias_corrections(self, op: Any, t: Any) -> tuple[Any, Any]:
        """Write the corrections (1 - b1) / (1 - b1^t) of m, (1 - b2) / (1 - b2^t) of v, float64."""
        one, two = (1.0 - write_power(op, b, t) for b in (self.b1, self.b2))
        return (1 - self.b1) / one, (1 - self.b2) / two


@dataclass(frozen=True)
class ScaleByAdam(_AdamMoments):
    """m <- b1 m + (1 - b1) u;  v <- b2 v + (1 - b2) u^2;  u -> m' / (sqrt(v') + eps),
    m' = m / (1 - b1^t), v' = v / (1 - b2^t).  Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.

    The slots hold m / (1 - b1) and v / (1 - b2), which takes fewer nodes. There is no slot m if
    b1 = 0. With `amsgrad` (Reddi et al. 2018), v in the denominator is the largest v so far.

    Examples:
        >>> from onnxgrad.optimizers import Chain, ScaleByAdam, ScaleByLearningRate
        >>> Chain((ScaleByAdam(b1=0.8), ScaleByLearningRate())).slots
        ('m', 'v')
    """

    amsgrad: bool = False
    elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of the moments that the options need."""
        return (*(("m",) if self.b1 else ()), "v", *(("largest",) if self.amsgrad else ()))

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of both moments and of the step, a quotient of the moments."""
        t, unit = to_float64(op, inputs.step), sqrt(1 - self.b2)
        root = op.Sqrt(1.0 - write_power(op, self.b2, t))
        # sqrt(v') = unit / root sqrt(slot), so that all corrections are scalars
        scale = root * ((1 - self.b1) / unit) / (1.0 - write_power(op, self.b1, t))
        new = {"v": self._updated_mean_square(slots, u)} | (
            {"m": self._updated_mean(slots, u)} if self.b1 else {}
        )
        v = new["v"]
        if self.amsgrad:
            v = new["largest"] = op.Max(slots["largest"], v)
        eps = _cast_like(op, self._eps_factor(root) * (self.eps / unit), u)
        quotient = new.get("m", u) / (op.Sqrt(v) + eps)
        return quotient * _cast_like(op, scale, u), new

    def _eps_factor(self, root: Any) -> Any:
        """Return the factor of eps in the denominator of the step, for `root` = sqrt(1 - b2^t)."""
        return root


@dataclass(frozen=True)
class ScaleByAdamEpsHat(ScaleByAdam):
    """As `ScaleByAdam`, with eps added before the correction of v:
    u -> m' sqrt(1 - b2^t) / (sqrt(v) + eps).  Kingma & Ba 2015, arXiv:1412.6980, end of section 2.

    TensorFlow, the first AdamW of Hugging Face and onnxruntime-training compute this.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByAdamEpsHat
        >>> ScaleByAdamEpsHat(eps=1e-6).slots
        ('m', 'v')
    """

    def _eps_factor(self, root: Any) -> Any:
        return 1.0


@dataclass(frozen=True)
class ScaleByAdamax(_AdamMoments):
    """m <- b1 m + (1 - b1) u;  n <- max(b2 n, |u| + eps);  u -> m / (1 - b1^t) / n.
    Kingma & Ba 2015, arXiv:1412.6980, algorithm 2.

    The slot m holds m / (1 - b1).

    Examples:
        >>> from onnxgrad.optimizers import ScaleByAdamax
        >>> ScaleByAdamax(b1=0.8).slots
        ('m', 'norm')
    """

    slots = ("m", "norm")
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the mean, the maximum norm and the step."""
        m = self._updated_mean(slots, u)
        norm = op.Max(self.b2 * slots["norm"], op.Abs(u) + self.eps)
        first = (1 - self.b1) / (1.0 - write_power(op, self.b1, to_float64(op, inputs.step)))
        return m / norm * _cast_like(op, first, u), {"m": m, "norm": norm}


@dataclass(frozen=True)
class ScaleByNadam(_AdamMoments):
    """m, v as Adam;  u -> ((1 - mu_t) / (1 - p_t) u + mu_t+1 / (1 - p_t+1) m) / (sqrt(v') + eps),
    mu_t = b1 (1 - 0.96^(t d) / 2), p_t = mu_1 ... mu_t.  Dozat 2016.

    The slots hold m / (1 - b1), v / (1 - b2) and p_t.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByNadam
        >>> ScaleByNadam(momentum_decay=0.0).slots
        ('m', 'v', 'mu_product')
    """

    momentum_decay: float = 4e-3
    slots = ("m", "v", "mu_product")
    elementwise = True

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return () for the slot of the product of momenta mu, else the weight's shape."""
        return () if slot == "mu_product" else shape

    def slot_initial(self, slot: str, weight: np.ndarray) -> float:
        """Return 1 for the slot of the product of the momentum schedule mu, else 0."""
        return 1.0 if slot == "mu_product" else 0.0

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of both moments and of the step with Nesterov's look-ahead."""
        t = to_float64(op, inputs.step)
        root = op.Sqrt(self._bias_corrections(op, t)[1])
        powers = (write_power(op, 0.96, self.momentum_decay * s) for s in (t, t + 1.0))
        mu, mu_next = (self.b1 * (1.0 - 0.5 * p) for p in powers)
        product = to_float64(op, slots["mu_product"]) * mu
        of_u = (1.0 - mu) / (1.0 - product) / root
        of_m = (1 - self.b1) * mu_next / (1.0 - product * mu_next) / root
        m, v = self._updated_mean(slots, u), self._updated_mean_square(slots, u)
        ahead = u * _cast_like(op, of_u, u) + m * _cast_like(op, of_m, u)
        new = {"m": m, "v": v, "mu_product": _cast_like(op, product, u)}
        return ahead / (op.Sqrt(v) + _cast_like(op, self.eps / root, u)), new


@dataclass(frozen=True)
class ScaleByRadam(_AdamMoments):
    """m, v as Adam;  u -> m' r sqrt(1 - b2^t) / (sqrt(v) + eps) if rho > 5 else m',
    rho = n - 2 t b2^t / (1 - b2^t), n = 2 / (1 - b2) - 1,
    r^2 = (rho - 4) (rho - 2) n / ((n - 4) (n - 2) rho).  Liu et al. 2020, arXiv:1908.03265.

    The slots hold m / (1 - b1) and v / (1 - b2).

    Examples:
        >>> from onnxgrad.optimizers import ScaleByRadam
        >>> ScaleByRadam(b2=0.99).slots
        ('m', 'v')
    """

    slots = ("m", "v")
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of both moments and of the step, a rectified quotient of the moments."""
        m, v = self._updated_mean(slots, u), self._updated_mean_square(slots, u)
        t = to_float64(op, inputs.step)
        first, second = self._bias_corrections(op, t)
        longest = 2 / (1 - self.b2) - 1
        mean = m * _cast_like(op, first, u)
        if longest <= 5:  # rho stays below it
            return mean, {"m": m, "v": v}
        decayed = write_power(op, self.b2, t)
        rho = longest - 2.0 * t * decayed / (1.0 - decayed)
        square = (rho - 4.0) * (rho - 2.0) / rho * (longest / ((longest - 4) * (longest - 2)))
        rectified = op.Sqrt(op.Max(square, 0.0) / second)
        adaptive = _cast_like(op, rectified, u) / (op.Sqrt(v) + self.eps / sqrt(1 - self.b2))
        return mean * op.Where(op.Greater(rho, 5.0), adaptive, 1.0), {"m": m, "v": v}


@dataclass(frozen=True)
class ScaleByAdagrad(Optimizer):
    """s <- s + u^2;  u -> u / (1 + (t - 1) lr_decay) / (sqrt(s) + eps). Duchi, Hazan & Singer 2011.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByAdagrad
        >>> ScaleByAdagrad(lr_decay=0.1).slots
        ('sum',)
    """

    usual_rate = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    slots = ("sum",)
    elementwise = True

    def slot_initial(self, slot: str, weight: np.ndarray) -> float:
        """Return the initial value of the slot of the sum of squares."""
        return self.initial_accumulator_value

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the sum of squares and of the step."""
        total = slots["sum"] + u * u
        u = u / (op.Sqrt(total) + self.eps)
        if self.lr_decay:
            u = u * (1.0 / (1.0 + self.lr_decay * (inputs.step - 1.0)))
        return u, {"sum": total}


@dataclass(frozen=True)
class ScaleByAdadelta(Optimizer):
    """v <- rho v + (1 - rho) u^2;  u -> d = sqrt(a + eps) / sqrt(v + eps) u;
    a <- rho a + (1 - rho) d^2.  Zeiler 2012, arXiv:1212.5701.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByAdadelta
        >>> ScaleByAdadelta(rho=0.95).slots
        ('v', 'steps')
    """

    usual_rate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    slots = ("v", "steps")
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of both means of squares and of the step."""
        v = self.rho * slots["v"] + (1 - self.rho) * (u * u)
        step = op.Sqrt((slots["steps"] + self.eps) / (v + self.eps)) * u
        return step, {"v": v, "steps": self.rho * slots["steps"] + (1 - self.rho) * (step * step)}


@dataclass(frozen=True)
class ScaleByRms(Optimizer):
    """v <- a v + (1 - a) u^2;  u -> u / (sqrt(v) + eps);  if centered,
    m <- a m + (1 - a) u, and v - m^2 under the root.  Tieleman & Hinton 2012; Graves 2013.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByRms
        >>> len(ScaleByRms(centered=True).slots)
        2
    """

    usual_rate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    centered: bool = False
    elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots: the mean of squares, and the mean of gradients if `centered`."""
        return ("v", "m") if self.centered else ("v",)

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the means and of the step."""
        v = self.alpha * slots["v"] + (1 - self.alpha) * (u * u)
        if not self.centered:
            return u / (op.Sqrt(v) + self.eps), {"v": v}
        m = self.alpha * slots["m"] + (1 - self.alpha) * u
        variance = op.Max(v - m * m, 0.0)  # rounding may make it negative
        return u / (op.Sqrt(variance) + self.eps), {"v": v, "m": m}


@dataclass(frozen=True)
class Rprop(Optimizer):
    """s <- clip(s e+) if u u_last > 0, clip(s e-) and u <- 0 if u u_last < 0, else s;
    u -> -s sign(u).  Riedmiller & Braun 1993.

    The step size s of an element starts at the learning rate of its first step. Later learning
    rates of a schedule have no effect, as in PyTorch.
    """

    usual_rate = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    slots = ("last", "size")
    elementwise = True

    def __post_init__(self) -> None:
        if not 0 < self.etas[0] < 1 < self.etas[1]:
            raise ValueError(
                "etas must be two factors, the first between 0 and 1 and the second above 1, not "
                f"{self.etas!r}"
            )
        if not 0 < self.step_sizes[0] <= self.step_sizes[1]:  # 0 means not started
            raise ValueError(
                "step_sizes must be two positive numbers, the lower bound first, not "
                f"{self.step_sizes!r}"
            )

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the step sizes and of the step, by the signs of gradients."""
        size = slots["size"]
        size = op.Where(op.Equal(size, 0.0), op.Neg(inputs.minus_learning_rate), size)
        product = u * slots["last"]
        turned, same = op.Less(product, 0.0), op.Greater(product, 0.0)
        factor = op.Where(same, op.const(self.etas[1], u.dtype), op.const(1.0, u.dtype))
        factor = op.Where(turned, op.const(self.etas[0], u.dtype), factor)
        size = op.Min(op.Max(size * factor, self.step_sizes[0]), self.step_sizes[1])
        u = op.Where(turned, op.const(0.0, u.dtype), u)
        return op.Neg(op.Sign(u) * size), {"last": u, "size": size}


@dataclass(frozen=True)
class ScaleByLion(Optimizer):
    """u -> sign(b1 m + (1 - b1) u);  m <- b2 m + (1 - b2) u.  Chen et al. 2023, 2302.06675.

    Examples:
        >>> from onnxgrad.optimizers import ScaleByLion
        >>> ScaleByLion(b2=0.98).slots
        ('m',)
    """

    usual_rate = 1e-4
    b1: float = 0.9
    b2: float = 0.99
    slots = ("m",)
    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Write the nodes of the mean of gradients and of the step, the sign of a mean."""
        mean = self.b1 * slots["m"] + (1 - self.b1) * u
        return op.Sign(mean), {"m": self.b2 * slots["m"] + (1 - self.b2) * u}


def _cast_like(op: Any, scalar: ir.Value, x: ir.Value) -> ir.Value:
    """Write a Cast of a scalar to the dtype of `x`."""
    return op.Cast(scalar, to=x.dtype)
