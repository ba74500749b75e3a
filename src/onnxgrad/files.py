"""Output files: whole or not at all, and never found out too late."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxgrad.errors import printable


def check_writable(path: Path, overwrite: bool) -> None:
    """Raise now for what would otherwise fail after hours of training."""
    if path.is_dir():
        raise ValueError(f"{printable(path)} is a folder: name a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{printable(path)} exists: choose another --output, or pass --overwrite")
    try:
        with _temporary(path) as temporary:
            temporary.touch()
    except OSError as e:
        raise ValueError(
            f"cannot write {printable(path)}: {e.strerror}; choose another --output, "
            "or create its folder"
        ) from None


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`; what was written there becomes `path` if all went well."""
    with _temporary(path) as temporary:
        yield temporary
        temporary.replace(path)


def write_models(
    models: Mapping[str, Any], folder: str | os.PathLike | type[bytes], prefix: str = ""
) -> dict[str, Any]:
    """Write models, in dictionaries that may be nested, into a folder, which is made if missing.

    Returns:
        The same dictionaries, of paths; or with `bytes` in place of the folder, of serialized
        models.

    Raises:
        OSError: the folder cannot be written.
    """
    from onnxgrad.graph.write import save  # slow to import, and the command line starts here

    made: dict[str, Any] = {}
    for name, model in models.items():
        full = f"{prefix}{name}"
        if isinstance(model, dict):
            made[name] = write_models(model, folder, f"{full}.")
        elif isinstance(folder, type):
            made[name] = model.SerializeToString()
        else:
            path = Path(folder) / f"{full}.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            save(model, path)
            made[name] = str(path)
    return made
