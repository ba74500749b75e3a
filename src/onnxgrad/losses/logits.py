"""Logits from which a graph computes probabilities, also by Exp and Div instead of a Softmax node.

Files write probabilities in many forms: a Softmax that is cast or transposed, e^x / sum(e^x),
e^(x - logsumexp(x)), 1 / (1 + e^-x), sigmoids divided by their sum, or the columns 1 - p and p. The
logarithm of a share, up to a number for each row, is a logit: so the loss of each form can be
computed without the form itself, whose gradient is zero or NaN where it saturates.

The last functions find the scores of classifiers of pairs, which add votes to them, and of two
classes with opposite scores, whose columns a lowering marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import named, node_text
from onnxgrad.graph.traversal import dependents, nodes_behind, reads
from onnxgrad.losses.value_range import (
    constant_range,
    moved_operands,
    quotient_operands,
    strip_zero_guard,
    summed_axes,
    value_before_casts,
    value_range,
)
from onnxgrad.operators import OF_SHAPES, SAME_ELEMENTS, made_by, marks, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import output_axes
from onnxgrad.operators.shapes import constant, dims, is_real, rank
from onnxgrad.reporting import logger

_DEPTH = 24  # most consecutive nodes that a search visits
_ONE = (1.0, 1.0)  # the range of the number 1


def softmax_logits(op: Any, x: ir.Value, axis: int, depth: int = _DEPTH) -> ir.Value | None:
    """Return the logits z with softmax(z) = `x` along `axis`, or None if no nodes are found that
    compute a softmax.
    """
    node, n = x.producer(), rank(x)
    if node is None or node.domain or depth == 0:
        return None
    inputs = [v for v in node.inputs if v is not None]
    if len(moved_operands(node)) == 1:
        before = _axis_in_first_operand(node, x, axis)
        z = None if before is None else softmax_logits(op, inputs[0], before, depth - 1)
        return None if z is None else _copy_node_with_operands(op, node, z)
    if n is None:
        return None
    if node.op_type == "Softmax":
        return (
            _declare_missing_shape(inputs[0], x)
            if int_attribute(node, "axis") % n == axis
            else None
        )
    if node.op_type == "Exp":
        return _scores_of_log_softmax(inputs[0], axis, n)
    share = quotient_operands(node) if node.op_type in ("Div", "Mul") else None
    if share is not None and {a % n for a in summed_axes(*share) or ()} == {axis}:
        return _cast_to_dtype_of(op, write_logarithm(op, strip_zero_guard(share[0]), depth - 1), x)
    if node.op_type == "Concat" and len(inputs) == 2 and int_attribute(node, "axis") % n == axis:
        first, second = inputs
        if _complement_operand(first) is second or _complement_operand(second) is first:
            return _cast_to_dtype_of(op, write_logarithm(op, x, depth - 1), x)
    return None


def _extend_search_through_moves(
    find: Callable[[Any, ir.Value, int], ir.Value | None],
) -> Callable[..., Any]:
    """Return the search function `find` extended: it also searches the operands of nodes that move
    or join elements, such as Concat.
    """

    def find_through_moves(op: Any, x: ir.Value, depth: int = _DEPTH) -> ir.Value | None:
        node = x.producer()
        if node is None or node.domain or depth == 0:
            return None
        sources = moved_operands(node)
        if (z := find(op, x, depth)) is not None or not sources or len(node.outputs) > 1:
            return z
        parts = [find_through_moves(op, v, depth - 1) for v in sources if v is not None]
        values = [z for z in parts if z is not None]
        return _copy_node_with_operands(op, node, *values) if len(values) == len(parts) else None

    return find_through_moves


@_extend_search_through_moves
def sigmoid_logits(op: Any, x: ir.Value, depth: int) -> ir.Value | None:
    """Return the logits z with sigmoid(z) = `x`, or None if the graph shows no sigmoid."""
    if (score := written_sigmoid(x)) is not None:
        s, negated = score
        return _cast_to_dtype_of(op, op.Neg(s) if negated else s, x)
    if made_by(x, "Sub") and (p := _complement_operand(x)) is not None:
        z = sigmoid_logits(op, p, depth - 1)
        return None if z is None else _cast_to_dtype_of(op, op.Neg(z), x)
    if node := made_by(x, "Where"):  # sigmoid by two formulas, for scores above and below zero
        first, second = (sigmoid_logits(op, v, depth - 1) for v in node.inputs[1:] if v is not None)
        return first if first is second else None
    return None


@_extend_search_through_moves
def write_logarithm(op: Any, x: ir.Value, depth: int) -> ir.Value | None:
    """Write log(`x`) without computing `x`, if `x` is a sigmoid, softmax or exponential; else
    return None.
    """
    if (z := sigmoid_logits(op, x, depth)) is not None:
        return op.Neg(op.Softplus(op.Neg(z)))
    if node := made_by(x, "Exp"):
        return node.inputs[0]
    if node := made_by(x, "Softmax"):
        return op.LogSoftmax(node.inputs[0], axis=int_attribute(node, "axis"))
    return None


def written_sigmoid(x: ir.Value) -> tuple[ir.Value, bool] | None:
    """Return (s, negated) if nodes compute `x` as sigmoid(s), or sigmoid(-s) if negated, else None.

    The forms are Sigmoid, 1 / (1 + e^s) and e^s / (1 + e^s).
    """
    node = x.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Sigmoid":
        return node.inputs[0], False
    share = quotient_operands(node)
    whole = None if share is None else made_by(value_before_casts(share[1]), "Add")
    terms = [] if whole is None else [v for v in whole.inputs if v is not None]
    powers = [v for v in terms if constant_range(v) is None]
    if len(powers) != 1 or {constant_range(v) for v in terms} != {None, _ONE}:
        return None
    power = made_by(value_before_casts(powers[0]), "Exp")
    if power is None or share is None or power.inputs[0] is None:
        return None
    if value_before_casts(share[0]) is value_before_casts(powers[0]):
        return power.inputs[0], False
    return _strip_negation(power.inputs[0]) if constant_range(share[0]) == _ONE else None


def _strip_negation(s: ir.Value) -> tuple[ir.Value, bool]:
    """Return (z, False) if `s` = -z, where 1 / (1 + e^s) = sigmoid(z); else (s, True), where it is
    sigmoid(-s).
    """
    if (node := made_by(s, "Neg")) and node.inputs[0] is not None:
        return node.inputs[0], False
    inputs = [v for v in node.inputs if v is not None] if (node := made_by(s, "Mul")) else []
    for a, b in zip(inputs, inputs[::-1], strict=True):
        if constant_range(b) == (-1.0, -1.0):
            return a, False
    return s, True


def _scores_of_log_softmax(x: ir.Value, axis: int, n: int) -> ir.Value | None:
    """Return z if `x` is the logarithm of a softmax: LogSoftmax(z), or z - logsumexp(z)."""
    node = made_by(value_before_casts(x), "LogSoftmax", "Sub")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "LogSoftmax":
        axes: tuple[int, ...] | None = (int_attribute(node, "axis"),)
    else:
        axes = summed_axes(node.inputs[0], node.inputs[1], ("ReduceLogSumExp",))
    return (
        _declare_missing_shape(node.inputs[0], x) if {a % n for a in axes or ()} == {axis} else None
    )


def log_softmax_logits(op: Any, x: ir.Value, axis: int) -> ir.Value | None:
    """Return the logits z if `x` is log(softmax(z)) along `axis`, else None."""
    n, node = rank(x), made_by(value_before_casts(x), "Log")
    if node is not None and node.inputs[0] is not None:
        return softmax_logits(op, node.inputs[0], axis)
    return None if n is None else _scores_of_log_softmax(x, axis, n)


def _complement_operand(x: ir.Value) -> ir.Value | None:
    """Return p if a node computes `x` as 1 - p, else None."""
    node = made_by(value_before_casts(x), "Sub")
    is_complement = node is not None and node.inputs[0] and constant_range(node.inputs[0]) == _ONE
    return node.inputs[1] if node is not None and is_complement else None


def _axis_in_first_operand(node: ir.Node, x: ir.Value, axis: int) -> int | None:
    """Return the axis of the first operand of `node` whose elements are exactly the elements along
    `axis` of the result `x`.

    None: the node drops elements along the axis, or another operand chooses them one by one.
    """
    before, after = dims(node.inputs[0]), dims(x)
    if before is None or after is None:
        return axis if node.op_type in ("Cast", "Identity") else None
    if len(node.outputs) > 1:
        return None
    axes = [a for a in range(len(before)) if output_axes(node, 0, a) == [axis]]
    if len(axes) == 1:
        n, others = before[axes[0]], range(1, len(node.inputs))
        is_whole = node.op_type in SAME_ELEMENTS or (n is not None and n == after[axis])
        is_chosen = any(
            output_axes(node, i, a) == [axis]
            for i in others
            for a in range(rank(node.inputs[i]) or 0)
        )
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


def _copy_node_with_operands(op: Any, node: ir.Node, *values: ir.Value) -> ir.Value | None:
    """Write a copy of `node` that reads `values` in place of its first operands, and return the
    copy's output.
    """
    if node.op_type in ("Identity", "Concat") and len(values) == 1:
        return values[0]
    attributes = {a.name: a.value for a in node.attributes.values()}
    z = op.emit(node.op_type, [*values, *node.inputs[len(values) :]], attributes)
    return _cast_to_dtype_of(op, z, node.outputs[0])


def _cast_to_dtype_of(op: Any, z: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """Return `z` cast to the dtype of `x`, with the shape of `x` if the shape of `z` is unknown;
    None if `z` is None.
    """
    if z is None:
        return None
    if x.dtype is not None and z.dtype is not None and z.dtype != x.dtype:
        z = op.Cast(z, to=x.dtype)
    return _declare_missing_shape(z, x)


def _declare_missing_shape(z: ir.Value, x: ir.Value) -> ir.Value:
    """Return `z`; if its shape is unknown, declare the shape of `x` for it."""
    z.shape = x.shape if z.shape is None else z.shape
    return z


# -- votes, and opposite columns ------------------------------------------------------------------


def require_class_columns(prediction: ir.Value) -> None:
    """Raise `ValueError` if the graph has a note that the columns of the prediction are not one
    score for each class.
    """
    x: ir.Value | None = prediction
    while x is not None:
        if marks.NOT_CLASSES in x.meta:
            raise ValueError(f"{prediction.name!r} {x.meta[marks.NOT_CLASSES]}")
        x = node.inputs[0] if (node := made_by(x, "Identity", "Cast")) else None


def scores_without_votes(prediction: ir.Value) -> ir.Value:
    """Return s if the prediction is v + s / (3 (|s| + 1)), v votes of one-vs-one classifiers; else
    return the prediction.

    skl2onnx writes classifiers of pairs of classes so: s are the sums of the scores of the pairs.
    Votes are steps without a gradient, and the second term is less than 1 / 3. So the loss is
    computed from s, which orders the classes as the votes do, except for ties.

    Raises:
        ValueError: the scores are probabilities, whose sums do not order the classes.
    """
    node = made_by(value_before_casts(prediction), "Add", "Sum")
    operands = [] if node is None else [v for v in node.inputs if v is not None]
    if node is None or len(operands) != 2:
        return prediction
    votes = _step_function_operands(node, operands)
    if len(votes) != 1:
        return prediction
    scores = _softsign_operand(next(v for v in operands if v is not votes[0]))
    low, high = value_range(scores)
    where = node_text(node)
    if low > -inf and high < inf:
        raise ValueError(
            f"{prediction.name!r} cannot be trained: {where} adds {votes[0].name!r}, votes without "
            "a gradient, to sums of probabilities, which may order the classes differently. Train "
            "the classifier of each pair of classes, by "
            f"{named('loss={tensor: loss}')} with its scores, or give the model a new "
            f"head, by {named('onnxgrad.replace_head')}"
        )
    logger.warning(
        "%s adds votes, which have no gradient, to the scores of %r: the loss is computed from %r, "
        "the sums of the scores",
        where, prediction.name, scores.name,
    )  # fmt: skip
    if scores.shape is None:
        scores.shape = prediction.shape
    return scores


def _step_function_operands(node: ir.Node, operands: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the operands that are step functions of data, such as counts of comparisons.

    Return none if every operand depends on data so.
    """
    behind = nodes_behind(node.outputs)
    nodes = [n for n in node.graph or () if n in behind and n.op_type not in OF_SHAPES]
    read = (x for n in nodes for x in reads(n))
    inputs = {x for x in read if x.producer() is None and x.const_value is None}
    data = dependents(nodes, inputs)
    with_slope = dependents([n for n in nodes if not _is_step_function(n, data)], inputs)
    if with_slope.isdisjoint(operands):
        return []
    return [v for v in operands if v in data and v not in with_slope]


