"""What is removed before a model is handed out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import subgraphs

_MANY = 64  # inputs of a node


def tidy(model: ir.Model) -> None:
    """Remove, in place, the nodes and constants that no output needs.

    The nodes of the main graph are removed at once: the pass takes one by one, asks for the list of
    outputs each time, and stumbles over branches that still read what it removes.
    """
    drop_unused(model.graph)
    RemoveUnusedNodesPass()(model)


def drop_unused(graph: ir.Graph) -> None:
    """Remove, in place, the nodes that no output of `graph` needs, in graphs that nodes hold too.

    What a removed node held lets go of what it has read, which could not be removed otherwise.
    """
    needed: set[ir.Value | None] = set(graph.outputs)
    unused = []
    for node in reversed(graph):
        if needed.isdisjoint(node.outputs):
            unused.append(node)
            release(subgraphs(node))
        else:
            needed.update(node.inputs)
            for held in subgraphs(node):
                drop_unused(held)
                needed.update(held.outputs, *(n.inputs for n in held.all_nodes()))
    for node in unused:
        detach(node)
    graph.remove(unused, safe=True)


def release(graphs: Iterable[ir.Graph]) -> None:
    """Let graphs that nothing will hold read nothing any more."""
    for node in (node for graph in graphs for node in graph.all_nodes()):
        detach(node)


def detach(node: ir.Node) -> None:
    """Let `node` read nothing any more.

    onnx_ir copies all inputs for each one that it removes, which is too slow for thousands.
    """
    if len(node.inputs) < _MANY or not hasattr(ir.Value, "_remove_usage"):
        node.resize_inputs(0)
        return
    for i, x in enumerate(node.inputs):
        if x is not None:
            x._remove_usage(node, i)
    node._inputs = ()


def free(graph: ir.Graph, names: Collection[str | None]) -> None:
    """Rename the results of these names that nothing reads: the `label` beside probabilities."""
    for node in graph:
        keeps = node.domain == "ai.onnx.ml" and not node.name  # its weights are named after it
        for y in node.outputs:
            if y.name in names and not (keeps or y.uses() or y.is_graph_output()):
                y.name = Emit(graph).name(str(y.name))
