"""`onnxgrad eval`: the loss and the metrics of a model for data."""

from __future__ import annotations

from numbers import Real

from rich.table import Table
from rich.text import Text

from onnxgrad.cli.arguments import loss_arguments
from onnxgrad.cli.classes import class_labels
from onnxgrad.cli.command_options import EvalOptions
from onnxgrad.cli.console import ignoring_closed_output, note, print_json, say, stdout
from onnxgrad.cli.job import check_classes, classifies, mapped
from onnxgrad.cli.model_files import read_model
from onnxgrad.cli.model_with_loss import ModelWithLoss, with_loss
from onnxgrad.errors import printable
from onnxgrad.training.judges import select_metrics


def evaluate(options: EvalOptions) -> None:
    """Print the loss and the metrics.

    Raises:
        ValueError: data that the model or the loss does not take.
    """
    proto = read_model(options.model, options.data)
    arguments = loss_arguments(options)
    classes = options.classes.split(",") if options.classes else class_labels(proto)
    model = with_loss(proto, arguments["loss"], options.loss_output)
    scored = ModelWithLoss(model, **arguments, device=options.device)
    task, objective = mapped(options, options.data, scored, classes)
    check_classes(options, objective)
    if not options.metrics and classifies(objective):
        scored.metrics_by_output = select_metrics(["accuracy"])
    for text in task.notes:
        note(text)
    numbers = scored.evaluate(task.data, options.batch_size)
    if options.json:
        loss = numbers.pop("loss")
        remarks = [*task.notes, *task.remarks]
        print_json({"loss": loss, "metrics": numbers, "rows": task.rows, "remarks": remarks})
        return
    table = Table(show_header=False)
    for name, value in numbers.items():
        shown = f"{value:.6g}" if isinstance(value, Real) else str(value)
        table.add_row(Text(printable(name.replace("_", " "))), shown)
    table.add_row("rows", str(task.rows))
    with ignoring_closed_output():
        stdout.print(table, highlight=False)
    for remark in task.remarks:
        say(remark)
