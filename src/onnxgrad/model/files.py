"""Write output files atomically, in place of regular files only."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# {letter of `stat.filemode`: kind of file}
_KINDS = {
    "d": "folder",
    "c": "character device",
    "b": "block device",
    "p": "named pipe",
    "s": "socket",
}

# errors of fsync on some network filesystems
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

_PARTIAL = ".onnxgrad-"  # begins the names of temporary files

KEPT = "nothing was replaced, and models and weights in memory are kept: save to another path"


def one_line_message(error: OSError) -> str:
    """Return the message of an `OSError` in one line, as the command line shows it."""
    if error.filename is None:
        return str(error)
    return f"{error.filename}: {str(error.strerror).removesuffix(f'; {KEPT}')}"


def resolve_target(path: str | os.PathLike) -> Path:
    """Return the file that is written when `path` is saved: `path` itself, or the target of a
    symbolic link.

    The file need not exist.

    Raises:
        OSError: `path` exists and is no regular file, or is read-only.
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
        kind = _KINDS.get(stat.filemode(mode)[0], "special file")
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"this is a {kind}: name a regular file", text)
    if not os.access(text, os.W_OK):
        raise OSError(errno.EACCES, "this file is read-only", text)
    return target


@contextmanager
def replacement_file(path: str | os.PathLike, locks: ExitStack | None = None) -> Iterator[Path]:
    """Yield a new empty file beside `path`, which replaces `path` when the `with` block ends
    without an error.

    The new file gets the mode of the old file, and its owner where that is permitted. Other hard
    links of the old file keep its data. Files that killed processes left beside `path` are removed.
    The new file is locked until the block ends, or until `locks` ends if it is given.

    Raises:
        OSError: `path` cannot be written; an existing file is unchanged.
    """
    target = resolve_target(path)
    old = target.stat() if target.exists() else None
    remove_leftovers(target)
    with _report_errors_with_path(path), ExitStack() as stack:
        # private until the file gets the mode of the old file; a new file has the mode of the umask
        mode = 0o666 if old is None else 0o600
        while True:
            temporary = _temporary_path(target)
            temporary.touch(mode, exist_ok=False)
            if lock_path(temporary, stack if locks is None else locks) is not False:
                break  # otherwise, another process took the file for a leftover
        try:
            yield temporary
            _flush_and_set_mode(temporary, old)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def remove_leftovers(target: Path, suffix: str = "") -> None:
    """Remove the temporary files that killed processes left beside `target` while they wrote it.

    `suffix` is a regular expression behind the name of `target`, for files written beside it.
    """
    own = re.compile(rf"{re.escape(_temporary_name_start(target))}{suffix}\.[0-9a-f]{{16}}")
    for path in target.parent.glob(f"{_PARTIAL}*"):
        if path.is_symlink() or not own.fullmatch(path.name.removeprefix(_PARTIAL)):
            continue
        with ExitStack() as stack, suppress(OSError):
            if path.is_file() and lock_path(path, stack):
                path.unlink()


def lock_path(path: Path, stack: ExitStack) -> bool | None:
    """Lock a file or folder until the `ExitStack` `stack` is closed; return whether this call has
    the lock.

    False: another process or thread writes or removes the file. None: the system does not tell. A
    lock ends with its process, also when the process is killed.
    """
    try:
        import fcntl  # Windows lacks it, and lets nobody remove a file that another process writes
    except ImportError:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return None


def _temporary_path(file: Path) -> Path:
    """Return an unused path beside `file` for a temporary file that will replace `file`."""
    return file.with_name(f"{_PARTIAL}{_temporary_name_start(file)}.{os.urandom(8).hex()}")


def _temporary_name_start(file: Path) -> str:
    """Return the first 100 characters of the name of `file`, which begin the name of its temporary
    file.
    """
    return file.name[:100]


@contextmanager
def _report_errors_with_path(path: str | os.PathLike) -> Iterator[None]:
    """Raise an `OSError` of the `with` block about a temporary file again, with the path `path`
    instead of the temporary path.
    """
    try:
        yield
    except OSError as e:
        named = [os.path.basename(str(file)) for file in (e.filename, e.filename2)]
        if e.filename is not None and not any(name.startswith(_PARTIAL) for name in named):
            raise  # the error is about another file, which was read
        reason = f"{e.strerror or e}; {KEPT}"
        raise OSError(e.errno or errno.EIO, reason, os.fspath(path)) from None


def _flush_and_set_mode(temporary: Path, old: os.stat_result | None) -> None:
    """Flush the file `temporary` to the disk, and give it the owner and mode of the file it
    replaces, whose status is `old`.
    """
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
    with suppress(OSError):  # some filesystems have no modes
        temporary.chmod(stat.S_IMODE(old.st_mode))


def check_writable(
    path: str | os.PathLike, overwrite: bool, inputs: Iterable[str | os.PathLike] = ()
) -> Path:
    """Return `path`; raise an error now, and not after a long training, if no file can be written
    there.

    Raises:
        OSError: the file cannot be written, or exists and `overwrite` is false.
        ValueError: the file is one of `inputs`, or a link to one of them.
    """
    try:
        target = resolve_target(path)
        check_not_input(path, inputs)
        if target.exists() and not overwrite:
            raise FileExistsError(f"{path} exists: choose another file, or pass --overwrite")
        probe = _temporary_path(target)
        probe.touch(0o600, exist_ok=False)
        probe.unlink()
    except OSError as e:
        if e.errno is None:
            raise
        raise OSError(
            f"cannot write {path}: {e.strerror}; choose another file, or create its folder"
        ) from None
    return Path(path)


def check_not_input(path: str | os.PathLike, inputs: Iterable[str | os.PathLike]) -> None:
    """Raise `ValueError` if `path` is one of the files `inputs`, or a link to one of them."""
    for file in inputs:
        if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
            raise ValueError(f"{path} is the input file {file}: choose another file for the result")
