"""The types and shapes of what a node makes, by its operator and its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.graph import sequences, shapes
from onnxgrad.graph.operators import BOOLEAN, INT64

_OUTPUT_DTYPE = dict.fromkeys(INT64, ir.DataType.INT64) | dict.fromkeys(BOOLEAN, ir.DataType.BOOL)


def output_types(
    op_type: str, operands: Sequence, attributes: dict, outputs: int
) -> Sequence[ir.TypeProtocol | None]:
    """Return the types of the outputs: those of the graph that the node holds, or by one dtype."""
    held = attributes.get("body", attributes.get("then_branch"))
    if held is not None:
        return [y.type for y in held.outputs[op_type == "Loop" :]]
    if op_type in sequences.OPERATORS:
        return [sequences.output_type(op_type, operands, attributes)]
    dtype = _dtype(op_type, operands, attributes)
    return [None if dtype is None else ir.TensorType(dtype) for _ in range(outputs)]


def output_shape(op_type: str, operands: Sequence, attributes: Mapping) -> shapes.Dims | None:
    """Return the shape of the first output, or of its elements, as far as it is known."""
    of = sequences if op_type in sequences.OPERATORS else shapes
    return of.output_shape(op_type, operands, attributes)


def _dtype(op_type: str, operands: Sequence, attributes: dict) -> ir.DataType | None:
    """Return the dtype of the outputs, by the operator or by the first operand that counts."""
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type in _OUTPUT_DTYPE:
        return _OUTPUT_DTYPE[op_type]
    counted = operands[1:] if op_type == "Where" else operands
    return next((v.dtype for v in counted if v is not None and v.dtype), None)
