"""The options of all commands except `train`, `eval` and `predict`."""

from __future__ import annotations

from onnxgrad.cli.options import Common, ModelArgument, argument, option, options
from onnxgrad.cli.train_options import RESULT


@options(RESULT)
class Written:
    """The model that a command writes.

    Attributes:
        output: File of the model that is written; "-" is standard output.
        overwrite: Replace files that exist.
    """

    output: str | None = option(None, "--output", "-o", metavar="PATH")
    overwrite: bool = option(False)


@options()
class GenerateOptions(Common):
    """Print the text with which a language model continues TEXT.

    MODEL is a folder. It runs in onnxruntime-genai if that is installed and the folder has its
    genai_config.json, else in an ordinary session of onnxruntime.

    Examples:
        onnxgrad generate llama/ 'Once upon a time'

    Attributes:
        model: The folder of a language model.
        text: The text that the model continues.
        adapter: Name of an adapter in the folder, with which the model runs.
        max_new_tokens: Largest number of tokens to generate.
        temperature: 0: always take the most probable token. Above 0: draw tokens at random; the
            higher the temperature, the more alike are their probabilities.
        top_p: Draw only from the most probable tokens whose probabilities add up to this number.
        seed: Seed of the random draws.
    """

    model: str = argument()
    text: str = argument()
    adapter: str | None = option(metavar="NAME")
    max_new_tokens: int = option(64, min=1)
    temperature: float = option(0.0, min=0)
    top_p: float = option(1.0, max=1, needs=("temperature",))
    seed: int = option(0, min=0)


@options()
class TrainableOptions(Common, ModelArgument):
    """List the float constants of MODEL, which of them train, and why.

    Examples:
        onnxgrad trainable model.onnx --train 'layer4.*' --freeze '*bias'

    Attributes:
        train: Name or pattern of the weights to train; repeat for several. Default: all constants
            whose role in the graph is the role of a weight.
        freeze: Name or pattern of weights that do not train; repeat for several.
    """

    train: list[str] = option([], metavar="PATTERN")
    freeze: list[str] = option([], metavar="PATTERN")


@options()
class LossesOptions(Common):
    """List the losses, their mathematics, and their options with defaults.

    In the formulas, f is the prediction of the model, and y the label.

    Examples:
        onnxgrad losses
        onnxgrad losses ctc

    Attributes:
        name: Name of a loss, which is described in full. Without it, all losses are listed.
    """

    name: str = argument(required=False)


@options()
class Differentiated:
    """The weights and inputs w.r.t. which a gradient is computed.

    Attributes:
        weights: Weight with respect to which the gradient is computed; repeat for several. Default:
            all weights that train by default.
        inputs: Input with respect to which the gradient is computed; repeat for several. Default:
            all float inputs.
    """

    weights: list[str] = option([], metavar="NAME", needs=("model",))
    inputs: list[str] = option([], metavar="NAME", needs=("model",))


@options()
class GradOptions(Common, Written, Differentiated, ModelArgument):
    """Write the model that computes the gradient of MODEL, or a family of derivatives.

    Examples:
        onnxgrad grad model.onnx -o gradient.onnx --inputs x
        onnxgrad grad model.onnx --family f.onnx --dtype float64

    Attributes:
        fill_grad: Take the gradient of the sum of the outputs: the model that is written needs no
            cotangents as inputs. With --keep-outputs only.
        keep_outputs: The model that is written returns the outputs of MODEL as well.
        outputs: Output of which the gradient is computed; repeat for several. Default: all float
            outputs.
        family: Write MODEL to this file, and beside it three models of its directional derivatives,
            with names that begin with fwd_, adj_ and fwd_adj_, for CasADi and other optimizers.
            The weights of --weights become inputs. Default of --weights: none.
        dtype: float32 or float64: the float type to which all floats of the models of --family are
            converted. Default: the float types of MODEL.
    """

    fill_grad: bool = option(False, needs=("keep_outputs",))
    keep_outputs: bool = option(False)
    outputs: list[str] = option([], metavar="NAME")
    family: str | None = option(panel=RESULT, metavar="PATH")
    dtype: str | None = option(needs=("family",))


