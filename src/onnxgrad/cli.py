"""The command line: `onnxgrad train`, `grad`, `show`.

What is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import functools
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from onnxgrad import __version__
from onnxgrad.files import check_writable, replacing

if TYPE_CHECKING:
    from onnx import ModelProto

    from onnxgrad.training.full import OrtGradientOptimizer
    from onnxgrad.training.tables import Table as Data
    from onnxgrad.training.trainer import Progress as State

app = typer.Typer(
    help="Differentiate and train ONNX models on the ordinary onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
stdout, stderr = Console(), Console(stderr=True)


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
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                function(*args, debug=debug, **kwargs)
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as e:
            if debug:
                raise
            expected = isinstance(e, (ValueError, OSError, NotImplementedError))
            hint = "" if expected else " (unexpected: --debug shows where)"
            _complain(f"{e or type(e).__name__}{hint}")
            raise typer.Exit(2 if expected else 1) from None

    return command


def _complain(message: str) -> None:
    stderr.print(Text(f"Error: {' '.join(message.split())}", style="red"), soft_wrap=True)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    stderr.print(Text(f"Warning: {message}", style="yellow"), soft_wrap=True)


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
        Path, typer.Option(help="Where the trained model goes; its loss curves beside it.")
    ] = Path("trained.onnx"),
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train MODEL on DATA.

    One input: it takes all columns that are no target, in their order, reshaped to its shape.
    Several inputs: each takes the column (or .npz array) of its name. Columns may hold lists.

    The result is MODEL with new weights, those after the last epoch. Ctrl-C stops early and writes
    what was trained so far.
    """
    check_writable(output, overwrite)
    curves = output.with_suffix(".png")
    if output == curves:
        raise ValueError(f"--output {output} is the name of the loss curves: use one in .onnx")
    check_writable(curves, overwrite)

    from onnxgrad.errors import unknown
    from onnxgrad.graph.read import read
    from onnxgrad.graph.weights import FLOATS, sites
    from onnxgrad.schedules import LearningRateSGD
    from onnxgrad.training.full import OrtGradientOptimizer
    from onnxgrad.training.parameters import default_weights, listed, trainable
    from onnxgrad.training.tables import read_table
    from onnxgrad.training.task import Task, split

    proto = read(model)
    known = [site.name for site in sites(proto) if site.read().data_type in FLOATS]
    for name in weights or []:
        if name not in known:
            raise unknown("weight", name, known)
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
    rows, ended, code = _fit(trainer, task.rows(training), held_data, output)
    seconds = time.perf_counter() - began
    written = _save(trainer, proto, output, curves)
    accuracy = None
    if task.classifies and held_data:
        accuracy = task.accuracy(trainer.get_trained_onnx(), held_data)
    stdout.print(_results(trainer.train_losses_, trainer.validation_losses_, accuracy))
    stdout.print(f"{rows / seconds:,.0f} rows/s, {seconds:.1f} s", highlight=False)
    for path in written:
        stdout.print(Text(f"wrote {path}"), soft_wrap=True)
    left = [] if weights else [t for t in trainable(proto) if not t.trains]
    if left:
        stdout.print(Text(f"not trained by default: {listed(left, len(left))}"), soft_wrap=True)
    if task.ignored:
        stdout.print(Text(f"ignored columns: {', '.join(task.ignored)}"), soft_wrap=True)
    if ended:
        _complain(ended)
        raise typer.Exit(code)


def _fit(
    trainer: OrtGradientOptimizer, data: Data, held: Data | None, output: Path
) -> tuple[int, str, int]:
    """Train; return the rows seen, and what ended it early with the exit code for that."""
    from onnxgrad.errors import ConvergenceError

    with _Bar() as bar:
        try:
            trainer.fit(data, X_val=held, callback=bar)
        except KeyboardInterrupt:
            if not bar.rows:
                raise
            return bar.rows, f"interrupted; {output} holds what was trained so far", 130
        except ConvergenceError as e:
            return bar.rows, f"{e}. {output} holds the state before that", 1
    return bar.rows, "", 0


def _save(
    trainer: OrtGradientOptimizer, proto: ModelProto, output: Path, curves: Path
) -> list[Path]:
    """Write the trained model, then the curves of its losses; return the paths."""
    from onnxgrad.graph.write import save

    save(trainer.get_trained_onnx(proto), output)
    if not trainer.train_losses_:
        return [output]
    from onnxgrad.plot.curves import plot_losses

    with replacing(curves) as temporary:
        plot_losses(trainer.train_losses_, trainer.validation_losses_, temporary)
    return [output, curves]


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(
            f"--loss-option {text!r} is not NAME=VALUE with a number, true or false"
        ) from None


class _Bar:
    """The progress bar; what `fit` calls back."""

    def __init__(self) -> None:
        self.rows = 0

    def __enter__(self) -> _Bar:
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[report]}"),
            TimeRemainingColumn(),
            console=stderr,
        )
        self.bar = self.progress.add_task("", total=None, epoch="", report="")
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows:  # else it was never shown
            self.progress.stop()

    def __call__(self, state: State) -> None:
        """Show the state after a slice of batches."""
        assert state.total_rows is not None  # as it is for an iterable of batches
        self.progress.start()
        self.rows = state.epoch * state.total_rows + state.rows
        parts = [f"loss {state.loss:.4g}"]
        if state.validation_loss is not None:
            parts.append(f"validation {state.validation_loss:.4g}")
        self.progress.update(
            self.bar,
            total=state.epochs * state.total_rows,
            completed=self.rows,
            epoch=f"{state.epoch + 1}/{state.epochs}",
            report=", ".join([*parts, f"{state.rows_per_second:,.0f} rows/s"]),
        )


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
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the gradient goes.")],
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Weight to differentiate by; repeat.", show_default="all"),
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
    check_writable(output, overwrite)
    if fill_grad and not keep_outputs:
        raise ValueError("--fill-grad needs --keep-outputs")
    from onnxgrad import DerivativeOptions, onnx_derivative
    from onnxgrad.graph.read import read
    from onnxgrad.graph.write import save

    proto = read(model)
    options = DerivativeOptions(
        keep_outputs * DerivativeOptions.KeepOutputs | fill_grad * DerivativeOptions.FillGrad
    )
    made = onnx_derivative(proto, weights or None, inputs or None, options)
    save(made, output)
    counts = Counter(node.op_type for node in made.graph.node).most_common(8)
    table = Table(show_header=False)
    table.add_row("nodes", f"{len(proto.graph.node)} -> {len(made.graph.node)}")
    table.add_row("operators", ", ".join(f"{n} {op}" for op, n in counts))
    table.add_row("inputs", _listed(made.graph.input))
    table.add_row("outputs", _listed(made.graph.output))
    stdout.print(table)
    stdout.print(Text(f"wrote {output}"), soft_wrap=True)


def _listed(values) -> Text:
    names = [v.name for v in values]
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return Text(", ".join(names[:12]) + more)


@_command
def show(
    model: Model,
    gradient: Annotated[bool, typer.Option("--grad", help="Its gradient as well.")] = False,
    debug: Debug = False,
) -> None:
    """Print MODEL as text, nodes indented by what feeds them."""
    from onnxgrad.graph.read import read
    from onnxgrad.plot.text import onnx_simple_text_plot

    proto = read(model)
    typer.echo(onnx_simple_text_plot(proto))
    if gradient:
        from onnxgrad import onnx_derivative

        typer.echo("\ngradient")
        typer.echo(onnx_simple_text_plot(onnx_derivative(proto)))
