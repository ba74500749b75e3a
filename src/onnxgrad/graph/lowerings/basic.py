"""What does nothing is dropped, and what would make a rule long is rewritten."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.lowerings.registry import lowering
from onnxgrad.graph.shapes import dims, equal, rank


@lowering("Identity")
@lowering("Cast")
@lowering("Reshape")
@lowering("Dropout")
def no_operation(op: Emit, node: Any) -> list[ir.Value] | None:
    """A node that hands on its input is dropped, unless it makes an output of the graph."""
    x, (y, *others) = node.inputs[0], node.outputs
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    same = {
        "Identity": True,
        "Cast": x.dtype is not None and x.dtype == y.dtype,
        "Reshape": equal(dims(x), dims(y)),
        "Dropout": not others and (training is None or op.is_all(training, False)),
    }[node.op_type]
    return [x] if same and y not in op.graph.outputs else None


@lowering("MatMul")
def matmul(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Rank one on either side becomes rank two, and the added axis is taken away again."""
    a, b = node.inputs
    if 1 not in (rank(a), rank(b)) or None in (rank(a), rank(b)):
        return None
    y = op.MatMul(
        op.Unsqueeze(a, [0]) if rank(a) == 1 else a, op.Unsqueeze(b, [1]) if rank(b) == 1 else b
    )
    axes = [-2] * (rank(a) == 1) + [-1] * (rank(b) == 1)
    return [op.Squeeze(y, axes)]
