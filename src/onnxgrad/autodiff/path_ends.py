"""Why a value does not depend differentiably on another: the nodes that end every path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxgrad.errors import node_text
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.operators import operator_of
from onnxgrad.operators.shapes import is_real

_SHOWN = 3  # nodes in one message


def smooth_values(graph: ir.Graph, starts: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the floats that depend differentiably on `starts`, which are among them."""
    values = set(starts)
    for node in graph:
        if operator_of(node).no_gradient or values.isdisjoint(reads(node)):
            continue
        values.update(y for y in node.outputs if y.dtype is None or is_real(y))
    return values


def path_ends(graph: ir.Graph, starts: Iterable[ir.Value], ends: Sequence[ir.Value]) -> str:
    """Return the nodes before `ends` that end all paths from `starts`, for messages; "" if none."""
    values, behind = smooth_values(graph, starts), nodes_behind(ends)
    found = [
        node_with_reason(node)
        for node in graph
        if node in behind and not values.isdisjoint(reads(node)) and values.isdisjoint(node.outputs)
    ]
    return f"What ends the paths: {'; '.join(found[:_SHOWN])}" if found else ""


def node_with_reason(node: ir.Node) -> str:
    """Return a node for messages, with the reason if it has no gradient."""
    reason = operator_of(node).no_gradient
    return node_text(node) + (f", {reason}" if reason else "")
