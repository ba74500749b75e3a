"""`onnxgrad predict`: the outputs of a model for the rows of data, or the results of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxgrad.cli.command_options import PredictOptions
from onnxgrad.cli.console import note, print_json
from onnxgrad.cli.model_files import (
    STDIN,
    STDOUT,
    check_not_data,
    check_output,
    inputs_of,
    read_model,
    standard_input,
)
from onnxgrad.cli.tasks import open_task, predict_arguments, set_options
from onnxgrad.tasks import Task
from onnxgrad.tasks.row_predictions import check_ending, column_writer
from onnxgrad.tasks.rows_task import RowsTask

_FOLDER = "predictions"


def predict(options: PredictOptions) -> None:
    """Write the outputs, or what people of a task look at."""
    proto = read_model(options.model, options.data)
    task = open_task(options, proto, training=False)
    if isinstance(task, RowsTask):
        _write_columns(options, task)
    else:
        _write_results(options, task)


def _write_columns(options: PredictOptions, task: RowsTask) -> None:
    """Write the columns of predictions to a file or to standard output."""
    if options.output != STDOUT:
        check_ending(options.output)
    inputs = inputs_of(options.model, options.data)
    check_output(options.output, options.overwrite, inputs, options.json, binary=False)
    check_not_data(options.output, options.model)
    data: Any = standard_input("CSV file") if options.data == STDIN else options.data
    blocks = task.prediction_columns(
        task.model,
        data,
        outputs=options.outputs,
        batch_size=options.batch_size,
        device=options.device,
    )
    names: list[str] = []
    with column_writer(None if options.output == STDOUT else options.output) as write:
        for columns in blocks:
            names = list(columns)
            write(columns)
    for text in task.notes:
        note(text)
    if options.output == STDOUT:
        return
    if options.json:
        about = {"rows": task.rows, "columns": names, "remarks": task.notes}
        print_json({"files": [options.output], **about})
    else:
        note(f"wrote {options.output}")


def _write_results(options: PredictOptions, task: Task) -> None:
    """Write the results of a task into a folder."""
    for name in {"batch_size", "device"} & set_options(options):
        flag = name.replace("_", "-")
        raise ValueError(f"--task predicts one input after another on the CPU: leave out --{flag}")
    folder = Path(_FOLDER if options.output == STDOUT else options.output)
    if folder.is_file():
        raise ValueError(f"--output {str(folder)!r} is a file: --task writes into a folder")
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise FileExistsError(
            f"the folder {str(folder)!r} is not empty: name another with --output, or pass "
            "--overwrite"
        )
    results = list(task.predict(task.model, options.data, **predict_arguments(options, task)))
    files = task.write(options.data, results, folder)
    for text in task.notes:
        note(text)
    if options.json:
        print_json({"files": [str(file) for file in files], "rows": len(results)})
        return
    note(task.describe_results(results))
    note(f"wrote {files[0]}" if len(files) == 1 else f"wrote {len(files)} files in {folder}")
