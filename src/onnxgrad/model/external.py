"""Tensors in files beside the model.

A model read from a path holds them, up to `IN_MODEL` bytes. Beyond, as no `ModelProto` of 2 GB can
be serialized, all but the `SMALL` ones stay where they are, and only what is asked of them is
mapped into memory. They are marked by a location that is an absolute path, so that the model goes
through every function like any other; `files.save` and sessions make the paths relative again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad.errors import ModelError

IN_MODEL = 1 << 30
SMALL = 1000  # what inference reads is never larger: it is the limit that onnx_ir has for it
_ALIGNED = 4096


@dataclass
class _Place:
    """Where the data of a tensor are."""

    tensor: TensorProto
    file: Path
    offset: int
    size: int


def tensors(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield the tensors of `model`, those of subgraphs and functions too, with their names."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, TensorProto]]:
    for node in nodes:
        for a in node.attribute:
            if a.type == AttributeProto.TENSOR:
                yield node.output[0] if node.op_type == "Constant" else a.t.name, a.t
            elif a.type == AttributeProto.TENSORS:
                yield from ((tensor.name, tensor) for tensor in a.tensors)
            elif a.type == AttributeProto.GRAPH:
                yield from _of_graph(a.g)
            elif a.type == AttributeProto.GRAPHS:
                for graph in a.graphs:
                    yield from _of_graph(graph)


def resolve(model: ModelProto, path: Path | None, where: str) -> None:
    """Read the external data of `model`, which lies at `path`, or refer to them.

    Without a path, references are checked, and `model` stays as it is.

    Raises:
        ModelError: the data are missing, too short, or elsewhere than in the folder of the model.
    """
    places = [_place(t, name, path, where) for name, t in tensors(model) if _is_external(t)]
    if path is None:
        return
    try:
        held = path.stat().st_size + sum(place.size for place in places)
        for place in places:
            if held <= IN_MODEL or place.size <= SMALL:
                _load(place)
            else:
                refer(place.tensor, place.file, place.offset, place.size)
    except OSError as e:
        raise ModelError(f"the external data of {where} cannot be read: {e}") from None


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def _place(tensor: TensorProto, name: str, path: Path | None, where: str) -> _Place:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "?")
    keeps = f"{where} keeps {name!r} in the external file {location!r}"
    if path is None and not os.path.isabs(location):
        raise ModelError(
            f"{keeps}; pass the path of the .onnx file instead, or call "
            "onnx.load_external_data_for_model first"
        )
    folder = Path() if path is None else path.parent.resolve()
    file = folder / location
    if not file.is_file():
        raise ModelError(
            f"{keeps}, which is not in {os.fspath(file.parent if path is None else folder)!r}; "
            "put it beside the model"
        )
    # a cache of downloads may hold links: then the data are where the model itself is
    homes = () if path is None else (folder, path.resolve().parent)
    if homes and not any(file.resolve().is_relative_to(home) for home in homes):
        raise ModelError(f"{keeps}, outside of the folder of the model: put it beside the model")
    size = nbytes(tensor)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError:
        offset, length = -1, -1
    if offset < 0 or length != size:
        raise ModelError(
            f"{keeps}, at offset {entries.get('offset', 0)} and of length {entries.get('length')}: "
            f"its shape {list(tensor.dims)} needs {size} bytes"
        )
    if (there := file.stat().st_size) < offset + size:
        raise ModelError(
            f"{keeps}, which is truncated: {there} bytes where {offset + size} are needed"
        )
    return _Place(tensor, file, offset, size)


def nbytes(tensor: TensorProto) -> int:
    """Return the bytes of the elements of a tensor, 0 for text."""
    kind = ir.DataType(tensor.data_type)
    text = kind in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    return 0 if text else ceil(prod(tensor.dims) * kind.itemsize)


def _load(place: _Place) -> None:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.size)
    place.tensor.ClearField("external_data")
    place.tensor.ClearField("data_location")
    place.tensor.raw_data = data


def refer(tensor: TensorProto, file: os.PathLike | str, offset: int, size: int) -> None:
    """Let `tensor` have its data in `file`."""
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", offset), ("length", size)):
        tensor.external_data.add(key=key, value=str(value))


def array(tensor: TensorProto) -> np.ndarray:
    """Return the elements of `tensor`: of data in a file, a view that cannot be written to."""
    if _is_external(tensor):
        return ir.serde.deserialize_tensor(tensor).numpy()
    return numpy_helper.to_array(tensor)


def files_of(model: ModelProto) -> set[Path]:
    """Return the files that `model` refers to."""
    found = (_location(t) for _, t in tensors(model) if _is_external(t))
    return {Path(location.value) for location in found}


def _location(tensor: TensorProto) -> Any:
    return next(e for e in tensor.external_data if e.key == "location")


def relocated(model: ModelProto, place_of: Callable[[Path], Path]) -> ModelProto:
    """Return a copy of `model` that refers to its files by other paths."""
    made = ModelProto()
    made.CopyFrom(model)
    for _, tensor in tensors(made):
        if _is_external(tensor):
            location = _location(tensor)
            location.value = place_of(Path(location.value)).as_posix()
    return made


def held(model: ModelProto) -> int:
    """Return the bytes of the initializers that `written_out` would write."""
    return sum(nbytes(t) for t in model.graph.initializer if _is_heavy(t))


def _is_heavy(tensor: TensorProto) -> bool:
    return not _is_external(tensor) and nbytes(tensor) > SMALL


def written_out(model: ModelProto, file: Path, location: Path) -> ModelProto:
    """Return `model` without the data of its initializers, written to `file`.

    It refers to them as to be found at `location`, where the caller puts `file`.
    """
    made = ModelProto()
    _copy(model, made, "graph")
    _copy(model.graph, made.graph, "initializer")
    with file.open("wb") as out:
        for tensor in model.graph.initializer:
            new = made.graph.initializer.add()
            if not _is_heavy(tensor):
                new.CopyFrom(tensor)
                continue
            new.name, new.data_type = tensor.name, tensor.data_type
            new.doc_string = tensor.doc_string
            new.dims.extend(tensor.dims)
            out.write(bytes(-out.tell() % _ALIGNED))
            refer(new, location, out.tell(), nbytes(tensor))
            out.write(ir.serde.deserialize_tensor(tensor).tobytes())
    return made


def _copy(old: Any, new: Any, without: str) -> None:
    """Copy all fields of a message but one, which may be too large to be there twice."""
    for field, value in old.ListFields():
        if field.name == without:
            continue
        if hasattr(value, "extend"):
            getattr(new, field.name).extend(value)
        elif hasattr(value, "ListFields"):
            getattr(new, field.name).CopyFrom(value)
        else:
            setattr(new, field.name, value)
