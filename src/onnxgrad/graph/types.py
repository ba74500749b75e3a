"""The types and shapes of the outputs of a node, from its operator and its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.graph import output_shapes, sequences
from onnxgrad.graph.operators import BOOLEAN, INT64
from onnxgrad.graph.shapes import Dims

_OUTPUT_DTYPE = dict.fromkeys(INT64, ir.DataType.INT64) | dict.fromkeys(BOOLEAN, ir.DataType.BOOL)


def output_types(
    op_type: str, operands: Sequence, attributes: dict, outputs: int
) -> Sequence[ir.TypeProtocol | None]:
    """Return the types of the outputs of a node; None for a type that is not known.

    Nodes with a subgraph have the types of its outputs; the others have outputs of one type.
    """
    subgraph = attributes.get("body", attributes.get("then_branch"))
    if subgraph is not None:  # the first output of the body of a Loop is its condition
        return [y.type for y in subgraph.outputs[op_type == "Loop" :]]
    if op_type in sequences.OPERATORS:
        return [sequences.output_type(op_type, operands, attributes)]
    dtype = _dtype(op_type, operands, attributes)
    return [None if dtype is None else ir.TensorType(dtype) for _ in range(outputs)]


def output_shape(op_type: str, operands: Sequence, attributes: Mapping) -> Dims | None:
    """Return the shape of the first output, or of its elements if it is a sequence.

    None is an unknown rank, and as a dimension an unknown length.
    """
    module = sequences if op_type in sequences.OPERATORS else output_shapes
    return module.output_shape(op_type, operands, attributes)


def _dtype(op_type: str, operands: Sequence, attributes: dict) -> ir.DataType | None:
    """Return the dtype that the operator sets, else that of the first tensor operand."""
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type in _OUTPUT_DTYPE:
        return _OUTPUT_DTYPE[op_type]
    typed = operands[1:] if op_type == "Where" else operands  # the condition is bool
    return next((v.dtype for v in typed if v is not None and v.dtype), None)
