"""Models from files or standard input, and to files or standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto

from onnxgrad.language.folders import ModelFolder, load_folder
from onnxgrad.model import external
from onnxgrad.model.files import check_not_input, check_writable
from onnxgrad.model.read import read
from onnxgrad.model.write import external_data_files

STDIN = STDOUT = "-"


def standard_input(what: str) -> BinaryIO:
    """Return standard input; raise `ValueError` if it is a terminal, not a pipe."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(f"standard input is a terminal: pipe a {what} into the command")
    return sys.stdin.buffer


def read_model(path: str, data: str | None = None) -> ModelProto:
    """Return the model at `path`; raise if `path` and `data` are both standard input."""
    if path != STDIN:
        return read(folder_of(path) or path)
    if data == STDIN:
        raise ValueError('MODEL and DATA are both "-", standard input: name a file for one of them')
    return read(standard_input("model").read())


def folder_of(path: str) -> ModelFolder | None:
    """Return the language model in the folder at `path`; None if it is no folder."""
    return load_folder(path) if path != STDIN and os.path.isdir(path) else None


def inputs_of(model: str, *data: str | None) -> list[Path]:
    """Return the input files that an output must not replace."""
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


def check_not_data(output: str, model: str) -> None:
    """Raise if `output` is a file of external data of the model."""
    if output != STDOUT and model != STDIN:
        check_not_input(output, external_data_files(model))


def write_to_stdout(model: ModelProto) -> None:
    """Write a model to standard output, which takes no external data."""
    if external.external_files(model) or external.inline_nbytes(model) > external.IN_MODEL:
        raise ValueError(
            "a model with external data does not fit standard output: name a file with --output"
        )
    sys.stdout.buffer.write(model.SerializeToString())
    sys.stdout.buffer.flush()
