"""Write and read a folder with the state of a training, which appears on the disk as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from onnxgrad.model.files import lock_path
from onnxgrad.training.array_files import Arrays, read_arrays, serialize_arrays
from onnxgrad.training.equality import new_digest

FORMAT = "onnxgrad.state.2"
# suffixes of folders that a crash may leave behind; a replaced folder is complete
PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"
_STATE = "state.json"
_MANIFEST = "files.json"  # written last: digests of the other files, and the mark of the writer


def flatten_slots(nested: Mapping[str, Mapping[str, np.ndarray]]) -> Arrays:
    """Return `{"slot/weight": array}` for `{weight: {slot: array}}`.

    The name of a slot has no slash; the name of a weight may have slashes.
    """
    return {f"{inner}/{name}": a for name, group in nested.items() for inner, a in group.items()}


def nest_slots(arrays: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
    """Return `{weight: {slot: array}}` for the result of `flatten_slots`."""
    result: dict[str, Arrays] = {}
    for key, array in arrays.items():
        inner, _, name = key.partition("/")
        result.setdefault(name, {})[inner] = array
    return result


def write_state(
    folder: Path,
    arrays: Mapping[str, Arrays],
    numbers: Mapping[str, Any],
    mark: Mapping[str, str] | None = None,
) -> None:
    """Write each of `arrays` to `<name>.safetensors`, and `numbers` to `state.json`, in `folder`.

    The files are written into a folder beside `folder`, synced to the disk, and the folder is
    renamed. `files.json` has a digest of every file, and `mark`, by which the writer finds its
    folders again.

    Raises:
        FileExistsError: `folder` exists and holds no state.
        OSError: a file cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not (folder / _STATE).is_file():
        raise FileExistsError(f"{folder} exists and holds no state: write to another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    digests: dict[str, str] = {}

    def write_file(name: str, parts: Iterable[bytes | memoryview]) -> None:
        digests[name] = _write_and_sync_file(partial / name, parts)

    try:
        with ExitStack() as stack:
            partial = _create_partial_folder(folder, stack)
            for name, group in arrays.items():
                write_file(f"{name}.safetensors", serialize_arrays(group))
            text = json.dumps(dict(numbers), indent=1, default=_encode_number)
            write_file(_STATE, [text.encode()])
            manifest = {"format": FORMAT, "mark": dict(mark or {}), "files": dict(digests)}
            write_file(_MANIFEST, [json.dumps(manifest, indent=1).encode()])
            _sync_folder(partial)
            _replace_folder(partial, folder, stack)
    except OSError as e:
        if e.errno is None:
            raise
        # the error of a failed write names no file
        raise OSError(e.errno, f"{os.strerror(e.errno)}, writing a state", str(folder)) from e


def damage_error(folder: Path, fault: str) -> ValueError:
    """Return the error to raise if the state in `folder` cannot be read, because of `fault`."""
    return ValueError(f"the state in {folder} is {fault}: use another checkpoint")


def read_state(folder: Path) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Return the arrays and numbers that `write_state` wrote into `folder`.

    Raises:
        FileNotFoundError: the folder holds no state.
        ValueError: a file is missing, damaged, of another state, or of another format.
    """
    folder = _existing_state_folder(folder)
    digests, arrays, numbers = _read_manifest(folder)["files"], {}, None
    for name, expected in digests.items():
        digest, data = new_digest(), b""
        try:
            if name == _STATE:
                digest.update(data := (folder / name).read_bytes())
            else:
                arrays[Path(name).stem], _ = read_arrays(folder / name, digest)
            is_damaged = digest.hexdigest() != expected
        except FileNotFoundError:
            raise damage_error(folder, f"incomplete, {name} is missing") from None
        except ValueError:  # its header is no header of a safetensors file
            is_damaged = True
        if is_damaged:
            raise damage_error(folder, f"damaged, {name} is not the file that was written there")
        if name == _STATE:
            numbers = json.loads(data)
    if numbers is None:
        raise damage_error(folder, f"damaged, {_MANIFEST} does not name {_STATE}")
    return arrays, numbers


def read_mark(folder: Path) -> dict[str, str] | None:
    """Return the dict `mark` that `write_state` was called with for `folder`.

    None if the state is damaged or missing.
    """
    try:
        return dict(_read_manifest(folder)["mark"])
    except (OSError, ValueError):
        return None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of `files.json`, with the keys "files" and "mark".

    Raises:
        FileNotFoundError: the folder holds no state.
        ValueError: the file is missing, damaged, or of another format.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except FileNotFoundError:
        if (folder / _STATE).is_file():
            raise damage_error(folder, f"incomplete, {_MANIFEST} is missing") from None
        raise FileNotFoundError(
            f"{folder} holds no state of a training: pass a folder that a Checkpoint or "
            "TrainState.save wrote"
        ) from None
    except ValueError as e:
        raise damage_error(folder, f"damaged, {_MANIFEST} is no JSON ({e})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damage_error(folder, f"not in the format {FORMAT}")
    if not all(isinstance(manifest.get(key), dict) for key in ("files", "mark")):
        raise damage_error(folder, f"damaged, {_MANIFEST} lacks 'files' or 'mark'")
    return manifest


def is_state(folder: Path) -> bool:
    """Return whether `folder` holds the files of a state, which may be damaged."""
    return any((folder / name).is_file() for name in (_MANIFEST, _STATE))


def remove_state(state: Path) -> None:
    """Remove a folder with a state; the folder is renamed first, so that no half of it remains."""
    hidden = _hidden_path(state, REMOVED)
    with suppress(FileNotFoundError):  # another process removed the folder
        state.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def restore_replaced(folder: Path, names: re.Pattern[str]) -> None:
    """Rename back the states in `folder` that a process was replacing when it crashed."""
    for path, state in _leftover_folders(folder, names, REPLACED):
        with ExitStack() as stack:
            if not state.exists() and lock_path(path, stack) is not False:
                path.rename(state)


def remove_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the hidden folders that crashed processes left in `folder`.

    A hidden folder that is the only copy of a state is renamed back. `names` matches the names of
    the states whose leftovers are removed.
    """
    restore_replaced(folder, names)
    for suffix in (PARTIAL, REPLACED, REMOVED):
        for path, _ in _leftover_folders(folder, names, suffix):
            with ExitStack() as stack:
                if lock_path(path, stack) is not False:  # a living process writes a locked folder
                    shutil.rmtree(path, ignore_errors=True)


def _leftover_folders(folder: Path, names: re.Pattern[str], suffix: str) -> list[tuple[Path, Path]]:
    """Return pairs of a hidden folder in `folder` with this suffix, and the path of its state.

    `names` matches the names of the states.
    """
    found = []
    for path in folder.glob(f".*{suffix}"):
        state, _, random = path.name[1:].removesuffix(suffix).rpartition(".")
        if names.fullmatch(state) and re.fullmatch("[0-9a-f]+", random):
            found.append((path, folder / state))
    return found


def _existing_state_folder(folder: Path) -> Path:
    """Return `folder` if it exists, or else a hidden copy that a crash left when replacing it."""
    if folder.exists():
        return folder
    folder = Path(os.path.abspath(folder))
    found = _leftover_folders(folder.parent, re.compile(re.escape(folder.name)), REPLACED)
    replaced = [path for path, _ in found]
    return max(replaced, key=lambda path: path.stat().st_mtime_ns, default=folder)


def _hidden_path(folder: Path, suffix: str) -> Path:
    """Return an unused path in the parent of `folder`, for `_leftover_folders` to find."""
    return folder.with_name(f".{folder.name}.{uuid4().hex}{suffix}")


def _create_partial_folder(folder: Path, stack: ExitStack) -> Path:
    """Create a hidden folder in the parent of `folder`, and return its path.

    It is locked until `stack` ends, and is then removed unless it was renamed.
    """
    while True:
        partial = _hidden_path(folder, PARTIAL)
        partial.mkdir()
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        if lock_path(partial, stack) is not False:
            return partial


def _replace_folder(partial: Path, folder: Path, stack: ExitStack) -> None:
    """Rename the folder `partial` to `folder`, and remove the state that `folder` held before."""
    if folder.exists():
        lock_path(folder, stack)  # so that no process takes the folder for a leftover of a crash
        replaced = _hidden_path(folder, REPLACED)
        folder.rename(replaced)
        partial.rename(folder)
        remove_state(replaced)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)


def _write_and_sync_file(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write the parts of a file one by one, sync it to the disk, and return its digest."""
    digest = new_digest()
    with open(path, "wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk, on systems that can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _encode_number(value: Any) -> Any:
    """Return a number of numpy as a number of Python, which JSON can hold.

    Raises:
        TypeError: the value is no number of numpy.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"the state holds a {type(value).__name__}, which JSON cannot hold: keep numbers and text "
        "in `state.callbacks`, and arrays in `state.kept`"
    )
