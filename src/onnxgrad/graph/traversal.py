"""What a node reads: its inputs, and what the graphs that it holds take from around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir


def reads(node: ir.Node) -> list[ir.Value]:
    """Return what `node` reads, each value once, in the order of the graph."""
    inputs = dict.fromkeys(v for v in node.inputs if v is not None)
    return list(inputs | dict.fromkeys(captured(node)))


def captured(node: ir.Node) -> list[ir.Value]:
    """Return what the graphs that `node` holds take from around it, each value once, in order."""
    own: set[ir.Value] = set()
    taken: dict[ir.Value, None] = {}
    for held in subgraphs(node):
        own.update(held.inputs, held.initializers.values())
        for n in held.all_nodes():
            own.update(n.outputs)
            for inner in subgraphs(n):
                own.update(inner.inputs, inner.initializers.values())
            taken |= dict.fromkeys(v for v in n.inputs if v is not None)
    return [v for v in taken if v not in own]


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs that `node` holds as attributes."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def all_names(graph: ir.Graph) -> set[str]:
    """Return the names of the values of `graph`, and of the graphs inside of its nodes."""
    names = {v.name for node in graph.all_nodes() for v in node.outputs if v.name}
    for g in (graph, *graph.subgraphs()):
        names.update(v.name for v in (*g.inputs, *g.initializers.values()) if v.name)
    return names


def attribute_key(attr: ir.Attr) -> Any:
    """Return what is the same for attributes that say the same."""
    value = attr.value
    if isinstance(value, (list, tuple)):
        value = tuple(value)
    elif attr.type == ir.AttributeType.TENSOR:
        value = (value.dtype, tuple(value.shape), value.tobytes())
    return attr.name, value
