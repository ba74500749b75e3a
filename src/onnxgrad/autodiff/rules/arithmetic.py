"""Arithmetic with broadcasting, and elementwise mathematics.

Kinks follow PyTorch: |x|' is 0 at 0, equal maxima and minima get equal shares of the gradient, and
Clip passes the gradient at its bounds.
"""

from __future__ import annotations

from math import log, pi, sqrt

import numpy as np

from onnxgrad.autodiff.registry import elementwise, rule

elementwise(
    Abs=lambda op, x, y: op.Sign(x),
    Neg=lambda op, x, y: op.const(-1.0, x.dtype),
    Exp=lambda op, x, y: y,
    Log=lambda op, x, y: 1.0 / x,
    Sqrt=lambda op, x, y: 0.5 / y,
    Reciprocal=lambda op, x, y: -(y * y),
    Sin=lambda op, x, y: op.Cos(x),
    Cos=lambda op, x, y: -op.Sin(x),
    Tan=lambda op, x, y: 1.0 + y * y,
    Sinh=lambda op, x, y: op.Cosh(x),
    Cosh=lambda op, x, y: op.Sinh(x),
    Tanh=lambda op, x, y: 1.0 - y * y,
    # factored, as 1 - x^2 loses digits near 1 and x^2 - 1 overflows
    Asin=lambda op, x, y: 1.0 / op.Sqrt((1.0 - x) * (1.0 + x)),
    Acos=lambda op, x, y: -1.0 / op.Sqrt((1.0 - x) * (1.0 + x)),
    Atan=lambda op, x, y: 1.0 / (1.0 + x * x),
    Asinh=lambda op, x, y: 1.0 / op.Sqrt(x * x + 1.0),
    Acosh=lambda op, x, y: 1.0 / (op.Sqrt(x - 1.0) * op.Sqrt(x + 1.0)),
    Atanh=lambda op, x, y: 1.0 / ((1.0 - x) * (1.0 + x)),
    Erf=lambda op, x, y: op.Exp(log(2.0 / sqrt(pi)) - x * x),
)


@rule("Sub")
def sub(op, node, g):
    """y = a - b:  da = g,  db = -g."""
    a, b = node.inputs
    return op.sum_to(g, a), -op.sum_to(g, b)


@rule("Mul")
def mul(op, node, g):
    """y = a b:  da = g b,  db = g a."""
    a, b = node.inputs
    return op.sum_to(g * b, a), op.sum_to(g * a, b)


@rule("Div")
def div(op, node, g):
    """y = a / b:  da = g / b,  db = -(g / b) y."""
    a, b = node.inputs
    (y,) = node.outputs
    return op.sum_to(g / b, a), -op.sum_to(g / b * y, b)


@rule("Mod")
def mod(op, node, g):
    """y = a - q b, q = a / b rounded down, or toward zero with fmod:  da = g,  db = -g q."""
    a, b = node.inputs
    quotient = op.Round((a - node.outputs[0]) / b)  # the q of y, even if a / b is inexact
    return op.sum_to(g, a), -op.sum_to(g * quotient, b)


@rule("Range")
def range_(op, node, g):
    """y_i = a + i d:  da = sum g,  dd = sum i g."""
    start, _, delta = node.inputs
    i = op.Cast(op.arange(op.Size(g)), to=g.dtype)
    dstart, ddelta = (op.ReduceSum(v, keepdims=0) for v in (g, g * i))
    return op.reshape_like(dstart, start), None, op.reshape_like(ddelta, delta)


@rule("Add", "Sum")
def add(op, node, g):
    """y = a + b + ...:  da = db = ... = g."""
    return [op.sum_to(g, x) for x in node.inputs]


@rule("Mean")
def mean(op, node, g):
    """y = (a + b + ...) / n:  da = db = ... = g / n."""
    return [op.sum_to(g / len(node.inputs), x) for x in node.inputs]


@rule("Max", "Min")
def extremum(op, node, g):
    """y = max(a, b, ...):  g in equal shares to the inputs that equal y."""
    (y,) = node.outputs
    hits = [op.Cast(op.Equal(x, y), to=y.dtype) for x in node.inputs]
    share = g / op.total([op.set_type_like(hit, y) for hit in hits])
    return [op.sum_to(share * hit, x) for hit, x in zip(hits, node.inputs, strict=True)]


@rule("Pow")
def power(op, node, g):
    """y = a^b:  da = g b a^(b-1), 0 where a = b = 0,  db = g y ln a, 0 where a <= 0."""
    a, b = node.inputs
    (y,) = node.outputs
    real = b if b.dtype == a.dtype else op.Cast(b, to=a.dtype)
    exponent = op.known_value(b)
    if exponent is not None and exponent.size == 1 and exponent.item() == 2:
        da = g * (2.0 * a)
    elif exponent is not None and np.all(exponent != 0):
        da = g * (real * op.Pow(a, real - 1.0))
    else:
        zero = op.And(op.Equal(a, 0.0), op.Equal(real, 0.0))
        da = g * op.Where(zero, 0.0, real * op.Pow(a, op.Where(zero, 1.0, real) - 1.0))
    if b.dtype != a.dtype and not b.dtype.is_floating_point():
        return op.sum_to(da, a), None
    positive = op.Greater(a, 0.0)
    db = op.Where(positive, g * y * op.Log(op.Where(positive, a, 1.0)), 0.0)
    return op.sum_to(da, a), op.sum_to(op.Cast(db, to=b.dtype), b)


@rule("Where")
def where(op, node, g):
    """y = a where c else b:  da = g where c,  db = g where not c."""
    c, a, b = node.inputs
    return None, op.sum_to(op.Where(c, g, 0.0), a), op.sum_to(op.Where(c, 0.0, g), b)


@rule("Clip")
def clip(op, node, g):
    """y = min(max(x, low), high):  dx = g where y = x,  dlow = g where x < low,  dhigh = g where
    max(x, low) > high; for low > high, dx = 0.
    """
    x, low, high = (*node.inputs, None, None)[:3]
    if low is None and high is None:
        return (g,)
    inside = op.Equal(x, node.outputs[0])
    above = None if high is None else op.Greater(x if low is None else op.Max(x, low), high)
    below = None if low is None else op.Less(x, low)
    if low is not None and high is not None:
        below = op.And(below, op.Not(above))
        least, most = op.known_value(low), op.known_value(high)
        if least is None or most is None or not np.all(least <= most):  # they may be exchanged
            inside = op.And(inside, op.Not(above))
    dlow = None if low is None else op.sum_to(op.Where(below, g, 0.0), low)
    dhigh = None if high is None else op.sum_to(op.Where(above, g, 0.0), high)
    return op.Where(inside, g, 0.0), dlow, dhigh


@rule("Cast", "CastLike")
def cast(op, node, g):
    """y = x in another dtype:  dx = g in the dtype of x."""
    return op.Cast(g, to=node.inputs[0].dtype), *(None for _ in node.inputs[1:])
