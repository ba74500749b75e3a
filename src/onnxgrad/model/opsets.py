"""Conversion of models to newer opsets, and the IR versions that opsets require."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, defs, numpy_helper
from onnx_ir.schemas import OpSignature, Parameter

from onnxgrad.errors import ModelError, first_line
from onnxgrad.model.constants import normalize_domain, opset_versions
from onnxgrad.model.external import copy_without_data, copy_without_elements, restore_data
from onnxgrad.model.scopes import rename_values, unused_name
from onnxgrad.model.traversal import (
    all_nodes,
    declared_names,
    keep_only,
    subgraphs,
    value_names,
    walk_graphs,
)
from onnxgrad.operators.attributes import cpu_kernels

# operators that onnxruntime has in the standard domain; onnx has the first from opset 17 on
_NOT_STANDARD = ("LayerNormalization", "SimplifiedLayerNormalization")
_HIDDEN = "onnxgrad.hidden"  # a domain whose nodes the converter does not change
_OLD_IR = 8  # an IR version that any onnxruntime loads
# the last opset that onnxruntime states for a kernel of one operator version
_NO_END = (1 << 31) - 1
_CONVERTER_NAME = re.compile(r"_v_\d+")  # names of the results that the converter of onnx adds

WORKING_OPSET = 18


@cache
def newest_opset() -> int:
    """Return the newest opset of onnx that the installed onnxruntime loads."""
    newest = defs.onnx_opset_version()
    return next(v for v in range(newest, WORKING_OPSET - 1, -1) if _onnxruntime_loads(v, _OLD_IR))


@cache
def newest_ir_version() -> int:
    """Return the newest IR version of onnx that the installed onnxruntime loads."""
    return next(
        v for v in range(onnx.IR_VERSION, _OLD_IR - 1, -1) if _onnxruntime_loads(WORKING_OPSET, v)
    )


def _onnxruntime_loads(opset: int, ir_version: int) -> bool:
    """Return whether onnxruntime loads a model, a single Identity, of the opset `opset` and the IR
    version `ir_version`.
    """
    model = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": {opset}]>'
        "versions (float x) => (float y) { y = Identity(x) }"
    )
    import onnxruntime as ort  # imported here, as many commands run no model

    options = ort.SessionOptions()
    options.log_severity_level = 4
    slowest = ort.get_available_providers()[-1:]  # the CPU
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=slowest)
    except Exception:  # onnxruntime's errors have no common base
        return False
    return True


def opset_has_node(node: ir.Node, opset: int) -> bool:
    """Return whether the standard opset `opset` has the operator of `node`, with all its attributes
    and operand types.
    """
    if node.domain:
        return True
    known = _operator_signature(node.op_type, opset)
    return (
        known is not None
        and {x.name for x in known.attributes} >= node.attributes.keys()
        and _types_are_allowed(known.inputs, node.inputs)
        and _types_are_allowed(known.outputs, node.outputs)
    )


def onnxruntime_runs_node(node: ir.Node, opset: int) -> bool:
    """Return whether onnxruntime has a kernel, or onnx a function body, for `node` at `opset`."""
    return bool(node.domain) or _onnxruntime_runs_operator(node.op_type, opset)


@cache
def _onnxruntime_runs_operator(op_type: str, opset: int) -> bool:
    """Return whether onnxruntime runs the standard operator `op_type` at `opset`: see
    `onnxruntime_runs_node`.
    """
    schema = operator_schema(op_type, opset)
    if schema is None:
        return False
    since, kernels = schema.since_version, cpu_kernels().get(("", op_type), ())
    has_body = schema.has_function or schema.has_context_dependent_function
    return has_body or any(
        first == since or first < since <= last < _NO_END for first, last in kernels
    )


def means_same_at_opset(node: ir.Node, opset: int, other: int) -> bool:
    """Return whether `node`, written for the opset `opset`, computes the same at the opset `other`,
    assuming that `other` has its operator.
    """
    if node.domain or opset == other:
        return True
    a, b = (_operator_signature(node.op_type, version) for version in (opset, other))
    if a is None or b is None:
        return False
    n, before = len(node.inputs), {x.name: x.default for x in a.attributes}
    same_inputs = [x.name for x in a.inputs[:n]] == [x.name for x in b.inputs[:n]]
    return same_inputs and all(x.default == before.get(x.name, x.default) for x in b.attributes)


def operator_schema(op_type: str, opset: int, domain: str = "") -> Any:
    """Return the schema of an operator; None if `opset` lacks the operator or deprecates it."""
    if opset < 1 or not defs.has(op_type, opset, domain):
        return None
    schema = defs.get_schema(op_type, opset, domain)
    return None if schema.deprecated else schema


@cache
def _operator_signature(op_type: str, opset: int) -> OpSignature | None:
    """Return the signature of an operator of ONNX; None if `opset` lacks the operator."""
    schema = operator_schema(op_type, opset)
    return None if schema is None else OpSignature.from_op_schema(schema)


def _types_are_allowed(parameters: Sequence[Parameter], values: Sequence[ir.Value | None]) -> bool:
    """Return whether each of `values`, operands or results of a node, has a type that its parameter
    in `parameters` allows.

    Unknown types, and types that are no tensor types, are not checked.
    """
    return all(
        v.type in parameters[min(i, len(parameters) - 1)].type_constraint.allowed_types
        for i, v in enumerate(values)
        if v is not None and isinstance(v.type, ir.TensorType)
    )


def min_ir_version(imports: list[onnx.OperatorSetIdProto]) -> int:
    """Return the first IR version of ONNX that allows the opsets `imports`."""
    return onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)  # noqa: TID251


def upgrade_opset(model: ModelProto, version: int, target: int) -> ModelProto:
    """Return `model`, whose opset is `version`, converted to the newer opset `target`; `model` may
    be modified.

    It must have no local functions.

    Raises:
        ModelError: the model cannot be converted.
    """
    model = import_all_domains(model)
    model.ir_version = max(model.ir_version, 8)
    if version < 7:
        try:
            _align_prelu_slopes(model)
        except onnx.shape_inference.InferenceError as e:
            raise ModelError(
                f"its shapes cannot be inferred: {first_line(e)}; export the model at opset 7 or "
                "newer"
            ) from e
    if version == 8 and any(node.op_type == "Scan" for node in all_nodes(model.graph.node)):
        raise ModelError(
            "the Scan of opset 8 has a batch axis, which onnx does not convert: export the model "
            "at opset 9 or newer"
        )
    upsampled = {n.output[0] for n in all_nodes(model.graph.node) if n.op_type == "Upsample"}
    model = _convert_by_onnx(model, target)
    if version < 11:
        _add_resize_attributes(model.graph, upsampled)
        dtypes = _declared_dtypes(model.graph).values()
        if TensorProto.FLOAT16 in dtypes or TensorProto.DOUBLE in dtypes:
            _cast_clip_bounds(model)
    return model


def downgrade_opset(model: ModelProto, target: int) -> ModelProto:
    """Return a copy of `model`, a model without local functions, converted to the older opset
    `target`.

    Raises:
        ModelError: the model cannot be converted.
    """
    try:
        return _convert_by_onnx(model, target)
    except ModelError as e:
        raise ModelError(f"{e}. Export the model at that opset, or choose a newer opset") from e


def _convert_by_onnx(proto: ModelProto, target: int) -> ModelProto:
    """Return a copy of `proto` that the version converter of onnx converted to the opset `target`.

    The converter of onnx fails for operators that onnxruntime has in the domain of ONNX and onnx
    lacks, or has in later opsets only; the optimizer of onnxruntime writes them at any opset. They
    are moved to another domain during the conversion.
    """
    bare = import_all_domains(
        copy_without_data(proto)
    )  # the converter would copy the data several times
    bare.opset_import.add(domain=_HIDDEN, version=1)
    _avoid_converter_names(bare.graph)
    for node in all_nodes(bare.graph.node):
        if not node.domain and (node.op_type in _NOT_STANDARD or _is_training_batch_norm(node)):
            node.domain = _HIDDEN
    read = {name for node in all_nodes(bare.graph.node) for name in node.input}
    read.update(declared_names(bare.graph.output))
    try:
        converted = onnx.version_converter.convert_version(bare, target)
    except Exception as e:  # the converter raises several undeclared types
        version = opset_versions(proto.opset_import).get("")
        change = f"from opset {version} to {target}"
        raise ModelError(f"the model cannot be converted {change}: {first_line(e)}") from e
    restore_data(converted, proto)
    for node in all_nodes(converted.graph.node):
        if node.domain == _HIDDEN:
            node.domain = ""
            if _is_training_batch_norm(node):
                _rewrite_training_batch_norm(node, read)
    keep_only(converted.opset_import, lambda entry: entry.domain != _HIDDEN)
    return converted


def import_all_domains(model: ModelProto) -> ModelProto:
    """Return `model` if it imports the operator domains of all its nodes, or else a copy that
    imports the missing domains.

    onnxruntime runs models without these imports. Its optimizer for transformers adds them when it
    saves a model.
    """
    domains = {normalize_domain(node.domain) for node in all_nodes(model.graph.node)} - {""}
    if not (missing := domains - opset_versions(model.opset_import).keys()):
        return model
    copy = copy_without_elements(model, lambda tensor: False)
    for domain in sorted(missing):
        copy.opset_import.add(domain=domain, version=1)
    return copy


def _avoid_converter_names(graph: onnx.GraphProto) -> None:
    """Rename, in place, the node results whose names (`_v_1`) the version converter of onnx may
    give to new results.

    The converter does not check whether a name is taken.
    """
    taken, outputs = set(value_names(graph)), declared_names(graph.output)
    entries = list(walk_graphs(graph))  # the list keeps the graphs alive, and so their ids unique
    results = ((g, y) for g, node in entries if node is not None for y in node.output)
    chosen = {
        (id(g), y): unused_name(f"result{y}", taken)
        for g, y in results
        if _CONVERTER_NAME.fullmatch(y) and not (g is graph and y in outputs)
    }
    rename_values(graph, chosen)


def _is_training_batch_norm(node: NodeProto) -> bool:
    """Return whether `node` is a BatchNormalization before opset 14 in training mode.

    This is a node with several outputs; the converter fails for more than three.
    """
    return node.op_type == "BatchNormalization" and any(node.output[1:])


def _rewrite_training_batch_norm(node: NodeProto, read: set[str]) -> None:
    """Rewrite a BatchNormalization in training mode, of an opset before 14, for opset 14, in place.

    At opset 14, the operator returns no statistics of the batch, and statistics are per channel.
    `read` are the names of all values that nodes and outputs read.
    """
    where = f"BatchNormalization {node.name!r} (output {node.output[0]!r}) before opset 14"
    if used := [y for y in node.output[3:] if y in read]:
        raise ModelError(
            f"{where}: its output {used[0]!r}, a statistic of the batch, cannot be kept: compute "
            "it with ReduceMean, or export the model at opset 14 or newer"
        )
    if any(a.name == "spatial" and not a.i for a in node.attribute):
        raise ModelError(f"{where}: spatial=0 was removed from ONNX: export the model again")
    del node.output[3:]
    keep_only(node.attribute, lambda a: a.name in ("epsilon", "momentum"))
    node.attribute.add(name="training_mode", type=AttributeProto.INT, i=1)


def _align_prelu_slopes(model: ModelProto) -> None:
    """Reshape the slopes of PRelu nodes for opset 7, in place: before opset 7, slopes are aligned
    with axis 1.

    From opset 7 on, slopes broadcast to the last axes; the converter does not reshape them.
    """
    for graph, node in walk_graphs(model.graph):
        if node is not None and node.op_type == "PRelu" and graph is not model.graph:
            raise ModelError(
                f"PRelu {node.name!r} (output {node.output[0]!r}) in the subgraph {graph.name!r} "
                "before opset 7: export the model at opset 7 or newer"
            )
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {v.name: v.type.tensor_type for v in values}
    shapes = {name: kind.shape.dim for name, kind in types.items() if kind.HasField("shape")}
    lengths = {name: [d.dim_value for d in dims] for name, dims in shapes.items()}
    lengths |= {t.name: list(t.dims) for t in graph.initializer}
    taken = set(value_names(graph))
    for index, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "PRelu" or lengths.get(node.input[1]) in ([], [1]):
            continue
        for name in node.input:
            if name not in lengths:
                raise ModelError(
                    f"PRelu {node.name!r} (output {node.output[0]!r}) before opset 7: declare the "
                    f"shape of {name!r} in value_info"
                )
        x, slope = (len(lengths[name]) for name in node.input)
        if x > 2 and slope == 1:
            reshaped = unused_name(node.input[1], taken)
            unsqueeze = NodeProto(op_type="Unsqueeze", input=[node.input[1]], output=[reshaped])
            unsqueeze.attribute.add(name="axes", type=AttributeProto.INTS, ints=range(1, x - 1))
            node.input[1] = reshaped
            model.graph.node.insert(index, unsqueeze)


def _nodes_with_visible_values(
    graph: onnx.GraphProto,
    describe: Callable[[onnx.GraphProto], dict[str, Any]],
    outer: ChainMap[str, Any],
) -> Iterator[tuple[NodeProto, ChainMap[str, Any]]]:
    """Yield pairs (node, visible values) for the nodes of `graph` and its subgraphs.

    A scope has the entries of `describe(graph)` for the graph of the node and the graphs around it.
    """
    known = outer.new_child(describe(graph))
    for node in graph.node:
        yield node, known
        for inner in subgraphs(node):
            yield from _nodes_with_visible_values(inner, describe, known)


def _constant_tensors(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """Return `{name: tensor}` of the initializers and Constant nodes of a graph."""
    constants = {t.name: t for t in graph.initializer}
    return constants | {
        n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"
    }


def _declared_dtypes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return `{name: dtype}` that a graph declares for its values and initializers."""
    values = (*graph.input, *graph.value_info, *graph.output)
    dtypes = {v.name: v.type.tensor_type.elem_type for v in values}
    return dtypes | {t.name: t.data_type for t in graph.initializer}


