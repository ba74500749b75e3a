"""The types, shapes and elements of the outputs of a node, from its record and its operands.

Elements are known of short vectors of lengths, from which shapes are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.operators.records import ValueRange, standard_operator
from onnxgrad.operators.shapes import Dim, Dims, UnknownShapeError, coefficient, dims, static


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
    except UnknownShapeError:
        return None
    except (IndexError, ZeroDivisionError, ValueError) as e:
        shapes = [dims(v) for v in inputs]
        raise ModelError(
            f"operands of shapes {shapes} do not fit {op_type} or its attributes: correct the node"
        ) from e
    return shape[0] if isinstance(shape, list) else shape


# -- functions for the fields `shape`, `result_type` and `value_range` of several operators --------


def type_of_first(inputs: Sequence, _attributes: Mapping[str, Any]) -> ir.TypeProtocol | None:
    """Return the type of the first operand."""
    return inputs[0].type if inputs and inputs[0] is not None else None


def shape_of_first(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the first operand."""
    return dims(inputs[0]) if inputs else None


def range_of_first(_node: ir.Node, ranges: Sequence[ValueRange]) -> ValueRange:
    """Return the range of values of the first operand."""
    return ranges[0]


def range_of_all(_node: ir.Node, ranges: Sequence[ValueRange]) -> ValueRange:
    """Return the smallest range of values that holds the ranges of all operands."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def range_if_increasing(
    function: Callable[..., float],
) -> Callable[[ir.Node, Sequence[ValueRange]], ValueRange]:
    """Return the `value_range` function of an operator whose result increases with each operand."""

    def range_between_ends(_node: ir.Node, ranges: Sequence[ValueRange]) -> ValueRange:
        lows, highs = zip(*ranges, strict=True)
        return function(*lows), function(*highs)

    return range_between_ends


INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
MOST_ELEMENTS = 1024  # of a tensor whose elements are followed

DimArray = np.ndarray  # of objects: int, bool, a symbolic dimension, or None if unknown


def result_elements(node: ir.Node, elements: Mapping[ir.Value, DimArray]) -> DimArray | None:
    """Return the known elements of the result of a node; None if no element is known, or if there
    are too many.
    """
    function = standard_operator(node.op_type).elements
    if len(node.outputs) != 1 or function is None:
        return None
    try:
        result = function(node, [operand_elements(x, elements) for x in node.inputs])
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # the node would fail as well
        return None
    if result is None or result.size > MOST_ELEMENTS:
        return None
    bits = 32 if node.outputs[0].dtype == ir.DataType.INT32 else 64
    limit = 1 << (bits - 1)
    beyond = any(isinstance(e, int) and not -limit <= e < limit for e in result.flat)
    return None if beyond or (result.size and all(e is None for e in result.flat)) else result


def shape_by_elements(node: ir.Node, elements: Mapping[ir.Value, DimArray]) -> Dims | None:
    """Return the shape of the result of an operator whose operand lists lengths, as a Reshape's
    does.
    """
    function = standard_operator(node.op_type).lengths
    if function is None:
        return None
    return function(node, [operand_elements(x, elements) for x in node.inputs])


def operand_elements(x: ir.Value | None, elements: Mapping[ir.Value, DimArray]) -> DimArray | None:
    """Return the elements of a small tensor of integers; all are None in a vector of which only
    the length is known.
    """
    if x is None or x in elements:
        return None if x is None else elements[x]
    if x.dtype not in INTEGERS:
        return None
    tensor = None if x.is_graph_input() else ir.convenience.get_const_tensor(x)
    shape = static(dims(x)) if tensor is None else tensor.shape.numpy()
    if shape is None or prod(shape) > MOST_ELEMENTS or (tensor is None and len(shape) > 1):
        return None
    return np.full(shape, None) if tensor is None else tensor.numpy().astype(object)


# -- functions that make a function for the field `elements` -------------------------------------


def none_if_unknown(function: Callable[..., DimArray | None]) -> Callable[..., DimArray | None]:
    """Return `function`, a function of a node and its operands' elements, changed to return None if
    the elements of an operand are unknown.
    """

    def call_if_known(node: ir.Node, operands: Sequence[DimArray | None]) -> DimArray | None:
        pairs = zip(operands, node.inputs, strict=True)
        unknown = any(v is None and x is not None for v, x in pairs)
        return None if unknown else function(node, *operands)

    return call_if_known


def vectorize_known(function: Callable[..., Any]) -> Callable[..., DimArray | None]:
    """Return the elementwise function of arrays, from a function of scalars; operands broadcast."""
    vectorized = np.vectorize(function, [object])
    return none_if_unknown(lambda node, *operands: vectorized(*operands))


def int_function(function: Callable[..., Any]) -> Callable[..., DimArray | None]:
    """Return the elementwise function of arrays; None where an operand is not an int."""
    return vectorize_known(none_unless_numbers(function))


def none_unless_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of scalars that is None if an argument is not an int, as a symbol is."""
    return lambda *v: function(*v) if all(isinstance(each, int) for each in v) else None


def product_of_lengths(shape: Iterable[Dim]) -> DimArray:
    """Return the product of lengths, as an array of rank 0."""
    result: Dim = 1
    for d in shape:
        result = multiply_lengths(result, d)
    return np.array(result, object)


def multiply_lengths(a: Dim, b: Dim) -> Dim:
    """Return the product of two lengths: `"8*N"` of 8 and `"N"`."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int) and isinstance(b, str):
        a, b = b, a
    if not isinstance(a, str) or not isinstance(b, int) or b < 1:
        return None
    times, symbol = coefficient(a)
    return a if b == 1 else f"{b * times}*{symbol}"
