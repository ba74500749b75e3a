"""The logits in front of probabilities, also where a file writes out a softmax or a sigmoid.

Files write probabilities in many forms: a Softmax that is cast or transposed, e^x / sum(e^x),
e^(x - logsumexp(x)), 1 / (1 + e^-x), sigmoids divided by their sum, or the columns 1 - p and p. The
logarithm of a share, up to a number of each row, is a logit: so the loss of each form can be
computed without the form itself, whose gradient is zero or NaN where it saturates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxgrad.losses.value_range import (
    before_casts,
    behind_guard,
    constant_range,
    moved_operands,
    quotient,
    summed_axes,
)
from onnxgrad.operators import SAME_ELEMENTS, made_by
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import places
from onnxgrad.operators.shapes import constant, dims, rank

_DEPTH = 24  # nodes in a row
_ONE = (1.0, 1.0)  # the range of the number 1


def softmax_logits(op: Any, x: ir.Value, axis: int, depth: int = _DEPTH) -> ir.Value | None:
    """Return z with softmax(z) = `x` along `axis`, or None if `x` is not proven to be a softmax."""
    node, n = x.producer(), rank(x)
    if node is None or node.domain or depth == 0:
        return None
    inputs = [v for v in node.inputs if v is not None]
    if len(moved_operands(node)) == 1:
        before = _axis_before(node, x, axis)
        z = None if before is None else softmax_logits(op, inputs[0], before, depth - 1)
        return None if z is None else _write_again(op, node, z)
    if n is None:
        return None
    if node.op_type == "Softmax":
        return _give_shape(inputs[0], x) if int_attribute(node, "axis") % n == axis else None
    if node.op_type == "Exp":
        return _scores_of_log_softmax(inputs[0], axis, n)
    share = quotient(node) if node.op_type in ("Div", "Mul") else None
    if share is not None and {a % n for a in summed_axes(*share) or ()} == {axis}:
        return _in_dtype_of(op, write_logarithm(op, behind_guard(share[0]), depth - 1), x)
    if node.op_type == "Concat" and len(inputs) == 2 and int_attribute(node, "axis") % n == axis:
        first, second = inputs
        if _find_complement(first) is second or _find_complement(second) is first:
            return _in_dtype_of(op, write_logarithm(op, x, depth - 1), x)
    return None


def _through_moves(find: Callable[[Any, ir.Value, int], ir.Value | None]) -> Callable[..., Any]:
    """Let `find` look at the values, too, whose elements its argument moves and joins."""

    def found(op: Any, x: ir.Value, depth: int = _DEPTH) -> ir.Value | None:
        node = x.producer()
        if node is None or node.domain or depth == 0:
            return None
        sources = moved_operands(node)
        if (z := find(op, x, depth)) is not None or not sources or len(node.outputs) > 1:
            return z
        parts = [found(op, v, depth - 1) for v in sources if v is not None]
        values = [z for z in parts if z is not None]
        return _write_again(op, node, *values) if len(values) == len(parts) else None

    return found


@_through_moves
def sigmoid_logits(op: Any, x: ir.Value, depth: int) -> ir.Value | None:
    """Return z with sigmoid(z) = `x`, or None if the elements of `x` are not proven to be that."""
    if (score := written_sigmoid(x)) is not None:
        s, negated = score
        return _in_dtype_of(op, op.Neg(s) if negated else s, x)
    if made_by(x, "Sub") and (p := _find_complement(x)) is not None:
        z = sigmoid_logits(op, p, depth - 1)
        return None if z is None else _in_dtype_of(op, op.Neg(z), x)
    if node := made_by(x, "Where"):  # a form for scores above zero, and one for those below
        first, second = (sigmoid_logits(op, v, depth - 1) for v in node.inputs[1:] if v is not None)
        return first if first is second else None
    return None


@_through_moves
def write_logarithm(op: Any, x: ir.Value, depth: int) -> ir.Value | None:
    """Return log(`x`), from the scores that `x` is computed from; None for other values."""
    if (z := sigmoid_logits(op, x, depth)) is not None:
        return op.Neg(op.Softplus(op.Neg(z)))
    if node := made_by(x, "Exp"):
        return node.inputs[0]
    if node := made_by(x, "Softmax"):
        return op.LogSoftmax(node.inputs[0], axis=int_attribute(node, "axis"))
    return None


def written_sigmoid(x: ir.Value) -> tuple[ir.Value, bool] | None:
    """Return (s, negated) if a node computes `x` as the sigmoid of s, or of -s if it is negated.

    These are Sigmoid, 1 / (1 + e^s) and e^s / (1 + e^s).
    """
    node = x.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Sigmoid":
        return node.inputs[0], False
    share = quotient(node)
    whole = None if share is None else made_by(before_casts(share[1]), "Add")
    terms = [] if whole is None else [v for v in whole.inputs if v is not None]
    powers = [v for v in terms if constant_range(v) is None]
    if len(powers) != 1 or {constant_range(v) for v in terms} != {None, _ONE}:
        return None
    power = made_by(before_casts(powers[0]), "Exp")
    if power is None or share is None or power.inputs[0] is None:
        return None
    if before_casts(share[0]) is before_casts(powers[0]):
        return power.inputs[0], False
    return _without_sign(power.inputs[0]) if constant_range(share[0]) == _ONE else None


def _without_sign(s: ir.Value) -> tuple[ir.Value, bool]:
    """Return (z, negated) with 1 / (1 + e^s) the sigmoid of z, or of -z if it is negated."""
    if (node := made_by(s, "Neg")) and node.inputs[0] is not None:
        return node.inputs[0], False
    inputs = [v for v in node.inputs if v is not None] if (node := made_by(s, "Mul")) else []
    for a, b in zip(inputs, inputs[::-1], strict=True):
        if constant_range(b) == (-1.0, -1.0):
            return a, False
    return s, True


def _scores_of_log_softmax(x: ir.Value, axis: int, n: int) -> ir.Value | None:
    """Return z if `x` is the logarithm of a softmax: LogSoftmax(z), or z - logsumexp(z)."""
    node = made_by(before_casts(x), "LogSoftmax", "Sub")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "LogSoftmax":
        axes: tuple[int, ...] | None = (int_attribute(node, "axis"),)
    else:
        axes = summed_axes(node.inputs[0], node.inputs[1], ("ReduceLogSumExp",))
    return _give_shape(node.inputs[0], x) if {a % n for a in axes or ()} == {axis} else None


def log_softmax_logits(op: Any, x: ir.Value, axis: int) -> ir.Value | None:
    """Return the logits if `x` is the logarithm of a softmax of them along `axis`."""
    n, node = rank(x), made_by(before_casts(x), "Log")
    if node is not None and node.inputs[0] is not None:
        return softmax_logits(op, node.inputs[0], axis)
    return None if n is None else _scores_of_log_softmax(x, axis, n)


def _find_complement(x: ir.Value) -> ir.Value | None:
    """Return p if `x` is 1 - p."""
    node = made_by(before_casts(x), "Sub")
    is_complement = node is not None and node.inputs[0] and constant_range(node.inputs[0]) == _ONE
    return node.inputs[1] if node is not None and is_complement else None


def _axis_before(node: ir.Node, x: ir.Value, axis: int) -> int | None:
    """Return the axis of the operand that is `axis` of `x`, if the node keeps all of it.

    The elements along it stay together: no other operand says for each one where it goes.
    """
    before, after = dims(node.inputs[0]), dims(x)
    if before is None or after is None:
        return axis if node.op_type in ("Cast", "Identity") else None
    if len(node.outputs) > 1:
        return None
    axes = [a for a in range(len(before)) if places(node, 0, a) == [axis]]
    if len(axes) == 1:
        n, others = before[axes[0]], range(1, len(node.inputs))
        is_whole = node.op_type in SAME_ELEMENTS or (n is not None and n == after[axis])
        is_chosen = any(_has_axis_at(node, i, axis) for i in others)
        return axes[0] if is_whole and not is_chosen else None
    n = before[axis] if len(before) == len(after) else None
    if not isinstance(n, int):
        return None
    if node.op_type == "Slice":
        return axis if n == after[axis] else None
    indices = constant(node.inputs[1]) if node.op_type == "Gather" else None
    if indices is None:
        return None
    return axis if sorted(int(i) % n for i in indices.ravel()) == list(range(n)) else None


def _has_axis_at(node: ir.Node, operand: int, axis: int) -> bool:
    """Return whether an axis of an operand stands at `axis` of the result."""
    n = rank(node.inputs[operand]) or 0
    return any(places(node, operand, a) == [axis] for a in range(n))


def _write_again(op: Any, node: ir.Node, *values: ir.Value) -> ir.Value | None:
    """Return the output of a node like `node` whose first operands are `values`."""
    if node.op_type in ("Identity", "Concat") and len(values) == 1:
        return values[0]
    attributes = {a.name: a.value for a in node.attributes.values()}
    z = op.emit(node.op_type, [*values, *node.inputs[len(values) :]], attributes)
    return _in_dtype_of(op, z, node.outputs[0])


def _in_dtype_of(op: Any, z: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """Return `z` in the dtype of `x`, and with its shape if `z` has none; None for None."""
    if z is None:
        return None
    if x.dtype is not None and z.dtype is not None and z.dtype != x.dtype:
        z = op.Cast(z, to=x.dtype)
    return _give_shape(z, x)


def _give_shape(z: ir.Value, x: ir.Value) -> ir.Value:
    """Return `z`, with the shape of `x` if it has none."""
    z.shape = x.shape if z.shape is None else z.shape
    return z
