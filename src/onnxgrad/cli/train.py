"""`onnxgrad train`: read, train, write, report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from onnx import ModelProto

from onnxgrad.cli.command import FAILED, reason_of, stop
from onnxgrad.cli.console import complain, note, print_json, results
from onnxgrad.cli.job import Job, prepare_job
from onnxgrad.cli.model_files import (
    STDOUT,
    check_not_data,
    folder_of,
    inputs_of,
    read_model,
    write_model,
)
from onnxgrad.cli.output import Output
from onnxgrad.cli.report import Report, epochs
from onnxgrad.cli.report_page import card, card_of, check_card, check_record, describe, recorder
from onnxgrad.cli.rescue import Keeper
from onnxgrad.cli.samples import check_prompts, sample
from onnxgrad.cli.signals import Stopped
from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.cli.watch import Watch
from onnxgrad.errors import ConvergenceError
from onnxgrad.model.files import check_writable, one_line, replacing
from onnxgrad.parallel.process_groups import join_launched_group
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.callbacks.checkpoint import Checkpoint, newest
from onnxgrad.training.callbacks.diagnostics import NanWatch
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.callbacks.history import History
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    reason: str = ""  # why it ended early
    code: int = 0  # the exit code


def train(options: TrainOptions) -> None:
    """Train a model on data, write the result, and report."""
    output = Output(folder_of(options.model), options.adapter)
    named = options.output is not None
    if not named:
        unused = output.default if options.overwrite else output.unused_default(options.curves)
        options = replace(options, output=unused)
    if options.dry_run:
        from onnxgrad.cli.dry_run import dry_run

        dry_run(options, read_model(options.model, options.data))
        return
    first = (
        join_launched_group()
    )  # of the processes that train one model: it writes files, and reports
    if first:
        _check_files(options, output)
    proto = read_model(options.model, options.data)
    if first and options.output != STDOUT:
        output.check_data(options.output, options.overwrite, options.model, proto)
        for file in _result_files(options, output)[1:] if options.overwrite else ():
            check_not_data(str(file), options.model)
    watch = Watch(stop)
    job = prepare_job(options, proto, [watch, *_chosen_callbacks(options)])
    describe(job)
    asked = check_prompts(job, options.prompt)
    for text in job.task.notes if first else ():
        note(text)
    if first and not named and options.output != output.default:
        note(f"{output.default} or its curves exist: the result goes to {options.output}")
    began = time.perf_counter()
    outcome = _fit_job(job, options, watch)
    seconds = time.perf_counter() - began
    if not first:
        if outcome.reason:
            complain(outcome.reason)
        if outcome.code:
            raise typer.Exit(outcome.code)
        return
    trained = job.trained_model()
    files = _write_results(job.trainer, trained, options, output)
    beside = job.task.write_beside(files[0].parent) if files else ""
    files += card(job, options)
    report = Report(job, options, seconds, watch.rows, files, stop.request is not None)
    report.samples = sample(job, asked) if asked and not stop.request else []
    if options.json:
        print_json(report.as_json(outcome.reason))
    else:
        report.show(results(output=options.output))
    if beside:
        note(beside)
    expected = _result_files(options, output)[: None if epochs(job.trainer) else 1] + card_of(
        options
    )
    _exit_with_reason(outcome, str(report.kept), files, expected)


# -- before training --------------------------------------------------------------------------


def _check_files(options: TrainOptions, output: Output) -> None:
    """Raise if the results cannot be written, or would replace something that they must not."""
    inputs = inputs_of(options.model, options.data, options.validation, options.config)
    output.check(options.output, options.overwrite, inputs, options.json)
    _check_different(options, output)
    for file in _result_files(options, output)[1:]:
        check_writable(file, options.overwrite, inputs)
    if options.history is not None:
        History(options.history)  # raises for an unknown ending
        check_writable(options.history, options.overwrite or options.resume, inputs)
    check_record(options, inputs)
    check_card(options, inputs)
    if options.checkpoint is not None and os.path.isfile(options.checkpoint):
        raise ValueError(f"--checkpoint {options.checkpoint} is a file: name a folder")
    begun = options.checkpoint and newest(options.checkpoint, lambda path: None)
    if begun and not options.resume:
        raise ValueError(
            f"--checkpoint {options.checkpoint} holds a training: pass --resume to go on with it, "
            "or name another folder"
        )


def _check_different(options: TrainOptions, output: Output) -> None:
    """Raise `ValueError` if two results would be one file or folder."""
    named = ("output", "history", "record", "checkpoint")
    written = [(f"--{name}", getattr(options, name)) for name in named]
    written += [("--card", str(file)) for file in card_of(options)]
    written += [("the loss curves", str(file)) for file in _result_files(options, output)[1:]]
    known: dict[str, str] = {}
    for name, path in written:
        if path in (None, STDOUT):
            continue
        if (other := known.setdefault(os.path.realpath(path), name)) != name:
            raise ValueError(f"{other} {path} is the name of {name}, too: use another")


def _result_files(options: TrainOptions, output: Output) -> list[Path]:
    """Return the files of the model and its curves."""
    if options.output == STDOUT:
        return []
    model = Path(options.output)
    return [model, output.curves(model)] if options.curves else [model]


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
    if options.record is not None:  # behind EarlyStopping, whose weights it examines
        callbacks.append(recorder(options))
    return callbacks


# -- training ---------------------------------------------------------------------------------


def _fit_job(job: Job, options: TrainOptions, watch: Watch) -> Outcome:
    """Train; an error or a signal after the first steps does not lose them."""
    try:
        job.fit(options, options.epochs, options.checkpoint if options.resume else None)
    except Stopped as e:
        if not watch.rows:
            raise
        return Outcome(str(e), e.code)
    except ConvergenceError as e:
        return Outcome(str(e), FAILED)
    except Exception as e:
        if not watch.rows:
            raise
        return Outcome(reason_of(e), FAILED)
    finally:
        stop.hold()
    return Outcome()


# -- after training ---------------------------------------------------------------------------


def _write_results(
    trainer: Trainer, trained: ModelProto, options: TrainOptions, result: Output
) -> list[Path]:
    """Write the trained model and the curves of its losses; return the files written."""
    if options.output == STDOUT:
        write_model(trained, options.output)
        return []
    output = Path(options.output)
    model_path = Keeper(trained, result, stop, complain).write(output, options.overwrite)
    if model_path is None:
        return []
    records = epochs(trainer)
    if not records or not options.curves:
        return [model_path]
    from matplotlib.figure import Figure  # slow to import; pyplot would start a window system

    from onnxgrad.plot.loss_curves import plot_history

    curves = result.curves(model_path)
    try:
        check_writable(curves, options.overwrite and model_path == output)
        figure = Figure(figsize=(6, 4), layout="constrained")
        plot_history(records, figure.add_subplot())
        with replacing(curves) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
    except OSError as e:
        complain(f"the loss curves are not written: {one_line(e)}")
        return [model_path]
    return [model_path, curves]


def _exit_with_reason(outcome: Outcome, kept: str, files: list[Path], expected: list[Path]) -> None:
    """Say why training ended early; exit with a code if it did, or if a file is missing."""
    reason, code = outcome.reason, outcome.code
    if not reason and stop.request:  # the signal came after the last slice of batches
        reason, code = str(stop.request), stop.request.code
    if reason:
        where = files[0] if files else "no file" if expected else "standard output"
        complain(f"{reason.removesuffix('.')}; {where} holds {kept}")
    if files != expected:
        raise typer.Exit(FAILED)
    if code:
        raise typer.Exit(code)
