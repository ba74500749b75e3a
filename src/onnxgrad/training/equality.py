"""Tell whether two arguments are equal: for caches, checkpoints and estimators.

Arguments are compared by descriptions or fingerprints, since models, functions and arrays have no
useful `==`.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxgrad.estimator import BaseEstimator
from onnxgrad.model import external
from onnxgrad.model.external import lacks_elements
from onnxgrad.model.read import is_model_path
from onnxgrad.model.weights import without_large_weights

T = TypeVar("T")


def describe(value: Any, here: bool = False) -> Any:
    """Return a JSON description of `value`; equal values have equal descriptions in all processes.

    Models and arrays are described by a digest, functions by their name, code and captured values,
    and other objects by class and attributes. With `here`, descriptions are compared in this
    process only: functions and classes describe themselves, and an object without a description is
    equal to no other.
    """
    if isinstance(value, Path) or is_model_path(value):
        return _digest_of_file(Path(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    describe_inner = partial(describe, here=here)
    if isinstance(value, Mapping):
        return {str(key): describe_inner(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(describe_inner, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, ModelProto):
        return _digest_of_model(value)
    if isinstance(value, bytes):
        return digest_bytes(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {digest_bytes(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
        return value if here else name
    if isinstance(value, partial):
        return describe_inner([value.func, list(value.args), value.keywords])
    if isinstance(value, types.FunctionType):
        return _describe_function(value, here)
    return _describe_object(value, here)


def fingerprint(value: Any) -> Any:
    """Return a key to compare `value` within this process; equal values have equal keys."""
    return describe(value, here=True)


def are_surely_equal(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal; False if equality cannot be decided."""
    if a is b or fingerprint(a) == fingerprint(b):
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_surely_equal(a[key], b[key]) for key in a)
    try:
        return bool(a == b)
    except ValueError:  # arrays compare element by element
        return False


def model_fingerprint(model: Any) -> Any:
    """Return the fingerprint of a `ModelLike`; for a path, with times and sizes of the files."""
    if not isinstance(model, (str, os.PathLike)):
        files = external.external_files(model) if isinstance(model, ModelProto) else ()
        return fingerprint(model), _file_stamps(files)
    path = Path(model)
    try:
        stamp = _file_stamp(path)
        return os.fspath(path), stamp, _file_stamps(_external_data_files(path, stamp))
    except Exception:  # missing or no model: reading the model raises the error
        return object()


def class_and_arguments(value: Any) -> Any:
    """Return a JSON description of a callback or metric: its class name, for ours with arguments.

    Classes of this package are described with their arguments, as `{name: arguments}`.
    """
    kind = type(value)
    if not kind.__module__.startswith("onnxgrad."):
        return kind.__qualname__
    names = inspect.signature(kind).parameters
    return {kind.__qualname__: {n: getattr(value, n) for n in names if hasattr(value, n)}}


