"""`onnxgrad report`: a training as a page of HTML; and what `onnxgrad train --record` records."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from onnxgrad.cli.command_options import ReportOptions
from onnxgrad.cli.console import print_json, say
from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.model.files import check_writable

if TYPE_CHECKING:
    from onnxgrad.cli.job import Job
    from onnxgrad.report.recorder import Recorder


def report(options: ReportOptions) -> None:
    """Write the page."""
    from onnxgrad.report.page import write_report

    page = write_report(options.run, options.output, overwrite=options.overwrite)
    if options.json:
        print_json({"files": [str(page)]})
    else:
        say(f"wrote {page}")


def recorder(options: TrainOptions) -> Recorder:
    """Return the callback that records a training of the command line."""
    from onnxgrad.report.recorder import Recorder  # what it needs is slow to import

    assert options.record is not None
    command = shlex.join(["onnxgrad", *sys.argv[1:]])
    values = {f.name.replace("_", "-"): getattr(options, f.name) for f in fields(options)}
    chosen = {n: ", ".join(v) if isinstance(v, list) else str(v) for n, v in values.items() if v}
    made = Recorder(options.record, about={"command": command, "options": chosen})
    made.first_row = 1
    return made


def describe(job: Job) -> None:
    """Tell the recorder of a training what the data say of classes and rows."""
    for callback in job.trainer.callbacks.callbacks:
        if callback.key == "Recorder":
            folders = getattr(job.training.data.X, "classes", None)
            callback.classes = job.classes or folders
            callback.row_numbers = job.validation.numbers if job.validation else None


def check_record(options: TrainOptions, inputs: Iterable[Path]) -> None:
    """Raise if `--record` cannot be written, or would replace another training."""
    if options.record is None or not os.path.lexists(options.record):
        return
    if not os.path.isdir(options.record):
        raise ValueError(f"--record {options.record} is a file: name a folder")
    from onnxgrad.report.recorder import FILE

    replaces = options.overwrite or options.resume
    check_writable(Path(options.record, FILE), replaces, inputs)
