"""Nodes with very many inputs or outputs, as trees.

onnxruntime creates a session in time quadratic in the width of a node: that of a step with 2,000
packed weights in 14 s, with trees in 6 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import constant, dims, static
from onnxgrad.native.phases import WIDTH

_WIDTH = 64


@rewrites("Concat", group=WIDTH)
def narrow_concat(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """A Concat of more than 64 parts is a tree of Concats."""
    parts: list[Any] = list(node.inputs)
    if len(parts) <= _WIDTH:
        return None
    axis = node.attributes.get_int("axis", 0)
    while len(parts) > _WIDTH:
        groups = (parts[i : i + _WIDTH] for i in range(0, len(parts), _WIDTH))
        parts = [op.Concat(*group, axis=axis) for group in groups]
    return [op.Concat(*parts, axis=axis)]


@rewrites("Split", group=WIDTH)
def narrow_split(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """A Split into more than 64 parts is a tree of Splits."""
    axis = node.attributes.get_int("axis", 0)
    if len(node.outputs) <= _WIDTH or (sizes := _lengths(node, axis)) is None:
        return None
    return _split(op, node.inputs[0], sizes, axis)


def _lengths(split: ir.Node, axis: int) -> np.ndarray | None:
    """Return the lengths of the parts of a Split if they are known, else None."""
    if len(split.inputs) > 1:
        return constant(split.inputs[1])
    shapes = [dims(y) for y in split.outputs]
    lengths = static(tuple(None if shape is None else shape[axis] for shape in shapes))
    return None if lengths is None else np.array(lengths)


def _split(op: Emit, v: Any, sizes: np.ndarray, axis: int) -> list[ir.Value]:
    if len(sizes) <= _WIDTH:
        return op.emit_many("Split", [v, sizes], {"axis": axis}, outputs=len(sizes))
    groups = [sizes[i : i + _WIDTH] for i in range(0, len(sizes), _WIDTH)]
    wholes = _split(op, v, np.array([group.sum() for group in groups]), axis)
    pairs = zip(wholes, groups, strict=True)
    return [part for whole, group in pairs for part in _split(op, whole, group, axis)]
