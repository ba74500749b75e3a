"""The options of the commands other than `train`."""

from __future__ import annotations

from onnxgrad.cli.command import Common, ModelArgument
from onnxgrad.cli.data_options import InputOptions, LabelOptions
from onnxgrad.cli.options import argument, option, options, output_option
from onnxgrad.cli.train_options import LossOptions

RESULT = "Result"


@options()
class DeviceOptions:
    """Where a model runs, and how many rows at once."""

    batch_size: int | None = option(
        "Rows of one call of the runtime.",
        min=1,
        show_default="256, or that of the model",
        usual=True,
    )
    device: str = option("cpu, cuda or cuda:1.", "cpu", usual=True)


@options("Result")
class Written:
    """The model that a command writes."""

    output: str | None = output_option('Where the model goes; "-" is standard output.')
    overwrite: bool = option("Replace files that exist.", False)


@options()
class EvalOptions(Common, DeviceOptions, LossOptions, LabelOptions, ModelArgument):
    """Of `onnxgrad eval`."""


@options()
class PredictOptions(Common, DeviceOptions, InputOptions, ModelArgument):
    """Of `onnxgrad predict`."""

    outputs: list[str] = option(
        "Output to write; repeat for several.",
        [],
        panel=RESULT,
        metavar="NAME",
        show_default="all that have rows",
    )
    output: str = output_option(
        'A .csv, .tsv, .parquet or .npz file; "-" is CSV on standard output.', "-", panel=RESULT
    )
    overwrite: bool = option("Replace a file that exists.", False, panel=RESULT)


@options()
class GenerateOptions(Common):
    """Of `onnxgrad generate`."""

    model: str = argument("The folder of a language model.")
    text: str = argument("The text to go on with.")
    adapter: str | None = option("Adapter of the folder, by its name.", metavar="NAME")
    max_new_tokens: int = option("How many tokens to generate, at most.", 64, min=1)
    temperature: float = option("0 takes the most probable token; others draw.", 0.0, min=0)
    top_p: float = option(
        "Draw from the most probable tokens that have this probability together.",
        1.0,
        max=1,
        needs=("temperature",),
    )
    seed: int = option("Of the draws.", 0, min=0)


@options()
class TrainableOptions(Common, ModelArgument):
    """Of `onnxgrad trainable`."""

    train: list[str] = option("Name or pattern of weights to train.", [], metavar="PATTERN")
    freeze: list[str] = option("Name or pattern of weights that stay.", [], metavar="PATTERN")


@options()
class LossesOptions(Common):
    """Of `onnxgrad losses`."""

    name: str = argument(
        "A loss, of which all is said; without it, all losses are listed.", required=False
    )


@options()
class Differentiated:
    """What a gradient is taken with respect to."""

    weights: list[str] = option(
        "Weight to take the gradient with respect to; repeat.",
        [],
        show_default="all by their role",
        needs=("model",),
    )
    inputs: list[str] = option(
        "Input to take the gradient with respect to; repeat.",
        [],
        show_default="all floats",
        needs=("model",),
    )


@options()
class GradOptions(Common, Written, Differentiated, ModelArgument):
    """Of `onnxgrad grad`."""

    fill_grad: bool = option(
        "Use cotangents of ones; needs --keep-outputs.", False, needs=("keep_outputs",)
    )
    keep_outputs: bool = option("Return the outputs of MODEL too.", False)
    outputs: list[str] = option(
        "Output to take the gradient of; repeat.", [], show_default="all floats"
    )
    family: str | None = option(
        "Write MODEL to this file, and beside it its directional derivatives fwd_, adj_ and "
        "fwd_adj_, for CasADi and other optimizers. --weights become inputs; by default none.",
        panel=RESULT,
        metavar="PATH",
    )
    dtype: str | None = option(
        "Of all floats of a family: float32 or float64.",
        show_default="that of MODEL",
        needs=("family",),
    )


@options()
class CheckOptions(Common, Differentiated, ModelArgument):
    """Of `onnxgrad check`."""

    model: str = argument(
        'The .onnx file; "-" reads it from standard input. Without it, the machine is described.',
        required=False,
    )
    order: int = option(
        "2 checks the gradient of the gradient, too.", 1, min=1, max=2, needs=("model",)
    )
    rtol: float | None = option(
        "Largest relative error.",
        min=0,
        show_default="1e-6 in float64, 0.02 in float32",
        needs=("model",),
    )
    seed: int = option("Of the inputs and the directions.", 0, min=0, needs=("model",))
    separately: bool = option(
        "Change each input and weight by itself; without it, several together if there are many.",
        False,
        show_default=False,
        needs=("model",),
    )
    budget: float | None = option(
        "Begin no further comparison after this time, and say what was not compared.",
        metavar="SECONDS",
        needs=("model",),
    )


@options()
class MergeOptions(Common, Written):
    """Of `onnxgrad merge`."""

    model: str = argument(
        'The .onnx file with adapters, "-" for standard input; the folder of a language model with '
        "adapters; or a folder of generate_artifacts."
    )
    checkpoint: str | None = option(
        "Of a folder: the .safetensors file with the trained weights.",
        metavar="PATH",
        show_default="that of the folder",
    )
    prefix: str = option("Of a folder: what the names of its files begin with.", "")
    requantize: bool = option(
        "Round the sum of a quantized weight and its adapter to integers again, and say what this "
        "changes.",
        False,
    )


@options()
class ReportOptions(Common):
    """Of `onnxgrad report`."""

    run: str = argument(
        "The folder of --record; a file of --history; or the folder of --checkpoint."
    )
    output: str | None = output_option(
        "Where the page goes.", panel=RESULT, show_default="report.html in the folder of the run"
    )
    overwrite: bool = option("Replace a page that exists.", False, panel=RESULT)


@options()
class ShowOptions(Common, ModelArgument):
    """Of `onnxgrad show`."""

    grad: bool = option("Print its gradient as well.", False)
    summary: bool = option("Print a table of its layers instead of its nodes.", False)
