"""`onnxgrad train`: read, train, write, report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from onnx import ModelProto

from onnxgrad.cli.command import FAILED, Stopped, StopRequests, error_text, stop
from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.console import print_error, print_json, print_note
from onnxgrad.cli.job import Job, prepare_job
from onnxgrad.cli.model_files import (
    STDOUT,
    ModelKeeper,
    OutputPath,
    check_not_external_data,
    input_files,
    language_model_folder,
    read_model,
)
from onnxgrad.cli.records import (
    card_paths,
    check_card,
    check_prompts,
    check_record,
    continue_prompts,
    describe_data_to_recorder,
    make_recorder,
    write_model_card,
)
from onnxgrad.cli.report import Report, epoch_entries
from onnxgrad.errors import ConvergenceError
from onnxgrad.model.files import check_writable, one_line_message, replacement_file
from onnxgrad.parallel.process_groups import join_launched_group
from onnxgrad.training.callbacks.base import Callback, TrainingControl
from onnxgrad.training.callbacks.checkpoint import Checkpoint, newest_checkpoint
from onnxgrad.training.callbacks.diagnostics import NanWatch
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.callbacks.history import History
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.trainer import Trainer


def train(options: TrainOptions) -> None:
    """Train a model on data, write the result, and report."""
    output = OutputPath(language_model_folder(options.model), options.adapter)
    named = options.output is not None
    if not named:
        unused = (
            output.default_path if options.overwrite else output.unused_default_path(options.curves)
        )
        options = replace(options, output=unused)
    if options.dry_run:
        from onnxgrad.cli.dry_run import dry_run

        dry_run(options, read_model(options.model, options.data))
        return
    first = join_launched_group()  # among several processes, only the first writes files and prints
    if first:
        _check_output_files(options, output)
    proto = read_model(options.model, options.data)
    if first and options.output != STDOUT:
        output.check_data_files(options.output, options.overwrite, options.model, proto)
        for file in _model_and_curve_files(options, output)[1:] if options.overwrite else ():
            check_not_external_data(str(file), options.model)
    watch = Watch(stop)
    job = prepare_job(options, proto, [watch, *_chosen_callbacks(options)])
    describe_data_to_recorder(job)
    asked = check_prompts(job, options.prompt)
    for text in job.task.notes if first else ():
        print_note(text)
    if first and not named and options.output != output.default_path:
        print_note(
            f"{output.default_path} or its curves exist: the result goes to {options.output}"
        )
    began = time.perf_counter()
    reason, code = _fit_job(job, options, watch)
    seconds = time.perf_counter() - began
    if not first:
        if reason:
            print_error(reason)
            raise typer.Exit(code)
        return
    trained = job.task.finished(job.trainer.model)
    files = _write_model_and_curves(job.trainer, trained, options, output)
    beside = job.task.write_beside(files[0].parent) if files else ""
    files += write_model_card(job, options)
    report = Report(job, options, seconds, watch.rows, files, stop.request is not None)
    report.samples = continue_prompts(job, asked) if asked and not stop.request else []
    if options.json:
        print_json(report.as_json(reason))
    else:
        report.show(stderr=options.output == STDOUT)
    if beside:
        print_note(beside)
    if not reason and stop.request:  # the signal came after the last step
        reason, code = str(stop.request), stop.request.code
    expected = _model_and_curve_files(options, output)[: None if epoch_entries(job.trainer) else 1]
    if reason:
        where = files[0] if files else "no file" if expected else "standard output"
        print_error(f"{reason.removesuffix('.')}; {where} holds {report.kept_weights}")
    if files != expected + card_paths(options):
        raise typer.Exit(FAILED)
    if code:
        raise typer.Exit(code)


class Watch(Callback):
    """A callback that counts rows, and raises `Stopped` after the step in which a signal came.

    `rows` is the number of rows that this training went through, counted once an epoch.
    """

    def __init__(self, stop: StopRequests) -> None:
        self.stop = stop
        self.rows = 0
        self._first = 0, 0  # epochs and rows before the resumed training

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Remember the step from which a resumed training continues."""
        self._first = trainer.progress.epoch, trainer.progress.rows

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Count the rows, and raise `Stopped` if a signal was received during the step."""
        self.stop.delay_signals()
        progress, (epoch, rows) = trainer.progress, self._first
        self.rows = (progress.epoch - epoch) * (progress.total_rows or 0) + progress.rows - rows
        self.stop.raise_if_signaled()

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Raise `Stopped` if a signal was received during the evaluation."""
        self.stop.raise_if_signaled()


# -- before training --------------------------------------------------------------------------


