"""Conversion between `ModelProto` and `onnx_ir`."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import onnx
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import ModelError, escaping, first_line
from onnxgrad.graph.precision import FLOATS, set_precision
from onnxgrad.graph.tidy import take_apart
from onnxgrad.model.opsets import min_ir_version, newest_ir_version
from onnxgrad.model.rewrites import prepare_for_onnx_ir
from onnxgrad.model.traversal import keep_only
from onnxgrad.operators import names_with_trait


def to_proto(model: ir.Model) -> ModelProto:
    """Return the onnx_ir model `model` as a `ModelProto`, whose IR version is raised if its opsets
    need a newer IR version.
    """
    imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in model.opset_imports.items()]
    model.ir_version = max(8, min(model.ir_version, newest_ir_version()), min_ir_version(imports))
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as e:
        raise ModelError(
            f"the model cannot be written as a ModelProto: {first_line(e)[:300]}"
        ) from e


def to_proto_and_free(model: ir.Model) -> ModelProto:
    """Return the onnx_ir model `model` as `to_proto` does, and take it apart: nothing reads it any
    more.
    """
    proto = to_proto(model)
    take_apart(model.graph)
    parts: Any
    for parts in model.functions.values():
        take_apart(parts.graph)
        parts._attributes = None  # they refer to the function
    return proto


@escaping()
def to_ir(proto: ModelProto) -> ir.Model:
    """Return the `ModelProto` `proto` as a model of onnx_ir, without the outputs that are
    sequences, maps or Optionals.

    Sequences of maps (`ZipMap`) cannot be differentiated, and onnx_ir does not support them.
    """
    kept, maps = prepare_for_onnx_ir(proto), names_with_trait("maps")
    dropped = {o.name for o in proto.graph.output if is_non_tensor(o)}
    if dropped:
        kept = deepcopy(proto) if kept is proto else kept
        keep_only(kept.graph.output, lambda o: o.name not in dropped)
        keep_only(kept.graph.node, lambda n: n.op_type not in maps or n.output[0] not in dropped)
        keep_only(kept.graph.value_info, lambda v: v.name not in dropped)
    for node in kept.graph.node:
        if node.domain == "ai.onnx.ml" and node.op_type in maps:
            where = f"{node.op_type} (node {node.name!r}, output {node.output[0]!r})"
            raise ModelError(
                f"{where} works on maps, and only tensors can be differentiated: "
                "pass a model without this node"
            )
    try:
        model = ir.from_proto(kept)
    except ir.serde.SerdeError as e:
        reason = first_line(e.__cause__ or e)
        raise ModelError(f"the model is not valid: {reason}; export the model again") from e
    declare_constant_types(model)
    return model


def declare_constant_types(model: ir.Model) -> None:
    """Declare for each constant of `model` the shape and type of its tensor, and store strings of
    Constant nodes as tensors of bytes, in place.

    onnxruntime-genai's builder states other shapes, and onnx_ir reads texts as ASCII.
    """
    for outer in (model.graph, *(function.graph for function in model.functions.values())):
        for graph in (outer, *outer.subgraphs()):
            stored = [(v, v.const_value) for v in graph.initializers.values()]
            nodes = [n for n in graph if n.op_type == "Constant" and not n.domain]
            for node in nodes:
                _encode_constant_strings(node)
            values = ((n.outputs[0], n.attributes.get("value")) for n in nodes)
            stored += [(y, a.as_tensor()) for y, a in values if a is not None and not a.is_ref()]
            for value, tensor in stored:
                if tensor is None or value.is_graph_input():  # a call may feed another tensor
                    continue
                if value.shape != tensor.shape:
                    value.shape = ir.Shape(tensor.shape.numpy())
                if value.type is None:  # onnx_ir warns of a shape without a type
                    value.type = ir.TensorType(tensor.dtype)


def _encode_constant_strings(node: ir.Node) -> None:
    """Replace the attribute `value_string` or `value_strings` of a Constant node by a tensor of
    UTF-8 bytes, in place.
    """
    for name in ("value_string", "value_strings"):
        attribute = node.attributes.get(name)
        if attribute is not None and not attribute.is_ref():
            texts = [attribute.as_string()] if name == "value_string" else attribute.as_strings()
            shape = ir.Shape([] if name == "value_string" else [len(texts)])
            tensor = ir.StringTensor([text.encode() for text in texts], shape=shape)
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", tensor)


def convert_precision(
    proto: ModelProto, dtype: ir.DataType, of: Collection[ir.DataType] = FLOATS
) -> ModelProto:
    """Return `proto` with its floats converted to `dtype`; only floats whose dtype is in `of` are
    converted.
    """
    model = to_ir(proto)
    set_precision(model, dtype, of)
    converted = to_proto_and_free(model)
    converted.ir_version = proto.ir_version
    return converted


def is_non_tensor(value: onnx.ValueInfoProto) -> bool:
    """Return whether the declared type of `value` is a sequence, map or Optional, and no tensor."""
    return value.type.WhichOneof("value") not in (None, "tensor_type")


def source_tensor_name(proto: ModelProto, name: str) -> str | None:
    """Return the name of the tensor from which a ZipMap or a sequence operator builds the output
    `name`; None if no such node computes `name`.
    """
    packs = ("ZipMap", "SequenceConstruct", "SplitToSequence", "Optional")
    sources = (n for n in proto.graph.node if name in n.output and n.op_type in packs)
    return next((node.input[0] for node in sources), None)
