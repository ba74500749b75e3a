"""`onnxgrad eval`: the loss and the metrics of a model for data."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from onnxgrad.cli.arguments import loss_arguments
from onnxgrad.cli.command_options import EvalOptions
from onnxgrad.cli.console import note, print_json, print_rows, say
from onnxgrad.cli.model_files import STDIN, read_model, standard_input
from onnxgrad.cli.tasks import open_task


def evaluate(options: EvalOptions) -> None:
    """Print the loss and the metrics."""
    proto = read_model(options.model, options.data)
    task = open_task(options, proto, training=False)
    if metrics := loss_arguments(options)["metrics"]:
        task.metrics = metrics
    data: Any = standard_input("CSV file") if options.data == STDIN else options.data
    numbers = task.evaluate(data, batch_size=options.batch_size, device=options.device)
    for text in task.notes:
        note(text)
    if options.json:
        loss, remarks = numbers.pop("loss"), [*task.notes, *task.remarks]
        print_json({"loss": loss, "metrics": numbers, "rows": task.rows, "remarks": remarks})
        return
    rows = {name.replace("_", " "): _metric_text(value) for name, value in numbers.items()}
    print_rows(rows | {"rows": task.rows})
    for remark in task.remarks:
        say(remark)


def _metric_text(value: Any) -> Any:
    """Return a number as text, and numbers by name as "name number, ..."."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return f"{value:.6g}" if isinstance(value, Real) else value
