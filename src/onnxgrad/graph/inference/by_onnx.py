"""The types and shapes that onnx infers for one node, from those of its operands."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, TypeProto, defs
from onnx.shape_inference import infer_function_output_types, infer_node_outputs

from onnxgrad.graph.shapes import Dims, dims, is_stated

_SMALL = 64  # elements: only constants up to this size are passed as possible shapes or axes


def infer_node(
    node: ir.Node,
    opsets: Mapping[str, int],
    elements: Mapping[ir.Value, np.ndarray] | None = None,
    function: ir.Function | None = None,
) -> None:
    """Set the unknown types and dimensions of the outputs of `node`; nothing where onnx fails.

    Without them, rules compute shapes at run time.

    Args:
        node: a node without subgraphs.
        opsets: the version of each domain.
        elements: of short vectors that are no constants.
        function: that which the node calls.
    """
    version = opsets.get(node.domain, 0)
    if function is None and not defs.has(node.op_type, version, node.domain):
        return
    try:
        if function is None:
            schema = defs.get_schema(node.op_type, version, node.domain)
            operands = [x for x in node.inputs if x is not None]
            data = {str(x.name): d for x in operands if (d := _data(x, elements or {}))}
            types = {str(x.name): _type(x) for x in operands}
            inferred = infer_node_outputs(schema, ir.to_proto(node), types, data)
        else:
            attributes = [ir.serde.serialize_attribute(a) for a in node.attributes.values()]
            found = infer_function_output_types(
                ir.to_proto(function), [_type(x) for x in node.inputs], attributes
            )
            inferred = dict(zip((str(y.name) for y in node.outputs), found, strict=False))
    except Exception:  # of several types
        return
    for y in node.outputs:
        if (proto := inferred.get(str(y.name))) is not None:
            y.type = y.type or ir.serde.deserialize_type_proto_for_type(proto)
            shape = dims(ir.Value(shape=ir.serde.deserialize_type_proto_for_shape(proto)))
            if not any(isinstance(d, int) and d < 0 for d in shape or ()):  # of what cannot run
                complete(y, shape)


def complete(value: ir.Value, shape: Dims | None) -> None:
    """Set the dimensions of `value` that are unknown, or symbols that were generated."""
    known = dims(value)
    if known is None or shape is None or len(known) != len(shape):
        chosen = shape if known is None else known
        value.shape = None if chosen is None else ir.Shape(chosen)
    elif not all(map(is_stated, known)):
        pairs = zip(known, shape, strict=True)
        value.shape = ir.Shape([k if s is None or is_stated(k) else s for k, s in pairs])


def _type(x: ir.Value | None) -> TypeProto:
    proto = None if x is None or x.type is None else ir.serde.serialize_value(x).type
    return TypeProto() if proto is None else proto


def _data(x: ir.Value, elements: Mapping[ir.Value, np.ndarray]) -> TensorProto | None:
    """Return the elements of an operand, if they are few and do not change between runs."""
    if x.is_graph_input():
        return None
    if x in elements and x.dtype is not None:
        numbers = elements[x]
        known = all(isinstance(n, int) for n in numbers.flat)
        tensor = ir.tensor(numbers.astype(x.dtype.numpy())) if known else None
    else:
        tensor = ir.convenience.get_const_tensor(x)
    small = tensor is not None and tensor.size <= _SMALL
    return ir.serde.serialize_tensor(tensor) if small and tensor is not None else None


def complete_types(node: ir.Node) -> None:
    """Set the types that onnx does not infer, where the schema allows only one.

    onnx does not infer those of several operators of `ai.onnx.ml`.
    """
    if all(y.type is not None for y in node.outputs) or not defs.has(node.op_type, node.domain):
        return
    outputs = defs.get_schema(node.op_type, domain=node.domain).outputs
    for y, formal in zip(node.outputs, outputs, strict=False):
        allowed = {_DTYPES.get(name) for name in formal.types}
        dtype = allowed.pop() if len(allowed) == 1 else None
        if y.type is None and dtype is not None:
            y.type = ir.TensorType(dtype)


_DTYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(string)": ir.DataType.STRING,
}
