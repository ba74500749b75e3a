"""What is removed before a model is handed out."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.reads import subgraphs


def tidy(model: ir.Model) -> None:
    """Remove, in place, the nodes and constants that no output needs.

    The nodes of the main graph are removed at once: the pass takes one by one, asks for the list of
    outputs each time, and stumbles over branches that still read what it removes.
    """
    drop_unused(model.graph)
    RemoveUnusedNodesPass()(model)


def drop_unused(graph: ir.Graph) -> None:
    """Remove, in place, the nodes that no output of `graph` needs."""
    needed: set[ir.Value | None] = set(graph.outputs)
    unused = []
    for node in reversed(graph):
        inner = [n for held in subgraphs(node) for n in held.all_nodes()]
        if needed.isdisjoint(node.outputs):
            unused.append(node)
            for n in inner:
                n.resize_inputs(0)
        else:
            needed.update(node.inputs, *(n.inputs for n in inner))
            needed.update(*(held.outputs for held in subgraphs(node)))
    graph.remove(unused, safe=True)


def free(graph: ir.Graph, names: Collection[str | None]) -> None:
    """Rename the results of these names that nothing reads: the `label` beside probabilities."""
    for node in graph:
        keeps = node.domain == "ai.onnx.ml" and not node.name  # its weights are named after it
        for y in node.outputs:
            if y.name in names and not (keeps or y.uses() or y.is_graph_output()):
                y.name = Emit(graph).name(str(y.name))