def _check_output_files(options: TrainOptions, output: OutputPath) -> None:
    """Raise if an output file cannot be written, exists without `--overwrite`, or is an input."""
    inputs = input_files(options.model, options.data, options.validation, options.config)
    output.check_path(options.output, options.overwrite, inputs, options.json)
    _check_distinct_paths(options, output)
    for file in _model_and_curve_files(options, output)[1:]:
        check_writable(file, options.overwrite, inputs)
    if options.history is not None:
        History(options.history)  # raises for an unknown suffix
        check_writable(options.history, options.overwrite or options.resume, inputs)
    check_record(options, inputs)
    check_card(options, inputs)
    if options.checkpoint is not None and os.path.isfile(options.checkpoint):
        raise ValueError(f"--checkpoint {options.checkpoint} is a file: name a folder")
    begun = options.checkpoint and newest_checkpoint(options.checkpoint, lambda path: None)
    if begun and not options.resume:
        raise ValueError(
            f"--checkpoint {options.checkpoint} holds a training: pass --resume to continue it, "
            "or name another folder"
        )


def _check_distinct_paths(options: TrainOptions, output: OutputPath) -> None:
    """Raise `ValueError` if two outputs, such as the model and the history, have one path."""
    named = ("output", "history", "record", "checkpoint")
    written = [(f"--{name}", getattr(options, name)) for name in named]
    written += [("--card", str(file)) for file in card_paths(options)]
    written += [
        ("the loss curves", str(file)) for file in _model_and_curve_files(options, output)[1:]
    ]
    known: dict[str, str] = {}
    for name, path in written:
        if path in (None, STDOUT):
            continue
        if (other := known.setdefault(os.path.realpath(path), name)) != name:
            raise ValueError(f"{other} {path} is also the path of {name}: name another path")


def _model_and_curve_files(options: TrainOptions, output: OutputPath) -> list[Path]:
    """Return the paths of the trained model and of the picture of loss curves, in a list."""
    if options.output == STDOUT:
        return []
    model = Path(options.output)
    return [model, output.curves_path(model)] if options.curves else [model]


def _chosen_callbacks(options: TrainOptions) -> list[Callback]:
    callbacks: list[Callback] = [Progress(console=None), NanWatch()]
    monitor = options.monitor or "validation_loss"
    if options.early_stopping is not None:
        callbacks.append(EarlyStopping(monitor, patience=options.early_stopping))
    if options.checkpoint is not None:
        callbacks.append(
            Checkpoint(
                options.checkpoint,
                every_steps=options.checkpoint_every,
                every_seconds=options.checkpoint_seconds,
                keep=options.checkpoint_keep,
                monitor=options.monitor,
            )
        )
    if options.history is not None:
        callbacks.append(History(options.history))
    # behind EarlyStopping, as the record examines the weights that it keeps
    if options.record is not None:
        callbacks.append(make_recorder(options))
    return callbacks


# -- training ---------------------------------------------------------------------------------


def _fit_job(job: Job, options: TrainOptions, watch: Watch) -> tuple[str, int]:
    """Train the job; return why training ended early ("" if it did not), and the exit code.

    An error or a signal after the first steps does not lose them.
    """
    try:
        job.fit(options, options.epochs, options.checkpoint if options.resume else None)
    except (Stopped, Exception) as e:
        if not watch.rows and not isinstance(e, ConvergenceError):
            raise
        return (str(e), e.code) if isinstance(e, Stopped) else (error_text(e), FAILED)
    finally:
        stop.delay_signals()
    return "", 0


# -- after training ---------------------------------------------------------------------------


def _write_model_and_curves(
    trainer: Trainer, trained: ModelProto, options: TrainOptions, result: OutputPath
) -> list[Path]:
    """Write the trained model and the curves of its losses; return the files written."""
    if options.output == STDOUT:
        result.save_model(trained, Path(options.output), options.overwrite)
        return []
    output = Path(options.output)
    model_path = ModelKeeper(trained, result, stop, print_error).write(output, options.overwrite)
    if model_path is None:
        return []
    records = epoch_entries(trainer)
    if not records or not options.curves:
        return [model_path]
    # imported here, as it is slow; pyplot would start a window system
    from matplotlib.figure import Figure

    from onnxgrad.plot.figure import plot_history

    curves = result.curves_path(model_path)
    try:
        check_writable(curves, options.overwrite and model_path == output)
        figure = Figure(figsize=(6, 4), layout="constrained")
        plot_history(records, figure.add_subplot())
        with replacement_file(curves) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
    except OSError as e:
        print_error(f"the loss curves are not written: {one_line_message(e)}")
        return [model_path]
    return [model_path, curves]
