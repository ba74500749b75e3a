"""Emitters of new graphs, and the order of the nodes that they write."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads


def emitter_of(*inputs: ir.Value) -> Emit:
    """Return an emitter into a new graph with these inputs."""
    return Emit(ir.Graph(list(inputs), [], nodes=[], opset_imports={"": 20}, name="g"))


def assert_ordered(graph: ir.Graph, known: frozenset[ir.Value] = frozenset()) -> None:
    """Assert that every node stands behind those that compute what it reads."""
    seen = {*known, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        assert seen.issuperset(reads(node)), node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                assert_ordered(attribute.as_graph(), frozenset(seen))
        seen.update(node.outputs)
    assert seen.issuperset(graph.outputs)
