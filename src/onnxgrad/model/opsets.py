"""Models between versions of the standard: opsets, IR versions, local functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import AttributeProto, ModelProto, NodeProto, defs, numpy_helper, version_converter

from onnxgrad.errors import ModelError, first_line
from onnxgrad.model.constants import subgraphs
from onnxgrad.model.normalize import all_nodes, names, rename_uses, unused

_UNKNOWN = ("LayerNormalization", "SimplifiedLayerNormalization")  # the first until opset 17
_HIDDEN = "onnxgrad.hidden"  # a domain that the converter leaves alone
_OF_CONVERTER = re.compile(r"_v_\d+")

WORKING_OPSET = 18
NEWEST_OPSET = 26  # that onnxruntime 1.31 loads


def exists(node: ir.Node, opset: int) -> bool:
    """Tell whether the operator and the attributes of `node` are there at `opset`."""
    if node.domain:
        return True
    if not defs.has(node.op_type, opset):
        return False
    return node.attributes.keys() <= defs.get_schema(node.op_type, opset).attributes.keys()


def min_ir_version(imports: list[onnx.OperatorSetIdProto]) -> int:
    """Return the first IR version that knows these opsets."""
    return onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)  # noqa: TID251


def convert(model: ModelProto, version: int, target: int) -> ModelProto:
    """Return `model`, which is written to and has no functions, at a newer opset.

    Raises:
        ModelError: it cannot be converted.
    """
    model.ir_version = max(model.ir_version, 8)
    if version < 7:
        try:
            _keep_channels(model)
        except onnx.shape_inference.InferenceError as e:
            raise ModelError(f"its shapes cannot be inferred: {first_line(e)}") from e
    if version == 8 and any(node.op_type == "Scan" for node in all_nodes(model.graph.node)):
        raise ModelError(
            "the Scan of opset 8 runs over a batch, which onnx does not convert: export the model "
            "at opset 9 or newer"
        )
    upsampled = {n.output[0] for n in all_nodes(model.graph.node) if n.op_type == "Upsample"}
    try:
        model = _converted(model, target)
    except ModelError:
        raise
    except Exception as e:  # the converter raises several undeclared types
        raise ModelError(f"opset {version} cannot be raised to {target}: {first_line(e)}") from e
    if version < 11:
        _keep_places(model.graph, upsampled, {})
    return model


def _converted(proto: ModelProto, target: int) -> ModelProto:
    """Return `proto`, which is written to, at another opset.

    The converter fails at operators that onnx does not know, or not yet, and onnxruntime calls
    standard: its optimizer leaves them at any opset.
    """
    proto.opset_import.add(domain=_HIDDEN, version=1)
    _free_names(proto.graph)
    for node in all_nodes(proto.graph.node):
        if not node.domain and (node.op_type in _UNKNOWN or _trains(node)):
            node.domain = _HIDDEN
    read = {name for node in all_nodes(proto.graph.node) for name in node.input}
    read.update(y.name for y in proto.graph.output)
    made = version_converter.convert_version(proto, target)
    for node in all_nodes(made.graph.node):
        if node.domain == _HIDDEN:
            node.domain = ""
            if _trains(node):
                _state_training(node, read)
    for hidden in [o for o in made.opset_import if o.domain == _HIDDEN]:
        made.opset_import.remove(hidden)
    return made


def _free_names(graph: onnx.GraphProto) -> None:
    """Rename results that are named as the converter names its own, which it does not look for."""
    taken = set(names(graph))
    for held in (graph, *(g for node in all_nodes(graph.node) for g in subgraphs(node))):
        kept = {y.name for y in graph.output} if held is graph else set()
        for node in held.node:
            for i, old in enumerate(node.output):
                if _OF_CONVERTER.fullmatch(old) and old not in kept:
                    node.output[i] = unused(f"result{old}", taken)
                    rename_uses(held, old, node.output[i])


def _trains(node: NodeProto) -> bool:
    """Tell whether `node` is a BatchNormalization before opset 14 that uses the batch's statistics.

    Its outputs said so, and the converter refuses more than three.
    """
    return node.op_type == "BatchNormalization" and any(node.output[1:])


def _state_training(node: NodeProto, read: set[str]) -> None:
    """Write a BatchNormalization in training mode as from opset 14 on.

    Raises:
        ModelError: something reads the statistics of the batch, which are no outputs any more, or
            they are those of single elements (`spatial=0`, until opset 8).
    """
    where = f"BatchNormalization {node.name!r} (output {node.output[0]!r}) before opset 14"
    if used := [y for y in node.output[3:] if y in read]:
        raise ModelError(
            f"{where}: its output {used[0]!r}, a statistic of the batch, cannot be kept: compute "
            "it with ReduceMean, or export the model at opset 14 or newer"
        )
    if any(a.name == "spatial" and not a.i for a in node.attribute):
        raise ModelError(f"{where}: spatial=0 was removed from ONNX: export the model anew")
    del node.output[3:]
    kept = [a for a in node.attribute if a.name in ("epsilon", "momentum")]
    kept.append(AttributeProto(name="training_mode", type=AttributeProto.INT, i=1))
    del node.attribute[:]
    node.attribute.extend(kept)


def _keep_channels(model: ModelProto) -> None:
    """Write slopes of PRelu as what they were before opset 7: one for each channel, axis 1.

    Later they broadcast from the last axis, which the converter forgets.
    """
    for held in (held for node in model.graph.node for held in subgraphs(node)):
        for node in (n for n in all_nodes(held.node) if n.op_type == "PRelu"):
            raise ModelError(
                f"PRelu {node.name!r} (output {node.output[0]!r}) in the graph {held.name!r} "
                "before opset 7: export the model at opset 7 or newer"
            )
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in values if _has_shape(v)}
    lengths = {n: [d.dim_value for d in shape] for n, shape in shapes.items()}
    lengths |= {t.name: list(t.dims) for t in graph.initializer}
    taken = set(names(graph))
    for place, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "PRelu" or lengths.get(node.input[1]) in ([], [1]):
            continue
        for name in node.input:
            if name not in lengths:
                raise ModelError(
                    f"PRelu {node.name!r} (output {node.output[0]!r}) before opset 7: the rank of "
                    f"{name!r} must be known"
                )
        x, slope = (len(lengths[name]) for name in node.input)
        if x > 2 and slope == 1:
            made = unused(node.input[1], taken)
            wide = NodeProto(op_type="Unsqueeze", input=[node.input[1]], output=[made])
            axes = list(range(1, x - 1))
            wide.attribute.add(name="axes", type=onnx.AttributeProto.INTS, ints=axes)
            node.input[1] = made
            model.graph.node.insert(place, wide)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.HasField("shape")


def _keep_places(
    graph: onnx.GraphProto, upsampled: set[str], around: Mapping[str, onnx.TensorProto]
) -> None:
    """Say at each Resize what was meant before opset 11, which the converter forgets.

    Places were multiples of 1 / scale; onnxruntime takes the element before them where it makes an
    axis longer, and the one after where it makes it shorter.
    """
    tensors = {**around, **{t.name: t for t in graph.initializer}}
    tensors |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for node in graph.node:
        for inner in subgraphs(node):
            _keep_places(inner, upsampled, tensors)
        if node.op_type != "Resize":
            continue
        said = {"coordinate_transformation_mode": "asymmetric"}
        if not any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
            tensor = tensors.get(node.input[2])
            scales = np.array([0.5, 2]) if tensor is None else numpy_helper.to_array(tensor)
            longer = node.output[0] in upsampled or (scales >= 1).all()
            if not longer and (scales > 1).any():
                raise ModelError(
                    f"Resize {node.name!r} (output {node.output[0]!r}) before opset 11: nearest "
                    "needs constant scales, all at least one or all at most one"
                )
            said["nearest_mode"] = "floor" if longer else "ceil"
        for name, value in said.items():
            node.attribute.add(name=name, type=onnx.AttributeProto.STRING, s=value.encode())
