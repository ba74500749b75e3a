"""Files of arrays in the format of safetensors, written and read one array at a time.

A file has the length of its header, the header in JSON with dtype, shape and place of each tensor,
and the elements, little-endian and without gaps. The functions of the package `safetensors` hold
copies of all tensors at once: large weights would be in memory several times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]

_METADATA = "__metadata__"
_BFLOAT16 = "bfloat16"  # metadata key: the names of bfloat16 arrays, which are stored as uint16
_ALIGNMENT = 8  # bytes: the elements begin at a multiple
_DTYPES = {  # by the name in a header; numpy reads them from a file on every processor
    "BOOL": np.dtype("?"),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def serialize_arrays(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file with `arrays`, bfloat16 included, in parts.

    The first part is the header, and each other part the elements of one array: the memory of the
    array itself, unless it is not contiguous.

    Raises:
        TypeError: an array of a dtype that the format lacks, such as text.
    """
    held = {name: np.asarray(array) for name, array in arrays.items()}
    short = [name for name, array in held.items() if array.dtype == ml_dtypes.bfloat16]
    held |= {name: held[name].view(np.uint16) for name in short}
    entries: dict[str, Any] = {
        _METADATA: {_BFLOAT16: json.dumps(short), **(metadata or {})},
    }
    # the largest elements first, as safetensors does, so that all elements are aligned
    names, end = sorted(held, key=lambda name: (-held[name].itemsize, name)), 0
    for name in names:
        array = held[name]
        if (dtype := _NAMES.get(array.dtype.newbyteorder("<"))) is None:
            raise TypeError(
                f"the array {name!r} has the dtype {array.dtype}, which a safetensors file cannot "
                "hold: convert it to numbers of at most 64 bits"
            )
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (start, end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    yield len(header).to_bytes(8, "little") + header
    for name in names:
        array = held[name]
        yield _memory_of(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))


def read_arrays(path: Path, digest: Any = None) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays and the metadata of a safetensors file.

    Arrays that `serialize_arrays` wrote as bfloat16 are bfloat16 again.

    Args:
        path: the file.
        digest: an object of `hashlib` that is updated with the content of the file.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is damaged, or of another format.
    """
    with path.open("rb") as file:

        def read(buffer: bytearray | memoryview) -> None:
            if file.readinto(buffer) != len(buffer):
                raise ValueError("it ends too early")
            if digest is not None:
                digest.update(buffer)

        try:
            left, length = path.stat().st_size - 8, bytearray(8)
            read(length)
            if (size := int.from_bytes(length, "little")) > left:
                raise ValueError("it ends too early")
            read(header := bytearray(size))
            entries = json.loads(header)
            metadata = entries.pop(_METADATA, {})
            arrays, short = {}, set(json.loads(metadata.get(_BFLOAT16, "[]")))
            for name, dtype, shape in _tensors_in_order(entries, left - size):
                array = np.empty(shape, dtype)
                read(_memory_of(array))
                arrays[name] = array.view(ml_dtypes.bfloat16) if name in short else array
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise ValueError(f"{path} is no safetensors file, or damaged: {e}") from None
    return arrays, metadata


def _tensors_in_order(
    entries: Mapping[str, Any], size: int
) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor, in the order of their elements.

    Args:
        entries: the entries of the header, by the name of the tensor.
        size: the count of bytes behind the header.

    Raises:
        ValueError: the elements have gaps, or another size than the bytes behind the header.
    """
    tensors, place = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if start != place or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name!r} does not fit its shape")
        tensors.append((name, dtype, tuple(shape)))
        place = end
    if place != size:
        raise ValueError(f"its tensors have {place} bytes, and the file has {size}")
    return tensors


def _memory_of(array: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array, as bytes."""
    return array.reshape(-1).view(np.uint8).data
