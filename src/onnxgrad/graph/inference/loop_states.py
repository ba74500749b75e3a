"""The subgraphs of Loops and Scans, as inference needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, rank
from onnxgrad.graph.traversal import all_nodes, subgraphs

RANKS = "onnxgrad.ranks"  # `meta` key of the body of a Scan: the declared ranks of its outputs


def note_ranks(nodes: Iterable[ir.Node]) -> None:
    """Record the declared ranks of the outputs of Scan bodies, which onnxruntime needs."""
    for node in nodes:
        if (node.domain, node.op_type) == ("", "Scan"):
            body = node.attributes["body"].as_graph()
            body.meta[RANKS] = [rank(y) for y in body.outputs]


def give_scalars(graph: ir.Graph) -> None:
    """Let the bodies of Loops take their number and condition as scalars, in place.

    onnxruntime passes tensors of the declared shape, (1,) in files of PyTorch: their nodes get the
    scalar reshaped.
    """
    for node in all_nodes(graph):
        if (node.domain, node.op_type) != ("", "Loop"):
            continue
        body = node.attributes["body"].as_graph()
        for i, x in enumerate(body.inputs[:2]):
            if dims(x) == (1,):
                op = Emit(body, outer=Emit(graph))
                scalar = ir.Value(name=op.name(str(x.name)), type=x.type, shape=ir.Shape(()))
                body.inputs[i] = scalar
                with op.at(next(iter(body), None)):
                    reshaped = op.Reshape(scalar, [1])
                ir.convenience.replace_all_uses_with(x, reshaped, replace_graph_outputs=True)


def forget_declared(nodes: Iterable[ir.Node]) -> None:
    """Remove the declared shapes of inputs and outputs of subgraphs: exporters write wrong ones."""
    for node in nodes:
        for graph in subgraphs(node):
            for value in (*graph.inputs, *graph.outputs):
                value.shape = None
        if (node.domain, node.op_type) == ("", "Loop"):
            inputs = node.attributes["body"].as_graph().inputs
            for x, dtype in zip(inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
                x.shape, x.dtype = ir.Shape(()), dtype


def states(node: ir.Node) -> Iterator[tuple]:
    """Yield four values for each state of a Loop, nothing for other nodes.

    They are its initial value, an input and an output of the body, and an output of the Loop.
    """
    if (node.domain, node.op_type) == ("", "Loop"):
        body, starts = node.attributes["body"].as_graph(), node.inputs[2:]
        n = len(starts)
        ends, results = body.outputs[1:][:n], node.outputs[:n]
        yield from zip(starts, body.inputs[2:], ends, results, strict=True)
