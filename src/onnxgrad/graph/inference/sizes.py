"""Sizes that exporters compute at run time though they follow from the shapes that are inferred."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.walk import Walk
from onnxgrad.graph.traversal import conditional_nodes, subgraphs
from onnxgrad.operators.elements import INTEGERS, Elements
from onnxgrad.operators.outputs import output_shape
from onnxgrad.operators.shapes import dims, static


def fold_sizes(graph: ir.Graph, walk: Walk) -> None:
    """Write what is computed from static lengths as constants, and complete shapes on the way.

    An exporter writes `view(x.shape[0], 64, 8, 32)` as a chain of Shape, Gather, Unsqueeze and
    Concat. Its result becomes a constant, in which 0 or -1 stands for the symbolic dimension, if it
    is proven that onnxruntime infers the same one. In subgraphs, only conditions of an If become
    constants. The nodes that are no longer needed stay in the graph. `walk` has inferred the graph.
    """
    _fold(Emit(graph), walk)


def _fold(op: Emit, walk: Walk) -> None:
    for node in list(op.graph):
        for body in subgraphs(node):
            _fold(Emit(body, outer=op), walk)
        fold_node(walk, op, node)


def fold_node(walk: Walk, op: Emit, node: ir.Node) -> None:
    """Let what reads the result of `node` read a constant, if all of its elements are known.

    It is a rewrite that does not apply. Nodes in a branch of an If keep reading the result: where
    they cannot run, because the condition excludes it, onnxruntime may refuse the constant.
    """
    if not node.outputs:
        return
    y = node.outputs[0]
    elements = walk.elements.get(y)
    if elements is None:
        if op.outer is None and node.op_type == "Reshape" and not node.domain:
            _fold_target(op, node, walk.elements)
        return
    if y.dtype not in INTEGERS or not all(isinstance(e, int) for e in elements.flat):
        return
    assert y.dtype is not None
    number = op.const(elements.astype(y.dtype.numpy()))
    for reader, i in list(y.uses()):
        always_runs = op.outer is None and not _is_conditional(op.graph, reader)
        if reader.op_type == "If" or always_runs:
            reader.replace_input_with(i, number)


def _is_conditional(graph: ir.Graph, node: ir.Node) -> bool:
    """Return whether `node`, of `graph` or its subgraphs, is in a branch of an If."""
    return node.graph is not graph and node in conditional_nodes(graph)


def _fold_target(op: Emit, node: ir.Node, elements: dict[ir.Value, Elements]) -> None:
    """Write the shape of a Reshape as a constant, if its symbolic dimensions can be inferred."""
    x, target = node.inputs[:2]
    wanted, shape = None if target is None else elements.get(target), dims(x)
    if wanted is None or shape is None or None in wanted or static(tuple(wanted)) is not None:
        return
    if node.attributes.get_int("allowzero", 0) or 0 in wanted:
        return
    numbers = [
        d if isinstance(d, int) else 0 if i < len(shape) and shape[i] == d else -1
        for i, d in enumerate(wanted)
    ]
    if numbers.count(-1) > 1:
        return
    result = output_shape("Reshape", [x, op.const(numbers)], {})
    if result is not None and all(w in (-1, d) for w, d in zip(wanted, result, strict=True)):
        node.replace_input_with(1, op.const(numbers))
        node.outputs[0].shape = ir.Shape(result)
