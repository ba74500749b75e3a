"""What `onnxgrad train` does: read, train, write, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from onnx import ModelProto
from rich.table import Table

from onnxgrad.cli.bar import Bar
from onnxgrad.cli.console import complain, ignoring_closed_output, say, stderr, stdout
from onnxgrad.cli.data_files import Table as Data, read_table
from onnxgrad.cli.rescue import Keeper
from onnxgrad.cli.signals import Stopped, StopRequests
from onnxgrad.cli.task import Task, split
from onnxgrad.errors import ConvergenceError, unknown
from onnxgrad.model.files import check_not_input, check_writable, one_line, replacing
from onnxgrad.model.read import read
from onnxgrad.model.weights import FLOATS, constant_refs
from onnxgrad.model.write import data_files
from onnxgrad.schedules.epochwise import LearningRateSGD
from onnxgrad.training.loss_inside import OrtGradientOptimizer
from onnxgrad.training.parameters.defaults import default_weights, listed, trainable


@dataclass(frozen=True)
class TrainOptions:
    """The arguments and options of `onnxgrad train`, see `onnxgrad train --help`."""

    model: Path
    data: Path
    target: Sequence[str]
    loss: str | None
    loss_option: Sequence[str]
    loss_output: str
    output_index: str | None
    optimizer: str
    learning_rate: float | None
    epochs: int
    batch_size: int
    validation: float
    seed: int
    weights: Sequence[str]
    output: str
    overwrite: bool


@dataclass(frozen=True)
class _Outcome:
    """How training ended."""

    rows: int  # on which it trained, counted once an epoch
    reason: str = ""  # why it ended early
    kept: str = ""  # which weights are kept then
    code: int = 0  # the exit code


def run(options: TrainOptions, stop: StopRequests) -> None:
    """Train a model on a data file, write the result, and report.

    Raises:
        typer.Exit: training ended early, or not all files could be written.
        ValueError: options, a model or data that do not fit each other.
        OSError: a file cannot be read, or the output cannot be written.
    """
    output = _checked_output(options)
    proto = read(options.model)
    if options.overwrite:
        for file in (output, _curves_path(output)):
            check_not_input(file, data_files(options.model))
    _check_weights(proto, options.weights)
    task = _read_task(options, proto)
    training_rows, validation_rows = split(task.count, options.validation, options.seed)
    if options.batch_size > len(training_rows):
        raise ValueError(
            f"--batch-size {options.batch_size} is more than the {len(training_rows)} rows to "
            "train on"
        )
    trainer = _trainer(options, proto, task)
    validation = task.rows(validation_rows) if len(validation_rows) else None

    began = time.perf_counter()
    outcome = _fit(trainer, task.rows(training_rows), validation, stop)
    seconds = time.perf_counter() - began
    task.names.keep(trained := trainer.get_trained_onnx(proto))
    files = _save(trainer, trained, output, options.overwrite, stop)
    _report(trainer, task, validation, f"{outcome.rows / seconds:,.0f} rows/s, {seconds:.1f} s")
    _say_remarks(options, proto, task, files)
    expected = [output, _curves_path(output)] if trainer.train_losses_ else [output]
    _exit(outcome, stop, files, expected)


# -- before training --------------------------------------------------------------------------


def _checked_output(options: TrainOptions) -> Path:
    """Return the path of the trained model, if it and the loss curves can be written."""
    inputs = (options.model, options.data)
    output = check_writable(options.output, options.overwrite, inputs)
    curves = _curves_path(output)
    if os.path.realpath(output) == os.path.realpath(curves):
        raise ValueError(
            f"--output {options.output} is the name of the loss curves: use one in .onnx"
        )
    check_writable(curves, options.overwrite, inputs)
    return output


def _curves_path(output: Path) -> Path:
    return output.with_suffix(".png")


def _check_weights(proto: ModelProto, names: Sequence[str]) -> None:
    """Raise `ValueError` for a name that is no float constant of the model."""
    floats = [ref.name for ref in constant_refs(proto) if ref.read().data_type in FLOATS]
    for name in names:
        if name not in floats:
            raise unknown("weight", name, floats)


def _read_task(options: TrainOptions, proto: ModelProto) -> Task:
    loss_options = dict(map(_loss_option, options.loss_option))
    return Task(
        proto,
        read_table(options.data),
        options.target,
        options.loss,
        options.loss_output,
        options.output_index,
        loss_options,
    )


def _loss_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(
            f"--loss-option {text!r} is not NAME=VALUE with a number, true or false"
        ) from None


def _trainer(options: TrainOptions, proto: ModelProto, task: Task) -> OrtGradientOptimizer:
    rate = options.learning_rate
    if rate is None:
        rate = 0.001 if options.optimizer.startswith("adam") else 0.01
    return OrtGradientOptimizer(
        task.model,
        options.weights or default_weights(proto, announce=True),
        loss_output_name=task.loss_output,
        max_iter=options.epochs,
        training_optimizer_name=options.optimizer,
        batch_size=options.batch_size,
        learning_rate=LearningRateSGD(rate, learning_rate="constant"),
        validation_every=1,
        random_state=options.seed,
    )


# -- training ---------------------------------------------------------------------------------


def _fit(
    trainer: OrtGradientOptimizer, data: Data, validation: Data | None, stop: StopRequests
) -> _Outcome:
    """Train, with a progress bar."""
    with Bar(stderr, stop) as bar:
        try:
            trainer.fit(data, X_val=validation, callback=bar)
        except Stopped as e:
            if not bar.rows:
                raise
            return _Outcome(bar.rows, str(e), "what was trained so far", e.code)
        except ConvergenceError as e:
            return _Outcome(bar.rows, str(e), "the state before that", 1)
        finally:
            stop.hold()
    return _Outcome(bar.rows)


# -- after training ---------------------------------------------------------------------------


def _save(
    trainer: OrtGradientOptimizer,
    trained: ModelProto,
    output: Path,
    overwrite: bool,
    stop: StopRequests,
) -> list[Path]:
    """Write the trained model and the curves of its losses; return the files written."""
    model_path = Keeper(trained, stop, complain).write(output, overwrite)
    if model_path is None:
        return []
    if not trainer.train_losses_:
        return [model_path]
    from onnxgrad.plot.curves import plot_losses  # matplotlib: slow to import

    curves = _curves_path(model_path)
    try:
        check_writable(curves, overwrite and model_path == output)
        with replacing(curves) as temporary:
            plot_losses(trainer.train_losses_, trainer.validation_losses_, temporary)
    except OSError as e:
        complain(f"the loss curves are not written: {one_line(e)}")
        return [model_path]
    return [model_path, curves]


def _report(trainer: OrtGradientOptimizer, task: Task, validation: Data | None, speed: str) -> None:
    """Print the losses, the accuracy on the validation rows, and the speed."""
    accuracy = None
    if task.classifies and validation:
        accuracy = task.accuracy(trainer.get_trained_onnx(), validation)
    with ignoring_closed_output():
        stdout.print(_results(trainer.train_losses_, trainer.validation_losses_, accuracy))
        stdout.print(speed, highlight=False)


def _results(train: list[float], validation: list[float], accuracy: float | None) -> Table:
    table = Table("", "first", "last", "best")
    for name, losses in (("training loss", train), ("validation loss", validation)):
        if losses:
            epoch = min(range(len(losses)), key=losses.__getitem__)
            best = f"{losses[epoch]:.5g} (epoch {epoch + 1})"
            table.add_row(name, f"{losses[0]:.5g}", f"{losses[-1]:.5g}", best)
    if accuracy is not None:
        table.add_row("validation accuracy", "", f"{accuracy:.2%}", "")
    return table


def _say_remarks(
    options: TrainOptions, proto: ModelProto, task: Task, files: Sequence[Path]
) -> None:
    """Print which files were written, which constants were not trained, and how columns map."""
    for file in files:
        say(f"wrote {file}")
    untrained = [] if options.weights else [t for t in trainable(proto) if not t.trains]
    if untrained:
        say(f"not trained by default: {listed(untrained, len(untrained))}")
    for remark in task.remarks:
        say(remark)


def _exit(
    outcome: _Outcome, stop: StopRequests, files: Sequence[Path], expected: Sequence[Path]
) -> None:
    """Say why training ended early; exit with a code if it did, or if a file is missing."""
    if not outcome.reason and stop.request:  # the signal came after the last slice of batches
        outcome = _Outcome(
            outcome.rows, str(stop.request), "all that was to be trained", stop.request.code
        )
    if outcome.reason:
        complain(f"{outcome.reason}; {files[0] if files else 'no file'} holds {outcome.kept}")
    if files != expected:
        raise typer.Exit(1)
    if outcome.code:
        raise typer.Exit(outcome.code)
