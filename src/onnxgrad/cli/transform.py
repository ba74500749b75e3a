"""`onnxgrad grad` and `onnxgrad merge`: a model in, a model out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto
from rich.table import Table
from rich.text import Text

from onnxgrad.cli.command_options import GradOptions, MergeOptions, Written
from onnxgrad.cli.console import print_json, results, say
from onnxgrad.cli.model_files import (
    STDOUT,
    check_not_data,
    check_output,
    inputs_of,
    read_model,
    write_model,
)
from onnxgrad.errors import printable

_LISTED = 12  # inputs and outputs in the table


def grad(options: GradOptions) -> None:
    """Write the model that computes the gradient."""
    output = _checked(options, options.model)
    if options.fill_grad and not options.keep_outputs:
        raise ValueError("--fill-grad needs --keep-outputs")
    from onnxgrad import DerivativeOptions, onnx_derivative

    proto = _read(options, options.model, output)
    flags = DerivativeOptions(
        options.keep_outputs * DerivativeOptions.KeepOutputs
        | options.fill_grad * DerivativeOptions.FillGrad
    )
    gradient = onnx_derivative(proto, options.weights or None, options.inputs or None, flags)
    write_model(gradient, output)
    _report(options, proto, gradient, output)


def merge(options: MergeOptions) -> None:
    """Write the model with its adapters merged, or with the weights of a checkpoint."""
    if options.model is not None and Path(options.model).is_dir():
        _merge_folder(options, options.model)
        return
    if options.checkpoint is not None or options.prefix:
        raise ValueError(
            f"--checkpoint and --prefix are of a folder of generate_artifacts, and {options.model} "
            "is none: the adapters of a file are in it"
        )
    output = _checked(options, options.model)
    from onnxgrad.finetune.lora import merge_lora

    proto = _read(options, options.model, output)
    merged = merge_lora(proto)
    write_model(merged, output)
    _report(options, proto, merged, output)


def _merge_folder(options: MergeOptions, folder: str) -> None:
    from onnxgrad.artifacts.manifest import read_manifest
    from onnxgrad.artifacts.merge import merge_artifacts

    files = read_manifest(Path(folder), options.prefix)["files"]
    model = str(Path(folder, files["model"]))
    inputs = [Path(folder, name) for name in files.values()]
    inputs += [Path(options.checkpoint)] if options.checkpoint else []
    output = _checked(options, model, inputs)
    proto = _read(options, model, output)
    merged = merge_artifacts(folder, options.checkpoint, options.prefix)
    write_model(merged, output)
    _report(options, proto, merged, output)


def _checked(options: Any, model: str | None, inputs: Sequence[Path] = ()) -> str:
    """Return where the model goes, if it can be written there and is none of the inputs."""
    assert model is not None
    if options.output is None:
        raise ValueError(
            "--output says where the model goes: name a file, or - for standard output"
        )
    if options.output == STDOUT and options.json:
        raise ValueError("--output - and --json both go to standard output: name a file")
    check_output(options.output, options.overwrite, [*inputs_of(model), *inputs], binary=True)
    return options.output


def _read(options: Written, model: str | None, output: str) -> ModelProto:
    assert model is not None
    proto = read_model(model)
    check_not_data(output, model)
    return proto


def _report(options: Any, before: ModelProto, after: ModelProto, output: str) -> None:
    """Print what was written."""
    counts = Counter(node.op_type for node in after.graph.node)
    names = {
        "inputs": [x.name for x in after.graph.input],
        "outputs": [y.name for y in after.graph.output],
    }
    if options.json:
        sizes = {"nodes_before": len(before.graph.node), "nodes": len(after.graph.node)}
        print_json({"files": [output], **sizes, "operators": counts, **names})
        return
    console, table = results(output=output), Table(show_header=False)
    table.add_row("nodes", f"{len(before.graph.node)} -> {len(after.graph.node)}")
    common = ", ".join(f"{n} {printable(op)}" for op, n in counts.most_common(8))
    table.add_row("operators", Text(common))
    for kind, listed in names.items():
        table.add_row(kind, _listed(listed))
    console.print(table)
    if output != STDOUT:
        say(f"wrote {output}", console)


def _listed(names: list[str]) -> Text:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return Text(", ".join(map(printable, names[:_LISTED])) + more)
