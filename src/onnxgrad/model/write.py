"""Write models to files; the elements of large models go to files of external data beside them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxgrad.model import external
from onnxgrad.model.files import lock_path, remove_leftovers, replacement_file, resolve_target
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import fill_weights


def save(model: ModelLike, path: str | os.PathLike) -> None:
    """Write a model of any size to a file, atomically: completely or not at all.

    More than 1 GB of initializers that `model` contains go to a new file of external data,
    `<name of path>.<number>.data`; a smaller model is one file. If `model` refers to external data
    already, files in the folder of `path` or below are referred to, and others are copied into it,
    once.

    Existing files of external data are never overwritten. A file `<name of path>.<number>.data` of
    the model that is replaced is removed when no model in that folder refers to it.

    Args:
        model: model, serialized model or path; never modified.
        path: the file, in a folder that exists. An existing file is replaced by one of the same
            mode; of a symbolic link, the target is replaced.

    Raises:
        OSError: `path` is no regular file, the folder is not writable, or the disk is full; an
            existing file is unchanged then.
        ValueError: `path` is a file of external data that `model` refers to.
        ModelError: `model` cannot be read.

    Examples:
        >>> import os, tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.onnx")
        ...     og.save(model, path)
        ...     og.graph.get_onnx_opset(path)
        20
    """
    proto = read(model)
    files, target = external.external_files(proto), resolve_target(path)
    if isinstance(model, (str, os.PathLike)):
        files |= external_data_files(model)
    if target.exists() and any(file.exists() and file.samefile(target) for file in files):
        raise ValueError(
            f"{target} holds external data of the model: save the model to another path"
        )
    save_filled(proto, {}, path)


def save_filled(
    proto: ModelProto, arrays: Mapping[str, np.ndarray], path: str | os.PathLike
) -> None:
    """Write `proto` to a file as `save` does, with elements from `arrays` for the initializers that
    lack their elements.
    """
    target = resolve_target(path)
    remove_leftovers(target, r"\.\d+\.data")
    home = target.parent
    large = external.inline_nbytes(proto) > external.IN_MODEL
    if (large or external.external_files(proto)) and Path(path).parent.resolve() != home:
        reason = f"models with external data cannot be read through links: save to {target}"
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    with ExitStack() as locks, ExitStack() as undo:
        if large:
            data = _reserve_file(_numbered_paths(target, ".data"), undo, locks)
            # the file is locked until a model refers to it
            with replacement_file(data, locks) as temporary:
                place = temporary, data
                proto = external.write_initializers(
                    proto,
                    lambda t: place if external.is_large_inline(t, external.SMALL) else None,
                    arrays,
                )
        copies = {
            file: _copy_into_folder(file, home, undo, locks)
            for file in external.external_files(proto)
        }
        if copies:
            proto = external.move_data_locations(proto, lambda file: copies[file].relative_to(home))
        formats = onnx.serialization.registry
        kind = formats.get_format_from_file_extension(Path(path).suffix) or "protobuf"
        with replacement_file(path) as temporary:
            if kind == "protobuf":
                external.write_filled(proto, temporary, arrays)
            else:
                text = formats.get(kind).serialize_proto(fill_weights(proto, arrays))
                temporary.write_bytes(text)
            before = _existing_data_files(target).difference(
                copies.values()
            ) and external_data_files(target)
        undo.pop_all()
    for file in _existing_data_files(target).difference(copies.values()):
        # other processes may save there, too
        with ExitStack() as stack, suppress(FileNotFoundError):
            size, free = file.stat().st_size, lock_path(file, stack)
            if _may_be_external_data(file):
                continue
            if file in before or (not size and free):
                file.unlink()
            elif size and free is not False:
                warnings.warn(
                    f"{file} belongs to no model in its folder: a process that was killed while it "
                    "saved may have left it; remove it if so",
                    stacklevel=3,
                )


def external_data_files(path: str | os.PathLike) -> set[Path]:
    """Return the files of external data of the model at `path`; an empty set if `path` is no
    model.
    """
    if not Path(path).is_file():
        return set()
    try:
        model = onnx.load_model_from_string(Path(path).read_bytes())
    except (OSError, DecodeError):
        return set()
    return {Path(path).parent.resolve() / file for file in external.external_files(model)}


def _reserve_file(names: Iterator[Path], undo: ExitStack, locks: ExitStack) -> Path:
    """Create and lock an empty file under the first unused path of `names`, and return the path.

    `undo` removes the file when it ends; `locks` ends its lock.
    """
    file = next(file for file in names if _create_locked_file(file, locks))
    undo.callback(file.unlink, missing_ok=True)
    return file


def _create_locked_file(file: Path, locks: ExitStack) -> bool:
    """Create and lock an empty file, and return True; return False if another process or a model
    uses the path.

    Other threads may save at the same time. An existing empty file that is not locked was left by a
    process that was killed, and is taken over.
    """
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        if file.is_symlink() or not file.is_file() or file.stat().st_size:
            return False
        return bool(lock_path(file, locks))
    return lock_path(file, locks) is not False  # another save may have taken the file over


def _copy_into_folder(file: Path, home: Path, undo: ExitStack, locks: ExitStack) -> Path:
    """Return the path of `file`, or of a copy in the folder `home` if `file` is outside of `home`.

    The file is not linked: neither onnx nor onnxruntime read external data through links.
    """
    if (real := file.resolve()).is_relative_to(home):
        return real
    copy = home / file.name
    others = _numbered_paths(copy.with_suffix(""), copy.suffix)
    while copy.is_symlink() or (copy.exists() and _size_and_time(copy) != _size_and_time(real)):
        copy = next(others)
    if not copy.exists():
        copy = _reserve_file(chain([copy], others), undo, locks)
        with replacement_file(copy, locks) as temporary:
            shutil.copy2(real, temporary)
    return copy


def _size_and_time(file: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, which are equal for a file and its
    copy.
    """
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _numbered_paths(stem: Path, suffix: str) -> Iterator[Path]:
    """Yield the paths `<stem>.1<suffix>`, `<stem>.2<suffix>` and so on."""
    return (stem.with_name(f"{stem.name}.{i}{suffix}") for i in count(1))


