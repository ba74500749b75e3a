"""Elementwise operators: arithmetic, comparisons, activations, casts.

Kinks follow PyTorch: |x|' is 0 at 0, equal maxima and minima get equal shares of the gradient, and
Clip passes the gradient at its bounds. Relu, LeakyRelu, Elu, ... have the slope of x < 0 at x = 0.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import exp, inf, log, pi, sqrt
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.axes import broadcast_axis
from onnxgrad.operators.outputs import (
    INTEGERS,
    DimArray,
    first_dtype,
    int_function,
    multiply_lengths,
    none_if_unknown,
    none_unless_numbers,
    range_if_increasing,
    range_of_all,
    shape_of_first,
    vectorize_known,
)
from onnxgrad.operators.records import (
    PIECEWISE,
    OperandNumbers,
    ValueRange,
    declare_operators,
    elementwise,
    lowering,
    rule,
)
from onnxgrad.operators.shapes import Dims, broadcast, constant, dims

_BOOLEAN: dict[str, Any] = {"traits": "cheap boolean", "no_gradient": "the output is boolean"}
_OF_BITS = "works on bits: no useful derivative"


def shape_of_broadcast(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape to which all operands broadcast."""
    return broadcast(*(dims(v) for v in inputs if v is not None))


def _where_result_type(inputs: Sequence, _attributes: Mapping[str, Any]) -> ir.TypeProtocol | None:
    """Return the type of the result of a Where, which its last two operands have."""
    dtype = first_dtype(inputs[1:])
    return None if dtype is None else ir.TensorType(dtype)


