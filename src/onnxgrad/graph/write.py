"""The door out: a model becomes a file, with its external data beside it where there are any."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxgrad.files import replacing
from onnxgrad.graph import external
from onnxgrad.graph.read import ModelLike, read


def save(model: ModelLike, path: str | os.PathLike) -> None:
    """Write a model of any size to a file, whole or not at all.

    Up to 1 GB it is one file, unless `model` refers to tensors in other files, as what is made of a
    larger model does. Those in the folder of `path`, or below, are referred to and not copied;
    others are copied into it, once. More than 1 GB of tensors that `model` holds itself go to a new
    file, `<name of path>.<number>.data`. No file of data is written over: only such a new file, of
    the model that was at `path` before, is removed when nothing refers to it any more.

    Args:
        model: model, serialized model or path; never modified.
        path: where to write it to, in a folder that exists; a model that is there is replaced.

    Raises:
        OSError: the folder cannot be written, or the disk is full: what was there before stays.
        ModelError: `model` cannot be read.
    """
    made, path = read(model), Path(path)
    home, before = path.parent.resolve(), _own_data(path)
    with ExitStack() as undo:
        if external.held(made) > external.IN_MODEL:
            data = next(f for f in _numbered(home / path.name, ".data") if not f.exists())
            with _added(undo, data) as temporary:
                made = external.written_out(made, temporary, data)
        places = {file: _placed(file, home, undo) for file in external.files_of(made)}
        if places:
            made = external.relocated(made, lambda file: places[file].relative_to(home))
        formats = onnx.serialization.registry
        kind = formats.get_format_from_file_extension(path.suffix) or "protobuf"
        with replacing(path) as temporary:
            temporary.write_bytes(formats.get(kind).serialize_proto(made))
        undo.pop_all()
    for file in before.difference(places.values()):
        file.unlink(missing_ok=True)


@contextmanager
def _added(undo: ExitStack, file: Path) -> Iterator[Path]:
    """Yield a name beside `file`, which becomes a new file that `undo` removes."""
    with replacing(file) as temporary:
        yield temporary
    undo.callback(file.unlink)


def _placed(file: Path, home: Path, undo: ExitStack) -> Path:
    """Return where `file` is in `home` or below, after copying it there if it is not.

    Copied and not linked: neither onnx nor onnxruntime read through links.
    """
    if (real := file.resolve()).is_relative_to(home):
        return real
    place = home / file.name
    others = _numbered(place.with_suffix(""), place.suffix)
    while place.is_symlink() or (place.exists() and _stamp(place) != _stamp(real)):
        place = next(others)
    if not place.exists():
        with _added(undo, place) as temporary:
            shutil.copy2(real, temporary)
    return place


def _stamp(file: Path) -> tuple[int, int]:
    """Return what is the same of a copy."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _numbered(stem: Path, suffix: str) -> Iterator[Path]:
    return (stem.with_name(f"{stem.name}.{i}{suffix}") for i in count(1))


def _own_data(path: Path) -> set[Path]:
    """Return the files of data that `save` made for the model that is at `path`."""
    home, pattern = path.parent.resolve(), re.compile(rf"{re.escape(path.name)}\.\d+\.data")
    named = {file for file in home.glob("*.data") if pattern.fullmatch(file.name)}
    if not named or not path.is_file():
        return set()
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except DecodeError:
        return set()
    return {home / file for file in external.files_of(model)} & named
