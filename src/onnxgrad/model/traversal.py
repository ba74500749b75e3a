"""The nodes, subgraphs and names of a `ModelProto`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

GraphLike = GraphProto | FunctionProto  # graphs and functions both have nodes


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs in the attributes of `node`, such as the branches of an If."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH and attribute.HasField("g"):
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def walk_graphs(*graphs: GraphLike) -> Iterator[tuple[GraphLike, NodeProto | None]]:
    """Yield for each graph and each of its subgraphs (graph, None), followed by (graph, node) for
    each node of the graph.

    The subgraphs of a node come after the node. This takes a stack, and no recursion, as graphs may
    be nested deeper than Python allows.
    """
    stack = [chain.from_iterable(map(_graph_and_nodes, graphs))]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        yield entry
        if entry[1] is not None and (inner := [*subgraphs(entry[1])]):  # few nodes have any
            stack.append(chain.from_iterable(map(_graph_and_nodes, inner)))


def _graph_and_nodes(graph: GraphLike) -> Iterator[tuple[GraphLike, NodeProto | None]]:
    """Yield (graph, None), followed by (graph, node) for each node of `graph`, without
    subgraphs.
    """
    yield graph, None
    yield from ((graph, node) for node in graph.node)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield `nodes`, each followed by the nodes of its subgraphs, at any depth."""
    for node in nodes:
        yield node
        yield from (inner for _, inner in walk_graphs(*subgraphs(node)) if inner is not None)


def model_nodes(model: ModelProto) -> list[NodeProto]:
    """Return all nodes of `model`, including the nodes of subgraphs and local functions."""
    return [node for _, node in walk_graphs(model.graph, *model.functions) if node is not None]


def model_graphs(model: ModelProto) -> list[GraphProto]:
    """Return the main graph of `model` and all subgraphs, including the subgraphs in local
    functions.
    """
    return [g for g in all_graphs(model.graph, *model.functions) if isinstance(g, GraphProto)]


def all_graphs(*graphs: GraphLike) -> Iterator[GraphLike]:
    """Yield `graphs`, each followed by its subgraphs, at any depth."""
    return (graph for graph, node in walk_graphs(*graphs) if node is None)


def names_read_by(node: NodeProto) -> Iterator[str]:
    """Yield the names of the values that `node` reads or its subgraphs capture."""
    yield from node.input
    for graph in subgraphs(node):
        own = set(direct_value_names(graph))
        inner = chain(declared_names(graph.output), *map(names_read_by, graph.node))
        yield from (name for name in inner if name not in own)


def declared_names(values: Iterable[Any]) -> list[str]:
    """Return the names of the declared inputs or outputs `values` of a graph or a local function.

    A function has names only, a graph has types, too.
    """
    return [value if isinstance(value, str) else value.name for value in values]


def declared_values(graph: GraphLike) -> Iterator[tuple[str, str]]:
    """Yield pairs (kind, name) of the values of `graph`, where kind is "input", "initializer" or
    "result" (of a node).
    """
    yield from (("input", name) for name in declared_names(graph.input))
    if isinstance(graph, GraphProto):
        yield from (("initializer", t.name) for t in graph.initializer)
        yield from (("initializer", s.values.name) for s in graph.sparse_initializer)
    yield from (("result", name) for node in graph.node for name in node.output)


def direct_value_names(graph: GraphLike) -> Iterator[str]:
    """Yield the names of the values of `graph`, without the values of its subgraphs."""
    return (name for _, name in declared_values(graph))


def value_names(graph: GraphLike) -> Iterator[str]:
    """Yield the names of all values of `graph` and its subgraphs."""
    return (name for inner in all_graphs(graph) for name in direct_value_names(inner))


def names_read_in_graph(graph: GraphLike) -> set[str]:
    """Return the names of the values that are read by nodes, or returned as outputs, in `graph` and
    its subgraphs.
    """
    outputs = (name for inner in all_graphs(graph) for name in declared_names(inner.output))
    return {*outputs, *(name for node in all_nodes(graph.node) for name in node.input)}


def keep_only(entries: Any, condition: Callable[[Any], bool]) -> None:
    """Remove from a repeated protobuf field, in place, the entries for which `condition(entry)` is
    false.
    """
    # to extend an emptied field by the others would copy them, and free no memory before the model
    for i in reversed([i for i, entry in enumerate(entries) if not condition(entry)]):
        del entries[i]
