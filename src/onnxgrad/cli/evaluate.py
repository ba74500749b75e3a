"""`onnxgrad eval`: the loss and the metrics of a model for data."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from onnxgrad.cli.arguments import loss_arguments
from onnxgrad.cli.command_options import EvalOptions
from onnxgrad.cli.console import note, print_json, print_rows, say
from onnxgrad.cli.image_source import with_parts
from onnxgrad.cli.job import check_classes, default_metrics, known_classes, map_data
from onnxgrad.cli.loss_note import with_loss_of
from onnxgrad.cli.model_files import read_model
from onnxgrad.cli.model_with_loss import ModelWithLoss, with_loss
from onnxgrad.cli.tasks import evaluate_task, has_task


def evaluate(options: EvalOptions) -> None:
    """Print the loss and the metrics."""
    if has_task(options):
        _print(options, *evaluate_task(options))
        return
    proto = read_model(options.model, options.data)
    options, told = with_loss_of(proto, options)
    options, more = with_parts(options, "test")
    arguments = loss_arguments(options)
    classes = known_classes(options, proto)
    model = with_loss(proto, arguments["loss"], options.loss_output)
    scored = ModelWithLoss(model, **arguments, device=options.device)
    task, objective = map_data(options, options.data, scored, classes)
    check_classes(options, objective)
    if not options.metrics:
        scored.judge_by(default_metrics(task, objective))
    task.notes[:0] = told + more
    for text in task.notes:
        note(text)
    numbers = scored.evaluate(task.data, options.batch_size)
    _print(options, numbers, task.rows, [*task.notes, *task.remarks], task.remarks)


def _print(
    options: EvalOptions,
    numbers: dict[str, Any],
    count: int | None,
    remarks: Sequence[str] = (),
    shown: Sequence[str] = (),
) -> None:
    """Print the loss, the metrics and the number of rows; of the remarks, those `shown` below."""
    if options.json:
        loss = numbers.pop("loss")
        print_json({"loss": loss, "metrics": numbers, "rows": count, "remarks": remarks})
        return
    rows = {
        name.replace("_", " "): f"{v:.6g}" if isinstance(v, Real) else v
        for name, v in numbers.items()
    }
    print_rows(rows | {"rows": count})
    for remark in shown:
        say(remark)
