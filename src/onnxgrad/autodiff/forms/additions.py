"""Sums of squares, of kept axes, and of tensors that are zero outside of a part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.forms.group import GRADIENT, is_own, is_zero, read_once
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.outputs import output_shape
from onnxgrad.operators.shapes import constant, dims, equal, is_real, rank, static


@rewrites("Add", group=GRADIENT)
def scatter_into_sum(op, node):
    """x + scatter(0, i, u) = scatter(x, i, u), which adds u; its sums are in another order.

    So is the gradient of a table that is read by rows, and as a matrix. Zeros would be as large.
    """
    for x, y in (node.inputs, node.inputs[::-1]):
        rows = op.is_own(node) and is_own(op, y, "ScatterElements") and read_once(y)
        made = y.producer() if rows else None
        if made is None or string_attribute(made, "reduction") != "add":
            continue
        exact = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and static(dims(x)) is not None
        if exact and is_zero(op, made.inputs[0]) and dims(x) == dims(y) == dims(node.outputs[0]):
            attributes = {name: a.value for name, a in made.attributes.items()}
            return [op.ScatterElements(x, *made.inputs[1:], **attributes)]
    return None


@rewrites("ReduceSum", group=GRADIENT)
def sum_squares(op, node):
    """ReduceSum(x x) = ReduceSumSquare(x)."""
    product, keepdims = made_by(node.inputs[0], "Mul"), int_attribute(node, "keepdims")
    # without axes, and with noop_with_empty_axes, ReduceSumSquare does not square
    if product is None or "noop_with_empty_axes" in node.attributes:
        return None
    x, other = product.inputs
    if x is None or x is not other or not is_real(x):  # onnxruntime has it for few integers
        return None
    return [op.ReduceSumSquare(x, *node.inputs[1:], keepdims=keepdims)]


@rewrites("Reshape", group=GRADIENT)
def sum_without_kept_axes(op, node):
    """A Reshape that removes the axes of length 1 which a ReduceSum keeps."""
    total, target = made_by(node.inputs[0], "ReduceSum"), constant(node.inputs[1])
    if total is None or target is None or len(total.inputs) < 2:
        return None
    shape = output_shape("ReduceSum", total.inputs, {"keepdims": 0})
    if shape is None or static(shape) != tuple(target) or 0 in target:  # 0 copies a length
        return None
    if not int_attribute(total, "keepdims") or "noop_with_empty_axes" in total.attributes:
        return None
    return [op.ReduceSum(*total.inputs, keepdims=0)]


@dataclass(frozen=True)
class _Part:
    """`value`, with `before` zeros in front of it along `axis` and `after` behind it."""

    value: ir.Value
    axis: int
    before: int
    length: int
    after: int

    def adjoins(self, other: _Part) -> bool:
        return self.axis == other.axis and self.before + self.length == other.before


@rewrites("Add", "Sum", group=GRADIENT)
def join_parts(op, node):
    """pad(a) + pad(b) = concat(a, b), where the parts adjoin, as the gradients of slices do."""
    terms = list(node.inputs)
    parts = {x: part for x in terms if (part := _part(x)) is not None}
    order = sorted(parts.values(), key=lambda part: (part.axis, part.before))
    repeated = len(parts) < sum(x in parts for x in terms)
    if len(order) < 2 or repeated or not all(a.adjoins(b) for a, b in pairwise(order)):
        return None
    first, last, like = order[0], order[-1], next(iter(parts))
    ranks = {rank(part.value) for part in order}  # a stack adds an axis to some
    own = op.is_own(node) and len(ranks) == 1
    if not own and not all(equal(dims(x), dims(like)) for x in parts):
        return None  # one may be broadcast
    whole = op.Concat(*(part.value for part in order), axis=first.axis)
    if first.before or last.after:
        n = len(dims(whole) or ())
        before, after = [0] * n, [0] * n
        before[first.axis], after[first.axis] = first.before, last.after
        whole = op.Pad(whole, [*before, *after])
    terms = [op.set_type_like(whole, like), *(x for x in terms if x not in parts)]
    return [whole if len(terms) == 1 else op.Add(*terms) if len(terms) == 2 else op.Sum(*terms)]


def _part(x):
    """Return the part of `x` outside of which a Pad wrote zeros, along one axis; else None."""
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
    return _Part(value, axis, int(before[axis]), length, int(after[axis]))
