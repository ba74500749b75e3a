"""The door out: a model becomes a file, with its external data beside it where there are any."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxgrad.model import external
from onnxgrad.model.files import replacing, target_of
from onnxgrad.model.read import ModelLike, read


def save(model: ModelLike, path: str | os.PathLike) -> None:
    """Write a model of any size to a file, whole or not at all.

    Up to 1 GB it is one file, unless `model` refers to tensors in other files, as what is made of a
    larger model does. Those in the folder of `path`, or below, are referred to and not copied;
    others are copied into it, once. More than 1 GB of tensors that `model` holds itself go to a new
    file, `<name of path>.<number>.data`. No file of data is written over: only such a new file, of
    the model that was at `path` before, is removed when no model in that folder refers to it.

    Args:
        model: model, serialized model or path; never modified.
        path: where to write it to, in a folder that exists; a model that is there is replaced, and
            keeps its mode. Where it is a symbolic link, its target is written.

    Raises:
        OSError: `path` is no regular file, the folder cannot be written, or the disk is full: what
            was there before stays.
        ValueError: `path` is a file of data that `model` refers to.
        ModelError: `model` cannot be read.
    """
    proto, target = read(model), target_of(path)
    _check_not_data(proto, model, target)
    home, before = target.parent, _own_data(target)
    large = external.held(proto) > external.IN_MODEL
    if (large or external.files_of(proto)) and Path(path).parent.resolve() != home:
        reason = f"a model with data in other files is not read through a link: save to {target}"
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    with ExitStack() as undo:
        if large:
            data = _reserved(_numbered(target, ".data"), undo)
            with replacing(data) as temporary:
                proto = external.written_out(proto, temporary, data)
        places = {file: _placed(file, home, undo) for file in external.files_of(proto)}
        if places:
            proto = external.relocated(proto, lambda file: places[file].relative_to(home))
        formats = onnx.serialization.registry
        kind = formats.get_format_from_file_extension(Path(path).suffix) or "protobuf"
        with replacing(path) as temporary:
            temporary.write_bytes(formats.get(kind).serialize_proto(proto))
        undo.pop_all()
    for file in before.difference(places.values()):
        if not _is_shared(file):
            file.unlink(missing_ok=True)


def data_files(path: str | os.PathLike) -> set[Path]:
    """Return the files that the model at `path` refers to, none if there is no model."""
    if not Path(path).is_file():
        return set()
    try:
        model = onnx.load_model_from_string(Path(path).read_bytes())
    except (OSError, DecodeError):
        return set()
    return {Path(path).parent.resolve() / file for file in external.files_of(model)}


def _check_not_data(proto: ModelProto, model: ModelLike, target: Path) -> None:
    files = external.files_of(proto)
    if isinstance(model, (str, os.PathLike)):
        files |= data_files(model)
    if target.exists() and any(file.exists() and file.samefile(target) for file in files):
        raise ValueError(f"{target} holds data that the model refers to: save to another path")


def _reserved(names: Iterator[Path], undo: ExitStack) -> Path:
    """Return the first name that is free, taken by an empty new file, which `undo` removes."""
    file = next(file for file in names if _is_new(file))
    undo.callback(file.unlink, missing_ok=True)
    return file


def _is_new(file: Path) -> bool:
    """Create `file`, unless it exists: threads may save beside each other."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


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
        place = _reserved(chain([place], others), undo)
        with replacing(place) as temporary:
            shutil.copy2(real, temporary)
    return place


def _stamp(file: Path) -> tuple[int, int]:
    """Return what is the same of a copy."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _numbered(stem: Path, suffix: str) -> Iterator[Path]:
    return (stem.with_name(f"{stem.name}.{i}{suffix}") for i in count(1))


def _own_data(path: Path) -> set[Path]:
    """Return the files of data that `save` wrote for the model that is at `path`."""
    pattern = re.compile(rf"{re.escape(path.name)}\.\d+\.data")
    named = {file for file in path.parent.glob("*.data") if pattern.fullmatch(file.name)}
    return data_files(path) & named if named else set()


def _is_shared(file: Path) -> bool:
    """Tell whether a model in the folder of `file` may refer to it."""
    models = (model for model in file.parent.glob("*.onnx") if model.is_file())
    try:
        return any(file.name.encode() in model.read_bytes() for model in models)
    except OSError:
        return True


"""x"""


def write_models(
    models: Mapping[str, Any],
    folder: str | os.PathLike | type[bytes],
    prefix: str | None = None,
    suffix: str | None = None,
) -> dict[str, Any]:
    """Write models, in dictionaries that may be nested, into a folder, created if missing.

    The model `models["a"]["b"]` is the file `<prefix>a.b<suffix>.onnx`.

    Returns:
        The same dictionaries, of paths; or with `bytes` in place of the folder, of serialized
        models.

    Raises:
        ValueError: a name, with `prefix` and `suffix`, that would be no plain name of a file in
            `folder`; nothing is written then.
        OSError: the folder cannot be written.
    """
    if isinstance(folder, type):
        return _mapped(models, lambda name, model: model.SerializeToString())
    from onnxgrad.model.write import save  # slow to import, and the command line starts here

    home, paths, around = Path(folder), dict[str, Path](), (prefix or "", suffix or "")

    def check(name: str, model: Any) -> None:
        if name in paths:
            raise ValueError(f"two models would be written to the file {name}.onnx: rename one")
        paths[name] = _inside(home, f"{name}.onnx")

    def write(name: str, model: Any) -> str:
        save(model, paths[name])
        return str(paths[name])

    _mapped(models, check, *around)
    home.mkdir(parents=True, exist_ok=True)
    return _mapped(models, write, *around)


def _mapped(
    models: Mapping[str, Any],
    function: Callable[[str, Any], Any],
    prefix: str = "",
    suffix: str = "",
) -> dict[str, Any]:
    """Return the same dictionaries, of what `function` returns for full names and models."""
    return {
        name: _mapped(model, function, f"{prefix}{name}.", suffix)
        if isinstance(model, Mapping)
        else function(f"{prefix}{name}{suffix}", model)
        for name, model in models.items()
    }


def _inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` of `folder`, from which no name or link leads away."""
    if not name.isprintable() or set(name) & set("/\\") or Path(name).name != name:
        raise ValueError(
            f"{name!r} is no plain name of a file: give names without '/', '\\' and line breaks"
        )
    path = folder / name
    if target_of(path).parent != Path(os.path.realpath(folder)):
        raise ValueError(f"{path} is a link out of its folder: remove it")
    return path