def _add_resize_attributes(graph: onnx.GraphProto, upsampled: set[str]) -> None:
    """Add to each Resize, in place, the attributes that state what Resize did before opset 11: the
    converter of onnx does not add them.

    Coordinates were multiples of 1 / scale. For the mode "nearest", onnxruntime rounds them down
    where the axis gets longer, and up where it gets shorter. `upsampled` are the outputs of nodes
    that were Upsample.
    """
    for node, constants in _nodes_with_visible_values(graph, _constant_tensors, ChainMap()):
        if node.op_type != "Resize":
            continue
        attributes = {"coordinate_transformation_mode": "asymmetric"}
        if not any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
            tensor = constants.get(node.input[2])
            scales = np.array([0.5, 2]) if tensor is None else numpy_helper.to_array(tensor)
            longer = node.output[0] in upsampled or (scales >= 1).all()
            if not longer and (scales > 1).any():
                raise ModelError(
                    f"Resize {node.name!r} (output {node.output[0]!r}) before opset 11: the mode "
                    "nearest requires constant scales, all at least 1 or all at most 1: export the "
                    "model at opset 11 or newer"
                )
            attributes["nearest_mode"] = "floor" if longer else "ceil"
        for name, value in attributes.items():
            node.attribute.add(name=name, type=AttributeProto.STRING, s=value.encode())


def _cast_clip_bounds(model: ModelProto) -> None:
    """Cast the bounds of Clip and the padding value of Pad to the dtype of the first operand, in
    place: the converter of onnx writes float32.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    nodes = _nodes_with_visible_values(model.graph, _constant_tensors, ChainMap())
    same = _nodes_with_visible_values(inferred, _declared_dtypes, ChainMap())
    for (node, constants), (_, dtypes) in zip(nodes, same, strict=True):
        dtype = dtypes.get(node.input[0], 0) if node.op_type in ("Clip", "Pad") else 0
        for name in node.input[1:]:
            tensor = constants.get(name)
            if dtype and tensor is not None and tensor.data_type == TensorProto.FLOAT != dtype:
                # a missing bound is written as the largest float32
                with np.errstate(over="ignore"):
                    array = numpy_helper.to_array(tensor).astype(ir.DataType(dtype).numpy())
                tensor.CopyFrom(numpy_helper.from_array(array))
