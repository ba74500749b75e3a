"""Shape inference by onnx itself, of which only the shapes and types are read back.

`ShapeInferencePass` of onnx_ir builds a second model of all nodes to read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx import AttributeProto, GraphProto, TypeProto, defs, shape_inference
from onnx.shape_inference import infer_node_outputs

from onnxgrad.graph.shapes import constant

_LARGE = 1000  # bytes; larger constants are not passed
_SMALL = 64  # elements: only constants up to this size are passed as possible shapes or axes


def infer_by_onnx(model: ir.Model, elements: bool) -> None:
    """Set the types and shapes that onnx infers; nothing where it fails.

    Without them, rules compute shapes at run time.

    Args:
        model: the model, which is modified in place.
        elements: whether onnx follows the elements of vectors, from which shapes are computed.
    """
    with _constants_as_inputs(model.graph):
        proto = ir.to_proto(model)
    try:
        inferred = shape_inference.infer_shapes(
            proto, check_type=False, strict_mode=False, data_prop=elements
        )
    except Exception:  # of several types
        return
    _read(model.graph, inferred.graph)


def infer_node(node: ir.Node, opset: int) -> None:
    """Set the unknown types and shapes of the outputs of `node`, from those of its inputs."""
    if node.domain or not defs.has(node.op_type, opset):
        return
    inputs = [x for x in node.inputs if x is not None]
    types = {str(x.name): ir.serde.serialize_value(x).type for x in inputs if x.type is not None}
    small = (x for x in inputs if x.const_value is not None and x.const_value.size <= _SMALL)
    data = {
        str(x.name): ir.serde.serialize_tensor(x.const_value)
        for x in small
        if constant(x) is not None and x.const_value is not None
    }
    schema = defs.get_schema(node.op_type, opset)
    try:
        inferred = infer_node_outputs(schema, ir.to_proto(node), types, data)
    except Exception:  # of several types; without shapes, rules compute them at run time
        return
    for y in node.outputs:
        if (proto := inferred.get(str(y.name))) is None:
            continue
        y.type = y.type or ir.serde.deserialize_type_proto_for_type(proto)
        y.shape = ir.serde.deserialize_type_proto_for_shape(proto) if y.shape is None else y.shape


@contextmanager
def _constants_as_inputs(graph: ir.Graph) -> Iterator[None]:
    """Let initializers be inputs during the block, the large ones without their values."""
    initializers, inputs = dict(graph.initializers), list(graph.inputs)
    listed = set(inputs)
    for name, value in initializers.items():
        tensor = value.const_value
        if tensor is not None:
            value.shape = ir.Shape(tensor.shape.numpy()) if value.shape is None else value.shape
            value.dtype = value.dtype or tensor.dtype
        if value not in listed:
            graph.inputs.append(value)
        if tensor is None or tensor.nbytes > _LARGE:
            del graph.initializers[name]
    try:
        yield
    finally:
        graph.inputs[:] = inputs
        graph.initializers.clear()
        graph.initializers.update(initializers)


def _read(graph: ir.Graph, inferred: GraphProto) -> None:
    """Set the types and shapes of the values of `graph` and its subgraphs."""
    types: dict[str, TypeProto] = {}
    for infos in (inferred.value_info, inferred.output, inferred.input):
        types.update((info.name, info.type) for info in infos)
    for value in graph.inputs:
        _set(value, types)
    for node, proto in zip(graph, inferred.node, strict=True):
        for y in node.outputs:
            _set(y, types)
        for attribute in proto.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _read(node.attributes[attribute.name].as_graph(), attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                inner = node.attributes[attribute.name].as_graphs()
                for pair in zip(inner, attribute.graphs, strict=True):
                    _read(*pair)


def _set(value: ir.Value, types: dict[str, TypeProto]) -> None:
    if (proto := types.get(value.name or "")) is None:
        return
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    if shape is not None and shape != value.shape:
        value.shape = shape
    kind = ir.serde.deserialize_type_proto_for_type(proto)
    if kind is not None and kind.dtype != value.dtype:
        value.dtype = kind.dtype
