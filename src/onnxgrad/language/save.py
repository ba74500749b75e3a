"""`save_folder`: a copy of the folder of a language model, with another model in it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, TensorProto

from onnxgrad.adapters.files import save_adapter
from onnxgrad.adapters.inputs import adapter_inputs
from onnxgrad.errors import ModelError, argument, named
from onnxgrad.language.folders import ModelFolder, adapter_file, load_folder
from onnxgrad.model import external
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import read
from onnxgrad.model.write import external_data_files
from onnxgrad.training.trainer import Trainer


def save_folder(
    model: Any,
    path: str | os.PathLike,
    like: Any,
    *,
    adapter: str | None = None,
    overwrite: bool = False,
) -> ModelFolder:
    """Write a copy of the folder of a language model with another model, completely or not at all.

    The file of the model has the same name as in `like`, and its tensors are in the same files; new
    tensors, as of adapters, are in the file of most tensors. All other files are copied, byte for
    byte, without hidden folders such as `.git`.

    Args:
        model: a `Trainer`, or a model, serialized model or path; never modified.
        path: the new folder. Missing parent folders are created.
        like: a `ModelFolder`, or its path.
        adapter: name of the adapters of the model: the model is written with adapters as inputs,
            and their values to the file `adapters/<name>.onnx_adapter`, so that one model serves
            several adapters. See `adapter_inputs`.
        overwrite: whether `path` may be a folder of a language model. Its files are replaced by
            new files of the same name; other files stay.

    Returns:
        The new folder.

    Raises:
        FileExistsError: `path` exists, and is no empty folder.
        ModelError: `like` is no folder of a language model, or `model` cannot be read.
        OSError: the folder cannot be written.
        ValueError: `adapter` is no name of a file, or `model` has no adapters.
        ValueError: `model` lacks an output of the model of `like`, or needs another input, as a
            model of `sequence_log_probs`.
        ValueError: `path` is inside of `like`, or holds the data of the model's tensors.

    Examples:
        >>> import json, tempfile, onnx, onnxgrad as og
        >>> from pathlib import Path
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,2] logits) <float[2,2] w = {1.0, 0, 0, 1.0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> with tempfile.TemporaryDirectory() as path:
        ...     old = Path(path, "old")
        ...     old.mkdir()
        ...     onnx.save(model, old / "model.onnx")
        ...     _ = (old / "config.json").write_text(json.dumps({"vocab_size": 2}))
        ...     new = og.save_folder(model, Path(path, "new"), like=old)
        ...     sorted(file.name for file in new.path.iterdir())
        ['config.json', 'model.onnx']
    """
    origin = load_folder(like)
    proto = adapted = read(model.model if isinstance(model, Trainer) else model)
    if adapter is not None:
        adapter_file(Path(), adapter)  # raises for an invalid name
        proto = adapter_inputs(adapted)
    target = check_folder(path, overwrite, origin, proto)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, file = _temporary_folder_beside(target), origin.model.relative_to(origin.path)
    temporary.mkdir()
    try:
        _copy_files_except_model(origin, temporary, target)
        (temporary / file).parent.mkdir(parents=True, exist_ok=True)
        _write_model(proto, temporary / file, origin.model)
        if adapter is not None:
            placed = adapter_file(temporary, adapter)
            placed.parent.mkdir(exist_ok=True)
            save_adapter(adapted, placed)
        for each in (each for each in temporary.rglob("*") if each.is_file()):
            with suppress(PermissionError), each.open("rb+") as opened:  # if the file is read-only
                os.fsync(opened.fileno())  # so that files survive a power cut
        _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load_folder(target, file.as_posix())


def check_folder(
    path: str | os.PathLike,
    overwrite: bool,
    like: ModelFolder,
    model: ModelProto | None = None,
) -> Path:
    """Return the folder that `save_folder` writes for `path`; raise if it cannot be written.

    Callers check it before a long training.

    Raises:
        OSError, ValueError: as `save_folder`.
    """
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(like.path))
    if target != home and target.is_relative_to(home):
        raise ValueError(
            f"{os.fspath(path)!r} is inside of the copied folder {str(home)!r}: name a "
            "folder outside of it"
        )
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{os.fspath(path)!r} is a file: name a folder")
    files = external.external_files(model) if model is not None else ()
    if model is not None:
        _check_same_interface(model, like)
    if any(Path(os.path.realpath(file)).is_relative_to(target) for file in files):
        raise ValueError(
            f"the model reads its data from {os.fspath(path)!r}: save to another folder"
        )
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"{os.fspath(path)!r} exists, and is not empty: name another folder, or pass "
                f"{argument('overwrite', True)}"
            )
        try:
            load_folder(target)
        except ModelError as e:
            raise FileExistsError(
                f"{e}; no other folder is overwritten: name another folder"
            ) from None
    home = next(folder for folder in target.parents if folder.exists())
    if not os.access(home, os.W_OK):
        raise PermissionError(f"cannot write {os.fspath(path)!r}: {str(home)!r} is read-only")
    return target


def _check_same_interface(model: ModelProto, like: ModelFolder) -> None:
    """Raise `ValueError` if `model` lacks outputs, or adds inputs, of the model in `like`."""
    held = onnx.load_model_from_string(like.model.read_bytes())
    inputs, outputs = ({x.name for x in face} for face in (held.graph.input, held.graph.output))
    lost = sorted(outputs - {y.name for y in model.graph.output})
    new = [x for x in names_without_default(model) if x not in inputs]
    if lost or new:
        differs = f"lacks the outputs {lost[:3]}" if lost else f"needs the inputs {new[:3]}"
        raise ValueError(
            f"the model {differs}, unlike {str(like.model)!r}, so that it cannot take the place of "
            "that file: write the trained tensors into that file, adapters by "
            f"{named('save_adapter')} and {named('load_adapter')}, weights by "
            f"{named('replace_initializers_into_onnx')}"
        )


def _temporary_folder_beside(target: Path) -> Path:
    """Return the path of a new temporary folder in the parent folder of `target`."""
    return target.with_name(f".onnxgrad-{target.name[:100]}.{os.urandom(8).hex()}")


def _copy_files_except_model(origin: ModelFolder, temporary: Path, target: Path) -> None:
    """Copy all files of a model folder, except the model and its external data."""
    replaced = {
        os.path.realpath(file) for file in (origin.model, *external_data_files(origin.model))
    }
    stale = []
    for folder, folders, names in os.walk(origin.path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in names):
            relative = file.relative_to(origin.path)
            if os.path.realpath(file) in replaced or file == target:
                continue
            if file.suffix == ".onnx":
                stale.append(relative.as_posix())
                if shared := replaced & {
                    os.path.realpath(data) for data in external_data_files(file)
                }:
                    raise ModelError(
                        f"{str(file)!r} and {origin.model.name!r} read {shared.pop()!r}, which "
                        "would be replaced. Remove one of both models from a copy of the folder"
                    )
            (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, temporary / relative)
    if stale:
        warnings.warn(
            f"{sorted(stale)} are copied unchanged, without the weights of the new "
            f"{origin.model.name!r}",
            stacklevel=3,
        )


def _write_model(proto: ModelProto, file: Path, like: Path) -> None:
    """Write `proto` to `file`; tensors are in external data files of the same names as in
    `like`.
    """
    old = onnx.load_model_from_string(like.read_bytes())
    known = {tensor.name for tensor in old.graph.initializer}
    places = {n: _external_data_path(t) for n, t in external.external_tensors(old) if n in known}
    if bad := next((p for p in places.values() if p.is_absolute() or ".." in p.parts), None):
        raise ModelError(f"{str(like)!r} reads {str(bad)!r}, outside of its folder: move it there")
    data = next((place for place, _ in Counter(places.values()).most_common(1)), None)
    if data is None and external.inline_nbytes(proto) > external.IN_MODEL:
        data, known = Path(f"{file.name}.data"), set()

    def data_file_of(tensor: TensorProto) -> tuple[Path, Path] | None:
        location = places.get(tensor.name)
        is_new = tensor.name not in known and external.nbytes(tensor) > external.SMALL
        if location is None and (external.is_external(tensor) or (is_new and data is not None)):
            location = data or Path(f"{file.name}.data")
        if location is None:
            return None
        (file.parent / location).parent.mkdir(parents=True, exist_ok=True)
        return file.parent / location, location

    written = external.write_initializers(proto, data_file_of)
    for _, tensor in external.external_tensors(written):
        # a tensor of a subgraph, which `write_initializers` leaves out
        if _external_data_path(tensor).is_absolute():
            tensor.raw_data = external.tensor_to_array(tensor).tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    external.write_filled(written, file, {})


def _external_data_path(tensor: TensorProto) -> Path:
    """Return the path of the external data file of a tensor, relative to the model's folder."""
    return Path(next(e.value for e in tensor.external_data if e.key == "location"))


def _move_into_place(temporary: Path, target: Path) -> None:
    """Move `temporary` to `target`; files of an old `target` that `temporary` lacks stay."""
    if not target.exists():
        temporary.rename(target)
        return
    aside = _temporary_folder_beside(target)
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    for folder, _, names in os.walk(aside):
        for file in (Path(folder, name) for name in names):
            new = target / file.relative_to(aside)
            if not os.path.lexists(new):
                new.parent.mkdir(parents=True, exist_ok=True)
                file.rename(new)
    with suppress(OSError):
        shutil.rmtree(aside)
