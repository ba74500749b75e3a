"""Operators that normalize along axes: Softmax, normalizations of layers; losses of classes."""

from __future__ import annotations

from typing import Any

from onnxgrad.operators.axes import (
    Answer,
    Place,
    axis_unless_named,
    first_operand,
    named_axes,
    row_axis,
)
from onnxgrad.operators.outputs import like_first
from onnxgrad.operators.records import Naming, declare_operators


def _axis_before_named(node: Any, _operand: int, axis: int) -> Place:
    named = named_axes(node)
    return None if named is None or axis >= named[0] else axis


def _axis_but_channels(node: Any, _operand: int, axis: int) -> Place:
    return None if axis == 1 or node.attributes.get_int("training_mode", 0) else axis


def _axis_of_loss(node: Any, operand: int, axis: int) -> Answer:
    # classes are along axis 1 of the scores; labels have no such axis, and weights no other
    if operand > 1 or (operand, axis) == (0, 1):
        return None
    loss = axis - 1 if operand == 0 and axis > 1 else axis
    scores = axis + 1 if operand == 1 and axis > 0 else axis
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    return (None if reduced else loss, scores)[: len(node.outputs)]


LAST = Naming("axis", default=lambda *_: [-1])
_CENTERED = Naming("axes", default=lambda *_: [0, 2, 3])
_unless_named = first_operand(axis_unless_named)

declare_operators(
    "LogSoftmax Softmax", "unary transcendental", shape=like_first, naming=LAST, axes=_unless_named
)
declare_operators("Hardmax LpNormalization", naming=LAST, axes=_unless_named)
declare_operators("MeanVarianceNormalization", naming=_CENTERED, axes=_unless_named)
declare_operators(
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization",
    "unary normalizes",
    shape=like_first,
)
declare_operators("RMSNormalization", "normalizes")
declare_operators(
    "LayerNormalization RMSNormalization", naming=LAST, axes=first_operand(_axis_before_named)
)
declare_operators("BatchNormalization", roles="xsor")
declare_operators("GroupNormalization InstanceNormalization LayerNormalization", roles="xso")
declare_operators("RMSNormalization SimplifiedLayerNormalization", roles="xs")
declare_operators("BatchNormalization LRN", axes=first_operand(_axis_but_channels))
declare_operators("GroupNormalization InstanceNormalization", axes=first_operand(row_axis))
declare_operators(
    "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", axes=_axis_of_loss, roles="c"
)
