"""The options of `onnxgrad train`: one table for the command line, its help and TOML files."""

from __future__ import annotations

from onnxgrad.cli.command import Common, ModelArgument
from onnxgrad.cli.complete import losses, metrics, optimizers, schedules
from onnxgrad.cli.data_options import DataOptions
from onnxgrad.cli.options import option, options, output_option

LOSSES = (
    "squared_error (l2, mse), absolute_error (l1, mae), elastic, huber, poisson, "
    "binary_cross_entropy (bce), cross_entropy (ce), log, hinge, focal, softmax_focal, dice, "
    "softmax_dice, kl_divergence, quantile, log_cosh, gaussian_nll, cosine_embedding, "
    "cosine_similarity, triplet, contrastive, multiple_negatives, arcface, cosface, ctc, or "
    "causal_lm"
)
OPTIMIZERS = (
    "sgd, momentum, nesterov, adam, adamw, adamax, nadam, radam, adagrad, adadelta, rmsprop, "
    "rprop, lion, schedule_free, lamb, adafactor, or muon"
)
SCHEDULES = (
    "constant, step_decay, exponential, linear, cosine, polynomial, one_cycle, inverse_sqrt, or "
    "plateau"
)
METRICS = "accuracy, f1_macro, auc, top_5_accuracy, perplexity, mae, rmse, r2"


@options("Loss")
class LossOptions:
    """What a model is judged by."""

    loss: list[str] = option(
        f"{LOSSES}; or a second model that computes it, as teacher.onnx. OUTPUT=LOSS, repeated, "
        "for several outputs. Needed unless the model computes its own: see --loss-output.",
        [],
        autocompletion=losses,
        usual=True,
    )
    loss_option: list[str] = option(
        "Option of the loss, as from_logits=true or delta=2; repeat for several. `onnxgrad losses "
        "NAME` lists those of a loss.",
        [],
        metavar="NAME=VALUE",
        needs=("loss",),
    )
    loss_output: str = option("Without --loss: the output of the model that is its loss.", "loss")
    output_index: str | None = option(
        "The output that --loss is of, if there are several.", metavar="NAME"
    )
    loss_weight: list[str] = option(
        "Factor of the loss of an output in the sum, for several outputs.",
        [],
        metavar="OUTPUT=FACTOR",
    )
    metrics: list[str] = option(
        f"Metrics of validation data, such as {METRICS}; repeat, or separate by commas. "
        "OUTPUT=METRIC for several outputs.",
        [],
        "--metrics",
        "--metric",
        show_default="accuracy for classes, perplexity for texts",
        autocompletion=metrics,
        usual=True,
    )


@options("Weights")
class WeightOptions:
    """Which weights train."""

    train: list[str] = option(
        "Name or pattern of weights to train, as 'layer4.*'; `last`: the last layer. Repeat for "
        "several.",
        [],
        "--train",
        "--weights",
        metavar="PATTERN",
        show_default="all by their role: see `onnxgrad trainable`",
        usual=True,
    )
    freeze: list[str] = option(
        "Name or pattern of weights that stay as they are; repeat for several.",
        [],
        metavar="PATTERN",
        usual=True,
    )
    train_ranges: bool = option(
        "Of a quantized model: train the scales of QuantizeLinear, too.",
        False,
        show_default=False,
    )
    head: str | None = option(
        "Give the model a new last layer: the number of its units, or the names of its classes "
        "separated by commas.",
        metavar="N|A,B,...",
        usual=True,
    )
    head_at: list[str] = option(
        "The layer that --head replaces: its node, its result or its weights; several by a "
        "pattern, or repeated, for the scales of a detector. With --head-pool: the value that the "
        "new layer is put on.",
        [],
        metavar="NAME",
        show_default="the last layer; with --head-pool, the output",
        needs=("head",),
    )
    head_pool: str | None = option(
        "Put the new layer on features instead of replacing one: on each position (none), on the "
        "mean or the first of all positions, or on the mean of each map of an image.",
        metavar="none|mean|first|image",
        needs=("head",),
    )
    head_mask: str | None = option(
        "With --head-pool mean: the input that is 0 at positions that do not count, as "
        "attention_mask.",
        metavar="NAME",
        needs=("head",),
    )
    lora: list[str] = option(
        "Put LoRA adapters beside the weights that match, and train only these (and a new head); "
        "repeat for several. `onnxgrad merge` gives the plain model afterwards.",
        [],
        metavar="PATTERN",
        usual=True,
    )
    lora_rank: int = option("Rank of the adapters.", 8, min=1, needs=("lora",))
    lora_alpha: float = option("Their scale is alpha / rank.", 16.0, min=0, needs=("lora",))
    lora_dropout: float = option(
        "Dropout before them, in training.", 0.0, min=0, max=1, needs=("lora",)
    )


@options("Optimizer")
class OptimizerOptions:
    """How weights move."""

    optimizer: str = option(OPTIMIZERS + ".", "adamw", autocompletion=optimizers, usual=True)
    optimizer_option: list[str] = option(
        "Option of the optimizer, as b1=0.95; repeat for several.", [], metavar="NAME=VALUE"
    )
    weight_decay: float | None = option(
        "Weight decay.", min=0, show_default="that of the optimizer"
    )
    learning_rate: float | None = option(
        "For the mean gradient of a batch; the highest rate of a schedule.",
        None,
        "--learning-rate",
        "--lr",
        min=0,
        show_default="that of the task, or 0.001 for adam and its kin, 0.01 for sgd and its kin, "
        "1 for adadelta, 0.0001 for lion",
        usual=True,
    )
    schedule: str = option(
        f"The learning rate by step: {SCHEDULES}. Those that end do so with the training.",
        "constant",
        autocompletion=schedules,
        usual=True,
    )
    schedule_option: list[str] = option(
        "Option of the schedule, as end=1e-5, or every=100 of step_decay; repeat for several.",
        [],
        metavar="NAME=VALUE",
    )
    warmup: float | None = option(
        "Steps in which the rate rises from 0, or below 1 their share of all steps.",
        min=0,
        metavar="STEPS|SHARE",
        usual=True,
    )
    clip_norm: float | None = option(
        "Largest norm of all gradients together; larger ones are scaled down.", min=0
    )


