"""Why a score does not depend differentiably on a value: the nodes that end every path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxgrad.errors import node_text
from onnxgrad.graph.operators import operator_of
from onnxgrad.graph.shapes import is_real
from onnxgrad.graph.traversal import dependents, nodes_behind, reads

_SHOWN = 3  # nodes in one message


def smooth_values(graph: ir.Graph, starts: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the floats that depend differentiably on `starts`, which are among them."""
    values = set(starts)
    for node in graph:
        if operator_of(node).no_gradient or values.isdisjoint(reads(node)):
            continue
        values.update(y for y in node.outputs if y.dtype is None or is_real(y))
    return values


def require_differentiable(graph: ir.Graph, wrt: Sequence[ir.Value], y: ir.Value) -> None:
    """Raise unless `y` depends differentiably on every value of `wrt`, and say what ends paths."""
    for x in wrt:
        values = smooth_values(graph, [x])
        if y in values:
            continue
        if y not in dependents(graph, [x]):
            raise ValueError(
                f"{y.name!r} does not depend on {x.name!r}: its attributions would all be zero; "
                "leave it out of `wrt`"
            )
        behind = nodes_behind([y])
        ends = [
            node_with_reason(node)
            for node in graph
            if node in behind
            and not values.isdisjoint(reads(node))
            and values.isdisjoint(node.outputs)
        ]
        raise ValueError(
            f"no differentiable path from {x.name!r} to {y.name!r}: every attribution would be "
            f"zero. What ends the paths: {'; '.join(ends[:_SHOWN])}. Name as `output` a value in "
            "front of it, as the scores before an ArgMax, or use `occlusion`, which needs no "
            "gradient"
        )


def node_with_reason(node: ir.Node) -> str:
    """Return a node for messages, with the reason if it has no gradient."""
    reason = operator_of(node).no_gradient
    return node_text(node) + (f", {reason}" if reason else "")
