"""Nodes that need not be written: what `Emit` returns instead of them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.shapes import broadcast, dims, equal, static
from onnxgrad.graph.types import output_shape


def simplified(op: Any, op_type: str, values: list, attributes: dict) -> ir.Value | None:
    """Return a value proven to equal the output, by no node or a cheaper one; or None."""
    if op_type == "Mul":
        a, b = values
        for x, other in ((a, b), (b, a)):
            if equal(broadcast(dims(x), dims(other)), dims(other)) and op.is_all(x, 1):
                return other
            inner = _expanded(x)  # Mul broadcasts: no Expand needed
            if inner is not None and equal(dims(x), dims(other)):
                return op.Mul(inner, other)
    if op_type == "Cast" and values[0].dtype == attributes["to"]:
        return values[0]
    # without axes, and with noop_with_empty_axes, ReduceSumSquare does not square
    if op_type == "ReduceSum" and "noop_with_empty_axes" not in attributes:
        factor = _squared(values[0])
        if factor is not None:
            return op.ReduceSumSquare(factor, *values[1:], **attributes)
    if op_type == "Reshape" and (target := op.known_value(values[1])) is not None:
        if static(dims(values[0])) == tuple(target):
            return values[0]
        return _without_kept_axes(op, values[0], tuple(target))
    return None


def _without_kept_axes(op: Any, x: ir.Value, target: tuple[int, ...]) -> ir.Value | None:
    """Return the ReduceSum `x` with keepdims=0 if that has the shape `target`, else None."""
    node = x.producer()
    if node is None or node.op_type != "ReduceSum" or len(node.inputs) < 2:
        return None
    shape = output_shape("ReduceSum", node.inputs, {"keepdims": 0})
    if shape != target or not node.attributes.get_int("keepdims", 1):
        return None
    return op.ReduceSum(*node.inputs, keepdims=0)


def _expanded(x: ir.Value) -> ir.Value | None:
    node = x.producer()
    return node.inputs[0] if node is not None and node.op_type == "Expand" else None


def _squared(x: ir.Value) -> ir.Value | None:
    node = x.producer()
    if node is None or node.op_type != "Mul" or node.inputs[0] is not node.inputs[1]:
        return None
    return node.inputs[0]
