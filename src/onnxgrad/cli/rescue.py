"""Writing a trained model so that a full disk, or another obstacle, does not cost the training."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer
from onnx import ModelProto

from onnxgrad.cli.signals import StopRequests
from onnxgrad.model.files import check_writable, one_line
from onnxgrad.model.write import save


class Keeper:
    """Writes a trained model where it should go, else where there is room for it.

    Args:
        model: the trained model.
        stop: what may interrupt a question to the user.
        complain: shows an error.
    """

    def __init__(
        self, model: ModelProto, stop: StopRequests, complain: Callable[[str], None]
    ) -> None:
        self.model, self.stop, self.complain = model, stop, complain

    def write(self, output: Path, overwrite: bool) -> Path | None:
        """Write the model; return its path, None if it was written nowhere."""
        if self._wrote(output, overwrite):
            return output
        kept = self._rescued(output)
        if kept:
            self.complain(f"the trained model is kept in {kept}")
        asked = self._asked(kept) if self._has_user() else None
        if asked and kept:
            shutil.rmtree(kept.parent, ignore_errors=True)
        if not asked and not kept:
            self.complain("the trained model is lost: no other folder has room for it")
        return asked or kept

    def _has_user(self) -> bool:
        """Tell whether somebody is there to answer: after SIGTERM or SIGHUP, nobody is."""
        request = self.stop.request
        stopped = request is not None and request.code != 128 + signal.SIGINT
        return not stopped and sys.stdin is not None and sys.stdin.isatty()

    def _wrote(self, path: Path, overwrite: bool) -> bool:
        try:
            check_writable(path, overwrite)  # it may have come into being meanwhile
            save(self.model, path)
        except OSError as e:
            self.complain(one_line(e))
            return False
        return True

    def _rescued(self, output: Path) -> Path | None:
        """Write the model into a new folder of its own, in the first folder that has room."""
        for folder in (lambda: output.parent, Path.home, lambda: Path(tempfile.gettempdir())):
            home = None
            try:
                home = Path(tempfile.mkdtemp(prefix="onnxgrad-", dir=folder().absolute()))
                save(self.model, home / output.name)
                return home / output.name
            except (OSError, RuntimeError):  # RuntimeError: there is no home folder
                if home is not None:
                    shutil.rmtree(home, ignore_errors=True)
        return None

    def _asked(self, kept: Path | None) -> Path | None:
        """Write the model to a path that the user types; None if they leave it."""
        leave = "leave it there" if kept else "give it up"
        while True:
            try:
                with self.stop.released():
                    answer = typer.prompt(
                        f"Another path to write it to (Enter: {leave})",
                        default="",
                        show_default=False,
                        err=True,
                    )
                path = check_writable(os.path.expanduser(answer), False) if answer else None
            except (typer.Abort, KeyboardInterrupt):
                return None
            except (OSError, ValueError) as e:
                self.complain(str(e))
                continue
            if path is None or self._wrote(path, False):
                return path