def _truncated_quotient(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _nonnegative_remainder(a: int, b: int) -> int | None:
    return None if b == 0 or a < 0 or b < 0 else a % b


def _are_equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    lengths = [v for v in (a, b) if isinstance(v, str)]
    negative = any(isinstance(v, int) and v < 0 for v in (a, b))
    return False if lengths and negative else None  # no length is negative


def _cast_elements(node: ir.Node, x: DimArray, *_like: DimArray | None) -> DimArray | None:
    if node.outputs[0].dtype == ir.DataType.BOOL:
        return np.vectorize(none_unless_numbers(bool), [object])(x)
    return x if node.outputs[0].dtype in INTEGERS else None


def _declare_elementwise(names: str, traits: str, **fields: Any) -> None:
    """Declare elementwise operators, whose result has the shape to which the operands broadcast, or
    with the trait "unary" the shape of the first operand.
    """
    shape = shape_of_first if "unary" in traits else shape_of_broadcast
    declare_operators(names, f"elementwise {traits}", shape=shape, axes=broadcast_axis, **fields)


_declare_elementwise("Neg", "cheap arithmetic exact sums affine")
_declare_elementwise("Ceil Floor Round", "cheap arithmetic", no_gradient=PIECEWISE)
_declare_elementwise("Max Min", "cheap arithmetic exact bounds", roles="v", straight_through=())
_declare_elementwise(
    "Add Sub", "cheap arithmetic exact sums affine", roles="a", straight_through=()
)
declare_operators("Add", elements=int_function(operator.add))
declare_operators("Sub", elements=int_function(operator.sub))
_declare_elementwise("Div Mul", "cheap arithmetic exact powers affine", roles="e")
declare_operators("Div", elements=int_function(_truncated_quotient))
declare_operators("Mul", elements=vectorize_known(multiply_lengths), straight_through=())
_declare_elementwise("Abs", "cheap powers")
_declare_elementwise("Mean", "cheap affine", roles="a")
_declare_elementwise("Reciprocal Sqrt", "cheap exact powers")
_declare_elementwise("Relu", "cheap", straight_through=(0,))
_declare_elementwise("Sum", "cheap sums affine", roles="a", straight_through=())
_declare_elementwise("Sign", "cheap", no_gradient=PIECEWISE)
_declare_elementwise("Mod", "cheap", roles="v", elements=int_function(_nonnegative_remainder))
_declare_elementwise(
    "Where",
    "cheap sums",
    roles="cw",
    result_type=_where_result_type,
    elements=vectorize_known(lambda c, a, b: None if c is None else a if c else b),
    straight_through=(1, 2),
)
_declare_elementwise("BitwiseNot", "cheap", no_gradient=_OF_BITS)
_declare_elementwise("BitwiseAnd BitwiseOr BitwiseXor", "cheap bits", no_gradient=_OF_BITS)
declare_operators("BitCast", no_gradient=_OF_BITS)
declare_operators("BitShift", "bits", no_gradient=_OF_BITS)
_declare_elementwise("IsInf IsNaN Xor", **_BOOLEAN)
_declare_elementwise("Not", **_BOOLEAN, elements=int_function(operator.not_))
_declare_elementwise("And", **_BOOLEAN, elements=int_function(lambda a, b: bool(a and b)))
_declare_elementwise("Or", **_BOOLEAN, elements=int_function(lambda a, b: bool(a or b)))
_declare_elementwise("Equal", **_BOOLEAN, roles="c", elements=vectorize_known(_are_equal))
_declare_elementwise("Greater", **_BOOLEAN, roles="c", elements=int_function(operator.gt))
_declare_elementwise("GreaterOrEqual", **_BOOLEAN, roles="c", elements=int_function(operator.ge))
_declare_elementwise("Less", **_BOOLEAN, roles="c", elements=int_function(operator.lt))
_declare_elementwise("LessOrEqual", **_BOOLEAN, roles="c", elements=int_function(operator.le))
_declare_elementwise(
    "Cast",
    "cheap moves reorders exact never_fails",
    result_type=lambda _, attributes: ir.TensorType(ir.DataType(attributes["to"])),
    elements=none_if_unknown(_cast_elements),
)
_declare_elementwise(
    "CastLike", "unary cheap moves", roles="xl", elements=none_if_unknown(_cast_elements)
)
_declare_elementwise("Clip", "unary cheap bounds", roles="xc", straight_through=())
_declare_elementwise("PRelu", "unary cheap", roles="xp")
_declare_elementwise("HardSigmoid HardSwish LeakyRelu Shrink ThresholdedRelu", "unary cheap")
_declare_elementwise("Pow", "transcendental powers", roles="v")
_declare_elementwise(
    "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Gelu Log Mish Sigmoid Sin Sinh Softplus "
    "Swish Tan Tanh",
    "transcendental",
)
_declare_elementwise("Celu Elu Selu Softsign", "unary transcendental")
declare_operators(
    "Dropout",
    "unary random moves",
    roles="xl",
    ratio_operand=1,
    shape=shape_of_first,
    axes=broadcast_axis,
)

# -- ranges of the elements of results -------------------------------------------------------------


def _range_of_product(a: ValueRange, b: ValueRange) -> ValueRange:
    products = [x * y if x and y else 0.0 for x in a for y in b]
    return min(products), max(products)


def _range_of_quotient(a: ValueRange, b: ValueRange) -> ValueRange:
    return (-inf, inf) if b[0] <= 0 <= b[1] else _range_of_product(a, (1 / b[1], 1 / b[0]))


def _range_of_clip(_node: ir.Node, ranges: Sequence[ValueRange]) -> ValueRange:
    """Return the range of values of a Clip's result, from the ranges of its operands; bounds that
    are left out are infinite.
    """
    x, low, high = (*ranges, (-inf, -inf), (inf, inf))[:3]
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


declare_operators("HardSigmoid Sigmoid", value_range=(0.0, 1.0))
declare_operators("Cos Erf Sin Softsign Tanh", value_range=(-1.0, 1.0))
declare_operators("Abs Softplus Sqrt", value_range=(0.0, inf))
declare_operators("Clip", value_range=_range_of_clip)
declare_operators("Mean", value_range=range_of_all)
declare_operators("Where", value_range=lambda node, ranges: range_of_all(node, ranges[1:]))
declare_operators("Add Sum", value_range=range_if_increasing(lambda *ends: sum(ends)))
declare_operators("Max", value_range=range_if_increasing(lambda *ends: max(ends)))
declare_operators("Min", value_range=range_if_increasing(lambda *ends: min(ends)))
declare_operators("Relu", value_range=range_if_increasing(lambda x: max(x, 0.0)))
declare_operators("Log", value_range=range_if_increasing(lambda x: -inf if x <= 0 else log(x)))
declare_operators("Exp", value_range=range_if_increasing(lambda x: inf if x > 700 else exp(x)))
declare_operators("Neg", value_range=lambda node, x: (-x[0][1], -x[0][0]))
declare_operators("Sub", value_range=lambda node, x: (x[0][0] - x[1][1], x[0][1] - x[1][0]))
declare_operators("Mul", value_range=lambda node, x: _range_of_product(*x))
declare_operators("Div", value_range=lambda node, x: _range_of_quotient(*x))
declare_operators("Reciprocal", value_range=lambda node, x: _range_of_quotient((1.0, 1.0), *x))


# -- numbers at which values and slopes are finite ------------------------------------------------


def _numbers_of_power(node: ir.Node) -> OperandNumbers:
    """Return the numbers at which a Pow and its slope are finite; () for a whole exponent."""
    exponent = constant(node.inputs[1])
    is_whole = exponent is not None and bool(np.all((exponent >= 1) & (exponent % 1 == 0)))
    return () if is_whole else ((0, 1.0), (1, 1.0))


declare_operators("Cosh Exp Sinh Tan", finite_at=((0, 0.0),))
declare_operators("Acos Asin Atanh", finite_at=((0, 0.0),))
declare_operators("Log Reciprocal Sqrt", finite_at=((0, 1.0),))
declare_operators("Acosh", finite_at=((0, 2.0),))
declare_operators("Div Mod", finite_at=((1, 1.0),))
declare_operators("Pow", finite_at=_numbers_of_power)


# -- arithmetic ------------------------------------------------------------------------------------

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
        if least is None or most is None or not np.all(least <= most):  # low may exceed high
            inside = op.And(inside, op.Not(above))
    dlow = None if low is None else op.sum_to(op.Where(below, g, 0.0), low)
    dhigh = None if high is None else op.sum_to(op.Where(above, g, 0.0), high)
    return op.Where(inside, g, 0.0), dlow, dhigh


@rule("Cast", "CastLike")
def cast(op, node, g):
    """y = x in another dtype:  dx = g in the dtype of x."""
    return op.Cast(g, to=node.inputs[0].dtype), *(None for _ in node.inputs[1:])


# -- activations -----------------------------------------------------------------------------------

elementwise(
    # bool(y), not y > 0: the slope at NaN is 1, as in PyTorch
    Relu=lambda op, x, y: op.Cast(op.Cast(y, to=ir.DataType.BOOL), to=y.dtype),
    Sigmoid=lambda op, x, y: y * (1.0 - y),
    Softplus=lambda op, x, y: op.Sigmoid(x),
    Softsign=lambda op, x, y: 1.0 / ((1.0 + op.Abs(x)) * (1.0 + op.Abs(x))),
    Mish=lambda op, x, y: _mish_slope(op, x),
    HardSwish=lambda op, x, y: _hard_swish_slope(op, x),
)


def _mish_slope(op, x):
    """Return the slope of x tanh(softplus(x))."""
    t = op.Tanh(op.Softplus(x))
    return t + x * op.Sigmoid(x) * (1.0 - t * t)


def _hard_swish_slope(op, x):
    """Return the slope of x clip(x / 6 + 1 / 2, 0, 1)."""
    above = op.Cast(op.GreaterOrEqual(x, 3.0), to=x.dtype)
    inside = op.And(op.Greater(x, -3.0), op.Less(x, 3.0))
    line = op.Clip(x, -3.0, 3.0) / 3.0 + 0.5
    return above + op.Cast(inside, to=x.dtype) * line


def _slope_by_sign(op, x, above, below):
    """Return the slope `above` where x > 0, else `below`, as a sum of products. Both must be finite
    for every x: they are multiplied by 0, too.

    In onnxruntime 1.32, Where takes 8 times as long, if signs are random: it branches at each
    element.
    """
    positive = op.Cast(op.Greater(x, 0.0), to=x.dtype)
    return above * positive + below * (1.0 - positive)


@rule("LeakyRelu")
def leaky_relu(op, node, g):
    """y = x where x > 0 else a x:  dx = g where x > 0 else a g."""
    alpha = float_attribute(node, "alpha")
    return (op.Where(op.Greater(node.inputs[0], 0.0), g, alpha * g),)


@rule("ThresholdedRelu")
def thresholded_relu(op, node, g):
    """y = x where x > a else 0:  dx = g where x > a."""
    alpha = float_attribute(node, "alpha")
    return (op.Where(op.Greater(node.inputs[0], alpha), g, 0.0),)


@rule("PRelu")
def prelu(op, node, g):
    """y = x where x > 0 else s x:  dx = g where x > 0 else s g,  ds = x g where x <= 0."""
    x, slope = node.inputs
    return g * _slope_by_sign(op, x, 1.0, slope), op.sum_to(g * op.Clip(x, None, 0.0), slope)


@rule("Elu")
def elu(op, node, g):
    """y = x where x > 0 else a (e^x - 1):  dx = g where x > 0 else g (y + a)."""
    alpha = float_attribute(node, "alpha")
    y = op.Clip(node.outputs[0], None, max(0.0, -alpha))
    return (g * _slope_by_sign(op, node.inputs[0], 1.0, y + alpha),)


@rule("Selu")
def selu(op, node, g):
    """y = c x where x > 0 else c a (e^x - 1):  dx = c g where x > 0 else g (y + c a)."""
    alpha = float_attribute(node, "alpha")
    gamma = float_attribute(node, "gamma")
    y = op.Clip(node.outputs[0], None, max(0.0, -gamma * alpha))
    return (g * _slope_by_sign(op, node.inputs[0], gamma, y + gamma * alpha),)


@rule("Celu")
def celu(op, node, g):
    """y = x where x > 0 else a (e^(x/a) - 1):  dx = g where x > 0 else g (y / a + 1)."""
    alpha = float_attribute(node, "alpha")
    y = op.Clip(node.outputs[0], None, 0.0)
    return (g * _slope_by_sign(op, node.inputs[0], 1.0, y / alpha + 1.0),)


@rule("HardSigmoid")
def hard_sigmoid(op, node, g):
    """y = clip(a x + b, 0, 1):  dx = a g where 0 < y < 1."""
    alpha = float_attribute(node, "alpha")
    (y,) = node.outputs
    return (op.Where(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), alpha * g, 0.0),)


