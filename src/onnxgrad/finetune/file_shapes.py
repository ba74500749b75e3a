"""Shapes and types that a file states, restored after shapes were inferred for a decision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.graph.traversal import all_nodes


@dataclass
class Stated:
    """What a file states of a value."""

    name: str | None
    shape: ir.Shape | None
    type: ir.TypeProtocol | None


def stated_types(graph: ir.Graph) -> dict[ir.Value, Stated]:
    """Return what the file states of the values of `graph` and its subgraphs."""
    return {
        v: Stated(v.name, None if v.shape is None else v.shape.copy(), v.type)
        for v in all_values(graph)
    }


def all_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of `graph`, then those of its subgraphs that no node computes."""
    results = [y for node in all_nodes(graph) for y in node.outputs]
    inner = [v for g in graph.subgraphs() for v in (*g.inputs, *g.initializers.values())]
    return [*dict.fromkeys([*graph.inputs, *graph.initializers.values(), *results, *inner])]


def restore(values: dict[ir.Value, Stated], changed: Collection[ir.Value] = ()) -> None:
    """Set what the file states again, except for values that have `changed`."""
    for v, before in values.items():
        if v not in changed:
            v.shape, v.type = before.shape, before.type
