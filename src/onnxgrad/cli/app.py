"""The command line: `onnxgrad train`, `grad`, `show`.

What is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onnxgrad import __version__
from onnxgrad.cli.bar import Bar, unseen
from onnxgrad.cli.signals import Stopped, StopRequests
from onnxgrad.errors import escape, printable, printable_lines
from onnxgrad.model.files import check_not_input, check_writable, one_line, replacing

if TYPE_CHECKING:
    from onnx import ModelProto

    from onnxgrad.cli.data_files import Table as Data
    from onnxgrad.cli.task import Task
    from onnxgrad.training.loss_inside import OrtGradientOptimizer

app = typer.Typer(
    help="Differentiate and train ONNX models on the ordinary onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
stdout, stderr = Console(), Console(stderr=True)
stop = StopRequests()


class OptimizerName(StrEnum):
    """The optimizers that need nothing but a learning rate."""

    sgd = "sgd"
    momentum = "momentum"
    nesterov = "nesterov"
    adam = "adam"
    adamw = "adamw"


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Model = Annotated[Path, typer.Argument(help="The .onnx file.", show_default=False)]


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose errors are one line on stderr."""

    @app.command()
    @functools.wraps(function)
    def command(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            with stop, warnings.catch_warnings():
                warnings.showwarning = _warn
                function(*args, debug=debug, **kwargs)
        except (typer.Exit, BrokenPipeError):
            raise
        except Stopped as e:
            trained = "nothing was trained yet, and " if function.__name__ == "train" else ""
            _complain(f"{e}: {trained}no file was written")
            raise typer.Exit(e.code) from None
        except Exception as e:
            if debug:
                escape(e)
                raise
            expected = isinstance(e, (ValueError, OSError, NotImplementedError))
            hint = "" if expected else " (unexpected: --debug shows where)"
            message = one_line(e) if isinstance(e, OSError) else str(e)
            _complain(f"{message or type(e).__name__}{hint}")
            raise typer.Exit(2 if expected else 1) from None

    return command


def _say(message: str, console: Console = stdout, style: str = "") -> None:
    with unseen():
        console.print(Text(printable_lines(message), style=style), soft_wrap=True)


def _complain(message: str) -> None:
    _say(f"Error: {' '.join(message.split())}", stderr, "red")


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    _say(f"Warning: {message}", stderr, "yellow")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"onnxgrad {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@_command
def train(
    model: Model,
    data: Annotated[
        Path, typer.Argument(help="CSV, Parquet or .npz file, a row each.", show_default=False)
    ],
    target: Annotated[
        list[str], typer.Option(help="Column to predict; repeat for several.", show_default=False)
    ],
    loss: Annotated[
        str | None,
        typer.Option(
            help="squared_error (l2), absolute_error (l1), elastic, huber, poisson, "
            "binary_cross_entropy, cross_entropy, log, or hinge. "
            "Needed unless the model computes its own: see --loss-output.",
            show_default=False,
        ),
    ] = None,
    loss_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of the loss, as from_logits=true or delta=2; repeat for several.",
            show_default=False,
        ),
    ] = None,
    loss_output: Annotated[
        str, typer.Option(help="Without --loss: the output of the model that is its loss.")
    ] = "loss",
    output_index: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The output to judge, if there are several.", show_default=False
        ),
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option()] = OptimizerName.adam,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="For the mean gradient of a batch; constant.",
            show_default="0.001 for adam(w), 0.01",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the rows kept for validation.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of the order of rows.")] = 0,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Weight to train; repeat for several.", show_default="all by their role"),
    ] = None,
    output: Annotated[
        str,  # a Path forgets the '/' at its end
        typer.Option(
            metavar="PATH", help="Where the trained model goes; its loss curves beside it."
        ),
    ] = "trained.onnx",
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train MODEL on DATA.

    One input: it takes all columns that are no target, in their order, reshaped to its shape.
    Several inputs: each takes the column (or .npz array) of its name. Columns may hold lists.

    The result is MODEL with new weights, those after the last epoch, and in its metadata the names
    of the columns, which are compared when it is trained again. Ctrl-C, SIGTERM and SIGHUP stop
    early and write what was trained so far.
    """
    path = check_writable(output, overwrite, (model, data))
    curves = _curves(path)
    if os.path.realpath(path) == os.path.realpath(curves):
        raise ValueError(f"--output {output} is the name of the loss curves: use one in .onnx")
    check_writable(curves, overwrite, (model, data))

    from onnxgrad.cli.data_files import read_table
    from onnxgrad.cli.task import Task, split
    from onnxgrad.model.read import read
    from onnxgrad.model.write import data_files
    from onnxgrad.schedules import LearningRateSGD
    from onnxgrad.training.loss_inside import OrtGradientOptimizer
    from onnxgrad.training.parameters.defaults import default_weights, listed, trainable

    proto = read(model)
    if overwrite:
        for file in (path, curves):
            check_not_input(file, data_files(model))
    _check_weights(proto, weights or [])
    options = dict(map(_option, loss_option or []))
    task = Task(proto, read_table(data), target, loss, loss_output, output_index, options)
    training, held = split(task.count, validation, seed)
    if batch_size > len(training):
        raise ValueError(
            f"--batch-size {batch_size} is more than the {len(training)} rows to train on"
        )
    if learning_rate is None:
        learning_rate = 0.001 if optimizer.value.startswith("adam") else 0.01
    trainer = OrtGradientOptimizer(
        task.model,
        weights or default_weights(proto, announce=True),
        loss_output_name=task.loss_output,
        max_iter=epochs,
        training_optimizer_name=optimizer.value,
        batch_size=batch_size,
        learning_rate=LearningRateSGD(learning_rate, learning_rate="constant"),
        validation_every=1,
        random_state=seed,
    )
    held_data = task.rows(held) if len(held) else None
    began = time.perf_counter()
    rows, ended, code = _fit(trainer, task.rows(training), held_data)
    seconds = time.perf_counter() - began
    task.names.keep(trained := trainer.get_trained_onnx(proto))
    files = _save(trainer, trained, path, overwrite)
    _report(trainer, task, held_data, f"{rows / seconds:,.0f} rows/s, {seconds:.1f} s")
    left = [] if weights else [t for t in trainable(proto) if not t.trains]
    remarks = [f"not trained by default: {listed(left, len(left))}"] * bool(left)
    for remark in (*(f"wrote {file}" for file in files), *remarks, *task.remarks):
        _say(remark)
    if not ended and stop.request:
        ended, code = (str(stop.request), "all that was to be trained"), stop.request.code
    if ended:
        _complain(f"{ended[0]}; {files[0] if files else 'no file'} holds {ended[1]}")
    if files != _expected(trainer, path):
        raise typer.Exit(1)
    if code:
        raise typer.Exit(code)


def _check_weights(proto: ModelProto, names: list[str]) -> None:
    """Raise `ValueError` for a name that is no float constant of the model."""
    from onnxgrad.errors import unknown
    from onnxgrad.model.weights import FLOATS, constant_refs

    known = [site.name for site in constant_refs(proto) if site.read().data_type in FLOATS]
    for name in names:
        if name not in known:
            raise unknown("weight", name, known)


def _fit(
    trainer: OrtGradientOptimizer, data: Data, held: Data | None
) -> tuple[int, tuple[str, str] | None, int]:
    """Train; return the rows seen, what ended it early and is kept, and the exit code."""
    from onnxgrad.errors import ConvergenceError

    with Bar(stderr, stop) as bar:
        try:
            trainer.fit(data, X_val=held, callback=bar)
        except Stopped as e:
            if not bar.rows:
                raise
            return bar.rows, (str(e), "what was trained so far"), e.code
        except ConvergenceError as e:
            return bar.rows, (str(e), "the state before that"), 1
        finally:
            stop.hold()
    return bar.rows, None, 0


def _expected(trainer: OrtGradientOptimizer, output: Path) -> list[Path]:
    """Return the files to write; curves need an epoch."""
    return [output, _curves(output)] if trainer.train_losses_ else [output]


def _curves(output: Path) -> Path:
    return output.with_suffix(".png")


def _save(
    trainer: OrtGradientOptimizer, trained: ModelProto, output: Path, overwrite: bool
) -> list[Path]:
    """Write the trained model, then the curves of its losses; return what could be written."""
    from onnxgrad.cli.rescue import Keeper

    written = Keeper(trained, stop, _complain).write(output, overwrite)
    if written is None or not trainer.train_losses_:
        return [] if written is None else [written]
    from onnxgrad.plot.curves import plot_losses

    curves = _curves(written)
    try:
        check_writable(curves, overwrite and written == output)
        with replacing(curves) as temporary:
            plot_losses(trainer.train_losses_, trainer.validation_losses_, temporary)
    except OSError as e:
        _complain(f"the loss curves are not written: {one_line(e)}")
        return [written]
    return [written, curves]


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(
            f"--loss-option {text!r} is not NAME=VALUE with a number, true or false"
        ) from None


def _report(trainer: OrtGradientOptimizer, task: Task, held: Data | None, speed: str) -> None:
    """Print the losses, the accuracy on the rows kept for validation, and the speed."""
    accuracy = None
    if task.classifies and held:
        accuracy = task.accuracy(trainer.get_trained_onnx(), held)
    with unseen():
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


@_command
def grad(
    model: Model,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="Where the gradient goes.")
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Weight to differentiate by; repeat.", show_default="all by their role"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(help="Input to differentiate by; repeat.", show_default="all floats"),
    ] = None,
    fill_grad: Annotated[
        bool, typer.Option("--fill-grad", help="Start from ones; needs --keep-outputs.")
    ] = False,
    keep_outputs: Annotated[
        bool, typer.Option("--keep-outputs", help="Return the outputs of MODEL too.")
    ] = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Write the model that computes the gradient of MODEL."""
    check_writable(output, overwrite, (model,))
    if fill_grad and not keep_outputs:
        raise ValueError("--fill-grad needs --keep-outputs")
    from onnxgrad import DerivativeOptions, onnx_derivative
    from onnxgrad.model.read import read
    from onnxgrad.model.write import data_files, save

    proto = read(model)
    check_not_input(output, data_files(model))
    options = DerivativeOptions(
        keep_outputs * DerivativeOptions.KeepOutputs | fill_grad * DerivativeOptions.FillGrad
    )
    made = onnx_derivative(proto, weights or None, inputs or None, options)
    save(made, output)
    counts = Counter(node.op_type for node in made.graph.node).most_common(8)
    table = Table(show_header=False)
    table.add_row("nodes", f"{len(proto.graph.node)} -> {len(made.graph.node)}")
    table.add_row("operators", Text(", ".join(f"{n} {printable(op)}" for op, n in counts)))
    table.add_row("inputs", _listed(made.graph.input))
    table.add_row("outputs", _listed(made.graph.output))
    stdout.print(table)
    _say(f"wrote {output}")


def _listed(values) -> Text:
    names = [printable(v.name) for v in values]
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return Text(", ".join(names[:12]) + more)


@_command
def show(
    model: Model,
    gradient: Annotated[bool, typer.Option("--grad", help="Its gradient as well.")] = False,
    debug: Debug = False,
) -> None:
    """Print MODEL as text, nodes indented by what feeds them."""
    from onnxgrad.model.read import read
    from onnxgrad.plot.text import onnx_simple_text_plot

    proto = read(model)
    typer.echo(onnx_simple_text_plot(proto))
    if gradient:
        from onnxgrad import onnx_derivative

        typer.echo("\ngradient")
        typer.echo(onnx_simple_text_plot(onnx_derivative(proto)))
