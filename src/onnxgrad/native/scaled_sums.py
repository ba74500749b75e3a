"""Sums x + s y with a number s: one pass over memory instead of two.

`com.microsoft.GatedAdd` rounds the product as a Mul does, so that no bit changes. For 65,536
elements it takes a third of the time of a Mul and an Add, and for a few no more than one of them.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import dims, static
from onnxgrad.graph.traversal import made_by
from onnxgrad.native.phases import PLAIN

_DOMAIN = "com.microsoft"
_HAS_IT = tuple(int(n) for n in ort.__version__.split(".")[:2]) >= (1, 32)


@rewrites("Add", group=PLAIN)
def scaled_sum(op, node):
    """x + s y of vectors of one length, as the update of weights writes it."""
    shape = static(dims(node.outputs[0]))
    if not _HAS_IT or shape is None or len(shape) != 1 or 0 in shape:
        return None
    if node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    for x, product in (node.inputs, node.inputs[::-1]):
        mul = made_by(product, "Mul")
        for y, s in () if mul is None else (mul.inputs, mul.inputs[::-1]):
            if dims(x) == dims(y) == shape and static(dims(s)) in ((), (1,)) and shape != (1,):
                op.root.graph.opset_imports[_DOMAIN] = 1
                return [op.emit("GatedAdd", [x, y, _as_vector(op, s)], {}, domain=_DOMAIN)]
    return None


def _as_vector(op: Emit, s: Any) -> ir.Value:
    """Return the number `s` in the shape (1,), from the graph that has it."""
    while s.graph is not op.graph and isinstance(op.outer, Emit):
        op = op.outer
    return s if len(dims(s) or ()) else op.Unsqueeze(s, [0])
