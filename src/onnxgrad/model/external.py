"""External data: tensors in files beside the model.

A model read from a path contains their data, up to `IN_MODEL` bytes in total. As a `ModelProto` of
2 GB cannot be serialized, the data of larger models stay in their files, except for `SMALL`
tensors, and are mapped into memory when they are read. The location of a tensor is then an absolute
path, so that all functions work on such a model; `write.save` and sessions make the paths relative
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from hashlib import sha1
from itertools import chain
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data as is_external

from onnxgrad.errors import ModelError
from onnxgrad.model.traversal import walk_graphs

IN_MODEL = 1 << 30  # bytes of data that a ModelProto in memory may hold
SMALL = 1000  # bytes; shape inference of onnx_ir reads no larger constants
_ALIGNMENT = 4096  # bytes; each tensor in a data file begins at a multiple
_LARGE = 1 << 16  # bytes of an initializer that is not copied needlessly
# kinds of serialized fields: contents that begin with their length, and contents of known size
_LENGTH_FIRST, _FIELD_SIZES = 2, {0: 0, 1: 8, 5: 4}
_NONE: Mapping[str, np.ndarray] = MappingProxyType({})
# location of a placeholder for a tensor; its offset is the index of the initializer
_IN_ORIGIN = "onnxgrad.in-origin"
# the fields of a TensorProto that hold its elements if these are in the model
ELEMENTS = (
    "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data",
    "raw_data",
)  # fmt: skip
# the fields of a TensorProto but its elements
_DESCRIBES = ("name", "data_type", "doc_string", "dims")


def external_tensors(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield pairs (name, tensor) of all tensors of a model whose elements are in files."""
    for graph, node in walk_graphs(model.graph, *model.functions):
        if node is None:
            held = getattr(graph, "initializer", ())
        else:
            held = chain.from_iterable(
                (a.t,) if a.type == AttributeProto.TENSOR else a.tensors for a in node.attribute
            )
        for tensor in filter(is_external, held):
            own = node is not None and node.op_type == "Constant" and node.output[0]
            yield own or tensor.name, tensor


def load_external_data(model: ModelProto, path: Path | None, where: str) -> None:
    """Read the external data of the file `path` into `model`, in place; of large models, only make
    the locations of the data absolute paths.

    Without a path, locations are checked, and `model` is not changed. `where` names the model in
    messages.

    Raises:
        ModelError: data are missing, too short, or outside of the folder of the model.
    """
    places = [(t, *_locate_elements(t, name, path, where)) for name, t in external_tensors(model)]
    if path is None:
        return
    try:
        total = path.stat().st_size + sum(size for *_, size in places)
        for tensor, file, offset, size in places:
            if total > IN_MODEL and size > SMALL:
                refer_to_file(tensor, file, offset, size)
                continue
            with file.open("rb") as data:
                data.seek(offset)
                tensor.raw_data = data.read(size)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    except OSError as e:
        raise ModelError(
            f"the external data of {where} cannot be read: {e}; put the file beside the model"
        ) from None


