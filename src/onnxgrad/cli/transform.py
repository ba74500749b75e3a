"""`onnxgrad grad` and `onnxgrad merge`, which write a model made from a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxgrad.cli.command_options import GradOptions, MergeOptions
from onnxgrad.cli.console import make_console, print_json, print_message, print_rows
from onnxgrad.cli.model_files import (
    STDOUT,
    OutputPath,
    check_not_external_data,
    check_output,
    input_files,
    language_model_folder,
    read_model,
)
from onnxgrad.errors import join_first, printable
from onnxgrad.model.surgery import replace_maps_by_tensors, select_model_inputs_outputs

if TYPE_CHECKING:
    from onnxgrad.language.folders import ModelFolder


def grad(options: GradOptions) -> None:
    """Write the gradient model, or with `--family` four models of directional derivatives."""
    if options.family is not None:
        _write_derivative_family(options, options.family)
        return

    def gradient(proto: ModelProto) -> ModelProto:
        from onnxgrad import DerivativeOptions, onnx_derivative

        flags = DerivativeOptions(
            options.keep_outputs * DerivativeOptions.KeepOutputs
            | options.fill_grad * DerivativeOptions.FillGrad
        )
        if options.outputs:
            proto, maps = replace_maps_by_tensors(proto)
            chosen = [maps.get(y, y) for y in options.outputs]
            proto = select_model_inputs_outputs(proto, chosen)
        return onnx_derivative(proto, options.weights or None, options.inputs or None, flags)

    _write_changed_model(options, options.model, gradient)


def _write_derivative_family(options: GradOptions, path: str) -> None:
    if options.output is not None or options.fill_grad or options.keep_outputs:
        raise ValueError(
            "--output, --fill-grad and --keep-outputs have no effect on --family: leave them out"
        )
    if path == STDOUT:
        raise ValueError(
            "--family writes four models beside each other: name the file of the first, not -"
        )
    from onnxgrad.autodiff.family import derivative_family, family_paths

    files = [str(file) for file in family_paths(path).values()]
    for file in files:
        check_output(file, options.overwrite, input_files(options.model), options.json)
    proto = read_model(options.model)
    for file in files:
        check_not_external_data(file, options.model)
    family = derivative_family(
        proto, path, options.weights, options.inputs or None, options.outputs or None, options.dtype
    )
    signatures = {file: _model_signature(m) for file, m in zip(files, family.values(), strict=True)}
    if options.json:
        print_json({"files": files, "models": signatures})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("file", "nodes", "inputs", "outputs")
    for file, signature in signatures.items():
        lists = (Text(_names_text(signature[kind])) for kind in ("inputs", "outputs"))
        table.add_row(Text(printable(file)), str(signature["nodes"]), *lists)
    make_console().print(table)


def merge(options: MergeOptions) -> None:
    """Write the model with its adapters merged, or with the weights of a checkpoint merged."""
    from onnxgrad.language.folders import is_folder

    if Path(options.model).is_dir() and not is_folder(options.model):
        if options.requantize:
            raise ValueError(
                f"--requantize is for adapters, and {options.model} has a checkpoint: leave it out"
            )
        _merge_folder(options, options.model)
        return
    if options.checkpoint is not None or options.prefix:
        raise ValueError(
            "--checkpoint and --prefix are for a folder that generate_artifacts wrote, and "
            f"{options.model} is another model, whose adapters are in its file"
        )
    from onnxgrad.adapters.merge import merge_lora

    def merge_adapters(proto: ModelProto) -> ModelProto:
        return merge_lora(proto, requantize=options.requantize)

    like = language_model_folder(options.model)
    _write_changed_model(options, options.model, merge_adapters, like=like)


def _merge_folder(options: MergeOptions, folder: str) -> None:
    from onnxgrad.artifacts.folder import read_manifest
    from onnxgrad.artifacts.merge import merge_artifacts

    files = read_manifest(Path(folder), options.prefix)["files"]
    model = str(Path(folder, files["model"]))
    inputs = [Path(folder, name) for name in files.values()]
    inputs += [Path(options.checkpoint)] if options.checkpoint else []

    def merge_files(proto: ModelProto) -> ModelProto:
        return merge_artifacts(folder, options.checkpoint, options.prefix)

    _write_changed_model(options, model, merge_files, inputs)


def _write_changed_model(
    options: GradOptions | MergeOptions,
    model: str,
    change: Callable[[ModelProto], ModelProto],
    inputs: Sequence[Path] = (),
    like: ModelFolder | None = None,
) -> None:
    """Write the result of `change` on the model to `--output`, and print what was written."""
    output = options.output
    if output is None:
        raise ValueError(
            "--output says where the model goes: name a file, or - for standard output"
        )
    place = OutputPath(like)
    place.check_path(output, options.overwrite, [*input_files(model), *inputs], options.json)
    proto = read_model(model)
    place.check_data_files(output, options.overwrite, model, proto)
    changed = change(proto)
    place.save_model(changed, Path(output), options.overwrite)
    _print_written_model(options, proto, changed, output)


def _print_written_model(options: Any, before: ModelProto, after: ModelProto, output: str) -> None:
    """Print the nodes, operators, inputs and outputs of the model that was written."""
    counts = Counter(node.op_type for node in after.graph.node)
    names = _model_signature(after)
    if options.json:
        sizes = {"nodes_before": len(before.graph.node), "nodes": names.pop("nodes")}
        print_json({"files": [output], **sizes, "operators": counts, **names})
        return
    rows = {
        "nodes": f"{len(before.graph.node)} -> {names.pop('nodes')}",
        "operators": ", ".join(f"{n} {printable(op)}" for op, n in counts.most_common(8)),
    }
    print_rows(rows | {kind: _names_text(each) for kind, each in names.items()}, output == STDOUT)
    if output != STDOUT:
        print_message(f"wrote {output}")


def _model_signature(proto: ModelProto) -> dict[str, Any]:
    return {
        "nodes": len(proto.graph.node),
        "inputs": [x.name for x in proto.graph.input],
        "outputs": [y.name for y in proto.graph.output],
    }


def _names_text(names: list[str]) -> str:
    return printable(join_first(names, 12))
