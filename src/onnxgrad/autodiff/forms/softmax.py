"""Gradients of Softmax where the model replaces rows of NaN."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.operators import marks, operator_of
from onnxgrad.operators.elementwise import softmax


def zero_replaced_rows(op: Any, written: Sequence[ir.Node]) -> None:
    """Let dx = y (g - sum(g y)) read y = 0 for NaN, where a Where replaces y.

    y is NaN in rows where all of x is -inf, as exported attention has where all keys are masked.
    The cotangent of such a row is 0, but 0 * NaN is NaN. To guard every Softmax would cost two
    nodes of the size of y. The cotangent does not tell: Clip and Dropout, which need no guard, mask
    it as Where does.

    A sweep calls this with the nodes that it wrote, as later the Where may be gone, and another
    sweep may follow.
    """
    readers = defaultdict(list)  # of the result of each Softmax, in its gradient
    for node in written:
        primal = node.meta.get(marks.PRIMAL)
        if primal is None or operator_of(primal).rule is not softmax:
            continue
        if (y := primal.outputs[0]) in node.inputs:
            readers[y].append(node)
    for y, nodes in readers.items():
        if _is_selected(y):
            with op.at(nodes[0]):
                zeroed = op.Where(op.IsNaN(y), 0.0, y)
            for node in nodes:
                node.replace_input_with(node.inputs.index(y), zeroed)


def _is_selected(y: ir.Value) -> bool:
    """Return whether a Where reads `y`, directly or through a Cast."""
    consumers = [consumer for consumer, _ in y.uses()]
    casts = [consumer for consumer in consumers if consumer.op_type == "Cast"]
    consumers += [consumer for cast in casts for consumer, _ in cast.outputs[0].uses()]
    return any(consumer.op_type == "Where" for consumer in consumers)