def _locate_elements(
    tensor: TensorProto, name: str, path: Path | None, where: str
) -> tuple[Path, int, int]:
    """Return the file that holds the elements of `tensor`, the offset of the elements in the file,
    and their size in bytes.

    Raises:
        ModelError: the entries of `tensor` or the file are not valid; `name` names the tensor in
            the message, and `where` the model.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "?")
    subject = f"{where} stores {name!r} in the external file {location!r}"
    if path is None and not os.path.isabs(location):
        raise ModelError(
            f"{subject}; pass the path of the .onnx file instead, or call "
            "onnx.load_external_data_for_model first"
        )
    folder = Path() if path is None else path.parent.resolve()
    file = folder / location
    if not file.is_file():
        home = os.fspath(file.parent if path is None else folder)
        raise ModelError(f"{subject}, which is not in {home!r}: put the file beside the model")
    # in a cache of downloads, the model and its data may be links into another folder
    folders = () if path is None else (folder, path.resolve().parent)
    if folders and not any(file.resolve().is_relative_to(folder) for folder in folders):
        raise ModelError(
            f"{subject}, outside of the folder of the model: put the file beside the model"
        )
    size = nbytes(tensor)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError:
        offset, length = -1, -1
    if offset < 0 or length != size:
        raise ModelError(
            f"{subject}, at offset {entries.get('offset', 0)} and of length "
            f"{entries.get('length')}: its shape {list(tensor.dims)} requires {size} bytes: "
            "export the model again"
        )
    if (available := file.stat().st_size) < offset + size:
        reason = f"{available} bytes where {offset + size} are needed"
        raise ModelError(f"{subject}, which is truncated ({reason}): copy the file again")
    return file, offset, size


def nbytes(tensor: TensorProto) -> int:
    """Return the size of the elements of a tensor in bytes, 0 for strings."""
    kind = ir.DataType(tensor.data_type)
    unsized = kind in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    return 0 if unsized else ceil(prod(tensor.dims) * kind.itemsize)


def refer_to_file(tensor: TensorProto, file: os.PathLike | str, offset: int, size: int) -> None:
    """Make `tensor` refer to `size` bytes of `file`, from `offset` on."""
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", offset), ("length", size)):
        tensor.external_data.add(key=key, value=str(value))


def tensor_to_array(tensor: TensorProto) -> np.ndarray:
    """Return the elements of `tensor` as an array; external data as a read-only view."""
    if is_external(tensor):
        return ir.serde.deserialize_tensor(tensor).numpy()
    return numpy_helper.to_array(tensor)


def external_files(model: ModelProto) -> set[Path]:
    """Return the paths of the files of external data that `model` refers to."""
    return {Path(_location_entry(tensor).value) for _, tensor in external_tensors(model)}


def _location_entry(tensor: TensorProto) -> Any:
    """Return the entry `location` (the path of the data file) in the `external_data` of a
    tensor.
    """
    return next(e for e in tensor.external_data if e.key == "location")


def move_data_locations(model: ModelProto, new_path: Callable[[Path], Path]) -> ModelProto:
    """Return a copy of `model` that expects its external data at the paths `new_path(old path)`;
    the files are not moved.
    """
    copy = deepcopy(model)
    for _, tensor in external_tensors(copy):
        location = _location_entry(tensor)
        location.value = new_path(Path(location.value)).as_posix()
    return copy


def lacks_elements(tensor: TensorProto) -> bool:
    """Return whether a tensor has a shape but no elements, neither inline nor in a file: see
    `copy_without_elements`.
    """
    has = tensor.HasField("raw_data") or any(getattr(tensor, field) for field in ELEMENTS)
    return nbytes(tensor) > 0 and not is_external(tensor) and not has


def is_large_inline(tensor: TensorProto, size: int) -> bool:
    """Return whether a tensor has more than `size` bytes of elements, and the elements are in the
    model and not in an external file.
    """
    return not is_external(tensor) and nbytes(tensor) > size


def inline_nbytes(model: ModelProto) -> int:
    """Return the size in bytes of all initializers that `write_initializers` would move from the
    model to files, as they are large.
    """
    return sum(nbytes(t) for t in model.graph.initializer if is_large_inline(t, SMALL))


def write_initializers(
    model: ModelProto,
    place: Callable[[TensorProto], tuple[Path, Path] | None],
    arrays: Mapping[str, np.ndarray] = _NONE,
) -> ModelProto:
    """Write the elements of initializers to files; return a copy of `model` that refers to the
    files.

    Args:
        model: the model.
        place: returns, for an initializer, the file to write to, and the file that the model
            refers to: the caller moves the first to the second. None: the initializer stays.
        arrays: elements of initializers that lack their elements in `model`.
    """
    places = {tensor.name: place(tensor) for tensor in model.graph.initializer}
    result = copy_without_elements(model, lambda tensor: places[tensor.name] is not None)
    opened: dict[Path, BinaryIO] = {}
    with ExitStack() as stack:
        for tensor, new in zip(model.graph.initializer, result.graph.initializer, strict=True):
            if (placed := places[tensor.name]) is None:
                continue
            file, location = placed
            if file not in opened:
                opened[file] = stack.enter_context(file.open("wb"))
            out = opened[file]
            out.write(bytes(-out.tell() % _ALIGNMENT))
            refer_to_file(new, location, out.tell(), nbytes(tensor))
            out.write(_little_endian_bytes(tensor, arrays))
    return result


def _little_endian_bytes(tensor: TensorProto, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the elements of a tensor as bytes, little-endian as files of external data hold them.

    `arrays` has the elements of tensors that lack their elements, by name.
    """
    if not lacks_elements(tensor):
        return ir.serde.deserialize_tensor(tensor).tobytes()
    dtype = ir.DataType(tensor.data_type)
    array = np.asarray(arrays[tensor.name], dtype.numpy())
    if array.shape != tuple(tensor.dims):
        raise ValueError(
            f"the tensor {tensor.name!r} has the shape {tuple(tensor.dims)}, and its new elements "
            f"have the shape {array.shape}: pass elements of the shape of the tensor"
        )
    return ir.Tensor(array, dtype).tobytes()


