"""Reading of models: every public function that takes a model calls `read`, which checks it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxgrad.errors import ModelError
from onnxgrad.model.external import load_external_data, parse_by_initializers
from onnxgrad.model.validate import repair_model, validate
from onnxgrad.reporting import escape_loggers

escape_loggers("onnx_ir")  # warnings of onnx_ir quote names of invalid models

LARGE_FILE = 1 << 24  # bytes of a file that is read one initializer at a time
ModelLike: TypeAlias = ModelProto | bytes | str | os.PathLike


def is_model_path(value: object) -> bool:
    """Return whether `value` is a string that ends with ".onnx", and therefore is taken for the
    path of a model.
    """
    return isinstance(value, str) and value.endswith(".onnx")


def read(model: ModelLike, promised: Collection[str] = (), broken: bool = False) -> ModelProto:
    """Return `model` as a `ModelProto` that passed `validate`; the argument is not modified.

    The proto contains its tensors, unless it is large: see `external`. The nodes of the main graph
    are sorted, and negative declared lengths are made unknown.

    Args:
        model: model, serialized model or path.
        promised: as in `validate`.
        broken: whether the graph is not checked, so that a broken model can be plotted.

    Raises:
        TypeError: `model` is of another type.
        ModelError: the model cannot be read, or is broken; the message says why.
    """
    path = None
    if isinstance(model, ModelProto):
        proto, where = model, "the given ModelProto"
    elif isinstance(model, (bytes, bytearray, memoryview)):
        proto, where = _parse_model(bytes(model), "the given bytes"), "the given bytes"
    elif isinstance(model, (str, os.PathLike)):
        path, where = Path(model), f"{os.fspath(model)!r}"
        try:
            proto = _parse_file(path, where)
        except ModelError:
            raise
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            raise ModelError(f"cannot read {where}: {reason}; name a file that exists") from None
    else:
        kind = f"{type(model).__name__}{_export_hint(model)}"
        raise TypeError(f"a model is a ModelProto, bytes or a path, not {kind}")
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{where} is no ONNX model, as it has no graph: export the model again")
    if not proto.opset_import:
        raise ModelError(f"{where} imports no opset: it is incomplete, export the model again")
    try:
        fix = not broken and validate(proto, promised)
    except UnicodeDecodeError:
        raise ModelError(f"{where} has a name that is not UTF-8: export the model again") from None
    except ModelError as e:
        raise ModelError(f"{where}: {e}") from None
    if fix and proto is model:
        proto = deepcopy(model)
    if fix:
        repair_model(proto)
    load_external_data(proto, path, where)
    return proto


def _export_hint(model: object) -> str:
    """Return the end of an error message that says how to export the object `model` of another
    library to ONNX; "" if unknown.
    """
    ways = {
        "torch.nn": "write it to a file by torch.onnx.export(module, args, 'model.onnx')",
        "sklearn": "convert it by skl2onnx.to_onnx(estimator, X[:1])",
        "onnxruntime": "pass the file that the session was created from",
        "keras": "write it to a file by model.export('model.onnx', format='onnx')",
    }
    modules = [f"{base.__module__}." for base in type(model).__mro__]
    found = (way for name, way in ways.items() if any(m.startswith(f"{name}.") for m in modules))
    way = next(found, None)
    return "" if way is None else f": {way}"


def _parse_file(path: Path, where: str) -> ModelProto:
    """Return the `ModelProto` that a file holds; memory holds no copy of the bytes of a large file.

    `where` names the file in the error message.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGE_FILE:
            with suppress(DecodeError):
                return parse_by_initializers(file, size)
            file.seek(0)
        return _parse_model(file.read(), where)


def _parse_model(data: bytes, where: str) -> ModelProto:
    """Return the `ModelProto` that the bytes `data` hold; `where` names the bytes in the error
    message.
    """
    try:
        return onnx.load_model_from_string(data)
    except DecodeError:
        raise ModelError(
            f"{where} ({len(data)} bytes) is no ONNX model, or is truncated, or nests subgraphs "
            "too deep, as it does not parse as a ModelProto: export the model again"
        ) from None


def require_unique_names(kind: str, names: Sequence[str]) -> Sequence[str]:
    """Return `names`; raise an error unless it is a list of strings without repetition.

    `kind` is the noun for a name in messages, such as "input".

    Raises:
        ValueError: `names` is a string, or a name is repeated.
        TypeError: `names` is no iterable of strings.
    """
    if isinstance(names, str):
        raise ValueError(f"pass a list of names of {kind}s, not the string {names!r}")
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        data = ": arrays are fed when the model runs" if hasattr(names, "__array__") else ""
        raise TypeError(f"pass a list of names of {kind}s, not {type(names).__name__}{data}")
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{kind} {name!r} is named twice: name each {kind} once")
    return names
