"""`onnxgrad report`, and what `train` writes beside the model: record, card and samples."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxgrad.cli.command_options import ReportOptions, TrainOptions
from onnxgrad.cli.console import print_error, print_json, print_message
from onnxgrad.cli.options import OptionField
from onnxgrad.errors import first_line, printable
from onnxgrad.estimator import NotFittedError
from onnxgrad.language.generation import generate
from onnxgrad.language.text_readers import Texts
from onnxgrad.model.files import check_writable, one_line_message

if TYPE_CHECKING:
    from onnxgrad.cli.job import Job
    from onnxgrad.report.recorder import Recorder


def report(options: ReportOptions) -> None:
    """Write the record of a training as one page of HTML."""
    from onnxgrad.report.page import write_report

    page = write_report(options.run, options.output, overwrite=options.overwrite)
    if options.json:
        print_json({"files": [str(page)]})
    else:
        print_message(f"wrote {page}")


def make_recorder(options: TrainOptions) -> Recorder:
    """Return the callback `Recorder` for `--record`, with the command line and its options."""
    from onnxgrad.report.recorder import Recorder  # imported here, as it is slow

    assert options.record is not None
    command = shlex.join(["onnxgrad", *sys.argv[1:]])
    chosen: dict[str, str] = {}
    for name, each in OptionField.fields_of(type(options)).items():
        value = getattr(options, name)
        if value or type(value) in (int, float) or each.is_set(options):
            text = ", ".join(value) if isinstance(value, list) else str(value)
            chosen[name.replace("_", "-")] = text
    made = Recorder(options.record, about={"command": command, "options": chosen})
    made.first_row = 1
    return made


def describe_data_to_recorder(job: Job) -> None:
    """Set class names and the indices of validation rows in the job's `Recorder`, if any."""
    for callback in job.trainer._job.callbacks.callbacks:
        if callback.key == "Recorder":
            folders = getattr(job.task.data, "classes", None)
            callback.classes = list(job.task.classes) or folders
            callback.row_numbers = job.task.held_out


def card_paths(options: TrainOptions) -> list[Path]:
    """Return the path of the model card for `--card`, in a list; [] without `--card`."""
    if options.card is None:
        return []
    path = Path(options.card)
    return [path / "README.md" if path.is_dir() else path]


def check_card(options: TrainOptions, inputs: Iterable[Path]) -> None:
    """Raise `OSError` or `ValueError` if the file of `--card` cannot be written."""
    for file in card_paths(options):
        check_writable(file, options.overwrite, inputs)


def write_model_card(job: Job, options: TrainOptions) -> list[Path]:
    """Write the model card of a trained model; return the paths written."""
    from onnxgrad.report.card import write_card

    try:
        return [
            write_card(
                job.trainer,
                file,
                license=options.license,
                base=options.model if os.path.isfile(options.model) else None,
                data=f"Read from `{printable(os.path.basename(os.path.normpath(options.data)))}`.",
                overwrite=options.overwrite,
            )
            for file in card_paths(options)
        ]
    except (OSError, NotFittedError) as e:
        reason = one_line_message(e) if isinstance(e, OSError) else "no epoch has ended"
        print_error(f"the card is not written: {reason}")
        return []


def check_record(options: TrainOptions, inputs: Iterable[Path]) -> None:
    """Raise if the folder of `--record` cannot be written, or holds another training."""
    if options.record is None or not os.path.lexists(options.record):
        return
    if not os.path.isdir(options.record):
        raise ValueError(f"--record {options.record} is a file: name a folder")
    from onnxgrad.report.recorder import FILE

    replaces = options.overwrite or options.resume
    check_writable(Path(options.record, FILE), replaces, inputs)


def check_prompts(job: Job, prompts: Sequence[str]) -> list[str]:
    """Return the prompts of `--prompt`, and set them in the job's `Recorder`, if any.

    Raises:
        ValueError: the data are no texts.
    """
    texts = job.task.data
    if prompts and not isinstance(texts, Texts):
        raise ValueError("--prompt is for language models, and the data are no texts: leave it out")
    for callback in job.trainer._job.callbacks.callbacks:
        if prompts and callback.key == "Recorder":
            callback.prompts, callback.tokenizer = list(prompts), texts.tokenizer
    return list(prompts)


def continue_prompts(job: Job, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a prompt and its continuation by the trained model; [] on errors."""
    try:
        new = generate(job.trainer, prompts, tokenizer=job.task.data.tokenizer)
    except Exception as e:  # not raised: the trained model is already written
        print_error(f"no text is generated: {first_line(e)}")
        return []
    return list(zip(prompts, new, strict=True))
