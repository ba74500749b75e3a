"""Emitters of new graphs, for tests of what they write."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit


def emitter_of(*inputs: ir.Value) -> Emit:
    """Return an emitter into a new graph with these inputs."""
    return Emit(ir.Graph(list(inputs), [], nodes=[], opset_imports={"": 20}, name="g"))
