"""The command line: its commands, their options, and the functions that they run."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgrad import __version__
from onnxgrad.cli import command_options as other, train_options as data
from onnxgrad.cli.command import EXIT_CODES, register
from onnxgrad.cli.command_help import Commands

COMMANDS: dict[str, tuple[type, str]] = {  # the function is in a module of this room
    "train": (data.TrainOptions, "train:train"),
    "eval": (data.EvalOptions, "predict:evaluate"),
    "predict": (data.PredictOptions, "predict:predict"),
    "generate": (other.GenerateOptions, "predict:generate"),
    "trainable": (other.TrainableOptions, "inspect:trainable"),
    "losses": (other.LossesOptions, "inspect:losses"),
    "grad": (other.GradOptions, "transform:grad"),
    "check": (other.CheckOptions, "inspect:check"),
    "merge": (other.MergeOptions, "transform:merge"),
    "report": (other.ReportOptions, "records:report"),
    "show": (other.ShowOptions, "inspect:show"),
}

app = typer.Typer(
    cls=Commands,
    help="Differentiate and train ONNX models on the ordinary onnxruntime.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"onnxgrad {__version__}")
        raise typer.Exit


@app.callback()
def _shell_main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


for _name, (_options, _function) in COMMANDS.items():
    register(app, _name, _options, f"onnxgrad.cli.{_function}")
