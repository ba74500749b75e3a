"""Predictions whose columns are not the scores of classes that they look like.

Lowerings say so of the scores of support vector machines; votes and opposite columns are read from
the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import named, node_text
from onnxgrad.graph.traversal import dependents, nodes_behind, reads
from onnxgrad.losses.spec import LossSpec
from onnxgrad.losses.value_range import before_casts, value_range
from onnxgrad.operators import OF_SHAPES, made_by, marks, operator_of
from onnxgrad.operators.shapes import is_real
from onnxgrad.reporting import logger


def refuse_other_columns(spec: LossSpec, prediction: ir.Value) -> None:
    """Raise `ValueError` if the loss takes class indices, and the columns are not of the classes.

    Users who state `from_logits` have decided it.
    """
    said = spec.all_options.get("from_logits") is not None
    of_classes = spec.activation == "Softmax" or spec.label_kind.dtype is not None
    x: ir.Value | None = prediction
    while x is not None and of_classes and not said:
        if marks.NOT_CLASSES in x.meta:
            raise ValueError(f"{prediction.name!r} {x.meta[marks.NOT_CLASSES]}")
        x = node.inputs[0] if (node := made_by(x, "Identity", "Cast")) else None


def scores_of_votes(spec: LossSpec, prediction: ir.Value) -> ir.Value:
    """Return the sums of scores of a prediction that adds votes to them, else the prediction.

    skl2onnx writes classifiers of pairs so: votes + s / (3 (|s| + 1)), s the sums of the scores of
    the pairs. Votes are steps, and the other term is less than 1 / 3: so the loss is computed from
    s, which orders the classes as the votes do, save ties.

    Raises:
        ValueError: the scores are probabilities, whose sums do not order the classes.
    """
    node = made_by(before_casts(prediction), "Add", "Sum")
    if spec.activation != "Softmax" or spec.all_options.get("from_logits") is not None:
        return prediction
    operands = [] if node is None else [v for v in node.inputs if v is not None]
    if node is None or len(operands) != 2:
        return prediction
    votes = _values_by_steps(node, operands)
    if len(votes) != 1:
        return prediction
    scores = _before_squashing(next(v for v in operands if v is not votes[0]))
    low, high = value_range(scores)
    where = node_text(node)
    if low > -inf and high < inf:
        raise ValueError(
            f"{where} adds {votes[0].name!r} to the scores of {prediction.name!r}: these are "
            "votes, steps without a gradient, and scores between bounds do not reach them. Train "
            f"the classifiers of the pairs one by one, by {named('loss={tensor: loss}')} with the "
            f"scores of each, or give the model a new head, by {named('onnxgrad.replace_head')}"
        )
    logger.warning(
        "%s adds votes, which have no gradient, to the scores of %r: the loss is computed from %r, "
        "the sums of the scores",
        where, prediction.name, scores.name,
    )  # fmt: skip
    if scores.shape is None:
        scores.shape = prediction.shape
    return scores


def _values_by_steps(node: ir.Node, operands: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the operands that depend on data by comparisons, labels and the like only.

    There are none if no operand has a slope.
    """
    behind = nodes_behind(node.outputs)
    nodes = [n for n in node.graph or () if n in behind and n.op_type not in OF_SHAPES]
    read = (x for n in nodes for x in reads(n))
    inputs = {x for x in read if x.producer() is None and x.const_value is None}
    data = dependents(nodes, inputs)
    with_slope = dependents([n for n in nodes if not _is_step(n, data)], inputs)
    if with_slope.isdisjoint(operands):
        return []
    return [v for v in operands if v in data and v not in with_slope]


def _is_step(node: ir.Node, data: Collection[ir.Value]) -> bool:
    """Return whether the results are constant between jumps, as functions of computed integers.

    Integers that stand for floats are trained straight through their rounding, and trees have
    scores, no votes.
    """
    operator = operator_of(node)
    is_trained = operator.straight_through is not None or "random" in operator.traits
    if node.domain or is_trained:
        return False
    varying = [x for x in reads(node) if x in data]
    of_integers = not any(is_real(x) or x.producer() is None for x in varying)
    return bool(operator.no_gradient) or of_integers


def _before_squashing(x: ir.Value) -> ir.Value:
    """Return s if `x` is s / (c (|s| + 1)), else `x`."""
    node = made_by(before_casts(x), "Div")
    if node is None or node.inputs[0] is None:
        return x
    s, waiting = node.inputs[0], [node.inputs[1]]
    for v in waiting:  # the loop appends to it
        if (size := made_by(v, "Abs")) and size.inputs[0] is s:
            return s
        if (inner := made_by(v, "Add", "Mul", "Sum")) and len(waiting) < 32:
            waiting.extend(inner.inputs)
    return x


def keep_opposite(op: Any, predictions: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """Let columns -z and z, as a file stores the scores of two classes, stay so in training.

    Labels are computed from both columns, and outputs maybe from one: trained apart, they would
    disagree. So both become -z and z, z half of their difference, and their weights have opposite
    gradients.

    Args:
        op: emitter of the graph.
        predictions: values of the graph by name. They are returned, such columns replaced.
    """
    replaced: dict[ir.Value, ir.Value] = {}
    for node, behind in pairwise([*op.graph, None]):
        columns = node.outputs[0] if node.outputs else None
        if columns is None or marks.OPPOSITE not in columns.meta:
            continue
        uses = list(columns.uses())
        with op.at(behind):
            z = _half_difference(op, columns)
            both = op.set_type_like(op.Concat(op.Neg(z), z, axis=1), columns)
        both.meta[marks.OPPOSITE] = columns.meta.pop(marks.OPPOSITE)
        for user, index in uses:
            user.replace_input_with(index, both)
        replaced[columns] = both
    return {name: replaced.get(value, value) for name, value in predictions.items()}


def logits_of_two(op: Any, spec: LossSpec, prediction: ir.Value) -> ir.Value | None:
    """Return logits with softmax `prediction`, if that is the sigmoid of opposite scores (-z, z).

    scikit-learn's classifiers of two classes are exported with the coefficients of both, which are
    opposite numbers, as their gradients then are: the softmax of (-d, d) / 4, d the difference of
    the scores. The losses of each sigmoid alone would not keep them so.
    """
    node = made_by(before_casts(prediction), "Sigmoid")
    left_open = spec.activation == "Softmax" and spec.all_options.get("from_logits") is None
    scores = node.inputs[0] if node is not None and left_open else None
    if scores is None or marks.OPPOSITE not in scores.meta:
        return None
    z = _half_difference(op, scores)
    logits = op.set_type_like(op.Concat(z * -0.5, z * 0.5, axis=1), prediction)
    logits.name = op.name(f"{prediction.name}_logits")
    logger.info("%r holds the probabilities of two classes, of opposite scores", prediction.name)
    return logits


def _half_difference(op: Any, columns: ir.Value) -> ir.Value:
    """Write half of the second column less the first one."""
    first, second = op.emit_many("Split", [columns], {"axis": 1, "num_outputs": 2}, outputs=2)
    return (second - first) * 0.5
