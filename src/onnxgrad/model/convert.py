"""Conversion between `ModelProto` and `onnx_ir`."""

from __future__ import annotations

from copy import deepcopy

import onnx
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import ModelError, escaping, first_line
from onnxgrad.graph.precision import set_precision
from onnxgrad.model.opsets import min_ir_version
from onnxgrad.model.rewrites import normalized
from onnxgrad.model.traversal import keep_only

_ON_MAPS = ("CastMap", "DictVectorizer", "ZipMap")
_OF_TENSORS = ("ZipMap", "SequenceConstruct", "SplitToSequence", "Optional")


def to_proto(model: ir.Model) -> ModelProto:
    """Return `model` as a `ModelProto` of the lowest IR version that its opsets allow."""
    imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in model.opset_imports.items()]
    model.ir_version = max(8, min(model.ir_version, 13), min_ir_version(imports))
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as e:
        raise ModelError(f"the model cannot be written: {first_line(e)[:300]}") from e


@escaping()
def to_ir(proto: ModelProto) -> ir.Model:
    """Return `proto` as an `onnx_ir` model, without the outputs that are no tensors.

    Sequences of maps (`ZipMap`) cannot be differentiated, and onnx_ir does not support them.
    """
    kept = normalized(proto)
    if any(non_tensor(o) for o in proto.graph.output):
        if kept is proto:
            kept = deepcopy(proto)
        dropped = {o.name for o in kept.graph.output if non_tensor(o)}
        keep_only(kept.graph.output, lambda o: o.name not in dropped)
        keep_only(
            kept.graph.node, lambda n: n.op_type not in _ON_MAPS or n.output[0] not in dropped
        )
        keep_only(kept.graph.value_info, lambda v: v.name not in dropped)
    proto = kept
    for node in proto.graph.node:
        if node.domain == "ai.onnx.ml" and node.op_type in _ON_MAPS:
            where = f"{node.op_type} (node {node.name!r}, output {node.output[0]!r})"
            raise ModelError(
                f"{where} works on maps, and only tensors can be differentiated: "
                "give the model without this node"
            )
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as e:
        raise ModelError(f"the model is not valid: {first_line(e.__cause__ or e)}") from e


def in_precision(proto: ModelProto, dtype: ir.DataType) -> ModelProto:
    """Return `proto` with all floats in `dtype`, and nothing else changed."""
    model = to_ir(proto)
    set_precision(model, dtype)
    converted = ir.to_proto(model)
    converted.ir_version = proto.ir_version
    return converted


def non_tensor(value: onnx.ValueInfoProto) -> bool:
    """Return whether `value` is declared with a type that is no tensor type."""
    return value.type.WhichOneof("value") not in (None, "tensor_type")


def tensor_behind(proto: ModelProto, name: str) -> str | None:
    """Return the name of the tensor that the non-tensor output `name` is built from, if any."""
    for node in proto.graph.node:
        if name in node.output and node.op_type in _OF_TENSORS:
            return node.input[0]
    return None
