"""Predictions whose columns are not the scores of classes that they look like.

Lowerings say so of the scores of support vector machines; votes and opposite columns are read from
the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import named
from onnxgrad.graph.operators import NOT_CLASSES, OPPOSITE, VIEWS
from onnxgrad.graph.shapes import constant, is_real
from onnxgrad.losses.spec import LossSpec
from onnxgrad.losses.value_range import stripped, value_range
from onnxgrad.reporting import logger

_OF_FIRST = VIEWS | frozenset("Expand Gather Slice Split Tile Transpose".split())
_OF_ALL = frozenset("Add Concat Max Min Mul Neg ReduceSum Sub Sum".split())
_STEPS = frozenset("Ceil Floor Hardmax OneHot Round Sign".split())


def refuse_other_columns(spec: LossSpec, prediction: ir.Value) -> None:
    """Raise `ValueError` if the loss takes class indices, and the columns are not of the classes.

    It does not if the user said what the columns are, by `from_logits`.
    """
    said = spec.all_options.get("from_logits") is not None
    of_classes = spec.activation == "Softmax" or spec.label_kind.dtype is not None
    x: ir.Value | None = prediction
    while x is not None and of_classes and not said:
        if NOT_CLASSES in x.meta:
            raise ValueError(f"{prediction.name!r} {x.meta[NOT_CLASSES]}")
        node = x.producer()
        x = node.inputs[0] if node is not None and node.op_type in ("Identity", "Cast") else None


def scores_of_votes(spec: LossSpec, prediction: ir.Value) -> ir.Value:
    """Return the sums of scores of a prediction that adds votes to them, else the prediction.

    skl2onnx writes classifiers of pairs so: votes + s / (3 (|s| + 1)), s the sums of the scores of
    the pairs. Votes are steps, and the other term is less than 1 / 3: so the loss is computed from
    s, which orders the classes as the votes do, save ties.

    Raises:
        ValueError: the scores are probabilities, whose sums do not order the classes.
    """
    node = stripped(prediction).producer()
    if spec.activation != "Softmax" or spec.all_options.get("from_logits") is not None:
        return prediction
    if node is None or node.domain or node.op_type not in ("Add", "Sum") or len(node.inputs) != 2:
        return prediction
    operands = [v for v in node.inputs if v is not None]
    votes = [v for v in operands if _is_steps(v)]
    if len(operands) != 2 or len(votes) != 1:
        return prediction
    scores = _before_squashing(next(v for v in operands if v is not votes[0]))
    low, high = value_range(scores)
    where = f"{node.op_type} (node {node.name!r})"
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


def _is_steps(x: ir.Value, depth: int = 32) -> bool:
    """Return whether `x` depends on data, and only by comparisons, labels and the like."""
    seen = _steps(x, depth)
    return seen is True


def _steps(x: ir.Value | None, depth: int) -> bool | None:
    """Return None for constants, True for steps, False for others."""
    if x is None or constant(x) is not None:
        return None
    node = x.producer()
    if node is None or node.domain or depth == 0:
        return False
    if node.op_type == "Constant":
        return None
    if node.op_type in _STEPS:
        return True
    if node.op_type == "Cast" and node.inputs[0] is not None:
        return _steps(node.inputs[0], depth - 1) if is_real(node.inputs[0]) else True
    if node.op_type in _OF_FIRST:
        return _steps(node.inputs[0], depth - 1)
    if node.op_type not in _OF_ALL:
        return False
    parts = {_steps(v, depth - 1) for v in node.inputs}
    return False if False in parts else (True if True in parts else None)


def _before_squashing(x: ir.Value) -> ir.Value:
    """Return s if `x` is s / (c (|s| + 1)), else `x`."""
    node = stripped(x).producer()
    if node is None or node.domain or node.op_type != "Div" or node.inputs[0] is None:
        return x
    s, waiting = node.inputs[0], [node.inputs[1]]
    for v in waiting:  # the loop appends to it
        inner = None if v is None else v.producer()
        if inner is not None and inner.op_type == "Abs" and inner.inputs[0] is s:
            return s
        if inner is not None and inner.op_type in ("Add", "Mul", "Sum") and len(waiting) < 32:
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
    nodes = list(op.graph)
    for node, behind in zip(nodes, [*nodes[1:], None], strict=True):
        columns = node.outputs[0] if node.outputs else None
        if columns is None or OPPOSITE not in columns.meta:
            continue
        uses = list(columns.uses())
        with op.at(behind):
            halves = op.emit_many("Split", [columns], {"axis": 1, "num_outputs": 2}, outputs=2)
            z = (halves[1] - halves[0]) * 0.5
            both = op.set_type_like(op.Concat(op.Neg(z), z, axis=1), columns)
        both.shape, both.meta[OPPOSITE] = columns.shape, True
        del columns.meta[OPPOSITE]
        for user, index in uses:
            user.replace_input_with(index, both)
        replaced[columns] = both
    return {name: replaced.get(value, value) for name, value in predictions.items()}
