"""Shape inference by onnx itself, of which only the shapes and types are read back.

`ShapeInferencePass` of onnx_ir builds a second model of all nodes to read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx import AttributeProto, GraphProto, TypeProto, shape_inference

_LARGE = 1000  # bytes; larger constants are not passed


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
