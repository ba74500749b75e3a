"""The nodes, subgraphs and names of a `ModelProto`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the subgraphs of `node`."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH and attribute.HasField("g"):
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield `nodes`, each followed by the nodes of its subgraphs, at any depth."""
    stack = [iter(nodes)]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            continue
        yield node
        stack.append(chain.from_iterable(graph.node for graph in subgraphs(node)))


def nodes_of(model: ModelProto) -> list[NodeProto]:
    """Return the nodes of `model`, those of subgraphs and local functions too."""
    return [n for graph in (model.graph, *model.functions) for n in all_nodes(graph.node)]


def graphs_of(model: ModelProto, nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """Yield the main graph, and the subgraphs of `nodes`, which are those of `nodes_of`."""
    yield model.graph
    for node in nodes:
        yield from subgraphs(node)


def own_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the values of `graph`, without those of its subgraphs."""
    yield from (x.name for x in (*graph.input, *graph.initializer))
    yield from (s.values.name for s in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output


def names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values of `graph` and its subgraphs."""
    yield from own_names(graph)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from names(inner)