class BuildCache:
    """A cache of sessions and graphs; an entry is built again when a trainer's arguments change."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, Any]] = {}
        self._described: tuple[list[Any], Any] = [], None

    def fingerprint(self, values: Mapping[str, Any]) -> Any:
        """Return `fingerprint(values)`; values that are the same as in the last call are reused."""
        items = _flatten_containers(values)
        old, found = self._described
        if len(items) != len(old) or not all(map(operator.is_, items, old)):
            found = fingerprint(values)
            self._described = (items, found) if all(map(_is_immutable, items)) else ([], None)
        return found

    def get(self, name: str, read_key: Callable[[], Any], build: Callable[[], T]) -> T:
        """Return the cached result called `name`, or build it if the key has changed.

        `read_key` returns the key on which the result of `build` depends.
        """
        key = read_key()
        entry = self._entries.get(name)
        if entry is not None and entry[0] == key:
            return entry[1]
        new = build()
        if read_key() == key:  # otherwise, another thread changed a parameter meanwhile
            self._entries[name] = key, new
        return new


def _flatten_containers(values: Mapping[str, Any]) -> list[Any]:
    """Return the values of a mapping as one flat list, with the elements of nested containers."""
    items: list[Any] = []
    for value in values.values():
        if isinstance(value, dict):
            items += [dict, len(value), *value, *value.values()]
        else:
            items += [list, len(value), *value] if isinstance(value, list) else [value]
    return items


def _is_immutable(value: Any) -> bool:
    """Return whether a value, and all that it contains, cannot change."""
    kind = type(value)
    if value is None or value is dict or value is list:
        return True
    if kind in (bool, int, float, str, bytes):
        return not is_model_path(value)
    if kind in (tuple, frozenset):
        return all(map(_is_immutable, value))
    if isinstance(value, types.FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    frozen = is_dataclass(value) and kind.__module__.startswith("onnxgrad.")
    frozen = frozen and kind.__dataclass_params__.frozen
    return frozen and all(_is_immutable(getattr(value, f.name)) for f in fields(value))


def _describe_function(function: Any, here: bool) -> Any:
    """Return the description of a function: its name and code, and the values that it captures.

    With `here`, the function itself stands for name and code.
    """
    text = f"{function.__qualname__} {digest_bytes(_code_text(function.__code__).encode())}"
    cells = [_cell_value(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    captured = [describe(v, here) for v in (*cells, *defaults) if v is not function]
    return [function if here else text, *captured] if captured or here else text


def _code_text(code: types.CodeType) -> str:
    """Return the bytecode, names and constants of a function as text, with inner functions."""
    # the order of a set differs between processes
    ordered = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in code.co_consts]
    constants = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in ordered]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _cell_value(cell: Any) -> Any:
    """Return the captured value of a closure's cell; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _describe_object(value: Any, here: bool) -> Any:
    """Return the description of an object: its class and attributes, or else its `repr`."""
    kind, own = type(value), getattr(value, "__dict__", {})
    ours = kind.__module__.startswith("onnxgrad.")
    if isinstance(value, BaseEstimator):
        own = {name: v for name, v in own.items() if name != "_sessions"}
    elif is_dataclass(value):  # a user's subclass may have more attributes than fields
        own = ({} if ours else own) | {f.name: getattr(value, f.name) for f in fields(value)}
    elif here and not ours:
        return object()  # an object of another package may have state beside its attributes
    elif not own or not repr(value).startswith("<"):
        return object() if here else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return [kind if here else kind.__qualname__, describe(own, here)]


def digest_bytes(data: bytes) -> str:
    """Return a digest of 16 bytes, in hexadecimal."""
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()


def new_digest() -> hashlib.blake2b:
    """Return the object of `hashlib` that computes `digest_bytes`, for data that come in parts."""
    return hashlib.blake2b(digest_size=16)


def _digest_of_file(path: Path) -> str:
    """Return the digest of a file, for a model with its external data.

    A path that names no file is returned unchanged, as text.
    """
    if not path.is_file():
        return str(path)
    try:
        is_model = is_model_path(str(path))
        data_files = _external_data_files(path, _file_stamp(path)) if is_model else ()
        digests = (digest_bytes(file.read_bytes()) for file in (path, *data_files))
        return digest_bytes("".join(digests).encode())
    except (DecodeError, OSError):  # no model: reading the model raises the error
        return digest_bytes(path.read_bytes())


def _digest_of_model(model: ModelProto) -> str:
    """Return the digest of a model; large weights are read one by one."""
    small = without_large_weights(model)
    if small is model:
        return digest_bytes(model.SerializeToString(deterministic=True))
    initializers = {t.name: t for t in model.graph.initializer}
    weights = (initializers[t.name] for t in small.graph.initializer if lacks_elements(t))
    digests = "".join(digest_bytes(t.SerializeToString(deterministic=True)) for t in weights)
    return digest_bytes(small.SerializeToString(deterministic=True) + digests.encode())


def _file_stamps(files: Any) -> tuple[Any, ...]:
    """Return pairs of the path and the `_file_stamp` of each file, sorted by path."""
    return tuple((os.fspath(file), _file_stamp(Path(file))) for file in sorted(files))


def _file_stamp(file: Path) -> tuple[int, ...]:
    """Return the modification time in nanoseconds, the size and the inode of a file."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=64)
def _external_data_files(path: Path, stamp: tuple[int, ...]) -> tuple[Path, ...]:
    """Return the files of external data of the model at `path`; `stamp` is its `_file_stamp`."""
    model = onnx.load_model_from_string(path.read_bytes())
    return tuple(path.parent / file for file in sorted(external.external_files(model)))
