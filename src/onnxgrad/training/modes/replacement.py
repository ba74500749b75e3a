"""Nodes of a graph and its subgraphs, and the replacement of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import remove_node, replace_value
from onnxgrad.graph.traversal import subgraphs


def walk(graph: ir.Graph, around: tuple[ir.Node, ...] = ()) -> Iterator[tuple[ir.Node, tuple]]:
    """Yield each node of `graph` and its subgraphs with the nodes that contain it, outermost first.

    The graph may be modified at nodes that were yielded.
    """
    for node in list(graph):
        yield node, around
        for subgraph in subgraphs(node):
            yield from walk(subgraph, (*around, node))


def describe(node: ir.Node) -> str:
    """Return the operator, name and first output of `node`, for messages."""
    return f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r})"


def emitter(op: Emit, graph: ir.Graph | ir.Function | None) -> Emit:
    """Return an emitter of `graph`, the main graph of `op` or a subgraph of it."""
    assert isinstance(graph, ir.Graph)
    return op if graph is op.graph else Emit(graph, outer=op)


def replace(op: Emit, node: ir.Node, results: Sequence[ir.Value]) -> None:
    """Replace `node` by nodes that compute `results`, which take over the names of its outputs."""
    for old, new in zip(node.outputs, results, strict=False):
        replace_value(op, old, new, keep=() if new in node.inputs else (old.name,))
    remove_node(node)
