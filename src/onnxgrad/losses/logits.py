"""The logits in front of probabilities, also where a file writes out a softmax or a sigmoid.

Files write probabilities in many forms: a Softmax that is cast or transposed, e^x / sum(e^x),
e^(x - logsumexp(x)), 1 / (1 + e^-x), sigmoids divided by their sum, or the columns 1 - p and p. The
logarithm of a share, up to a number of each row, is a logit: so the loss of each form can be
computed without the form itself, whose gradient is zero or NaN where it saturates.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.operators import VIEWS
from onnxgrad.graph.shapes import constant, dims, rank
from onnxgrad.losses.class_axis import axis_after
from onnxgrad.losses.value_range import behind_guard, number, quotient, stripped, summed_axes

_MOVES = VIEWS | frozenset("Cast Gather Slice Transpose".split())
_DEPTH = 24  # nodes in a row


def softmax_logits(op: Any, x: ir.Value, axis: int, depth: int = _DEPTH) -> ir.Value | None:
    """Return z with softmax(z) = `x` along `axis`, or None if `x` is not proven to be a softmax.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad import Emit
        >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3]))
        >>> with Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20})) as op:
        ...     e = op.Exp(x)
        ...     y = op.Cast(e / op.ReduceSum(e, [1], keepdims=1), to=ir.DataType.DOUBLE)
        >>> softmax_logits(op, y, 1).producer().op_type
        'Cast'
    """
    node = x.producer()
    if node is None or node.domain or depth == 0:
        return None
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type in _MOVES:
        before = _axis_before(node, x, axis)
        z = None if before is None else softmax_logits(op, inputs[0], before, depth - 1)
        return None if z is None else _again(op, node, z)
    n = rank(x)
    if n is None:
        return None
    if node.op_type == "Softmax":
        return _shaped(inputs[0], x) if node.attributes.get_int("axis", -1) % n == axis else None
    if node.op_type == "Exp":
        return _in_front_of_logarithm(op, inputs[0], axis, n)
    if node.op_type in ("Div", "Mul"):
        share = quotient(node)
        axes = None if share is None else summed_axes(*share)
        if share is None or axes is None or {a % n for a in axes} != {axis}:
            return None
        z = logarithm(op, behind_guard(share[0]), depth - 1)
        return None if z is None else _like(op, z, x)
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) % n == axis:
        first, second = inputs if len(inputs) == 2 else (None, None)
        if first is not None and second in (_complement(first), _complement_of(second, first)):
            z = logarithm(op, x, depth - 1)
            return None if z is None else _like(op, z, x)
    return None


def sigmoid_logits(op: Any, x: ir.Value, depth: int = _DEPTH) -> ir.Value | None:
    """Return z with sigmoid(z) = `x`, or None if the elements of `x` are not proven to be that."""
    node = x.producer()
    if node is None or node.domain or depth == 0:
        return None
    if (score := written_sigmoid(x)) is not None:
        s, negated = score
        return _like(op, op.Neg(s) if negated else s, x)
    if node.op_type in _MOVES and node.inputs[0] is not None:
        z = sigmoid_logits(op, node.inputs[0], depth - 1)
        return None if z is None else _again(op, node, z)
    if (p := _complement(x)) is not None:
        z = sigmoid_logits(op, p, depth - 1)
        return None if z is None else _like(op, op.Neg(z), x)
    if node.op_type == "Concat":
        parts = [sigmoid_logits(op, v, depth - 1) for v in node.inputs if v is not None]
        return None if None in parts else _again(op, node, *[z for z in parts if z is not None])
    if node.op_type == "Where":  # a form for scores above zero, and one for those below
        first, second = (sigmoid_logits(op, v, depth - 1) for v in node.inputs[1:] if v is not None)
        return first if first is second else None
    return None


def logarithm(op: Any, x: ir.Value, depth: int = _DEPTH) -> ir.Value | None:
    """Return log(`x`), from the scores that `x` is computed from; None for other values."""
    node = x.producer()
    if node is None or node.domain or depth == 0:
        return None
    if (z := sigmoid_logits(op, x, depth)) is not None:
        return op.Neg(op.Softplus(op.Neg(z)))
    if node.op_type == "Exp":
        return node.inputs[0]
    if node.op_type == "Softmax":
        return op.LogSoftmax(node.inputs[0], axis=node.attributes.get_int("axis", -1))
    if node.op_type in _MOVES and node.inputs[0] is not None:
        inner = logarithm(op, node.inputs[0], depth - 1)
        return None if inner is None else _again(op, node, inner)
    if node.op_type == "Concat":
        parts = [logarithm(op, v, depth - 1) for v in node.inputs if v is not None]
        return None if None in parts else _again(op, node, *[z for z in parts if z is not None])
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
    if share is None:
        return None
    whole = _computed_by(share[1], "Add")
    terms = [] if whole is None else [v for v in whole.inputs if v is not None]
    powers = [v for v in terms if number(v) is None]
    if len(terms) != 2 or len(powers) != 1 or {number(v) for v in terms} != {None, (1.0, 1.0)}:
        return None
    power = _computed_by(powers[0], "Exp")
    if power is None or power.inputs[0] is None:
        return None
    if stripped(share[0]) is stripped(powers[0]):
        return power.inputs[0], False
    return _negated(power.inputs[0]) if number(share[0]) == (1.0, 1.0) else None


def _negated(s: ir.Value) -> tuple[ir.Value, bool]:
    """Return the score of which 1 / (1 + e^s) is the sigmoid: -s, or what `s` is minus of."""
    node = s.producer()
    if node is not None and not node.domain:
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type == "Neg":
            return inputs[0], False
        if node.op_type == "Mul":
            for a, b in (inputs, inputs[::-1]):
                if number(b) == (-1.0, -1.0):
                    return a, False
    return s, True


def _in_front_of_logarithm(op: Any, x: ir.Value, axis: int, n: int) -> ir.Value | None:
    """Return z if `x` is the logarithm of a softmax: LogSoftmax(z), or z - logsumexp(z)."""
    node = _computed_by(x, "LogSoftmax") or _computed_by(x, "Sub")
    if node is None:
        return None
    z = node.inputs[0]
    if z is None:
        return None
    if node.op_type == "LogSoftmax":
        return _shaped(z, x) if node.attributes.get_int("axis", -1) % n == axis else None
    axes = summed_axes(z, node.inputs[1], ("ReduceLogSumExp",))
    if axes is not None and {a % n for a in axes} == {axis}:
        return _shaped(z, x)
    return None


def of_log_softmax(op: Any, x: ir.Value, axis: int) -> ir.Value | None:
    """Return the logits if `x` is the logarithm of a softmax of them along `axis`."""
    n, node = rank(x), _computed_by(x, "Log")
    if node is not None and node.inputs[0] is not None:
        return softmax_logits(op, node.inputs[0], axis)
    return None if n is None else _in_front_of_logarithm(op, x, axis, n)


def _complement(x: ir.Value | None) -> ir.Value | None:
    """Return p if `x` is 1 - p."""
    node = None if x is None else _computed_by(x, "Sub")
    if node is None or node.inputs[0] is None or number(node.inputs[0]) != (1.0, 1.0):
        return None
    return node.inputs[1]


def _complement_of(x: ir.Value | None, p: ir.Value) -> ir.Value | None:
    """Return `x` if it is 1 - `p`."""
    return x if _complement(x) is p else None


def _computed_by(x: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node of this type that computes `x`, perhaps through Identity."""
    node = stripped(x).producer()
    return node if node is not None and not node.domain and node.op_type == op_type else None


