"""Nodes with very many inputs or outputs, as trees.

onnxruntime creates a session in time quadratic in the width of a node: that of a step with 2,000
packed weights in 14 s, with trees in 6 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import constant, dims, static
from onnxgrad.graph.tidy import drop_unused

_WIDTH = 64


def narrow(op: Emit, target: Any) -> None:
    """Rewrite each `Split` and `Concat` of more than 64 parts as a tree."""
    for node in list(op.graph):
        wide = max(len(node.inputs), len(node.outputs)) > _WIDTH
        if node.domain or not wide or any(y.is_graph_output() for y in node.outputs):
            continue
        axis = node.attributes.get_int("axis", 0)
        with op.at(node):
            if node.op_type == "Concat":
                parts = [_concatenated(op, list(node.inputs), axis)]
            elif node.op_type == "Split" and (sizes := _lengths(node, axis)) is not None:
                parts = _split(op, node.inputs[0], sizes, axis)
            else:
                continue
        for y, part in zip(node.outputs, parts, strict=True):
            ir.convenience.replace_all_uses_with(y, op.set_type_like(part, y))
    if op.wrote:
        drop_unused(op.graph)


def _lengths(split: ir.Node, axis: int) -> np.ndarray | None:
    """Return the lengths of the parts of a Split if they are known, else None."""
    if len(split.inputs) > 1:
        return constant(split.inputs[1])
    shapes = [dims(y) for y in split.outputs]
    lengths = static(tuple(None if shape is None else shape[axis] for shape in shapes))
    return None if lengths is None else np.array(lengths)


def _concatenated(op: Emit, parts: list[Any], axis: int) -> ir.Value:
    while len(parts) > _WIDTH:
        groups = (parts[i : i + _WIDTH] for i in range(0, len(parts), _WIDTH))
        parts = [op.Concat(*group, axis=axis) for group in groups]
    return op.Concat(*parts, axis=axis)


def _split(op: Emit, v: Any, sizes: np.ndarray, axis: int) -> list[ir.Value]:
    if len(sizes) <= _WIDTH:
        return op.emit_many("Split", [v, sizes], {"axis": axis}, outputs=len(sizes))
    groups = [sizes[i : i + _WIDTH] for i in range(0, len(sizes), _WIDTH)]
    wholes = _split(op, v, np.array([group.sum() for group in groups]), axis)
    pairs = zip(wholes, groups, strict=True)
    return [part for whole, group in pairs for part in _split(op, whole, group, axis)]
