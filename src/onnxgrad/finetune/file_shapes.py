"""Shapes and types that a file states, restored after shapes were inferred for a decision."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.graph.traversal import all_nodes


def stated_types(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Return the stated name, shape and type of each value of `graph` and its subgraphs."""
    return {
        v: ir.Value(name=v.name, shape=None if v.shape is None else v.shape.copy(), type=v.type)
        for v in all_values(graph)
    }


def all_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of `graph`, then inputs and initializers of its subgraphs."""
    results = [y for node in all_nodes(graph) for y in node.outputs]
    inner = [v for g in graph.subgraphs() for v in (*g.inputs, *g.initializers.values())]
    return [*dict.fromkeys([*graph.inputs, *graph.initializers.values(), *results, *inner])]


def restore(values: dict[ir.Value, ir.Value], changed: Collection[ir.Value] = ()) -> None:
    """Set the stated shapes and types again, except for values that have `changed`."""
    for v, before in values.items():
        if v not in changed:
            v.shape, v.type = before.shape, before.type
