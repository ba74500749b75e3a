"""Sums, products by scalars and by broadcast operands, and sums of tensors padded with zeros."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.outputs import output_shape
from onnxgrad.operators.shapes import Dims, constant, dims, equal, is_real, rank, static

GRADIENT = "gradient"  # the group of the rewrites that run after the sweep
_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def is_emitted(op: Any, v: ir.Value, op_type: str) -> bool:
    """Return whether `v` is the result of a standard operator `op_type` whose node this package
    wrote.
    """
    node = made_by(v, op_type)
    return node is not None and op.is_own(node)


def has_one_reader(v: ir.Value) -> bool:
    """Return whether exactly one node reads `v`, and `v` is no output of its graph."""
    return len(list(v.uses())) == 1 and not v.is_graph_output()


@rewrites("ReduceSum", group=GRADIENT)
def sum_squares(op, node):
    """ReduceSum(x x) = ReduceSumSquare(x)."""
    product, keepdims = made_by(node.inputs[0], "Mul"), int_attribute(node, "keepdims")
    # without axes, and with noop_with_empty_axes, ReduceSumSquare does not square
    if product is None or "noop_with_empty_axes" in node.attributes:
        return None
    x, other = product.inputs
    # onnxruntime has no ReduceSumSquare of most integers
    if x is None or x is not other or not is_real(x):
        return None
    return [op.ReduceSumSquare(x, *node.inputs[1:], keepdims=keepdims)]


@rewrites("Reshape", group=GRADIENT)
def sum_without_kept_axes(op, node):
    """Reshape(ReduceSum(x, keepdims=1)) = ReduceSum(x, keepdims=0), where the Reshape drops the
    summed axes.
    """
    total, target = made_by(node.inputs[0], "ReduceSum"), constant(node.inputs[1])
    if total is None or target is None or len(total.inputs) < 2:
        return None
    shape = output_shape("ReduceSum", total.inputs, {"keepdims": 0})
    # 0 in a target copies a length
    if shape is None or static(shape) != tuple(target) or 0 in target:
        return None
    if not int_attribute(total, "keepdims") or "noop_with_empty_axes" in total.attributes:
        return None
    return [op.ReduceSum(*total.inputs, keepdims=0)]


@dataclass(frozen=True)
class _PaddedPart:
    """A `value` that a Pad extends along `axis` by `before` zeros in front of it and `after` behind
    it.
    """

    value: ir.Value
    axis: int
    before: int
    length: int
    after: int

    def adjoins(self, other: _PaddedPart) -> bool:
        return self.axis == other.axis and self.before + self.length == other.before


@rewrites("Add", "Sum", group=GRADIENT)
def join_padded_parts(op, node):
    """pad(a) + pad(b) = concat(a, b), where a ends at the index at which b begins, as in gradients
    of slices.
    """
    terms = list(node.inputs)
    parts = {x: part for x in terms if (part := _match_padded_part(x)) is not None}
    order = sorted(parts.values(), key=lambda part: (part.axis, part.before))
    repeated = len(parts) < sum(x in parts for x in terms)
    if len(order) < 2 or repeated or not all(a.adjoins(b) for a, b in pairwise(order)):
        return None
    first, last, like = order[0], order[-1], next(iter(parts))
    ranks = {rank(part.value) for part in order}  # a stack of members adds an axis to some
    own = op.is_own(node) and len(ranks) == 1
    if not own and not all(equal(dims(x), dims(like)) for x in parts):
        return None  # an operand may be broadcast
    whole = op.Concat(*(part.value for part in order), axis=first.axis)
    if first.before or last.after:
        n = len(dims(whole) or ())
        before, after = [0] * n, [0] * n
        before[first.axis], after[first.axis] = first.before, last.after
        whole = op.Pad(whole, [*before, *after])
    terms = [op.set_type_like(whole, like), *(x for x in terms if x not in parts)]
    return [whole if len(terms) == 1 else op.Add(*terms) if len(terms) == 2 else op.Sum(*terms)]


def _match_padded_part(x):
    """Return the operand and the zeros of the Pad that computes `x` along one axis; None for
    other nodes.
    """
    node = made_by(x, "Pad")
    if node is None or len(node.inputs) != 2:
        return None
    value, pads = node.inputs[0], constant(node.inputs[1])
    shape, mode = dims(value), string_attribute(node, "mode")
    if value is None or shape is None or pads is None or mode != "constant" or np.any(pads < 0):
        return None
    before, after = pads.reshape(2, -1)
    axes = np.flatnonzero(before + after)
    length = shape[axes[0]] if len(axes) == 1 else None
    if not isinstance(length, int):
        return None
    axis = int(axes[0])
    return _PaddedPart(value, axis, int(before[axis]), length, int(after[axis]))


# -- products -------------------------------------------------------------------------------------


@rewrites("Add", group=GRADIENT)
def double_by_product(op, node):
    """x + x = 2 x: a product by a scalar, which `multiply_scalars_first` joins with other
    products.
    """
    x, other = node.inputs
    return [op.Mul(x, 2.0)] if x is other and is_real(x) and op.is_own(node) else None


@rewrites("Mul", group=GRADIENT)
def multiply_scalars_first(op, node):
    """(x s) t = x (s t), and (x s + y r) t = x (s t) + y (r t), for scalars s, r and t.

    t may also hold one number for each element of the first axis. Only for products that the
    package wrote, in dtypes in which s t neither overflows nor is 0.
    """
    if not op.is_own(node) or node.outputs[0].dtype not in _WIDE:
        return None
    for v, t in (node.inputs, node.inputs[::-1]):
        shape = dims(t)
        if shape is None or not _is_column_shape(shape):
            continue
        terms = v.producer().inputs if is_emitted(op, v, "Add") and has_one_reader(v) else [v]
        found = [_match_scalar_product(op, term, shape) for term in terms]
        if all(found):
            scaled = [op.Mul(x, op.Mul(s, t)) for x, s in found]
            return [scaled[0] if len(scaled) == 1 else op.Add(*scaled)]
    return None


def _match_scalar_product(op, v, scale):
    """Return (x, s) if `v` = x s, s a scalar and x of more elements than `scale`, and one node
    reads `v`; else None.
    """
    if not is_emitted(op, v, "Mul") or not has_one_reader(v):
        return None
    operands = v.producer().inputs
    for x, s in (operands, operands[::-1]):
        shape = dims(x)
        if dims(s) != () or not shape:
            continue
        if not scale or (len(scale) <= len(shape) and not _is_column_shape(shape)):
            return x, s
    return None


def _is_column_shape(shape: Dims) -> bool:
    """Return whether all axes of a shape, except perhaps the first, have length 1."""
    return not shape or (shape[0] != 1 and {*shape[1:]} <= {1})


@rewrites("Mul", group=GRADIENT)
def multiply_without_expand(op, node):
    """expand(x) y = x y, where y has the shape of expand(x)."""
    for expanded, y in (node.inputs, node.inputs[::-1]):
        if (expand := made_by(expanded, "Expand")) and equal(dims(expanded), dims(y)):
            return [op.Mul(expand.inputs[0], y)]
    return None


@rewrites("Mul", group=GRADIENT)
def divide_once(op, node):
    """(1 / d) x = x / d; onnxruntime (1.32) does so too, and fails if x is a product by 1."""
    for v, x in (node.inputs, node.inputs[::-1]) if op.is_own(node) else ():
        if is_emitted(op, v, "Div") and has_one_reader(v):
            one, d = v.producer().inputs
            if not dims(one) and op.is_all(one, 1):
                return [op.Div(x, d)]
    return None


@rewrites("Mul", "Div", group=GRADIENT)
def scale_normal_density(op, node):
    """(p e) k = (p k) e = p e', where e = exp(c - s^2), e' = exp(c + log k - s^2), and k > 0 is a
    number, such as 1 / r in a division by r. The slope of Erf(s) is such an e, and k of s = k x.
    """
    v, k = _positive_factor(op, node)
    for p, e in _factors_read_once(op, v):
        if (density := _scaled_normal_density(op, e, k)) is not None:
            return [op.Mul(p, density)]
    for v, e in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
        p, k = _positive_factor(op, v.producer()) if has_one_reader(v) else (None, 0.0)
        if p is not None and (density := _scaled_normal_density(op, e, k)) is not None:
            return [op.Mul(p, density)]
    return None


def _positive_factor(op, node):
    """Return (x, k) if `node`, which this package wrote, computes x k or x / (1 / k) for a positive
    number k; else (None, 0).
    """
    if node is None or not op.is_own(node) or node.op_type not in ("Mul", "Div"):
        return None, 0.0
    for x, number in (node.inputs, node.inputs[::-1])[: 1 + (node.op_type == "Mul")]:
        k = constant(number)
        if k is not None and not k.shape and 0 < k < np.inf:
            return x, float(k) if node.op_type == "Mul" else 1 / float(k)
    return None, 0.0


def _factors_read_once(op, v):
    """Return both orders of the factors of a product `v` that this package wrote, and one node
    reads; () if there is none.
    """
    if v is None or not is_emitted(op, v, "Mul") or not has_one_reader(v):
        return ()
    return v.producer().inputs, v.producer().inputs[::-1]


def _scaled_normal_density(op, e, k):
    """Return e k as one exponential; None unless `e` = exp(c - s^2), and one node reads it."""
    found = _match_normal_density(op, e)
    if found is None or not has_one_reader(e):
        return None
    c, square = found
    density = op.Exp(op.Sub(op.const(float(c) + log(k), e.dtype), square))
    return op.set_type_like(density, e)


def _match_normal_density(op, e):
    """Return (c, s^2) if `e` = exp(c - s^2) for a number c, written by this package; else None."""
    if not is_emitted(op, e, "Exp") or not is_emitted(op, e.producer().inputs[0], "Sub"):
        return None
    number, square = e.producer().inputs[0].producer().inputs
    c = constant(number)
    if c is None or c.shape or not is_emitted(op, square, "Mul"):
        return None
    s, other = square.producer().inputs
    return (c, square) if s is other else None


@rewrites("Add", group=GRADIENT)
def factor_cotangent(op, node):
    """g a + (g x) e = g (a + x e), where e = exp(c - s^2), and s is x times a number: the gradient
    of GELU, x (1 + Erf(s)). The product x e is at most the number exp(c) x / s.
    """
    for first, second in (node.inputs, node.inputs[::-1]) if op.is_own(node) else ():
        for scaled, e in _factors_read_once(op, second):
            x = _base_of_density(op, e)
            for g, other in _factors_read_once(op, scaled) if x is not None else ():
                a = [v for u, v in _factors_read_once(op, first) if u is g]
                if other is x and a and all(equal(dims(v), dims(e)) for v in (g, a[0], x)):
                    slope = op.Add(a[0], op.set_type_like(op.Mul(x, e), e))
                    return [op.Mul(g, op.set_type_like(slope, e))]
    return None


def _base_of_density(op, e):
    """Return x if `e` = exp(c - s^2), where s is x times or divided by a number; else None."""
    found = _match_normal_density(op, e)
    scaled = None if found is None else made_by(found[1].producer().inputs[0], "Mul", "Div")
    if scaled is None:
        return None
    x, number = scaled.inputs
    if scaled.op_type == "Mul" and constant(x) is not None:
        x, number = number, x
    k = constant(number)
    return x if k is not None and not k.shape and k else None


@rewrites("Where", group=GRADIENT)
def multiply_by_slope(op, node):
    """where(c, g, a g) = g max(c, a), for 0 <= a <= 1: the gradient of a LeakyRelu.

    onnxruntime's Where takes several times as long as these three nodes.
    """
    positive, g, scaled = node.inputs
    if not op.is_own(node) or op.primal is None or op.primal.op_type != "LeakyRelu":
        return None
    product, alpha = made_by(scaled, "Mul"), float_attribute(op.primal, "alpha")
    if product is None or g not in product.inputs or not 0 <= alpha <= 1:
        return None
    return [op.Mul(g, op.Max(op.Cast(positive, to=g.dtype), op.const(alpha, g.dtype)))]
