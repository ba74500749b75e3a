"""Write several files into a folder, all of them or none."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


@contextmanager
def added_to(folder: str | os.PathLike, own: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary folder, whose files move into `folder` if the `with` block raises no error.

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
                os.fsync(opened.fileno())  # in case of a power cut
        if not existed:
            new.rename(home)
        else:
            old.mkdir()
            _move_files_or_restore(new, old, home, own)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _move_files_or_restore(new: Path, old: Path, home: Path, own: tuple[str, ...]) -> None:
    """Move files from `new` to `home`, replaced files to `old`; undo all moves after an error."""
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