def _axis_before(node: ir.Node, x: ir.Value, axis: int) -> int | None:
    """Return the axis of the operand that is `axis` of `x`, if the node keeps all of it."""
    operand = node.inputs[0]
    before, after = dims(operand), dims(x)
    if operand is None or before is None or after is None:
        return axis if node.op_type in ("Cast", "Identity") else None
    axes = [a for a in range(len(before)) if axis_after(node, operand, x, a) == axis]
    if len(axes) != 1:
        return None
    if node.op_type in ("Gather", "Slice") and not _keeps_all(node, axes[0], before, after[axis]):
        return None
    return axes[0]


def _keeps_all(node: ir.Node, axis: int, before: Any, after: Any) -> bool:
    """Return whether a Gather or Slice keeps all elements along `axis` of its operand."""
    if node.op_type == "Slice":
        axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
        elsewhere = axes is not None and axis not in {int(a) % len(before) for a in axes}
        return elsewhere or (isinstance(after, int) and after == before[axis])
    if node.attributes.get_int("axis", 0) % len(before) != axis:
        return True
    indices, n = constant(node.inputs[1]), before[axis]
    if indices is None or not isinstance(n, int):
        return False
    return sorted(int(i) % n for i in indices.ravel()) == list(range(n))


def _again(op: Any, node: ir.Node, *values: ir.Value) -> ir.Value:
    """Return the output of a node like `node` for other first operands."""
    if node.op_type in ("Identity", "Concat") and len(values) == 1:
        return values[0]
    y = node.outputs[0]
    attributes = {a.name: a.value for a in node.attributes.values()}
    z = op.emit(node.op_type, [*values, *node.inputs[len(values) :]], attributes)
    return _like(op, z, y)


def _like(op: Any, z: ir.Value, x: ir.Value) -> ir.Value:
    """Return `z` in the dtype of `x`, and of its shape."""
    if x.dtype is not None and z.dtype is not None and z.dtype != x.dtype:
        z = op.Cast(z, to=x.dtype)
    return _shaped(z, x)


def _shaped(z: ir.Value, x: ir.Value) -> ir.Value:
    if z.shape is None:
        z.shape = x.shape
    return z
