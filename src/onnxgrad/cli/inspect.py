"""`onnxgrad trainable`, `check`, `show` and `losses`: facts of a model, the machine and losses."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import onnx_ir as ir
import typer
from onnx import ModelProto, TensorProto

from onnxgrad.cli.command import FAILED
from onnxgrad.cli.command_options import CheckOptions, LossesOptions, ShowOptions, TrainableOptions
from onnxgrad.cli.console import print_json, print_message, print_rows
from onnxgrad.cli.model_files import read_model
from onnxgrad.errors import unknown
from onnxgrad.operators.shapes import dims


def trainable(options: TrainableOptions) -> None:
    """Print the float constants of a model, and which of them train, with the reasons."""
    from onnxgrad.training.parameters.choice import trainable as tensors

    rows = tensors(read_model(options.model), options.train or None, options.freeze)
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


def losses(options: LossesOptions) -> None:
    """Print all losses, or the mathematics and the options of one loss."""
    listed = _losses_as_json()
    if options.name:
        listed = [one for one in listed if options.name in one["names"]]
        if not listed:
            raise unknown(
                "loss", options.name, [name for one in _losses_as_json() for name in one["names"]]
            )
    if options.json:
        print_json({"losses": listed})
        return
    for one in listed:
        more = f" ({', '.join(one['names'][1:])})" if one["names"][1:] else ""
        print_message(f"{one['names'][0]}{more}")
        text = one["description"] if options.name else one["mathematics"]
        print_message("\n".join(f"    {line}" if line else "" for line in text.splitlines()))
        for name, value in one["options"].items():
            decided = "  (the model and the labels decide)" if name in one["open"] else ""
            print_message(f"    --loss-option {name}={_option_text(value)}{decided}")
        if options.name:
            print_message(f"    labels: {one['labels']}")


def _option_text(value: Any) -> str:
    """Return the value of a loss option as users type it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _losses_as_json() -> list[dict[str, Any]]:
    """Return the name, aliases, mathematics and options of each loss, as dicts for JSON."""
    from onnxgrad.losses.formulas import LOSSES
    from onnxgrad.losses.objectives import ALIASES
    from onnxgrad.losses.spec import LEFT_OPEN

    found: list[tuple[Any, dict[str, Any]]] = []
    for name, spec in LOSSES.items():
        kind = replace(spec, name="")
        same = next((one for other, one in found if other == kind), None)
        if same is None:
            same = _loss_as_json(spec)
            same["open"] = [n for n in LEFT_OPEN if n in same["options"]]
            same["options"] |= dict.fromkeys(same["open"])
            found.append((kind, same))
        same["names"] += [name, *(alias for alias, loss in ALIASES.items() if loss == name)]
    return [one for _, one in found]


def _loss_as_json(spec: Any) -> dict[str, Any]:
    """Return the mathematics, options, ... of a loss by the documented keys of `losses --json`."""
    text = inspect.cleandoc(spec.formula.__doc__ or "")
    dtype = spec.label_kind.dtype
    labels = "numbers in the shape of the prediction" if dtype is None else f"{dtype.name.lower()}"
    if spec.bounds is not None:
        labels += f", {spec.bounds.text}"
    options = spec.all_options | ({"ignore_nan": False} if spec.may_ignore_nan else {})
    return {
        "names": [],
        "open": [],
        "mathematics": text.splitlines()[0],
        "description": text,
        "options": options,
        "labels": f"{labels}; for {spec.label_kind.needs}",
    }
