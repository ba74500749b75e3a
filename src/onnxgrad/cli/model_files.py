"""Models from files or standard input, and to files, folders or standard output."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer
from onnx import ModelProto

from onnxgrad.cli.command import StopRequests
from onnxgrad.model import external
from onnxgrad.model.files import check_not_input, check_writable, one_line_message
from onnxgrad.model.read import read
from onnxgrad.model.write import external_data_files, save

if TYPE_CHECKING:  # `language`, which imports the trainer, is imported for folders only
    from onnxgrad.language.folders import ModelFolder

STDIN = STDOUT = "-"


def open_standard_input(what: str) -> BinaryIO:
    """Return the binary stream of standard input; raise `ValueError` if it is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(f"standard input is a terminal: pipe a {what} into the command")
    return sys.stdin.buffer


def read_model(path: str, data: str | None = None) -> ModelProto:
    """Return the model at `path`; raise if `path` and `data` are both standard input."""
    if path != STDIN:
        return read(language_model_folder(path) or path)
    if data == STDIN:
        raise ValueError('MODEL and DATA are both "-", standard input: name a file for one of them')
    return read(open_standard_input("model").read())


def language_model_folder(path: str) -> ModelFolder | None:
    """Return the `ModelFolder` of a language model at `path`; None if `path` is no folder."""
    if path == STDIN or not os.path.isdir(path):
        return None
    from onnxgrad.language.folders import load_folder

    return load_folder(path)


def input_files(model: str, *data: str | None) -> list[Path]:
    """Return the paths of a command's model and data files, without standard input."""
    files = {file for file in data if file and file != STDIN}
    return [Path(file) for file in (*({model} - {STDIN}), *sorted(files))]


def check_output(
    output: str, overwrite: bool, inputs: Iterable[Path], json: bool, binary: bool = True
) -> None:
    """Raise if a result cannot be written to `output`, before anything is computed.

    Raises:
        OSError: it cannot be written, or exists and `overwrite` is false.
        ValueError: it is one of `inputs`; or a binary result would go to a terminal, or any with
            JSON to standard output.
    """
    if output != STDOUT:
        check_writable(output, overwrite, inputs)
    elif binary and sys.stdout.isatty():
        raise ValueError("standard output is a terminal: name a file with --output, or pipe it")
    elif json:
        raise ValueError("--output - and --json both go to standard output: name a file")


def check_not_external_data(output: str, model: str) -> None:
    """Raise `ValueError` if `output` is a file of the model's external data."""
    if output != STDOUT and model != STDIN:
        check_not_input(output, external_data_files(model))


def write_to_stdout(model: ModelProto) -> None:
    """Write a model to standard output; raise `ValueError` if it needs external data."""
    if external.external_files(model) or external.inline_nbytes(model) > external.IN_MODEL:
        raise ValueError(
            "a model with external data does not fit standard output: name a file with --output"
        )
    sys.stdout.buffer.write(model.SerializeToString())
    sys.stdout.buffer.flush()


