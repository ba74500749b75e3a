"""Options of the commands, in the order in which the help shows them."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from onnxgrad.cli.options import CommonOptions, ModelArgument, argument, option, options

RESULT = "Result"


def _completion_of_dict_keys(*tables: str) -> Callable[[str], list[str]]:
    """Return a function that completes a word in the shell by the keys of dicts "module:NAME"."""

    def complete_name(incomplete: str) -> list[str]:
        names = (name for table in tables for name in resolve_name(table))
        return sorted(name for name in names if name.startswith(incomplete))

    return complete_name


complete_loss = _completion_of_dict_keys(
    "onnxgrad.losses.formulas:LOSSES", "onnxgrad.losses.spec:ALIASES"
)
complete_metric = _completion_of_dict_keys("onnxgrad.metrics.select:METRICS")
complete_optimizer = _completion_of_dict_keys(
    "onnxgrad.optimizers.presets:OPTIMIZERS", "onnxgrad.optimizers.presets:WHOLE_TENSORS"
)
complete_schedule = _completion_of_dict_keys("onnxgrad.schedules.curves:SCHEDULES")

# -- data --------------------------------------------------------------------------------------


@options("Columns")
class InputOptions:
    """Options of the rows: the data, and which of its columns are inputs.

    Attributes:
        data: The rows: a CSV, TSV, Parquet or .npz file; a folder of Parquet files; a folder with
            one folder of images for each class; a .jsonl or .txt file of texts for a language
            model; "-" reads CSV from standard input.
        columns: Columns that the model's input reads, in this order. For a model with several
            inputs, INPUT=A,B,... for each. Default: the columns of the earlier training that MODEL
            stores, or all columns but the targets.
        ignore: Column that the model does not read; repeat for several.
        drop_missing: Leave out each row with an empty cell, NaN or infinity, instead of failing.
        task: Kind of job. ctc, detection, embeddings, segmentation, sound, text-labels and tokens
            read DATA in formats of their own, and bring a loss and metrics; the others are images,
            table and texts. `onnxgrad.tasks` documents them. Default: the task of the earlier
            training that MODEL stores, or images, table or texts by the kind of DATA.
        task_option: Argument of the task, such as extend=true for ctc; repeat for several.
        image_size: Height and width in pixels to which images are resized: 48 320 or 48x320, or one
            number for both. Default: the size of the model's input.
        scale: Value of a white pixel: 1 if the model takes pixels from 0 to 1, 255 if it takes
            pixels from 0 to 255. Default: the scale of the earlier training, or 1.
        normalize: Subtract MEAN from the pixels and divide by STD, both in the unit of --scale: one
            number each, or one for each channel, such as 0.5,0.4,0.3/0.2,0.2,0.2. imagenet: the
            mean and standard deviation of ImageNet. none: do neither. Default: the values of the
            earlier training, or none.
    """

    data: str = argument()
    columns: list[str] = option([], metavar="A,B,...")
    ignore: list[str] = option([], metavar="COLUMN")
    drop_missing: bool = option(False)
    task: str | None = option(metavar="NAME", panel="Task", usual=True)
    task_option: list[str] = option([], metavar="NAME=VALUE", panel="Task", usual=True)
    image_size: str | None = option(metavar="H [W]", panel="Images")
    scale: float | None = option(metavar="X", panel="Images")
    normalize: str | None = option(metavar="imagenet|MEAN/STD|none", panel="Images")


@options("Texts")
class TextOptions:
    """Options of texts, which become rows of tokens for a language model.

    Attributes:
        max_length: Largest number of tokens in a row; longer texts are cut. Default: the context
            length of the model.
        completion_only: Compute the loss on completions and on the assistant's replies only, not on
            prompts. Default: yes, if DATA has completions or chats.
        packing: Join the texts and cut them into rows of --max-length tokens, instead of padding
            each text.
        tokenizer: Folder with the tokenizer.json of the model. Default: the folder of MODEL.
    """

    max_length: int | None = option(min=2)
    completion_only: bool | None = option()
    packing: bool = option(False)
    tokenizer: str | None = option(metavar="FOLDER")


@options("Columns")
class LabelOptions(TextOptions, InputOptions):
    """Options of rows with labels.

    Attributes:
        target: Column that the model predicts; repeat for several. With losses of several outputs,
            OUTPUT=COLUMN. Default: the target of the earlier training that MODEL stores.
        sample_weight: Column with the weight of each row in the loss.
        classes: Names of the classes of the labels or of the folders of images, separated by
            commas, in the order of the model's scores. Default: the names that MODEL stores.
    """

    target: list[str] = option([], metavar="COLUMN", usual=True)
    sample_weight: str | None = option(metavar="COLUMN")
    classes: str | None = option(metavar="A,B,...")


@options("Columns")
class DataOptions(LabelOptions):
    """Options of the rows to train on and to validate on.

    Attributes:
        prompt: Text that the trained model continues; the continuation is printed, and recorded by
            --record. Repeat for several.
        validation: Rows to validate on: the share of the rows of DATA that is held out from
            training, or another file or folder like DATA; 0: none. Default: 0.2, but none if DATA
            is streamed.
    """

    prompt: list[str] = option([], panel="Texts")
    validation: str | None = option(metavar="SHARE|DATA", usual=True)


# -- training ----------------------------------------------------------------------------------


@options("Loss")
class LossOptions:
    """Options of the loss and the metrics.

    Attributes:
        loss: One of squared_error (l2, mse), absolute_error (l1, mae), elastic, huber, poisson,
            binary_cross_entropy (bce), cross_entropy (ce), log, hinge, focal, softmax_focal, dice,
            softmax_dice, kl_divergence, quantile, log_cosh, gaussian_nll, cosine_embedding,
            cosine_similarity, triplet, contrastive, multiple_negatives, arcface, cosface, ctc, or
            causal_lm. Or the file of a second model that computes the loss, such as teacher.onnx.
            OUTPUT=LOSS, repeated, for losses of several outputs. Without it, MODEL must have an
            output that is the loss: see --loss-output.
        loss_option: Option of the loss, such as from_logits=true or delta=2; repeat for several.
            `onnxgrad losses NAME` lists the options of a loss.
        loss_output: Without --loss, the name of the output of MODEL that is the loss.
        output_index: Name of the output on which --loss is computed. Default: the only output.
        loss_weight: With losses of several outputs, the factor of an output's loss in the sum.
            Default: 1 for each output.
        metrics: Metrics of the validation rows, such as accuracy, f1_macro, auc, top_5_accuracy,
            perplexity, mae, rmse, r2; repeat the option, or separate names by commas. OUTPUT=METRIC
            for several outputs. Default: accuracy for classes, perplexity for texts, else none.
    """

    loss: list[str] = option([], autocompletion=complete_loss, usual=True)
    loss_option: list[str] = option([], metavar="NAME=VALUE", needs=("loss",))
    loss_output: str = option("loss", metavar="NAME")
    output_index: str | None = option(metavar="NAME")
    loss_weight: list[str] = option([], metavar="OUTPUT=FACTOR")
    metrics: list[str] = option(
        [], "--metrics", "--metric", autocompletion=complete_metric, usual=True
    )


@options("Weights")
class WeightOptions:
    """Options of the weights that train, new layers and adapters.

    Attributes:
        train: Name or pattern of the weights to train, such as 'layer4.*'; `last`: the weights of
            the last layer. Repeat for several. Default: the weights that `onnxgrad trainable` lists
            as trained.
        freeze: Name or pattern of weights that do not train; repeat for several.
        train_ranges: In a quantized model, train the scales of QuantizeLinear as well.
        head: Give the model a new last layer: the number of its units, or the names of the classes,
            separated by commas.
        head_at: Layer that --head replaces, by the name of its node, its output or its weights; a
            pattern, or the option repeated, names the several layers of a detector. With
            --head-pool, the value on which the new layer is put. Default: the last layer; with
            --head-pool, the model's output.
        head_pool: Put the layer of --head on features instead of replacing a layer. none: on each
            position; mean or first: on the mean of the positions or on the first one; image: on the
            mean of each feature map.
        head_mask: With --head-pool mean, the input that is 0 at padded positions, such as
            attention_mask.
        lora: Add LoRA adapters to the weights that match the name or pattern, and train only the
            adapters and a new head; repeat for several. `onnxgrad merge` adds the trained adapters
            to the weights afterwards.
        lora_rank: Rank of the adapters.
        lora_alpha: The adapters are multiplied by this number divided by --lora-rank.
        lora_dropout: Share of the inputs of the adapters that dropout sets to zero in training.
    """

    train: list[str] = option([], "--train", "--weights", metavar="PATTERN", usual=True)
    freeze: list[str] = option([], metavar="PATTERN", usual=True)
    train_ranges: bool = option(False)
    head: str | None = option(metavar="N|A,B,...", usual=True)
    head_at: list[str] = option([], metavar="NAME", needs=("head",))
    head_pool: str | None = option(metavar="none|mean|first|image", needs=("head",))
    head_mask: str | None = option(metavar="NAME", needs=("head_pool",))
    lora: list[str] = option([], metavar="PATTERN", usual=True)
    lora_rank: int = option(8, min=1, needs=("lora",))
    lora_alpha: float = option(16.0, min=0, needs=("lora",))
    lora_dropout: float = option(0.0, min=0, max=1, needs=("lora",))


@options("Optimizer")
class OptimizerOptions:
    """Options of the optimizer and the learning rate.

    Attributes:
        optimizer: One of sgd, momentum, nesterov, adam, adamw, adamax, nadam, radam, adagrad,
            adadelta, rmsprop, rprop, lion, schedule_free, lamb, adafactor, or muon.
        optimizer_option: Option of the optimizer, such as b1=0.95; repeat for several.
        weight_decay: Weight decay of the optimizer. Default: the optimizer's own, which
            `onnxgrad.optimizers` documents.
        learning_rate: Learning rate for the gradient of the mean loss of a batch; with --schedule,
            the highest one. Default: the learning rate of the task, or 0.001 for adam and its
            variants, 0.01 for sgd and its variants, 1 for adadelta, 0.0001 for lion.
        schedule: One of constant, step_decay, exponential, linear, cosine, polynomial, one_cycle,
            inverse_sqrt, or plateau. It sets the learning rate of each step; linear, cosine,
            polynomial and one_cycle end with the last step of the training.
        schedule_option: Option of the schedule, such as end=1e-5, or every=100 for step_decay;
            repeat for several.
        warmup: Number of steps in which the learning rate rises from 0; below 1, the share of all
            steps. Default: 0.
        clip_norm: Largest 2-norm of the gradients of all weights together; larger gradients are
            scaled down to it. Default: gradients are not clipped.
    """

    optimizer: str = option("adamw", autocompletion=complete_optimizer, usual=True)
    optimizer_option: list[str] = option([], metavar="NAME=VALUE")
    weight_decay: float | None = option(min=0)
    learning_rate: float | None = option(None, "--learning-rate", "--lr", min=0, usual=True)
    schedule: str = option("constant", autocompletion=complete_schedule, usual=True)
    schedule_option: list[str] = option([], metavar="NAME=VALUE")
    warmup: float | None = option(min=0, metavar="STEPS|SHARE", usual=True)
    clip_norm: float | None = option(min=0)


@options("Training")
class RunOptions:
    """Options of epochs, batches, precision and device.

    Attributes:
        epochs: Number of passes over the training rows.
        batch_size: Number of rows in a training step. Default: the batch size that MODEL or the
            task fixes, or 32.
        accumulate: Number of micro-batches into which each batch is split, to save memory; their
            gradients are added up for one step.
        shuffle: Draw a new order of the rows for every epoch.
        cache: Compute the frozen layers in front of the trained weights once, and keep their
            results for each row, in memory or in a temporary file.
        batch_norm: frozen: BatchNormalization uses its stored mean and variance. train: it uses the
            mean and variance of the batch, and updates the stored ones.
        dropout: In training, set elements of the outputs of the nodes that match PATTERN to zero
            with probability P; repeat for several.
        class_weight: Factor of the loss of the rows of a class; repeat for several. balanced:
            factors inversely proportional to the frequencies of the classes.
        early_stopping: Number of epochs without an improvement of --monitor after which training
            stops; the best weights are kept.
        monitor: Value of the history, such as validation_accuracy, by which --early-stopping and
            --checkpoint find the best weights. Default: validation_loss.
        recompute: Intermediate values that the backward pass computes again instead of storing
            them, to save memory: none, cheap (normalizations and elementwise results), or all.
        precision: Float type in which a model with float16 or bfloat16 weights is trained. float32:
            all in float32. mixed: weights in float32, gradients in 16 bits. file: all in the 16
            bits of the model. auto: float32 on the CPU, mixed on a GPU.
        device: Device that trains: cpu, cuda, cuda:1 for the second GPU, or another execution
            provider of onnxruntime by its name: webgpu, openvino, dml, coreml, qnn, ...
        sync_batch_norm: In a training by several processes, normalize by the mean and variance of
            the rows of all processes.
        shard_optimizer: In a training by several processes, divide the optimizer's state among
            them, to save memory.
        seed: Seed of the held-out rows, the order of rows, dropout and the new weights.
    """

    epochs: int = option(10, min=1, usual=True)
    batch_size: int | None = option(min=1, usual=True)
    accumulate: int = option(1, min=1)
    shuffle: bool = option(True)
    cache: bool = option(False)
    batch_norm: str = option("frozen", metavar="frozen|train")
    dropout: list[str] = option([], metavar="PATTERN=P")
    class_weight: list[str] = option([], metavar="CLASS=WEIGHT|balanced")
    early_stopping: int | None = option(min=1, metavar="PATIENCE", usual=True)
    monitor: str | None = option(metavar="NAME", needs=("early_stopping", "checkpoint"))
    recompute: str = option("none", metavar="none|cheap|all")
    precision: str = option("auto", metavar="auto|float32|mixed|file")
    device: str = option("cpu", usual=True)
    sync_batch_norm: bool = option(False)
    shard_optimizer: bool = option(False)
    seed: int = option(0, min=0, usual=True)


@options("Checkpoints")
class CheckpointOptions:
    """Options of checkpoints, from which a training resumes after a crash.

    Attributes:
        checkpoint: Folder in which the state of the training is written after every epoch.
        checkpoint_every: Write a checkpoint after this number of steps instead of every epoch.
        checkpoint_seconds: Write a checkpoint after this number of seconds instead of every epoch.
        checkpoint_keep: Number of the newest checkpoints that are kept.
        resume: Continue from the newest checkpoint in the folder of --checkpoint, bit for bit as if
            training had not stopped; without a checkpoint there, start from the beginning.
    """

    checkpoint: str | None = option(metavar="FOLDER", usual=True)
    checkpoint_every: int | None = option(min=1, metavar="STEPS", needs=("checkpoint",))
    checkpoint_seconds: float | None = option(min=0, metavar="SECONDS", needs=("checkpoint",))
    checkpoint_keep: int = option(2, min=1, needs=("checkpoint",))
    resume: bool = option(False, needs=("checkpoint",), usual=True)


@options("Result")
class ResultOptions:
    """Options of the files that a training writes.

    Attributes:
        output: File of the trained model, with its loss curves beside it; if MODEL is a folder, a
            folder with the same files; "-" is standard output. Default: trained.onnx, or the folder
            trained; if it exists, trained-2.onnx or trained-2.
        overwrite: Replace files that exist.
        adapter: With --lora and a folder, write the base model with the adapters as inputs, and the
            trained adapter as adapters/NAME.onnx_adapter.
        curves: Draw the losses by epoch into a .png file beside the model.
        history: File (.csv or .json) for the losses, learning rates and metrics of each epoch.
        card: File, or folder, for a model card: Markdown with license, data, arguments and results;
            facts that are not known are called unknown.
        license: License of the trained model in the card, such as "mit". Default: unknown.
        record: Folder for the record that `onnxgrad report` draws: curves, norms of gradients,
            histograms of weights, wrong predictions, time of each operator.
        dry_run: Run a few steps, print what would be trained, how long it would take and how much
            memory it needs, and write nothing.
        verbose: List at the end all constants that are not trained, and why.
        config: TOML file with options by their names. Options on the command line win.
    """

    # a str, as a Path drops a "/" at the end; None until the model is read
    output: str = option(None, "--output", "-o", metavar="PATH", usual=True)
    overwrite: bool = option(False, usual=True)
    adapter: str | None = option(metavar="NAME", needs=("lora",))
    curves: bool = option(True)
    history: str | None = option(metavar="FILE")
    card: str | None = option(metavar="PATH")
    license: str | None = option(metavar="NAME", needs=("card",))
    record: str | None = option(metavar="FOLDER")
    dry_run: bool = option(False)
    verbose: bool = option(False)
    config: str | None = option(metavar="FILE", usual=True)


@options()
class TrainOptions(
    CommonOptions,
    ResultOptions,
    CheckpointOptions,
    RunOptions,
    OptimizerOptions,
    LossOptions,
    WeightOptions,
    DataOptions,
    ModelArgument,
):
    """Train MODEL on DATA.

    A model with one input takes all columns that are no target, in their order, reshaped to the
    shape of the input. A model with several inputs takes for each the column, or the array of an
    .npz file, of the input's name. A cell may hold a list of numbers.

    The result is MODEL with the weights after the last epoch. It stores the names of its columns,
    by which it finds them in other data. Ctrl-C, SIGTERM and SIGHUP stop the training early, and
    the weights trained so far are written.

    Examples:
        onnxgrad train model.onnx houses.csv --target price --loss squared_error
        onnxgrad train vision.onnx photos/ --head cat,dog,bird --loss cross_entropy --lr 3e-4
            --schedule cosine --warmup 0.1 --early-stopping 3
        onnxgrad train text.onnx rows.parquet --target label --loss cross_entropy
            --lora '*attention*' --checkpoint runs/a --resume
        onnxgrad train llama/ texts.jsonl --loss causal_lm --lora '*proj*' --output tuned
        onnxgrad train --config run.toml --epochs 3 --dry-run
    """


# -- evaluation and predictions ----------------------------------------------------------------


@options()
class DeviceOptions:
    """Options of the device on which a model runs, and its batch size.

    Attributes:
        batch_size: Number of rows that the model computes at once. Default: the batch size that
            MODEL fixes, or 256.
        device: Device that computes: cpu, cuda, cuda:1 for the second GPU, or another execution
            provider of onnxruntime by its name: webgpu, openvino, dml, coreml, qnn, ...
    """

    batch_size: int | None = option(min=1, usual=True)
    device: str = option("cpu", usual=True)


@options()
class EvalOptions(CommonOptions, DeviceOptions, LossOptions, LabelOptions, ModelArgument):
    """Print the loss and the metrics of MODEL on DATA.

    Columns of DATA are inputs and labels as in `onnxgrad train`.

    Examples:
        onnxgrad eval trained.onnx test.csv --target price --loss squared_error --metrics mae,r2
        onnxgrad eval trained.onnx - --loss cross_entropy --json < test.csv

    Attributes:
        metrics: Metrics of the rows, such as accuracy, f1_macro, auc, top_5_accuracy, perplexity,
            mae, rmse, r2; repeat the option, or separate names by commas. OUTPUT=METRIC for several
            outputs. Default: accuracy for classes, perplexity for texts, else none.
    """


@options()
class PredictOptions(CommonOptions, DeviceOptions, InputOptions, ModelArgument):
    """Write the outputs of MODEL for DATA, one row of predictions for each row of DATA.

    An output with several numbers for each row gives as many columns; a map from labels to
    probabilities gives one column for each label. An .npz file has one array for each output.

    Examples:
        onnxgrad predict trained.onnx new.csv -o predictions.csv
        cat new.csv | onnxgrad predict trained.onnx - --outputs label > labels.csv

    Attributes:
        data: The rows: a CSV, TSV, Parquet or .npz file; a folder of Parquet files or of images; or
            the inputs of the task; "-" reads CSV from standard input.
        outputs: Name of an output to write; repeat for several. Default: all outputs with one entry
            for each row.
        output: A .csv, .tsv, .parquet or .npz file; "-" writes CSV to standard output. With a task
            that writes files, such as detection, a folder. Default: "-", or the folder predictions.
        overwrite: Replace files that exist.
    """

    outputs: list[str] = option([], panel=RESULT, metavar="NAME")
    output: str = option("-", "--output", "-o", panel=RESULT, metavar="PATH", show_default=False)
    overwrite: bool = option(False, panel=RESULT)


@options(RESULT)
class WrittenModelOptions:
    """Options of the model file that a command writes.

    Attributes:
        output: File of the model that is written; "-" is standard output.
        overwrite: Replace files that exist.
    """

    output: str | None = option(None, "--output", "-o", metavar="PATH")
    overwrite: bool = option(False)


@options()
class GenerateOptions(CommonOptions):
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
class TrainableOptions(CommonOptions, ModelArgument):
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
class LossesOptions(CommonOptions):
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
class DifferentiatedOptions:
    """Options of the weights and inputs w.r.t. which a gradient is computed.

    Attributes:
        weights: Weight with respect to which the gradient is computed; repeat for several. Default:
            all weights that train by default.
        inputs: Input with respect to which the gradient is computed; repeat for several. Default:
            all float inputs.
    """

    weights: list[str] = option([], metavar="NAME", needs=("model",))
    inputs: list[str] = option([], metavar="NAME", needs=("model",))


@options()
class GradOptions(CommonOptions, WrittenModelOptions, DifferentiatedOptions, ModelArgument):
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
class CheckOptions(CommonOptions, DifferentiatedOptions, ModelArgument):
    """Compare the gradient of MODEL with central differences; exit with 1 if it differs.

    With --device, list instead the nodes of the training step that the CPU computes, as they fail
    or have no kernel on that device, and the bytes that are copied; exit with 1 if the results
    differ from the CPU. Without MODEL, print the versions, the processor and its instruction sets,
    the execution providers of onnxruntime, and which extras of onnxgrad are installed.

    Examples:
        onnxgrad check model.onnx --order 2
        onnxgrad check model.onnx --device webgpu --loss cross_entropy
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
        device: Device whose nodes are listed, an execution provider of onnxruntime by its name:
            webgpu, openvino, dml, coreml, qnn, ...
        loss: Loss of the training step, with --device.
    """

    model: str = argument(required=False)
    order: int = option(1, min=1, max=2, needs=("model",))
    rtol: float | None = option(min=0, needs=("model",))
    seed: int = option(0, min=0, needs=("model",))
    separately: bool = option(False, needs=("model",))
    budget: float | None = option(metavar="SECONDS", needs=("model",))
    device: str | None = option(needs=("model",))
    loss: str = option("squared_error", needs=("device",))


@options()
class MergeOptions(CommonOptions, WrittenModelOptions):
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
class ReportOptions(CommonOptions):
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
class ShowOptions(CommonOptions, ModelArgument):
    """Print MODEL as text, nodes indented by their depth.

    Examples:
        onnxgrad show model.onnx --grad

    Attributes:
        grad: Print the gradient model as well.
        summary: Print a table of the layers instead of the nodes.
    """

    grad: bool = option(False)
    summary: bool = option(False)
