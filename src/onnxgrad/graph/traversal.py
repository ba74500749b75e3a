"""The subgraphs of a node, and the values that it reads: its inputs and captured values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir

_SEARCHED = 400  # the most values that `depends_on` visits


def reads(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of `node`, then the values that its subgraphs capture, each once."""
    inputs = dict.fromkeys([v for v in node.inputs if v is not None])
    # most nodes have no attributes, and so no subgraphs
    return list(inputs | dict.fromkeys(captured(node)) if node.attributes.data else inputs)


def captured(node: ir.Node) -> list[ir.Value]:
    """Return the values that the subgraphs of `node` capture from outside, each once.

    They are in the order in which the nodes of the subgraphs, at any depth, read them. An outer
    value that a subgraph returns without a node in between is not among them.
    """
    own: set[ir.Value] = set()
    inputs: dict[ir.Value, None] = {}
    for subgraph in subgraphs(node):
        own.update(subgraph.inputs, subgraph.initializers.values())
        for n in all_nodes(subgraph):
            own.update(n.outputs)
            for nested in subgraphs(n):
                own.update(nested.inputs, nested.initializers.values())
            inputs |= dict.fromkeys(v for v in n.inputs if v is not None)
    return [v for v in inputs if v not in own]


def all_nodes(graph: ir.Graph | ir.Function) -> list[ir.Node]:
    """Return the nodes of `graph`, each before the nodes of its subgraphs."""
    nodes = []
    for node in graph:
        nodes.append(node)
        if node.attributes.data:  # most have none
            for subgraph in subgraphs(node):
                nodes += all_nodes(subgraph)
    return nodes


def conditional_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes in branches of If nodes, which do not run for every input."""
    branches = (b for n in all_nodes(graph) if n.op_type == "If" for b in subgraphs(n))
    return {node for branch in branches for node in all_nodes(branch)}


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs among the attributes of `node`, not those nested in their nodes."""
    for attribute in node.attributes.data.values():  # without the slow views of a UserDict
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def all_names(graph: ir.Graph) -> set[str]:
    """Return the names of all values of `graph` and of its subgraphs at any depth."""
    names, graphs = set[str](), [graph]
    for g in graphs:  # the loop appends to it
        names.update(v.name for v in (*g.inputs, *g.initializers.values()) if v.name)
        for node in g:
            names.update([y.name for y in node.outputs if y.name])
            if node.attributes.data:
                graphs += subgraphs(node)
    return names


def nodes_behind(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes that `values` depend on."""
    nodes: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += reads(node)
    return nodes


def nodes_after(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> list[ir.Node]:
    """Return the `nodes`, in topological order, that depend on any of `values`."""
    after, found = set(values), []
    for node in nodes:
        if not after.isdisjoint(reads(node)):
            found.append(node)
            after.update(node.outputs)
    return found


def dependents(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """Return `values`, and the results of the `nodes` that depend on any of them."""
    values = list(values)
    return {*values, *(y for node in nodes_after(nodes, values) for y in node.outputs)}


def depends_on(value: ir.Value, wanted: set[ir.Value]) -> bool:
    """Return whether `value` is computed from all of `wanted`, through at most a few hundred
    values.
    """
    missing, queue, seen = set(wanted), [value], {value}
    while missing and queue and len(seen) < _SEARCHED:
        node = queue.pop(0).producer()
        for x in () if node is None else node.inputs:
            if x is not None and x not in seen:
                seen.add(x)
                missing.discard(x)
                if x not in wanted:
                    queue.append(x)
    return not missing


def attribute_key(attr: ir.Attr) -> Any:
    """Return the name and a hashable form of the value of an attribute, to compare attributes."""
    value = attr.value
    if isinstance(value, (list, tuple)):
        value = tuple(value)
    elif attr.type == ir.AttributeType.TENSOR:
        value = (value.dtype, tuple(value.shape), value.tobytes())
    return attr.name, value