def _existing_data_files(path: Path) -> set[Path]:
    """Return the existing files whose names `save` gives to the external data of the model
    `path`.
    """
    pattern = re.compile(rf"{re.escape(path.name)}\.\d+\.data")
    return {file for file in path.parent.glob("*.data") if pattern.fullmatch(file.name)}


def _may_be_external_data(file: Path) -> bool:
    """Return whether a model in the folder of `file` may refer to `file` as its external data."""
    models = (model for model in file.parent.glob("*.onnx") if model.is_file())
    try:
        return any(file.name.encode() in model.read_bytes() for model in models)
    except OSError:
        return True


def write_models(
    models: Mapping[str, Any],
    folder: str | os.PathLike | type[bytes],
    prefix: str | None = None,
    suffix: str | None = None,
) -> dict[str, Any]:
    """Write the models in a dictionary, which may be nested, to files in a folder, which is created
    if missing.

    The model `models["a"]["b"]` becomes the file `<prefix>a.b<suffix>.onnx`.

    Returns:
        The same dictionaries with the paths in place of the models, or with the serialized models
        if `bytes` is passed in place of the folder.

    Raises:
        ValueError: a name that, with `prefix` and `suffix`, is no name of a file in `folder`;
            nothing is written then.
        OSError: the folder is not writable.
    """
    if isinstance(folder, type):
        return _map_models(models, lambda name, model: model.SerializeToString())
    home, paths = Path(folder), set[Path]()

    def choose_path(name: str, model: Any) -> tuple[Path, Any]:
        path = _path_inside_folder(home, f"{name}.onnx")
        if path in paths:
            raise ValueError(
                f"two models would be written to the file {name}.onnx: rename one of them"
            )
        paths.add(path)
        return path, model

    def save_entry(_: str, entry: tuple[Path, Any]) -> str:
        path, model = entry
        save(model, path)
        return str(path)

    entries = _map_models(models, choose_path, prefix or "", suffix or "")
    home.mkdir(parents=True, exist_ok=True)
    return _map_models(entries, save_entry)


def _map_models(
    models: Mapping[str, Any],
    function: Callable[[str, Any], Any],
    prefix: str = "",
    suffix: str = "",
) -> dict[str, Any]:
    """Return a copy of nested dictionaries with `function(full name, model)` in place of each
    model.
    """
    return {
        name: _map_models(model, function, f"{prefix}{name}.", suffix)
        if isinstance(model, Mapping)
        else function(f"{prefix}{name}{suffix}", model)
        for name, model in models.items()
    }


def _path_inside_folder(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in `folder`; raise `ValueError` if the path is outside of
    `folder`.
    """
    if not name.isprintable() or set(name) & set("/\\") or Path(name).name != name:
        raise ValueError(
            f"{name!r} is no plain name of a file: use names without '/', '\\' and line breaks"
        )
    path = folder / name
    if resolve_target(path).parent != Path(os.path.realpath(folder)):
        raise ValueError(f"{path} is a link to another folder: remove the link")
    return path
