"""The types and shapes of the outputs of a node, from its operator, operands and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.operators.records import standard_operator
from onnxgrad.operators.shapes import Dims, dims


def output_types(
    op_type: str, operands: Sequence, attributes: dict, outputs: int
) -> Sequence[ir.TypeProtocol | None]:
    """Return the types of the outputs of a node; None for a type that is not known.

    Nodes with a subgraph have the types of its outputs; all others have outputs of one type, unless
    the record of the operator says more.
    """
    subgraph = attributes.get("body", attributes.get("then_branch"))
    if subgraph is not None:  # the first output of the body of a Loop is its condition
        return [y.type for y in subgraph.outputs[op_type == "Loop" :]]
    operator = standard_operator(op_type)
    if operator.result_type is not None:
        types = operator.result_type(operands, attributes)
        return types if isinstance(types, list) else [types] * outputs
    if "int64" in operator.traits:
        dtype: ir.DataType | None = ir.DataType.INT64
    elif "boolean" in operator.traits:
        dtype = ir.DataType.BOOL
    else:
        dtype = first_dtype(operands)
    return [None if dtype is None else ir.TensorType(dtype) for _ in range(outputs)]


def first_dtype(operands: Sequence) -> ir.DataType | None:
    """Return the dtype of the first operand that has one."""
    return next((v.dtype for v in operands if v is not None and v.dtype), None)


def output_shape(op_type: str, inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the first output of a node, or of its elements if it is a sequence.

    Known are operators that gradients consist of, and those for which onnx infers no symbols. None
    is an unknown rank, and as a dimension an unknown length.

    Raises:
        ModelError: operands that do not fit the operator.
    """
    function = standard_operator(op_type).shape
    try:
        shape = None if function is None else function(inputs, attributes)
    except (IndexError, ZeroDivisionError, ValueError) as e:
        shapes = [dims(v) for v in inputs]
        raise ModelError(
            f"operands of shapes {shapes} do not fit {op_type} or its attributes: correct the node"
        ) from e
    return shape[0] if isinstance(shape, list) else shape


# -- types and shapes that families share ----------------------------------------------------------


def type_of_first(inputs: Sequence, _attributes: Mapping[str, Any]) -> ir.TypeProtocol | None:
    """Return the type of the first operand."""
    return inputs[0].type if inputs and inputs[0] is not None else None


def like_first(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the first operand."""
    return dims(inputs[0]) if inputs else None
