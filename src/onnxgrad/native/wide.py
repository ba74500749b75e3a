"""Nodes with very many inputs or outputs, as trees.

onnxruntime creates a session in time quadratic in the width of a node: that of a step with 2,000
packed weights in 14 s, with trees in 6 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import constant, dims, static
from onnxgrad.native.phases import WIDTH

MOST_OPERANDS = 64


@rewrites("Concat", group=WIDTH)
def narrow_concat(op, node):
    """A Concat of more than 64 parts is a Concat of Concats; the driver visits it again."""
    axis, n = node.attributes.get_int("axis", 0), len(node.inputs)
    if n <= MOST_OPERANDS:
        return None
    groups = (node.inputs[i : i + MOST_OPERANDS] for i in range(0, n, MOST_OPERANDS))
    return [op.Concat(*(op.Concat(*group, axis=axis) for group in groups), axis=axis)]


@rewrites("Split", group=WIDTH)
def narrow_split(op, node):
    """A Split into more than 64 parts is a Split of Splits; the driver visits it again."""
    axis = node.attributes.get_int("axis", 0)
    if len(node.outputs) <= MOST_OPERANDS or (sizes := _lengths(node, axis)) is None:
        return None
    groups = [sizes[i : i + MOST_OPERANDS] for i in range(0, len(sizes), MOST_OPERANDS)]
    wholes = op.split(node.inputs[0], [sum(group) for group in groups], axis)
    pairs = zip(wholes, groups, strict=True)
    return [part for whole, group in pairs for part in op.split(whole, group, axis)]


def _lengths(split: ir.Node, axis: int) -> Sequence[int] | None:
    """Return the lengths of the parts of a Split if they are known, else None."""
    if len(split.inputs) > 1:
        lengths = constant(split.inputs[1])
        return None if lengths is None else lengths.tolist()
    shapes = [dims(y) for y in split.outputs]
    return static(tuple(None if shape is None else shape[axis] for shape in shapes))
