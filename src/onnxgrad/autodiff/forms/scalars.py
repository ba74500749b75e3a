"""Products by scalars and by broadcast operands."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.autodiff.forms.group import GRADIENT, is_own, read_once
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by
from onnxgrad.operators.shapes import Dims, dims, equal, is_real

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@rewrites("Add", group=GRADIENT)
def double(op, node):
    """x + x = 2 x: a product by a scalar, which `multiply_scalars_first` joins with others."""
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
        if shape is None or not _is_column(shape):
            continue
        terms = v.producer().inputs if is_own(op, v, "Add") and read_once(v) else [v]
        found = [_factors(op, term, shape) for term in terms]
        if all(found):
            scaled = [op.Mul(x, op.Mul(s, t)) for x, s in found]
            return [scaled[0] if len(scaled) == 1 else op.Add(*scaled)]
    return None


def _factors(op, v, scale):
    """Return x and s if only one node reads `v` = x s, s a scalar and x larger than `scale`."""
    if not is_own(op, v, "Mul") or not read_once(v):
        return None
    operands = v.producer().inputs
    for x, s in (operands, operands[::-1]):
        shape = dims(x)
        if dims(s) != () or not shape:
            continue
        if not scale or (len(scale) <= len(shape) and not _is_column(shape)):
            return x, s
    return None


def _is_column(shape: Dims) -> bool:
    """Return whether a shape is that of a scalar, or of numbers along the first axis only."""
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
        if is_own(op, v, "Div") and read_once(v):
            one, d = v.producer().inputs
            if not dims(one) and op.is_all(one, 1):
                return [op.Div(x, d)]
    return None