def _is_step_function(node: ir.Node, data: Collection[ir.Value]) -> bool:
    """Return whether a node computes a step function of data, such as a comparison, whose gradient
    is zero between jumps.

    Operators with a straight-through gradient are not: their integers stand for floats. Nor are
    operators of other domains: trees compute scores, no votes.
    """
    operator = operator_of(node)
    is_trained = operator.straight_through is not None or "random" in operator.traits
    if node.domain or is_trained:
        return False
    varying = [x for x in reads(node) if x in data]
    of_integers = not any(is_real(x) or x.producer() is None for x in varying)
    return bool(operator.no_gradient) or of_integers


def _softsign_operand(x: ir.Value) -> ir.Value:
    """Return s if nodes compute `x` as the softsign s / (c (|s| + 1)), else `x`."""
    node = made_by(value_before_casts(x), "Div")
    if node is None or node.inputs[0] is None:
        return x
    s, waiting = node.inputs[0], [node.inputs[1]]
    for v in waiting:  # the loop appends to the list
        if (size := made_by(v, "Abs")) and size.inputs[0] is s:
            return s
        if (inner := made_by(v, "Add", "Mul", "Sum")) and len(waiting) < 32:
            waiting.extend(inner.inputs)
    return x


def keep_scores_opposite(op: Any, predictions: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """Keep the scores of two classes, columns -z and z, opposite to each other during training.

    Labels are computed from both columns, and outputs perhaps from one: trained apart, they would
    disagree. So the columns become -z and z, z half of their difference, and their weights have
    opposite gradients.

    Args:
        op: emitter of the graph.
        predictions: values of the graph by name.

    Returns:
        The predictions, with the new columns in the place of the old ones.
    """
    replaced: dict[ir.Value, ir.Value] = {}
    for node, next_node in pairwise([*op.graph, None]):
        columns = node.outputs[0] if node.outputs else None
        if columns is None or marks.OPPOSITE not in columns.meta:
            continue
        uses = list(columns.uses())
        with op.at(next_node):
            z = _half_difference(op, columns)
            both = op.set_type_like(op.Concat(op.Neg(z), z, axis=1), columns)
        both.meta[marks.OPPOSITE] = columns.meta.pop(marks.OPPOSITE)
        for user, index in uses:
            user.replace_input_with(index, both)
        replaced[columns] = both
    return {name: replaced.get(value, value) for name, value in predictions.items()}


def two_class_logits(op: Any, prediction: ir.Value) -> ir.Value | None:
    """Return logits whose softmax is `prediction`, if the prediction is the sigmoid of opposite
    scores (-z, z); else None.

    scikit-learn's classifiers of two classes are exported with the coefficients of both classes,
    which are opposite numbers. The softmax of (-d, d) / 4, d the difference of the scores, gives
    them opposite gradients, which the loss of each sigmoid alone would not.
    """
    node = made_by(value_before_casts(prediction), "Sigmoid")
    scores = None if node is None else node.inputs[0]
    if scores is None or marks.OPPOSITE not in scores.meta:
        return None
    z = _half_difference(op, scores)
    logits = op.set_type_like(op.Concat(z * -0.5, z * 0.5, axis=1), prediction)
    logits.name = op.name(f"{prediction.name}_logits")
    logger.info("%r holds the probabilities of two classes with opposite scores", prediction.name)
    return logits


def _half_difference(op: Any, columns: ir.Value) -> ir.Value:
    """Write (z_2 - z_1) / 2 for columns z_1 and z_2."""
    first, second = op.emit_many("Split", [columns], {"axis": 1, "num_outputs": 2}, outputs=2)
    return (second - first) * 0.5
