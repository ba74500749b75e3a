"""Output files: whole or not at all, and never in place of what is no regular file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
    (stat.S_ISFIFO, "named pipe"),
    (stat.S_ISSOCK, "socket"),
)
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # of some network filesystems
KEPT = "nothing was replaced, and models and weights in memory are kept: save to another path"


def one_line(error: OSError) -> str:
    """Return the message for a user of the command line."""
    if error.filename is None:
        return str(error)
    return f"{error.filename}: {str(error.strerror).removesuffix(f'; {KEPT}')}"


def target_of(path: str | os.PathLike) -> Path:
    """Return the file that is written when `path` is: where a symbolic link leads to.

    A link whose target does not exist leads to a new file.

    Raises:
        OSError: `path` is something else than a regular file, or may not be written.
    """
    text = os.fspath(path)
    if os.path.basename(text) in ("", os.curdir, os.pardir):
        kind = "this is a folder" if os.path.isdir(text) else "this names a folder"
        raise OSError(errno.EISDIR, f"{kind}: name a file", text)
    target = Path(os.path.realpath(text))
    try:
        mode = os.stat(text).st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in _KINDS if test(mode)), "special file")
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"this is a {kind}: only regular files are written", text)
    if not os.access(text, os.W_OK):
        raise OSError(errno.EACCES, "this file is read-only", text)
    return target


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a new empty file beside `path`, which becomes `path` if all goes well.

    A file that was there keeps its mode, and its owner where that is permitted. Its other hard
    links keep the old data.

    Raises:
        OSError: `path` cannot be written; what was there is unchanged.
    """
    target = target_of(path)
    old = target.stat() if target.exists() else None
    temporary = _beside(target)
    with _named(path, temporary):
        # private until it has the mode of the old file; a new one gets what the umask leaves
        _create(temporary, 0o666 if old is None else 0o600)
        try:
            yield temporary
            _finish(temporary, old)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _beside(file: Path) -> Path:
    return file.with_name(f".onnxgrad-{os.urandom(8).hex()}")


def _create(file: Path, mode: int) -> None:
    """Create a file that does not exist, nor a link of its name."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


@contextmanager
def _named(path: str | os.PathLike, temporary: Path) -> Iterator[None]:
    """Let errors with the temporary file name `path`."""
    try:
        yield
    except OSError as e:
        if e.filename not in (None, str(temporary)) and e.filename2 != str(temporary):
            raise  # of another file, that was read
        reason = f"{e.strerror or e}; {KEPT}"
        raise OSError(e.errno or errno.EIO, reason, os.fspath(path)) from None


def _finish(temporary: Path, old: os.stat_result | None) -> None:
    """Bring the data to the disk, so that not even a power cut leaves half a file."""
    descriptor = os.open(temporary, os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)
    if old is None:
        return
    with suppress(OSError):
        if hasattr(os, "chown"):
            os.chown(temporary, old.st_uid, old.st_gid)
    with suppress(OSError):  # filesystems without modes
        temporary.chmod(stat.S_IMODE(old.st_mode))


def check_writable(
    path: str | os.PathLike, overwrite: bool, inputs: Iterable[str | os.PathLike] = ()
) -> Path:
    """Return `path`, or raise now for what would otherwise fail after hours of training.

    Raises:
        OSError: it cannot be written, or exists and `overwrite` is false.
        ValueError: it is one of `inputs`, under this name or through a link.
    """
    try:
        target = target_of(path)
        check_not_input(path, inputs)
        if target.exists() and not overwrite:
            raise FileExistsError(
                f"{path} exists: choose another --output, or pass --overwrite"
            ) from None
        probe = _beside(target)
        _create(probe, 0o600)
        probe.unlink()
    except OSError as e:
        if e.errno is None:
            raise
        raise OSError(
            f"cannot write {path}: {e.strerror}; choose another --output, or create its folder"
        ) from None
    return Path(path)


def check_not_input(path: str | os.PathLike, inputs: Iterable[str | os.PathLike]) -> None:
    """Raise ValueError if `path` is one of the files that are read, or a link to one."""
    for file in inputs:
        if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
            raise ValueError(f"{path} is the file {file}, which is read: choose another --output")


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
    from onnxgrad.graph.write import save  # slow to import, and the command line starts here

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
