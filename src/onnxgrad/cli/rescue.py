"""Writing a trained model, elsewhere if its path cannot be written, as with a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer
from onnx import ModelProto

from onnxgrad.cli.output import Output
from onnxgrad.cli.signals import StopRequests
from onnxgrad.model.files import one_line


@dataclass
class Keeper:
    """Writes a trained model to its path, or else to a folder that can be written."""

    model: ModelProto
    output: Output
    stop: StopRequests  # signals, which may interrupt the prompt for another path
    complain: Callable[[str], None]

    def write(self, output: Path, overwrite: bool) -> Path | None:
        """Write the model; return its path, None if it could not be written anywhere."""
        if self._write_model(output, overwrite):
            return output
        backup = self._write_backup(output)
        if backup:
            self.complain(f"the trained model is kept in {backup}")
        chosen = self._write_prompted(backup) if self._has_user() else None
        if chosen and backup:
            shutil.rmtree(backup.parent, ignore_errors=True)
        if not chosen and not backup:
            self.complain("the trained model is lost: no other folder has room for it")
        return chosen or backup

    def _has_user(self) -> bool:
        """Return whether a user can answer a prompt; after SIGTERM or SIGHUP nobody can."""
        request = self.stop.request
        stopped = request is not None and request.code != 128 + signal.SIGINT
        return not stopped and sys.stdin is not None and sys.stdin.isatty()

    def _write_model(self, path: Path, overwrite: bool) -> bool:
        """Write the model, or print why not; return whether it is written."""
        try:
            self.output.save(self.model, path, overwrite)
        except OSError as e:
            self.complain(one_line(e))
            return False
        return True

    def _write_backup(self, output: Path) -> Path | None:
        """Write the model into a new folder, in the first of three folders that has room."""
        for folder in (lambda: output.parent, Path.home, lambda: Path(tempfile.gettempdir())):
            new = None
            try:
                new = Path(tempfile.mkdtemp(prefix="onnxgrad-", dir=folder().absolute()))
                self.output.save(self.model, new / output.name, False)
                return new / output.name
            except (OSError, RuntimeError):  # RuntimeError: there is no home folder
                if new is not None:
                    shutil.rmtree(new, ignore_errors=True)
        return None

    def _write_prompted(self, backup: Path | None) -> Path | None:
        """Write the model to a path that the user types; None if they type none."""
        leave = "leave it there" if backup else "give it up"
        while True:
            try:
                with self.stop.let_through():
                    answer = typer.prompt(
                        f"Another path to write it to (Enter: {leave})",
                        default="",
                        show_default=False,
                        err=True,
                    )
                path = Path(os.path.expanduser(answer)) if answer else None
                if path is not None:  # a Path forgets the '/' at its end
                    self.output.check(os.path.expanduser(answer), False, (), False)
            except (typer.Abort, KeyboardInterrupt):
                return None
            except (OSError, ValueError) as e:
                self.complain(str(e))
                continue
            if path is None or self._write_model(path, False):
                return path
