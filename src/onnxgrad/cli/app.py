"""The command line: `onnxgrad train`, `grad`, `show`.

Modules that are slow to import are imported by the command that needs them.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from onnxgrad import __version__
from onnxgrad.cli.console import complain, say, stdout, warn
from onnxgrad.cli.signals import Stopped, StopRequests
from onnxgrad.errors import escape, printable
from onnxgrad.model.files import check_not_input, check_writable, one_line

app = typer.Typer(
    help="Differentiate and train ONNX models on the ordinary onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
stop = StopRequests()


class OptimizerName(StrEnum):
    """The optimizers that need nothing but a learning rate."""

    sgd = "sgd"
    momentum = "momentum"
    nesterov = "nesterov"
    adam = "adam"
    adamw = "adamw"
    adamax = "adamax"
    nadam = "nadam"
    radam = "radam"
    adagrad = "adagrad"
    adadelta = "adadelta"
    rmsprop = "rmsprop"
    rprop = "rprop"
    lion = "lion"
    lamb = "lamb"
    adafactor = "adafactor"
    muon = "muon"


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
                warnings.showwarning = _show_warning
                function(*args, debug=debug, **kwargs)
        except (typer.Exit, BrokenPipeError):
            raise
        except Stopped as e:
            trained = "nothing was trained yet, and " if function.__name__ == "train" else ""
            complain(f"{e}: {trained}no file was written")
            raise typer.Exit(e.code) from None
        except Exception as e:
            if debug:
                escape(e)
                raise
            expected = isinstance(e, (ValueError, OSError, NotImplementedError))
            hint = "" if expected else " (unexpected: --debug shows where)"
            message = one_line(e) if isinstance(e, OSError) else str(e)
            complain(f"{message or type(e).__name__}{hint}")
            raise typer.Exit(2 if expected else 1) from None

    return command


def _show_warning(message: Warning | str, *category_and_source: Any, **more: Any) -> None:
    warn(message)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"onnxgrad {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


Data = Annotated[
    Path, typer.Argument(help="CSV, Parquet or .npz file, a row each.", show_default=False)
]
Target = Annotated[
    list[str], typer.Option(help="Column to predict; repeat for several.", show_default=False)
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="squared_error (l2), absolute_error (l1), elastic, huber, poisson, "
        "binary_cross_entropy, cross_entropy, log, hinge, focal, softmax_focal, dice, "
        "softmax_dice, kl_divergence, quantile, log_cosh, gaussian_nll, cosine_embedding, triplet, "
        "contrastive, or ctc. "
        "Needed unless the model computes its own: see --loss-output.",
        show_default=False,
    ),
]
LossOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Option of the loss, as from_logits=true or delta=2; repeat for several.",
        show_default=False,
    ),
]
LossOutput = Annotated[
    str, typer.Option(help="Without --loss: the output of the model that is its loss.")
]
OutputIndex = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The output that --loss is of, if there are several.",
        show_default=False,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="For the mean gradient of a batch; constant.",
        show_default="0.001 for adam(w), 0.01",
    ),
]
Count = Annotated[int, typer.Option(min=1)]
Validation = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of the rows kept for validation.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the split and of the order of rows.")]
Weights = Annotated[
    list[str] | None,
    typer.Option(help="Weight to train; repeat for several.", show_default="all by their role"),
]
Output = Annotated[
    str,  # a Path forgets the '/' at its end
    typer.Option(metavar="PATH", help="Where the trained model goes; its loss curves beside it."),
]


@_command
def train(
    model: Model,
    data: Data,
    target: Target,
    loss: Loss = None,
    loss_option: LossOption = None,
    loss_output: LossOutput = "loss",
    output_index: OutputIndex = None,
    optimizer: Annotated[OptimizerName, typer.Option()] = OptimizerName.adam,
    learning_rate: LearningRate = None,
    epochs: Count = 10,
    batch_size: Count = 32,
    validation: Validation = 0.2,
    seed: Seed = 0,
    weights: Weights = None,
    output: Output = "trained.onnx",
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train MODEL on DATA.

    One input: it takes all columns that are no target, in their order, reshaped to its shape.
    Several inputs: each takes the column (or .npz array) of its name. Columns may hold lists.

    The result is MODEL with the weights after the last epoch. Its metadata store the names of the
    columns, which are compared when it is trained again. Ctrl-C, SIGTERM and SIGHUP stop early and
    write what was trained so far.
    """
    from onnxgrad.cli.train import TrainOptions, run

    options = TrainOptions(
        model=model,
        data=data,
        target=target,
        loss=loss,
        loss_option=loss_option or [],
        loss_output=loss_output,
        output_index=output_index,
        optimizer=optimizer.value,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        validation=validation,
        seed=seed,
        weights=weights or [],
        output=output,
        overwrite=overwrite,
    )
    run(options, stop)


@_command
def grad(
    model: Model,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="Where the gradient goes.")
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Weight to take the gradient with respect to; repeat.",
            show_default="all by their role",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            help="Input to take the gradient with respect to; repeat.", show_default="all floats"
        ),
    ] = None,
    fill_grad: Annotated[
        bool, typer.Option("--fill-grad", help="Use cotangents of ones; needs --keep-outputs.")
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
    gradient = onnx_derivative(proto, weights or None, inputs or None, options)
    save(gradient, output)
    counts = Counter(node.op_type for node in gradient.graph.node).most_common(8)
    table = Table(show_header=False)
    table.add_row("nodes", f"{len(proto.graph.node)} -> {len(gradient.graph.node)}")
    table.add_row("operators", Text(", ".join(f"{n} {printable(op)}" for op, n in counts)))
    table.add_row("inputs", _listed(gradient.graph.input))
    table.add_row("outputs", _listed(gradient.graph.output))
    stdout.print(table)
    say(f"wrote {output}")


def _listed(values) -> Text:
    names = [printable(v.name) for v in values]
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return Text(", ".join(names[:12]) + more)


@_command
def show(
    model: Model,
    gradient: Annotated[bool, typer.Option("--grad", help="Print its gradient as well.")] = False,
    debug: Debug = False,
) -> None:
    """Print MODEL as text, nodes indented by their depth."""
    from onnxgrad.model.read import read
    from onnxgrad.plot.text import onnx_simple_text_plot

    proto = read(model)
    typer.echo(onnx_simple_text_plot(proto))
    if gradient:
        from onnxgrad import onnx_derivative

        typer.echo("\ngradient")
        typer.echo(onnx_simple_text_plot(onnx_derivative(proto)))
