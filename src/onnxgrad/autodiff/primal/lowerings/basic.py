"""Nodes without effect are removed, and variants that rules would have to handle are rewritten."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.registry import lowering
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import dims, equal, rank

Operand = ir.Value | None  # None: it is left out


@lowering("Identity", "Cast", "Reshape", "Dropout")
def no_operation(op: Emit, node: Any) -> list[ir.Value] | None:
    """A node that returns its input is removed, unless its output is an output of the graph."""
    x, (y, *others) = node.inputs[0], node.outputs
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    trains = op.known_value(training)
    same = {
        "Identity": True,
        "Cast": x.dtype is not None and x.dtype == y.dtype,
        "Reshape": equal(dims(x), dims(y)),
        "Dropout": not others and (training is None or (trains is not None and not trains)),
    }[node.op_type]
    return [x] if same and y not in op.graph.outputs else None


@lowering("MatMul")
def matmul(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """A vector operand becomes a matrix, and the added axis is removed from the product."""
    a, b = node.inputs
    if 1 not in (rank(a), rank(b)) or None in (rank(a), rank(b)):
        return None
    return [product(op, a, b)]


def product(op: Emit, a: Any, b: Any) -> ir.Value:
    """Return the product of two matrices or vectors."""
    axes = [-2] * (rank(a) == 1) + [-1] * (rank(b) == 1)
    y = op.MatMul(
        op.Unsqueeze(a, [0]) if rank(a) == 1 else a, op.Unsqueeze(b, [1]) if rank(b) == 1 else b
    )
    return op.Squeeze(y, axes) if axes else y


def total(*terms: Operand) -> ir.Value:
    """Return the sum of the terms, without those that are left out."""
    first, *others = (v for v in terms if v is not None)
    return sum(others, start=first)


@lowering("Mod")
def mod(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = a - b floor(a / b) for floats without fmod: onnxruntime has no kernel."""
    a, b = node.inputs
    real = a.dtype is not None and a.dtype.is_floating_point()
    if not real or int_attribute(node, "fmod"):
        return None
    return [a - b * op.Floor(a / b)]
