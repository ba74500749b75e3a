"""What a node reads: its inputs, and what the graphs that it holds take from around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir
from onnx_ir.analysis import analyze_implicit_usage


def reader(graph: ir.Graph) -> Callable[[ir.Node], list[ir.Value]]:
    """Return the function that lists what a node of `graph`, as it is now, reads."""
    captured = analyze_implicit_usage(graph)

    def reads(node: ir.Node) -> list[ir.Value]:
        inner = (v for g in subgraphs(node) for v in captured.get(g, ()))
        return [v for v in (*node.inputs, *inner) if v is not None]

    return reads


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs that `node` holds as attributes."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()
