"""The door: a model as `ModelProto`, bytes or path comes in, and is checked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxgrad.errors import ModelError, escaping, first_line
from onnxgrad.graph.external import resolve
from onnxgrad.graph.normalize import normalized
from onnxgrad.graph.validate import normalize, validate
from onnxgrad.reporting import escape_loggers

escape_loggers("onnx_ir")  # which warns of invalid models, by the names in them

_ON_MAPS = ("CastMap", "DictVectorizer", "ZipMap")
_OF_TENSORS = ("ZipMap", "SequenceConstruct", "SplitToSequence", "Optional")

ModelLike: TypeAlias = ModelProto | bytes | str | os.PathLike


def read(model: ModelLike, promised: Collection[str] = (), broken: bool = False) -> ModelProto:
    """Return `model` as a `ModelProto` that passed `validate`; a given one is not modified.

    It holds its tensors, but for those of a large model: see `external`. The nodes of its main
    graph are sorted, and no declared length is negative: such a length is an unknown one.
    `promised` is that of `validate`. With `broken`, the graph is not checked: a picture shows what
    is wrong with it.

    Raises:
        TypeError: `model` is nothing that can be a model.
        ModelError: it cannot be read, or it is broken; the message says why.
    """
    path = None
    if isinstance(model, ModelProto):
        proto, where = model, "the given ModelProto"
    elif isinstance(model, (bytes, bytearray, memoryview)):
        proto, where = _parse(bytes(model), "the given bytes"), "the given bytes"
    elif isinstance(model, (str, os.PathLike)):
        path, where = Path(model), f"{os.fspath(model)!r}"
        try:
            proto = _parse(path.read_bytes(), where)
        except (OSError, ValueError) as e:
            if isinstance(e, ModelError):
                raise
            raise ModelError(f"cannot read {where}: {getattr(e, 'strerror', None) or e}") from None
    else:
        raise TypeError(f"a model is a ModelProto, bytes or a path, not {type(model).__name__}")
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{where} is no ONNX model: it holds no graph")
    if not proto.opset_import:
        raise ModelError(f"{where} states no opset: it is truncated, or was never finished")
    try:
        wanting = not broken and validate(proto, promised)
    except UnicodeDecodeError:
        raise ModelError(f"{where} holds a name that is not UTF-8: it is damaged") from None
    except ModelError as e:
        raise ModelError(f"{where}: {e}") from None
    if wanting and proto is model:
        proto = ModelProto()
        proto.CopyFrom(model)
    if wanting:
        normalize(proto)
    resolve(proto, path, where)
    return proto


def _parse(data: bytes, where: str) -> ModelProto:
    try:
        return onnx.load_model_from_string(data)
    except DecodeError:
        raise ModelError(
            f"{where} ({len(data)} bytes) is no ONNX model, or is truncated, or nests subgraphs "
            "too deep: it does not parse as a ModelProto"
        ) from None


@escaping()
def to_ir(proto: ModelProto) -> ir.Model:
    """Return `proto` as an `onnx_ir` model, without the outputs that hold no tensor.

    Sequences of maps (`ZipMap`) cannot be differentiated, and onnx_ir does not know them.
    """
    kept = normalized(proto)
    if any(non_tensor(o) for o in proto.graph.output):
        if kept is proto:
            kept = ModelProto()
            kept.CopyFrom(proto)
        dropped = {o.name for o in kept.graph.output if non_tensor(o)}
        _keep(kept.graph.output, lambda o: o.name not in dropped)
        _keep(kept.graph.node, lambda n: n.op_type not in _ON_MAPS or n.output[0] not in dropped)
        _keep(kept.graph.value_info, lambda v: v.name not in dropped)
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
        raise ModelError(f"the model is not valid: {first_line(e.__cause__ or e)}") from e  # type: ignore


def non_tensor(value: onnx.ValueInfoProto) -> bool:
    """Tell whether `value` is declared as something else than a tensor."""
    return value.type.WhichOneof("value") not in (None, "tensor_type")


def tensor_behind(proto: ModelProto, name: str) -> str | None:
    """Return the float tensor that the non-tensor output `name` is made from, if it is known."""
    for node in proto.graph.node:
        if name in node.output and node.op_type in _OF_TENSORS:
            return node.input[0]
    return None


def once(kind: str, names: Sequence[str]) -> Sequence[str]:
    """Return `names`, or raise if they are no list, or one of them is there twice."""
    if isinstance(names, str):
        raise ValueError(f"give a list of names of {kind}s, not the text {names!r}")
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{kind} {name!r} is named twice")
    return names


def _keep(repeated, wanted) -> None:
    kept = [item for item in repeated if wanted(item)]
    del repeated[:]
    repeated.extend(kept)