def write_filled(model: ModelProto, file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Serialize a model to a file, with elements from `arrays` for the initializers that lack their
    elements.

    `arrays` has these elements, by name. Memory has a copy of one initializer at a time.
    """
    before, after = _serialized_fields_around(model, "graph")
    nodes, others = _serialized_fields_around(model.graph, "initializer")
    missing = [nbytes(t) if lacks_elements(t) else 0 for t in model.graph.initializer]
    heads = [_field_header(TensorProto.RAW_DATA_FIELD_NUMBER, n) if n else b"" for n in missing]
    tensors = list(zip(model.graph.initializer, heads, strict=True))
    sizes = [t.ByteSize() + len(head) + n for (t, head), n in zip(tensors, missing, strict=True)]
    fields = [_field_header(GraphProto.INITIALIZER_FIELD_NUMBER, size) for size in sizes]
    size = len(nodes) + sum(map(len, fields)) + sum(sizes) + len(others)
    with file.open("wb") as out:
        out.write(before + _field_header(ModelProto.GRAPH_FIELD_NUMBER, size) + nodes)
        for field, (tensor, head) in zip(fields, tensors, strict=True):
            out.write(field + tensor.SerializeToString() + head)
            if head:
                out.write(_little_endian_bytes(tensor, arrays))
        out.write(others + after)


def _serialized_fields_around(message: Any, name: str) -> tuple[bytes, bytes]:
    """Return two byte strings: the serialized fields of a message that come before the field
    `name`, and the fields that come after it.
    """
    number = message.DESCRIPTOR.fields_by_name[name].number
    before = _copy_with_fields(message, lambda field: field.number < number)
    after = _copy_with_fields(message, lambda field: field.number > number)
    return before.SerializeToString(), after.SerializeToString()


def _field_header(number: int, length: int) -> bytes:
    """Return the bytes that begin a serialized protobuf field: the number of the field and the
    length of its content.
    """
    data = bytearray([number << 3 | 2])
    while length > 0x7F:
        data.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*data, length])


def parse_by_initializers(file: BinaryIO, size: int) -> ModelProto:
    """Parse the model in a file of `size` bytes; memory has a copy of one initializer at a time.

    Raises:
        DecodeError: the file is no model, or its fields are not as `SerializeToString` writes them.
    """
    of_model = _serialized_fields(file, 0, size)
    graphs = [field for field in of_model if field[0] == ModelProto.GRAPH_FIELD_NUMBER]
    if len(graphs) != 1:
        raise DecodeError("a model has one graph")
    of_graph = _serialized_fields(file, *graphs[0][2:])
    nodes, initializers = bytearray(), []
    for field in of_graph:
        if field[0] == GraphProto.INITIALIZER_FIELD_NUMBER:
            initializers.append(field)
        else:
            nodes += _read_bytes(file, field[1], field[3])
    others = b"".join(_read_bytes(file, f[1], f[3]) for f in of_model if f not in graphs)
    header = _field_header(ModelProto.GRAPH_FIELD_NUMBER, len(nodes))
    model = ModelProto.FromString(others + header + nodes)
    for *_, start, end in initializers:
        model.graph.initializer.add().ParseFromString(_read_bytes(file, start, end))
    return model


def _serialized_fields(file: BinaryIO, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Return the fields of the message between two positions of a file.

    Each is a tuple: the number of the field, and the positions of its header, content and end.
    """
    found, position = [], start
    while position < end:
        file.seek(position)
        tag = _read_varint(file)
        kind = tag & 7
        length = _read_varint(file) if kind == _LENGTH_FIRST else _FIELD_SIZES.get(kind)
        begin = file.tell()
        if kind == 0:
            _read_varint(file)
            length = file.tell() - begin
        if length is None or begin + length > end:
            raise DecodeError(f"no field of a message at position {position}")
        found.append((tag >> 3, position, begin, begin + length))
        position = begin + length
    return found


def _read_varint(file: BinaryIO) -> int:
    """Return the integer at the position of a file, seven bits a byte as protobuf writes it."""
    result = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        result |= (byte[0] & 0x7F) << shift if byte else 0
        if byte and byte[0] < 0x80:
            return result
    raise DecodeError("no integer")


def _read_bytes(file: BinaryIO, start: int, end: int) -> bytes:
    """Return the bytes of a file between two positions."""
    file.seek(start)
    return file.read(end - start)


def copy_without_elements(model: ModelProto, chosen: Callable[[TensorProto], bool]) -> ModelProto:
    """Return a copy of `model` that lacks the elements of the initializers for which
    `chosen(tensor)` is true.
    """
    result = _copy_with_fields(model, lambda field: field.name != "graph")
    result.graph.CopyFrom(_copy_with_fields(model.graph, lambda field: field.name != "initializer"))
    for tensor in model.graph.initializer:
        if chosen(tensor):
            tensor = _copy_with_fields(tensor, lambda field: field.name in _DESCRIBES)
        result.graph.initializer.append(tensor)
    return result


def _copy_with_fields(message: Any, chosen: Callable[[Any], bool]) -> Any:
    """Return a copy of a protobuf message that has only the fields for which `chosen(field)` is
    true.
    """
    fields = message.ListFields()
    return type(message)(**{field.name: value for field, value in fields if chosen(field)})


def copy_without_data(model: ModelProto) -> ModelProto:
    """Return a copy of `model` without the elements of large initializers, which `restore_data` or
    `restore_data_lazily` bring back.

    The large initializers of the copy refer to external data, so that a rewrite that copies the
    model does not copy elements.
    """
    result = copy_without_elements(model, lambda tensor: is_large_inline(tensor, _LARGE))
    for i, tensor in enumerate(model.graph.initializer):
        if is_large_inline(tensor, _LARGE):
            refer_to_file(result.graph.initializer[i], _IN_ORIGIN, i, nbytes(tensor))
    return result


def content_digest(model: ModelProto) -> bytes:
    """Return a hash of `model` and its elements; for external data, the sizes and modification
    times of the files are hashed.
    """
    digest = sha1(copy_without_data(model).SerializeToString())
    for tensor in model.graph.initializer:
        if is_large_inline(tensor, _LARGE):
            digest.update(tensor.SerializeToString())
    for file in sorted(external_files(model)):
        stat = Path(file).stat() if Path(file).is_file() else None
        digest.update(repr(stat and (stat.st_size, stat.st_mtime_ns, stat.st_ino)).encode())
    return digest.digest()


def restore_data_lazily(model: ir.Model, origin: ModelProto) -> ir.Model:
    """Give the initializers of `model`, rewritten from `copy_without_data(origin)`, the elements of
    `origin`, which are read when needed.
    """
    for value in model.graph.initializers.values():
        old = value.const_value
        if isinstance(old, ir.ExternalTensor) and old.location == _IN_ORIGIN:
            read = partial(ir.serde.deserialize_tensor, origin.graph.initializer[old.offset or 0])
            value.const_value = ir.LazyTensor(
                read, old.dtype, old.shape, name=old.name, doc_string=old.doc_string
            )
    return model


def forget_lazy_data(values: Iterable[ir.Value]) -> None:
    """Drop the elements of values that are, or were, initializers and are read when needed, in
    place: nothing needs them any more, and they keep the model or arrays in memory.
    """
    for value in values:
        if isinstance(value.const_value, ir.LazyTensor):
            value.const_value = None


def restore_data(model: ModelProto, origin: ModelProto) -> None:
    """Copy the elements of the initializers of `origin` into `model`, rewritten from
    `copy_without_data(origin)`, in place.
    """
    origins = {tensor.name: tensor for tensor in origin.graph.initializer}
    for tensor in model.graph.initializer:
        if is_external(tensor) and tensor.name in origins:
            tensor.CopyFrom(origins[tensor.name])
