"""The command line: the options and the help of each command, and the function that it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgrad import __version__
from onnxgrad.cli.command import EXIT_CODES, register
from onnxgrad.cli.command_help import Commands
from onnxgrad.cli.command_options import (
    CheckOptions,
    EvalOptions,
    GenerateOptions,
    GradOptions,
    LossesOptions,
    MergeOptions,
    PredictOptions,
    ReportOptions,
    ShowOptions,
    TrainableOptions,
)
from onnxgrad.cli.train_options import TrainOptions

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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@register(
    app,
    "onnxgrad.cli.train:train",
    "onnxgrad train model.onnx houses.csv --target price --loss squared_error",
    "onnxgrad train vision.onnx photos/ --head cat,dog,bird --loss cross_entropy --lr 3e-4 "
    "--schedule cosine --warmup 0.1 --early-stopping 3",
    "onnxgrad train text.onnx rows.parquet --target label --loss cross_entropy "
    "--lora '*attention*' --checkpoint runs/a --resume",
    "onnxgrad train llama/ texts.jsonl --loss causal_lm --lora '*proj*' --output tuned",
    "onnxgrad train --config run.toml --epochs 3 --dry-run",
)
def train(options: TrainOptions) -> None:
    """Train MODEL on DATA.

    One input takes all columns that are no target, in their order, reshaped to its shape. Several
    inputs: each takes the column (or .npz array) of its name. Columns may hold lists.

    The result is MODEL with the weights after the last epoch. Its metadata store the names of the
    columns: data for it are then taken by name. Ctrl-C, SIGTERM and SIGHUP stop early and write
    what was trained so far.
    """


@register(
    app,
    "onnxgrad.cli.evaluate:evaluate",
    "onnxgrad eval trained.onnx test.csv --target price --loss squared_error --metrics mae,r2",
    "onnxgrad eval trained.onnx - --loss cross_entropy --json < test.csv",
)
def eval_(options: EvalOptions) -> None:
    """Print the loss and the metrics of MODEL for DATA.

    Columns are inputs and labels as in `onnxgrad train`.
    """


@register(
    app,
    "onnxgrad.cli.predict:predict",
    "onnxgrad predict trained.onnx new.csv -o predictions.csv",
    "cat new.csv | onnxgrad predict trained.onnx - --outputs label > labels.csv",
)
def predict(options: PredictOptions) -> None:
    """Write the outputs of MODEL for the rows of DATA, a row each.

    An output of several numbers a row gives as many columns, and maps from labels to probabilities
    one for each label. An .npz file has one array for each output.
    """


@register(
    app,
    "onnxgrad.cli.samples:generate",
    "onnxgrad generate llama/ 'Once upon a time'",
)
def generate(options: GenerateOptions) -> None:
    """Print how the language model in the folder MODEL goes on with TEXT.

    It runs in onnxruntime-genai if that is installed and the folder is one of it, or else in an
    ordinary session.
    """


@register(
    app,
    "onnxgrad.cli.inspect:trainable",
    "onnxgrad trainable model.onnx --train 'layer4.*' --freeze '*bias'",
)
def trainable(options: TrainableOptions) -> None:
    """List the float constants of MODEL, which of them train, and why."""


@register(
    app,
    "onnxgrad.cli.losses:losses",
    "onnxgrad losses",
    "onnxgrad losses ctc",
)
def losses(options: LossesOptions) -> None:
    """List the losses, their mathematics and their options with defaults.

    f is the prediction of the model, y the label.
    """


@register(
    app,
    "onnxgrad.cli.transform:grad",
    "onnxgrad grad model.onnx -o gradient.onnx --inputs x",
    "onnxgrad grad model.onnx --family f.onnx --dtype float64",
)
def grad(options: GradOptions) -> None:
    """Write the model that computes the gradient of MODEL, or a family of derivatives."""


@register(
    app, "onnxgrad.cli.inspect:check", "onnxgrad check model.onnx --order 2", "onnxgrad check"
)
def check(options: CheckOptions) -> None:
    """Compare the gradient of MODEL with central differences; exit with 1 if it differs.

    Without MODEL, print the versions, the processor and its instruction sets, the execution
    providers of onnxruntime, and which extras of onnxgrad are installed.
    """


@register(
    app,
    "onnxgrad.cli.transform:merge",
    "onnxgrad merge adapted.onnx -o plain.onnx",
    "onnxgrad merge artifacts/ --checkpoint from_device.safetensors -o trained.onnx",
)
def merge(options: MergeOptions) -> None:
    """Write MODEL with what was trained beside it put into its weights: a plain model, as fast.

    Of a file or a language model, these are its LoRA adapters. Of a folder that generate_artifacts
    wrote, they are the weights and running statistics of a checkpoint, which a device may have
    written.
    """


@register(
    app,
    "onnxgrad.cli.report_page:report",
    "onnxgrad train model.onnx rows.csv --target y --loss l2 --record runs/a",
    "onnxgrad report runs/a",
)
def report(options: ReportOptions) -> None:
    """Write the record of a training as one page of HTML, which needs no network.

    It shows curves, norms of gradients and updates, histograms of the weights, wrong predictions,
    the time of each operator, the model and the machine; and says what was not recorded.
    """


@register(app, "onnxgrad.cli.inspect:show", "onnxgrad show model.onnx --grad")
def show(options: ShowOptions) -> None:
    """Print MODEL as text, nodes indented by their depth."""
