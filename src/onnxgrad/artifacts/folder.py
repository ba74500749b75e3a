"""A folder of artifacts: its manifest, and how its files are written completely or not at all.

The manifest, `training.json`, lists the inputs, outputs and tensors of the files.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from onnxgrad.artifacts.models import LOSS, Models
from onnxgrad.training.fields import DataSpec

MANIFEST, FORMAT = "training.json", 1
FILES = {
    "step": "step.onnx",
    "training": "training_model.onnx",
    "optimizer": "optimizer_model.onnx",
    "eval": "eval_model.onnx",
    "checkpoint": "checkpoint.safetensors",
    "model": "model.onnx",
}

Manifest = dict[str, Any]


def build_manifest(
    models: Models, rate: float, digest: str, prefix: str, ort_format: bool
) -> Manifest:
    """Return the manifest of the artifacts as a dict for JSON.

    Args:
        models: the models that are written.
        rate: the default learning rate.
        digest: digest of the model.
        prefix: prefix of the names of all files.
        ort_format: whether the models are also written as `.ort`.
    """
    keys = [key for key in FILES if key in (*models.by_key, "checkpoint", "model")]
    manifest: Manifest = {
        "format": FORMAT,
        "inputs": _batch_input_entries(models.fields),
        "weights": _array_entries(models.weights),
        "slots": [
            {"name": entry["name"], "weight": models.slot_weights[entry["name"]], **entry}
            for entry in _array_entries(models.slots)
        ],
        "buffers": _array_entries(models.buffers),
        "scalars": [_tensor_entry(name, dtype, ()) for name, dtype in models.scalars.items()],
        "learning_rate": rate,
        "loss": LOSS,
        "predictions": models.predictions,
        "files": {key: f"{prefix}{FILES[key]}" for key in keys},
        "digest": digest,
    }
    if ort_format:
        onnx = {key: name for key, name in manifest["files"].items() if key in models.by_key}
        manifest["ort_files"] = {k: str(Path(name).with_suffix(".ort")) for k, name in onnx.items()}
    return manifest


def read_manifest(folder: Path, prefix: str = "") -> Manifest:
    """Return the manifest read from a folder of artifacts.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: the manifest is damaged, or has another format.
    """
    path = folder / f"{prefix}{MANIFEST}"
    if not path.is_file():
        others = sorted(file.name for file in folder.glob(f"*{MANIFEST}"))
        hint = f": pass the prefix of one of {others}" if others else ""
        raise FileNotFoundError(f"{path} is missing: {folder} holds no artifacts{hint}")
    try:
        manifest = json.loads(path.read_bytes())
        found = manifest["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is damaged: {e}. Generate the artifacts again") from None
    if found != FORMAT:
        raise ValueError(
            f"{path} has the format {found!r}: this version reads {FORMAT}: generate "
            "the artifacts again"
        )
    return manifest


def _batch_input_entries(fields: DataSpec) -> list[dict[str, Any]]:
    """Return the manifest entries of the inputs of a batch, with their roles ("data", "label")."""
    roles = dict.fromkeys(fields.labels, "label")
    if fields.weight is not None:
        roles[fields.weight] = "weight_of_rows"
    return [
        _tensor_entry(name, own.dtype, own.shape) | {"role": roles.get(name, "data")}
        for name, own in fields.fields.items()
    ]


def _array_entries(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the manifest entries of named arrays."""
    return [_tensor_entry(name, array.dtype, array.shape) for name, array in arrays.items()]


def _tensor_entry(name: str, dtype: np.dtype, shape: Sequence[Any] | None) -> dict[str, Any]:
    """Return the manifest entry of a tensor: name, dtype (as "float32" or "string") and shape."""
    kind = "string" if dtype.kind == "O" else str(dtype)
    return {"name": name, "dtype": kind, "shape": None if shape is None else list(shape)}


@contextmanager
def write_all_or_none(folder: str | os.PathLike, own: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary folder; if the `with` block raises no error, its files move into `folder`.

    A file whose name begins with one of `own` replaces the file of the same name in `folder`. If a
    file cannot be moved, the replaced files are put back, so that `folder` stays as it was. A
    missing folder is created.

    Raises:
        FileExistsError: another file, external data of a model, has the name of one in `folder`,
            and another content.
        OSError: `folder` is no folder, or cannot be written.
    """
    home = Path(os.path.realpath(folder))
    existed = home.exists()
    if existed and not home.is_dir():
        raise NotADirectoryError(f"{home} is a file: name a folder for the artifacts")
    home.parent.mkdir(parents=True, exist_ok=True)
    # on the disk of `home`, but not inside: after a crash, `home` has no partial files
    work = Path(mkdtemp(prefix=f".{home.name}.", suffix=".partial", dir=home.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        yield new
        for file in new.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())  # so that files survive a power cut
        if not existed:
            new.rename(home)
        else:
            old.mkdir()
            _move_files_or_restore(new, old, home, own)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _move_files_or_restore(new: Path, old: Path, home: Path, own: tuple[str, ...]) -> None:
    """Move all files from `new` to `home`, and files they replace to `old`; undo after an error."""
    moved: list[Path] = []
    try:
        for file in sorted(new.iterdir()):
            target = home / file.name
            if target.is_dir():
                raise IsADirectoryError(
                    f"{target} is a folder where a file must be written: remove the folder"
                )
            foreign = target.exists() and not file.name.startswith(own)
            if foreign and not filecmp.cmp(file, target, shallow=False):
                raise FileExistsError(
                    f"{target} exists and is no file of these artifacts: choose another folder"
                )
            if os.path.lexists(target):
                target.rename(old / file.name)
            moved.append(target)
            file.rename(target)
    except BaseException:
        for target in moved:
            target.unlink(missing_ok=True)
        for file in old.iterdir():
            file.rename(home / file.name)
        raise
