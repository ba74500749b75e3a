"""The options of the commands other than `train`."""

# ruff: noqa: RUF009 (`option` returns a field)
from __future__ import annotations

from dataclasses import dataclass

from onnxgrad.cli.command import Common, ModelArgument
from onnxgrad.cli.data_options import InputOptions, LabelOptions
from onnxgrad.cli.options import argument, option
from onnxgrad.cli.train_options import LossOptions

RESULT = "Result"


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where a model runs, and how many rows at once."""

    batch_size: int | None = option(
        "Rows of one call of the runtime.", None, min=1, show_default="256, or that of the model"
    )
    device: str = option("cpu, cuda or cuda:1.", "cpu")


@dataclass(frozen=True, kw_only=True)
class Written:
    """The model that a command writes."""

    output: str | None = option(
        'Where the model goes; "-" is standard output.',
        None,
        "--output",
        "-o",
        panel=RESULT,
        metavar="PATH",
    )
    overwrite: bool = option("Replace files that exist.", False, panel=RESULT)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Common, DeviceOptions, LossOptions, LabelOptions, ModelArgument):
    """Of `onnxgrad eval`."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Common, DeviceOptions, InputOptions, ModelArgument):
    """Of `onnxgrad predict`."""

    outputs: list[str] = option(
        "Output to write; repeat for several.",
        [],
        panel=RESULT,
        metavar="NAME",
        show_default="all that have rows",
    )
    output: str = option(
        'A .csv, .tsv, .parquet or .npz file; "-" is CSV on standard output.',
        "-",
        "--output",
        "-o",
        panel=RESULT,
        metavar="PATH",
    )
    overwrite: bool = option("Replace a file that exists.", False, panel=RESULT)


@dataclass(frozen=True, kw_only=True)
class TrainableOptions(Common, ModelArgument):
    """Of `onnxgrad trainable`."""

    train: list[str] = option("Name or pattern of weights to train.", [], metavar="PATTERN")
    freeze: list[str] = option("Name or pattern of weights that stay.", [], metavar="PATTERN")


@dataclass(frozen=True, kw_only=True)
class Differentiated:
    """What a gradient is taken with respect to."""

    weights: list[str] = option(
        "Weight to take the gradient with respect to; repeat.",
        [],
        show_default="all by their role",
    )
    inputs: list[str] = option(
        "Input to take the gradient with respect to; repeat.", [], show_default="all floats"
    )


@dataclass(frozen=True, kw_only=True)
class GradOptions(Common, Written, Differentiated, ModelArgument):
    """Of `onnxgrad grad`."""

    fill_grad: bool = option("Use cotangents of ones; needs --keep-outputs.", False)
    keep_outputs: bool = option("Return the outputs of MODEL too.", False)
    family: str | None = option(
        "Write MODEL to this file, and beside it its directional derivatives fwd_, adj_ and "
        "fwd_adj_, for CasADi and other optimizers. --weights become inputs; by default none.",
        None,
        panel=RESULT,
        metavar="PATH",
    )
    dtype: str | None = option(
        "Of all floats of a family: float32 or float64.", None, show_default="that of MODEL"
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Common, Differentiated, ModelArgument):
    """Of `onnxgrad check`."""

    order: int = option("2 checks the gradient of the gradient, too.", 1, min=1, max=2)
    rtol: float | None = option(
        "Largest relative error.", None, min=0, show_default="1e-6 in float64, 0.02 in float32"
    )
    seed: int = option("Of the inputs and the directions.", 0, min=0)


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Common, Written):
    """Of `onnxgrad merge`."""

    model: str | None = argument(
        'The .onnx file with adapters, "-" for standard input; or a folder of generate_artifacts.',
    )
    checkpoint: str | None = option(
        "Of a folder: the .safetensors file with the trained weights.",
        None,
        metavar="PATH",
        show_default="that of the folder",
    )
    prefix: str = option("Of a folder: what the names of its files begin with.", "")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Common):
    """Of `onnxgrad report`."""

    run: str | None = argument(
        "The folder of --record; a file of --history; or the folder of --checkpoint.",
    )
    output: str | None = option(
        "Where the page goes.",
        None,
        "--output",
        "-o",
        panel=RESULT,
        metavar="PATH",
        show_default="report.html in the folder of the run",
    )
    overwrite: bool = option("Replace a page that exists.", False, panel=RESULT)


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Common, ModelArgument):
    """Of `onnxgrad show`."""

    grad: bool = option("Print its gradient as well.", False)
    summary: bool = option("Print a table of its layers instead of its nodes.", False)
