"""`onnxgrad eval`, `predict` and `generate`: run a model on data, or on a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from onnxgrad.cli.arguments import loss_arguments
from onnxgrad.cli.command_options import EvalOptions, GenerateOptions, PredictOptions
from onnxgrad.cli.console import print_json, print_message, print_note, print_rows
from onnxgrad.cli.model_files import (
    STDOUT,
    check_not_external_data,
    check_output,
    input_files,
    language_model_folder,
    read_model,
)
from onnxgrad.cli.options import set_options
from onnxgrad.cli.tasks import open_task, path_or_standard_input, predict_arguments
from onnxgrad.language.generation import generate as go_on
from onnxgrad.tasks import Task
from onnxgrad.tasks.row_predictions import check_predictions_suffix, column_writer
from onnxgrad.tasks.rows_task import RowsTask

_FOLDER = "predictions"


def evaluate(options: EvalOptions) -> None:
    """Print the loss and the metrics of a model on data."""
    proto = read_model(options.model, options.data)
    task = open_task(options, proto, training=False)
    if metrics := loss_arguments(options)["metrics"]:
        task.metrics = metrics
    data = path_or_standard_input(options.data)
    numbers = task.evaluate(data, batch_size=options.batch_size, device=options.device)
    for text in task.notes:
        print_note(text)
    if options.json:
        loss, remarks = numbers.pop("loss"), [*task.notes, *task.remarks]
        print_json({"loss": loss, "metrics": numbers, "rows": task.rows, "remarks": remarks})
        return
    rows = {name.replace("_", " "): _metric_text(value) for name, value in numbers.items()}
    print_rows(rows | {"rows": task.rows})
    for remark in task.remarks:
        print_message(remark)


def _metric_text(value: Any) -> Any:
    """Return a metric's value as text; a dict of values as "name number, ..."."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return f"{value:.6g}" if isinstance(value, Real) else value


def predict(options: PredictOptions) -> None:
    """Write a model's predictions: columns of outputs, or files of a task such as detection."""
    proto = read_model(options.model, options.data)
    task = open_task(options, proto, training=False)
    if isinstance(task, RowsTask):
        _write_prediction_columns(options, task)
    else:
        _write_prediction_files(options, task)


def _write_prediction_columns(options: PredictOptions, task: RowsTask) -> None:
    """Write the predictions of Table, Images or Texts as columns, to a file or standard output."""
    path = None if options.output == STDOUT else options.output
    if path is not None:
        check_predictions_suffix(path)
    inputs = input_files(options.model, options.data)
    check_output(options.output, options.overwrite, inputs, options.json, binary=False)
    check_not_external_data(options.output, options.model)
    blocks = task.prediction_columns(
        task.model,
        path_or_standard_input(options.data),
        outputs=options.outputs,
        batch_size=options.batch_size,
        device=options.device,
    )
    names: list[str] = []
    with column_writer(path) as write:
        for columns in blocks:
            names = list(columns)
            write(columns)
    for text in task.notes:
        print_note(text)
    if options.json:
        about = {"rows": task.rows, "columns": names, "remarks": task.notes}
        print_json({"files": [path], **about})
    elif path is not None:
        print_note(f"wrote {path}")


def _write_prediction_files(options: PredictOptions, task: Task) -> None:
    """Write the predictions of a task such as Detection into a folder, in the task's formats."""
    for name in {"batch_size", "device"} & set_options(options):
        flag = name.replace("_", "-")
        raise ValueError(f"--task predicts one input after another on the CPU: leave out --{flag}")
    folder = Path(_FOLDER if options.output == STDOUT else options.output)
    if folder.is_file():
        raise ValueError(f"--output {str(folder)!r} is a file: --task writes into a folder")
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise FileExistsError(
            f"the folder {str(folder)!r} is not empty: name another folder with --output, or pass "
            "--overwrite"
        )
    results = list(task.predict(task.model, options.data, **predict_arguments(options, task)))
    files = task.write(options.data, results, folder)
    for text in task.notes:
        print_note(text)
    if options.json:
        print_json({"files": [str(file) for file in files], "rows": len(results)})
        return
    print_note(task.describe_results(results))
    print_note(f"wrote {files[0]}" if len(files) == 1 else f"wrote {len(files)} files in {folder}")


def generate(options: GenerateOptions) -> None:
    """Print the text with which a language model continues a prompt."""
    folder = language_model_folder(options.model)
    if folder is None:
        raise ValueError(f"MODEL must be the folder of a language model, not {options.model!r}")
    text = go_on(
        folder,
        options.text,
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        adapter=options.adapter,
    )
    if options.json:
        print_json({"prompt": options.text, "text": text})
    else:
        print_message(text)
