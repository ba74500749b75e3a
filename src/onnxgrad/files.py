"""Output files: whole or not at all, and never found out too late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(path: Path, overwrite: bool) -> None:
    """Raise now for what would otherwise fail after hours of training."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another --output, or pass --overwrite")
    try:
        with _temporary(path) as temporary:
            temporary.touch()
    except OSError as e:
        raise ValueError(
            f"cannot write {path}: {e.strerror}; choose another --output, or create its folder"
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
