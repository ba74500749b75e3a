"""Nodes that need not be written, since an operand is what they would return."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.shapes import broadcast, dims, equal, static


def equal_operand(op: Any, op_type: str, values: list, attributes: dict) -> ir.Value | None:
    """Return the operand that the output is proven to equal, or None."""
    if op_type == "Mul":
        for x, other in (values, values[::-1]):
            if equal(broadcast(dims(x), dims(other)), dims(other)) and op.is_all(x, 1):
                return other
    if op_type == "Cast" and values[0].dtype == attributes["to"]:
        return values[0]
    if op_type == "Reshape" and (target := op.known_value(values[1])) is not None:
        return values[0] if static(dims(values[0])) == tuple(target) else None
    return None