@rule("Shrink")
def shrink(op, node, g):
    """y = x + b where x < -l, x - b where x > l, else 0:  dx = g where |x| > l."""
    limit = float_attribute(node, "lambd")
    return (op.Where(op.Greater(op.Abs(node.inputs[0]), limit), g, 0.0),)


@rule("Gelu")
def gelu(op, node, g):
    """y = x F(x):  dx = g (F(x) + x F'(x)), F the standard normal distribution function.

    With `approximate="tanh"`, F is its tanh approximation.
    Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    (x,) = node.inputs
    if string_attribute(node, "approximate") == "tanh":
        c = sqrt(2 / pi)
        x = op.Clip(x, -10.0, 10.0)  # beyond, the slope is 0 or 1, and x^3 may overflow
        t = op.Tanh(c * (x + 0.044715 * (x * x * x)))
        inner = c * (1.0 + 3 * 0.044715 * (x * x))
        return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner),)
    normal = 0.5 * (1.0 + op.Erf(x / sqrt(2)))
    return (g * (normal + x * op.Exp(-0.5 * log(2 * pi) - 0.5 * (x * x))),)


@lowering("Mod")
def lower_mod(op: Any, node: Any) -> list[ir.Value] | None:
    """y = a - b floor(a / b) for floats without fmod: onnxruntime has no kernel."""
    a, b = node.inputs
    real = a.dtype is not None and a.dtype.is_floating_point()
    if not real or int_attribute(node, "fmod"):
        return None
    return [a - b * op.Floor(a / b)]
