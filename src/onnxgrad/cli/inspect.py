"""`onnxgrad trainable`, `check` and `show`: facts of a model and of the machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import onnx_ir as ir
import typer
from onnx import ModelProto, TensorProto

from onnxgrad.cli.command import FAILED
from onnxgrad.cli.command_options import CheckOptions, ShowOptions, TrainableOptions
from onnxgrad.cli.console import print_json, print_message, print_rows
from onnxgrad.cli.model_files import read_model
from onnxgrad.operators.shapes import dims
from onnxgrad.training.parameters import choice


def trainable(options: TrainableOptions) -> None:
    """Print the float constants of a model, and which of them train, with the reasons."""
    rows = choice.trainable(read_model(options.model), options.train or None, options.freeze)
    if not options.json:
        print_message(str(rows))
        return
    trained = [row for row in rows if row.trains]
    keys = ("name", "shape", "dtype", "size", "trains", "why", "doubtful", "alias")
    print_json(
        {
            "tensors": [{key: getattr(row, key) for key in keys} for row in rows],
            "trained": len(trained),
            "parameters": sum(row.size for row in trained),
        }
    )


def check(options: CheckOptions) -> None:
    """Compare a model's gradient with central differences; exit with `FAILED` if it differs.

    With a device, list the nodes that it does not compute. Without a model, print versions and
    facts of the machine.
    """
    if not options.model:
        _print_machine_and_versions(options.json)
        return
    if options.device is not None:
        _print_device_report(options)
        return
    from onnxgrad import check_gradient

    report = check_gradient(
        read_model(options.model),
        options.inputs or None,
        options.weights or None,
        rtol=options.rtol,
        order=options.order,
        random_state=options.seed,
        separately=options.separately or None,
        budget_seconds=options.budget,
    )
    if options.json:
        keys = ("name", "names", "order", "expected", "found", "error", "rtol", "ok", "undefined")
        rows = [{key: getattr(row, key) for key in keys} for row in report.rows]
        print_json(
            {
                "ok": report.ok,
                "max_error": report.max_error,
                "computed": report.computed,
                "unchecked": report.unchecked,
                "rows": rows,
            }
        )
    else:
        print_message(str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_device_report(options: CheckOptions) -> None:
    """Print which nodes of the training step a device does not compute."""
    from onnxgrad.training.device_check import check_device

    report = check_device(
        read_model(options.model),
        options.device,
        options.loss,
        options.weights or None,
        options.seed,
    )
    if options.json:
        print_json(asdict(report) | {"ok": report.ok})
    else:
        print_message(str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_machine_and_versions(json: bool) -> None:
    """Print versions, processor, execution providers, and which extras are installed."""
    from onnxruntime import get_available_providers

    from onnxgrad.report.environment import instruction_sets, machine_and_versions, missing_packages

    known = {"providers": get_available_providers(), "instruction_sets": instruction_sets()}
    missing = missing_packages()
    if json:
        print_json({"machine": machine_and_versions(), **known, "missing_packages": missing})
        return
    installed = [extra for extra, packages in missing.items() if not packages]
    known |= {"extras": installed, "extras not installed": [e for e in missing if missing[e]]}
    texts = {name.replace("_", " "): ", ".join(values) for name, values in known.items()}
    print_rows(machine_and_versions() | texts)


def show(options: ShowOptions) -> None:
    """Print the model as text or as a table of its layers, or its contents as JSON."""
    from onnxgrad import onnx_derivative, summary
    from onnxgrad.plot.text import onnx_simple_text_plot

    proto = read_model(options.model)
    gradient = onnx_derivative(proto) if options.grad else None
    if options.json:
        known = _model_summary(proto, options.summary)
        if gradient is not None:
            known["gradient"] = _model_summary(gradient, options.summary)
        print_json(known)
        return
    show_one = summary if options.summary else onnx_simple_text_plot
    typer.echo(show_one(proto))
    if gradient is not None:
        typer.echo("\ngradient")
        typer.echo(show_one(gradient))


def _model_summary(proto: ModelProto, layers: bool = False) -> dict[str, Any]:
    """Return a model's inputs, outputs, operators, ... by the documented keys of `show --json`."""
    from onnxgrad import summary

    table = {}
    if layers:
        rows = summary(proto)
        table = {
            "layers": [asdict(row) for row in rows],
            "lengths": rows.lengths,
            "uncounted": rows.uncounted,
        }
    return table | {
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        "ir_version": proto.ir_version,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        "inputs": list(map(_value_as_json, proto.graph.input)),
        "outputs": list(map(_value_as_json, proto.graph.output)),
        "nodes": len(proto.graph.node),
        "operators": Counter(node.op_type for node in proto.graph.node),
        "functions": [function.name for function in proto.functions],
        "metadata": {entry.key: entry.value for entry in proto.metadata_props},
    }


def _value_as_json(value: Any) -> dict[str, Any]:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return {"name": value.name, "type": kind}
    dtype = TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    shape = dims(ir.from_proto(value))
    return {"name": value.name, "type": dtype, "shape": None if shape is None else [*shape]}