@options("Training")
class RunOptions:
    """How long, and in which form."""

    epochs: int = option("Passes over the data.", 10, min=1, usual=True)
    batch_size: int | None = option(
        "Rows of a step.", min=1, show_default="32, or that of the model or the task", usual=True
    )
    accumulate: int = option("Micro-batches into which a batch is split, to save memory.", 1, min=1)
    shuffle: bool = option("Order the rows anew for every epoch.", True)
    batch_norm: str = option(
        "frozen: normalize by the stored statistics; train: by those of the batch, and update "
        "the stored ones.",
        "frozen",
    )
    dropout: list[str] = option(
        "Zero elements behind the nodes that match with probability P, in training only.",
        [],
        metavar="PATTERN=P",
    )
    class_weight: list[str] = option(
        "Weight of a class in the loss; repeat for several. balanced: by their frequencies.",
        [],
        metavar="CLASS=WEIGHT|balanced",
    )
    early_stopping: int | None = option(
        "End when --monitor has not improved for so many epochs, and keep the best weights.",
        min=1,
        metavar="PATIENCE",
        usual=True,
    )
    monitor: str | None = option(
        "What --early-stopping watches, and --checkpoint keeps the best of.",
        show_default="validation_loss",
        needs=("early_stopping", "checkpoint"),
    )
    recompute: str = option(
        "none, cheap or all: what the backward pass computes again, to save memory.", "none"
    )
    precision: str = option(
        "In which a model of 16 bits computes: auto, float32, mixed or file. Only with file, its "
        "weights train in 16 bits, too.",
        "auto",
    )
    device: str = option("cpu, cuda or cuda:1.", "cpu", usual=True)
    sync_batch_norm: bool = option(
        "Of several processes: normalize by the statistics of the rows of all.",
        False,
        show_default=False,
    )
    shard_optimizer: bool = option(
        "Of several processes: each keeps the state of the optimizer of some weights only.",
        False,
        show_default=False,
    )
    seed: int = option(
        "Of the split, of the order of rows, of dropout and of new weights.", 0, min=0, usual=True
    )


@options("Checkpoints")
class CheckpointOptions:
    """What survives a crash."""

    checkpoint: str | None = option(
        "Folder for the state of training, written after every epoch.", metavar="FOLDER", usual=True
    )
    checkpoint_every: int | None = option(
        "Write it after every so many steps instead.", min=1, needs=("checkpoint",)
    )
    checkpoint_seconds: float | None = option(
        "Write it after every so many seconds instead.", min=0, needs=("checkpoint",)
    )
    checkpoint_keep: int = option(
        "How many of the newest to keep.", 2, min=1, needs=("checkpoint",)
    )
    resume: bool = option(
        "Go on where the newest checkpoint of --checkpoint was written, bit for bit; begin if "
        "there is none.",
        False,
        show_default=False,
        needs=("checkpoint",),
        usual=True,
    )


@options("Result")
class ResultOptions:
    """What is written."""

    output: str = output_option(  # a Path forgets the '/' at its end
        "Where the trained model goes, its loss curves beside it: a file, or for a folder a "
        'folder like it; "-" is standard output.',
        None,  # until the model is known
        show_default="trained.onnx, or the folder trained; trained-2 where that exists",
        usual=True,
    )
    overwrite: bool = option("Replace files that exist.", False, usual=True)
    adapter: str | None = option(
        "With --lora, for a folder: write the base with adapters as inputs, and the trained one as "
        "adapters/NAME.onnx_adapter.",
        metavar="NAME",
        needs=("lora",),
    )
    curves: bool = option("Draw the losses, as PATH with .png.", True)
    history: str | None = option(
        "File (.csv or .json) of losses, rates and metrics by epoch.", metavar="FILE"
    )
    card: str | None = option(
        "File or folder of a model card: Markdown with license, data, arguments and results; what "
        "is not known is called unknown.",
        metavar="PATH",
    )
    license: str | None = option(
        'Of the trained model, in the card, such as "mit"; default: unknown.',
        metavar="NAME",
        needs=("card",),
    )
    record: str | None = option(
        "Folder for what `onnxgrad report` draws: curves, norms, histograms, wrong predictions, "
        "time by operator.",
        metavar="FOLDER",
    )
    dry_run: bool = option(
        "Say what would be trained, for how long and in how much memory, by running a few steps; "
        "write nothing.",
        False,
    )
    verbose: bool = option(
        "List at the end every constant that does not train, and why.", False, show_default=False
    )
    config: str | None = option(
        "TOML file of options by name; what the command line says wins.", metavar="FILE", usual=True
    )


@options()
class TrainOptions(
    Common,
    ResultOptions,
    CheckpointOptions,
    RunOptions,
    OptimizerOptions,
    LossOptions,
    WeightOptions,
    DataOptions,
    ModelArgument,
):
    """All of them; the bases that come last are first in the help."""
