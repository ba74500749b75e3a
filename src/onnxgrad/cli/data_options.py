"""The options of `train`, `eval` and `predict` on data and their columns."""

from __future__ import annotations

from onnxgrad.cli.options import argument, option, options

TABLES, IMAGES, TEXTS = "tables", "images", "texts"  # the kinds of DATA


@options("Columns")
class InputOptions:
    """The data, and which of its columns are inputs."""

    data: str = argument(
        "CSV, TSV, Parquet or .npz file, a row each; a folder of Parquet files; a folder of "
        "folders of images, one a class; .jsonl or .txt with texts, for a language model; "
        '"-" reads CSV from standard input.'
    )
    columns: list[str] = option(
        "The columns of the input, in this order; others are left out. INPUT=A,B,..., repeated, "
        "for several inputs.",
        [],
        metavar="A,B,...",
        show_default="all, or those of an earlier training",
        data=(TABLES,),
    )
    ignore: list[str] = option(
        "Column to leave out; repeat for several.", [], metavar="COLUMN", data=(TABLES,)
    )
    drop_missing: bool = option(
        "Leave out the rows with an empty cell, NaN or infinity.", False, data=(TABLES,)
    )
    task: str | None = option(
        "Read DATA as ctc, detection, embeddings, segmentation, sound, text-labels or tokens do, "
        "which bring their loss and metrics; or as images, table or texts: see `onnxgrad.tasks`.",
        metavar="NAME",
        show_default="that of an earlier training, or the kind of DATA",
        panel="Task",
        usual=True,
    )
    task_option: list[str] = option(
        "Option of the task, as extend=true of ctc; repeat for several.",
        [],
        metavar="NAME=VALUE",
        panel="Task",
        usual=True,
    )
    image_size: str | None = option(
        "Height and width of images: 48 320 or 48x320, or one number for both.",
        metavar="H [W]",
        show_default="those of the model's input",
        panel="Images",
        data=(IMAGES,),
    )
    scale: float | None = option(
        "The value of white: 1, or 255.",
        metavar="X",
        show_default="that of an earlier training, or 1",
        panel="Images",
        data=(IMAGES,),
    )
    normalize: str | None = option(
        "Subtract MEAN and divide by STD, of values from 0 to --scale: a number each, or one for "
        "each channel, as 0.5,0.4,0.3/0.2,0.2,0.2. imagenet: those of ImageNet. none: as they are.",
        metavar="imagenet|MEAN/STD|none",
        show_default="that of an earlier training, or none",
        panel="Images",
        data=(IMAGES,),
    )


@options("Texts")
class TextOptions:
    """How texts become rows of tokens for a language model."""

    max_length: int | None = option(
        "Tokens of a row, at most; longer texts are cut.",
        min=2,
        show_default="what the model takes",
        data=(TEXTS,),
    )
    completion_only: bool | None = option(
        "Learn completions, and what the assistant says, without their prompts.",
        show_default="where there are any",
        data=(TEXTS,),
    )
    packing: bool = option(
        "Write texts one after another into rows of --max-length, instead of padding them.",
        False,
        data=(TEXTS,),
    )
    tokenizer: str | None = option(
        "Folder with the tokenizer.json of MODEL.",
        metavar="FOLDER",
        show_default="that of MODEL",
        data=(TEXTS,),
    )


@options("Columns")
class LabelOptions(TextOptions, InputOptions):
    """The data with labels."""

    target: list[str] = option(
        "Column to predict; repeat for several. OUTPUT=COLUMN if losses are of several outputs.",
        [],
        metavar="COLUMN",
        show_default="that of an earlier training",
        data=(TABLES,),
        usual=True,
    )
    sample_weight: str | None = option(
        "Column of the weights of rows.", metavar="COLUMN", data=(TABLES,)
    )
    classes: str | None = option(
        "Names of the classes that labels or folders have, separated by commas, in the order of "
        "the model's output.",
        metavar="A,B,...",
        show_default="those in the model",
        data=(TABLES, IMAGES),
    )


@options("Texts")
class SampleOptions:
    """What a trained language model is asked."""

    prompt: list[str] = option(
        "Text that the trained model goes on with, at the end and in the report; repeat for "
        "several.",
        [],
    )


@options("Columns")
class DataOptions(SampleOptions, LabelOptions):
    """The data of a training."""

    validation: str | None = option(
        "Share of the rows that is held out, or a file or folder like DATA; 0 for none.",
        metavar="SHARE|DATA",
        show_default="0.2 where rows can be drawn",
        usual=True,
    )