@options()
class CheckOptions(Common, Differentiated, ModelArgument):
    """Compare the gradient of MODEL with central differences; exit with 1 if it differs.

    Without MODEL, print the versions, the processor and its instruction sets, the execution
    providers of onnxruntime, and which extras of onnxgrad are installed.

    Examples:
        onnxgrad check model.onnx --order 2
        onnxgrad check

    Attributes:
        model: The .onnx file; "-" reads it from standard input. Without it, the machine is
            described.
        order: 1: check the gradient. 2: check the gradient of the gradient as well.
        rtol: Largest relative error that passes. Default: 1e-6 in float64, 0.02 in float32.
        seed: Seed of the random inputs and directions.
        separately: Vary each input and weight alone, which finds smaller errors. Default: of more
            than 16, several are varied together.
        budget: Number of seconds after which no further comparison begins; the report lists what
            was not compared. Default: no limit.
    """

    model: str = argument(required=False)
    order: int = option(1, min=1, max=2, needs=("model",))
    rtol: float | None = option(min=0, needs=("model",))
    seed: int = option(0, min=0, needs=("model",))
    separately: bool = option(False, needs=("model",))
    budget: float | None = option(metavar="SECONDS", needs=("model",))


@options()
class MergeOptions(Common, Written):
    """Write MODEL with its trained adapters, or a trained checkpoint, merged into its weights.

    The result is an ordinary model without adapters, as fast as the model before the training. If
    MODEL is a file or the folder of a language model, its LoRA adapters are added to its weights.
    If MODEL is a folder that generate_artifacts wrote, its model gets the weights and running
    statistics of a checkpoint, which a device may have written.

    Examples:
        onnxgrad merge adapted.onnx -o plain.onnx
        onnxgrad merge artifacts/ --checkpoint from_device.safetensors -o trained.onnx

    Attributes:
        model: The .onnx file with adapters, "-" for standard input; the folder of a language model
            with adapters; or a folder that generate_artifacts wrote.
        checkpoint: For a folder of generate_artifacts, the .safetensors file of the trained
            weights. Default: the checkpoint in the folder.
        prefix: For a folder of generate_artifacts, the prefix of the names of its files. Default:
            none.
        requantize: Round the sum of a quantized weight and its adapter to integers again, and print
            by how much that changes the weight.
    """

    model: str = argument()
    checkpoint: str | None = option(metavar="PATH")
    prefix: str = option("", show_default=False)
    requantize: bool = option(False)


@options()
class ReportOptions(Common):
    """Write the record of a training as one page of HTML, which opens without a network.

    The page shows curves, norms of gradients and updates, histograms of the weights, wrong
    predictions, the time of each operator, the model and the machine; and says what was not
    recorded.

    Examples:
        onnxgrad train model.onnx rows.csv --target y --loss l2 --record runs/a
        onnxgrad report runs/a

    Attributes:
        run: The folder of `onnxgrad train --record`, the file of --history, or the folder of
            --checkpoint.
        output: File of the page. Default: report.html in the folder of the record.
        overwrite: Replace a page that exists.
    """

    run: str = argument()
    output: str | None = option(None, "--output", "-o", panel=RESULT, metavar="PATH")
    overwrite: bool = option(False, panel=RESULT)


@options()
class ShowOptions(Common, ModelArgument):
    """Print MODEL as text, nodes indented by their depth.

    Examples:
        onnxgrad show model.onnx --grad

    Attributes:
        grad: Print the gradient model as well.
        summary: Print a table of the layers instead of the nodes.
    """

    grad: bool = option(False)
    summary: bool = option(False)
