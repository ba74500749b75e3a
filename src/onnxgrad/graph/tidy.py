"""Removal of nodes and initializers that no output needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.operators import marks


def tidy(model: ir.Model) -> None:
    """Remove, in place, the nodes, initializers and functions that no output needs.

    `drop_unused` goes first, and removes all unused nodes of a graph in one call: the pass of
    onnx_ir lists the outputs again for each one, and fails on values that a subgraph still reads.
    """
    drop_unused(model.graph)
    RemoveUnusedNodesPass()(model)
    if model.functions:
        RemoveUnusedFunctionsPass()(model)


def drop_unused(graph: ir.Graph, keep: Collection[str | None] = ()) -> None:
    """Remove, in place, the nodes that no output of `graph` needs, in its subgraphs too.

    Those that compute a value with a name of `keep` stay. The subgraphs of removed nodes are
    detached: a value that they capture still counts as used.
    """
    needed: set[ir.Value | None] = set(graph.outputs)
    unused = []
    for node in reversed(graph):
        kept = keep and any(y.name in keep for y in node.outputs)
        if not kept and needed.isdisjoint(node.outputs):
            unused.append(node)
            release(subgraphs(node))
        else:
            needed.update(node.inputs)
            for subgraph in subgraphs(node):
                drop_unused(subgraph, keep)
                needed.update(subgraph.outputs, *(n.inputs for n in all_nodes(subgraph)))
    for node in unused:
        detach(node)
    graph.remove(unused, safe=True)


def replace_value(
    op: Emit, old: ir.Value, new: ir.Value, keep: Collection[str | None] = ()
) -> ir.Value:
    """Let all nodes read `new` instead of `old`, and return it.

    It takes the name of a graph output, and of `old` if that is in `keep`; it is copied if it has
    a name to keep itself, or if no node that the package wrote into the graph computes it.
    """
    if has_name_to_keep(old, keep):
        node = new.producer()
        own = node is not None and node.graph is op.graph and op.is_own(node)
        if not own or has_name_to_keep(new, keep):
            new = op.copy_of(new)
        new.name, old.name = old.name, None
        new.shape, new.type = old.shape or new.shape, old.type or new.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.meta[marks.REPLACED] = new
    return new


def current(x: ir.Value) -> ir.Value:
    """Return what replaces `x` now, or `x` itself."""
    while marks.REPLACED in x.meta:
        x = x.meta[marks.REPLACED]
    return x


def has_name_to_keep(y: ir.Value, keep: Collection[str | None] = ()) -> bool:
    """Return whether `y` is an output of a graph, or has a name in `keep`."""
    return y.is_graph_output() or y.name in keep


def remove_node(node: ir.Node) -> None:
    """Remove a node whose results nothing reads from its graph.

    A safe removal looks at all outputs of the graph for each node: too slow for thousands.
    """
    detach(node)
    assert node.graph is not None
    node.graph.remove(node)


def release(graphs: Iterable[ir.Graph]) -> None:
    """Detach the inputs of all nodes in `graphs`, which are subgraphs that will be discarded."""
    for node in (node for graph in graphs for node in all_nodes(graph)):
        detach(node)


def detach(node: ir.Node) -> None:
    """Remove all inputs of `node`, so that it no longer counts as a user of them.

    `resize_inputs` copies all of them for each: too slow for thousands.
    """
    for i, x in enumerate(node.inputs):
        if x is not None:
            x._remove_usage(node, i)
    node._inputs = ()


def free(graph: ir.Graph, names: Collection[str | None]) -> None:
    """Rename unused results that have one of `names`, such as the `label` beside probabilities."""
    for node in graph:
        # the weights in attributes of an unnamed node are named after its first output
        names_weights = node.domain == "ai.onnx.ml" and not node.name
        for y in node.outputs:
            if y.name in names and not (names_weights or y.uses() or y.is_graph_output()):
                y.name = Emit(graph).name(str(y.name))