@dataclass(frozen=True)
class OutputPath:
    """How `--output` is checked and written: as a file, or as a folder if MODEL is a folder."""

    like: ModelFolder | None
    adapter: str | None = None

    @property
    def default_path(self) -> str:
        """The path of the result if `--output` is not given."""
        return "trained.onnx" if self.like is None else "trained"

    def unused_default_path(self, curves: bool) -> str:
        """Return the default path, numbered if the model or its curves would replace a file."""
        default = Path(self.default_path)
        numbered = (default.with_stem(f"{default.stem}-{number}") for number in count(2))
        paths = chain([default], numbered)
        free = (p for p in paths if not (p.exists() or (curves and self.curves_path(p).exists())))
        return str(next(free))

    def check_path(self, path: str, overwrite: bool, inputs: Iterable[Path], json: bool) -> None:
        """Raise if the result cannot be written to `path`, before anything is computed."""
        if self.adapter is not None:
            from onnxgrad.language.folders import adapter_file

            adapter_file(Path(), self.adapter)
        if self.like is None and self.adapter is not None:
            raise ValueError(
                "--adapter writes into a folder, and MODEL is a file: use `onnxgrad.save_adapter` "
                "and `onnxgrad.graph.adapter_inputs` in Python"
            )
        if self.like is None:
            check_output(path, overwrite, inputs, json)
        elif path == STDOUT:
            raise ValueError(
                "--output - is standard output, and the result is a folder: name a folder"
            )
        else:
            from onnxgrad.language.save import check_folder

            check_folder(path, overwrite, self.like)

    def check_data_files(self, path: str, overwrite: bool, model: str, proto: ModelProto) -> None:
        """Raise if the result would replace a file of external data that the model reads."""
        if self.like is not None:
            from onnxgrad.language.save import check_folder

            check_folder(path, overwrite, self.like, proto)
        else:
            check_not_external_data(path, model)

    def curves_path(self, path: Path) -> Path:
        """Return the path of the picture of loss curves, beside the model at `path`."""
        return path.with_suffix(".png") if self.like is None else Path(f"{path}.png")

    def save_model(self, model: ModelProto, path: Path, overwrite: bool) -> None:
        """Write the model into the file or the folder."""
        if self.like is not None:
            from onnxgrad.language.save import save_folder

            save_folder(model, path, self.like, adapter=self.adapter, overwrite=overwrite)
        elif str(path) == STDOUT:
            write_to_stdout(model)
        else:
            check_writable(path, overwrite)  # the file may have been created during training
            save(model, path)


@dataclass
class ModelKeeper:
    """A trained model, which is written to its path, or if that fails to another folder."""

    model: ModelProto
    output: OutputPath
    stop: StopRequests  # signals may interrupt the prompt for another path
    print_error: Callable[[str], None]

    def write(self, output: Path, overwrite: bool) -> Path | None:
        """Write the model; return the path written, or None if no folder could be written."""
        if self._write_model(output, overwrite):
            return output
        backup = self._write_backup(output)
        if backup:
            self.print_error(f"the trained model is kept in {backup}")
        chosen = self._write_to_prompted_path(backup) if self._user_can_answer() else None
        if chosen and backup:
            shutil.rmtree(backup.parent, ignore_errors=True)
        if not chosen and not backup:
            self.print_error("the trained model is lost: no other folder has room for it")
        return chosen or backup

    def _user_can_answer(self) -> bool:
        """Return whether a user can answer a prompt; after SIGTERM or SIGHUP nobody can."""
        request = self.stop.request
        stopped = request is not None and request.code != 128 + signal.SIGINT
        return not stopped and sys.stdin is not None and sys.stdin.isatty()

    def _write_model(self, path: Path, overwrite: bool) -> bool:
        """Write the model; return whether this succeeded, and print the reason if not."""
        try:
            self.output.save_model(self.model, path, overwrite)
        except OSError as e:
            self.print_error(one_line_message(e))
            return False
        return True

    def _write_backup(self, output: Path) -> Path | None:
        """Write the model into a new folder, in the first of three places that has room."""
        for folder in (lambda: output.parent, Path.home, lambda: Path(tempfile.gettempdir())):
            new = None
            try:
                new = Path(tempfile.mkdtemp(prefix="onnxgrad-", dir=folder().absolute()))
                self.output.save_model(self.model, new / output.name, False)
                return new / output.name
            except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
                if new is not None:
                    shutil.rmtree(new, ignore_errors=True)
        return None

    def _write_to_prompted_path(self, backup: Path | None) -> Path | None:
        """Write the model to a path that the user types; None if the user types none."""
        leave = "leave it there" if backup else "give it up"
        while True:
            try:
                with self.stop.allow_signals():
                    answer = typer.prompt(
                        f"Another path to write it to (Enter: {leave})",
                        default="",
                        show_default=False,
                        err=True,
                    )
                path = Path(os.path.expanduser(answer)) if answer else None
                if path is not None:  # the text, as a Path drops a '/' at its end
                    self.output.check_path(os.path.expanduser(answer), False, (), False)
            except (typer.Abort, KeyboardInterrupt):
                return None
            except (OSError, ValueError) as e:
                self.print_error(str(e))
                continue
            if path is None or self._write_model(path, False):
                return path
