"""Attributes that exist after `fit`, and a cache of what they build on demand."""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import ModelProto

from onnxgrad.estimator import BaseEstimator
from onnxgrad.model import external
from onnxgrad.optimizers import Optimizer

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, Optimizer)
_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


class Fitted:
    """An attribute of a trainer that `read` computes from the state.

    Before there is a state, it raises `NotFittedError`, which is an `AttributeError`.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        trainer._fitted()
        return self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"{self.name!r} is computed from the state: call set_state or fit")


class BuildCache:
    """Sessions and graphs built from the parameters of a trainer, until one of them changes."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, Any]] = {}

    def get(self, name: str, read_key: Callable[[], Any], build: Callable[[], T]) -> T:
        """Return the result that `build` returned under an equal key, or call it."""
        key = read_key()
        entry = self._entries.get(name)
        if entry is not None and entry[0] == key:
            return entry[1]
        new = build()
        if read_key() == key:  # else another thread changed a parameter meanwhile
            self._entries[name] = key, new
        return new


def fingerprint(value: Any) -> Any:
    """Return a key that is equal for equal parameters, and for no others.

    Models are compared by their content, files by size and modification time, functions and
    classes by identity. Objects whose content cannot be compared get a key that equals no other,
    so that whatever depends on them is built every time.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _NAMED):
        return value
    if isinstance(value, ModelProto):
        return _content(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return type(value), tuple((fingerprint(k), fingerprint(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(fingerprint, value))
    if isinstance(value, BaseEstimator):
        own = {k: v for k, v in vars(value).items() if k != "_sessions"}
        return type(value), fingerprint(own)
    return object()


def model_fingerprint(model: Any) -> Any:
    """Return the fingerprint of a `ModelLike`; for a path, that of the model's files."""
    if not isinstance(model, (str, os.PathLike)):
        return fingerprint(model)
    path = Path(model)
    try:
        stamp = _stamp(path)
        return os.fspath(path), stamp, tuple(map(_stamp, _data_files(path, stamp)))
    except Exception:  # missing or no model: the error is raised where it is read
        return object()


def _content(model: ModelProto) -> Any:
    try:
        digest = hashlib.blake2b(model.SerializeToString()).digest()
        return digest, tuple((file, _stamp(file)) for file in sorted(external.files_of(model)))
    except Exception:  # a file is missing, or the model is larger than can be serialized
        return object()


def _stamp(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=64)
def _data_files(path: Path, stamp: tuple[int, ...]) -> tuple[Path, ...]:
    """Return the files of external data of the model at `path`."""
    model = onnx.load_model_from_string(path.read_bytes())
    return tuple(path.parent / file for file in sorted(external.files_of(model)))
