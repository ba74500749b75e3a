"""Public functions that cut models, and read and replace their constants and opsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.constants import normalize_domain, opset_versions
from onnxgrad.model.convert import is_non_tensor, source_tensor_name, to_ir, to_proto_and_free
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.traversal import keep_only, names_read_by, value_names
from onnxgrad.model.weights import constant_refs, replace_constants
from onnxgrad.reporting import logger, logging_level, reporting, warn_once


def get_train_initializer(onx: ModelLike) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """Return the float tensors that are the weights of `onnx_derivative` by default.

    In graph order, these are

    - float initializers;
    - float `Constant` nodes of more than one element, also in subgraphs, under the name of the
      output of the node;
    - the coefficients of linear models and support vector machines of `ai.onnx.ml`, under the names
      `<node>.coefficients`, `<node>.intercepts`, `<node>.rho`, `<node>.prob_a` and `<node>.prob_b`,
      flat as the attributes are.

    Settings of operators are left out, such as the ends of a Range and the scales of a Resize.
    Trainers choose their weights by role instead: see `trainable`.

    Args:
        onx: model, serialized model or path; never modified.

    Returns:
        `{name: (value, tensor)}`.

    Raises:
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> {name: value for name, (value, tensor) in og.graph.get_train_initializer(model).items()}
        {'w': array([2., 3.], dtype=float32)}
    """
    weights = {}
    for ref in constant_refs(read(onx)):
        if ref.default:
            tensor = deepcopy(ref.read())
            tensor.name = ref.name
            weights[ref.name] = (ref.array(), tensor)
    return weights


def select_model_inputs_outputs(
    onx: ModelLike,
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    infer_shapes: bool = True,
    verbose: int = 0,
) -> ModelProto:
    """Return the part of `onx` that computes `outputs` from `inputs`.

    Args:
        onx: model, serialized model or path; never modified.
        outputs: names of any tensors of the graph; None keeps the outputs.
        inputs: names of any tensors of the graph; None keeps all inputs. Inputs with a default stay
            inputs where the outputs depend on them.
        infer_shapes: False declares only the shapes that `onx` declares. The types of new inputs
            and outputs are inferred in any case.
        verbose: 1 reports the number of nodes through `logging`, to stderr where it is not
            configured; 2 every node, kept or removed.

    Raises:
        ValueError: an unknown name, one named twice, an output that is no tensor, or outputs that
            depend on an input that is not in `inputs`.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { h = Exp(x)  y = Neg(h) }''')
        >>> part = og.graph.select_model_inputs_outputs(model, outputs=["h"])
        >>> [node.op_type for node in part.graph.node]
        ['Exp']
    """
    proto = read(onx)
    _check_outputs_are_tensors(proto, outputs)
    model = to_ir(proto)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    declared_shapes = {v: v.shape.copy() if v.shape else v.shape for v in values.values()}
    infer(model)
    if not infer_shapes:
        for value, shape in declared_shapes.items():
            value.shape = shape
    declared, nodes = list(graph.inputs), list(graph)
    for chosen in (outputs or (), inputs or ()):
        for name in require_unique_names("tensor", chosen):
            if name not in values:
                inner = [y for node in reversed(graph) for y in node.outputs]
                every = dict.fromkeys(str(v.name) for v in (*graph.outputs, *declared, *inner))
                raise unknown("tensor", name, every)
    if outputs is not None:
        graph.outputs[:] = [values[name] for name in outputs]
    if inputs is not None:
        optional = [x for x in declared if x.is_initializer() and x.name not in inputs]
        graph.inputs[:] = [*(replace_by_input(graph, values[name]) for name in inputs), *optional]
    tidy(model)
    name_unnamed_values(graph)
    lost = [v.name for v in declared if v not in graph.inputs and v.uses()]
    if lost:
        raise ValueError(
            f"the outputs also depend on the inputs {lost}: add these names to `inputs`"
        )
    _log_kept_and_removed_nodes(nodes, graph, verbose)
    return to_proto_and_free(model)


def replace_maps_by_tensors(proto: ModelProto) -> tuple[ModelProto, dict[str, str]]:
    """Return `proto` with the outputs of ZipMap nodes (maps) replaced by the tensors that the
    ZipMaps read.

    Also return the names of these tensors, by the names of the maps. A warning tells the names.
    """
    maps = {y: n.input[0] for n in proto.graph.node if n.op_type == "ZipMap" for y in n.output}
    found = {y.name: maps[y.name] for y in proto.graph.output if y.name in maps}
    if not found:
        return proto, {}
    for name, tensor in found.items():
        warn_once(f"the output {name!r} has maps: the tensor {tensor!r} in them is taken instead")
    own = {y.name for y in proto.graph.output}
    changed = deepcopy(proto)
    types = {v.name: v.type for v in proto.graph.value_info}
    keep_only(changed.graph.node, lambda n: n.op_type != "ZipMap" or n.output[0] not in found)
    keep_only(changed.graph.output, lambda y: found.get(y.name) not in own)
    for y in changed.graph.output:
        if y.name in found:
            tensor = found[y.name]
            y.Clear()
            y.name = tensor
            y.type.tensor_type.elem_type = TensorProto.FLOAT
            y.type.CopyFrom(types.get(tensor, y.type))
    return changed, found


def drop_unused_inputs(proto: ModelProto) -> None:
    """Remove the inputs of a model that no node reads and that are no outputs, in place."""
    used = {name for node in proto.graph.node for name in names_read_by(node)}
    used.update(y.name for y in proto.graph.output)
    keep_only(proto.graph.input, lambda x: x.name in used)


def _check_outputs_are_tensors(proto: ModelProto, outputs: Sequence[str] | None) -> None:
    """Raise `ValueError` if one of the outputs called `outputs` is no tensor; None checks all
    outputs.
    """
    for y in proto.graph.output:
        if is_non_tensor(y) and (outputs is None or y.name in outputs):
            source = source_tensor_name(proto, y.name)
            hint = f", such as {source!r}" if source else ""
            raise ValueError(f"the output {y.name!r} is no tensor: name outputs that are{hint}")


def _log_kept_and_removed_nodes(nodes: Sequence[ir.Node], graph: ir.Graph, verbose: int) -> None:
    """Log for each node of `nodes` whether it is kept in `graph` or removed."""
    with reporting(logging_level(verbose)):
        for node in nodes:
            outputs = ", ".join(str(y.name) for y in node.outputs)
            fate = "kept" if node.graph is graph else "removed"
            logger.debug("%s %s -> %s: %s", node.op_type, node.name, outputs, fate)
        logger.info("%d of %d nodes are kept", sum(1 for _ in graph), len(nodes))


def replace_by_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Replace `value` by a new graph input of the same name and return the input; `value` is left
    without a name.
    """
    if value.dtype is None:
        raise ValueError(
            f"the type of the new input {value.name!r} is unknown: declare its type in value_info"
        )
    if value.producer() is None:
        if not value.is_graph_input():
            graph.initializers.pop(str(value.name))
        return value
    new_input = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.name = None
    ir.convenience.replace_all_uses_with(value, new_input, replace_graph_outputs=True)
    return new_input


def name_unnamed_values(graph: ir.Graph) -> None:
    """Give new names to node results without a name, such as `replace_by_input` leaves, in
    place.
    """
    unnamed = [y for node in graph for y in node.outputs if y.name is None]
    if unnamed:
        op = Emit(graph)
        for y in unnamed:
            y.name = op.name("unused")


def replace_initializers_into_onnx(model: ModelLike, results: Mapping[str, Any]) -> ModelProto:
    """Return `model` with new values for some of its constants.

    Args:
        model: model, serialized model or path; never modified.
        results: `{name: value}`, such as `trained_coef_`: arrays or `OrtValue`s of the shape of the
            constant. Constants are initializers, `Constant` nodes (also in subgraphs), and
            coefficients of `ai.onnx.ml` operators, see `get_train_initializer`. Floats are rounded
            to the dtype of the constant.

    Raises:
        ValueError: an unknown name, a value of another shape, or one that the dtype of the constant
            cannot hold.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> changed = og.graph.replace_initializers_into_onnx(model, {"w": [4, 5]})
        >>> og.graph.get_train_initializer(changed)["w"][0]
        array([4., 5.], dtype=float32)
    """
    return replace_constants(
        read(model), {name: _as_array(value) for name, value in results.items()}
    )


def add_initializer(model: ModelLike, name: str, value: Any) -> ModelProto:
    """Return `model` with one more initializer.

    Args:
        model: model, serialized model or path; never modified.
        name: its name, which no other value of the model or of its subgraphs has. Nodes may read
            this name already.
        value: array or `OrtValue`; the initializer has its shape and dtype.

    Raises:
        ValueError: the name is taken or empty, or ONNX has no such dtype.
        ModelError: `model` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Mul(x, w) }''')
        >>> model = og.graph.add_initializer(model, "w", np.array([2, 3], np.float32))
        >>> [tensor.name for tensor in model.graph.initializer]
        ['w']
    """
    extended = deepcopy(read(model, promised=[name]))
    if not name:
        raise ValueError("the name of an initializer must not be empty: pass a name")
    if name in value_names(extended.graph):
        raise ValueError(f"the model has a value called {name!r} already: choose another name")
    array = _as_array(value)
    try:
        extended.graph.initializer.append(numpy_helper.from_array(array, name))
    except (KeyError, NotImplementedError, TypeError, ValueError) as e:
        raise ValueError(
            f"the initializer {name!r} cannot be of {array.dtype}, which ONNX does not have: "
            "convert the value to another dtype"
        ) from e
    # before IR version 4, initializers had to be inputs
    extended.ir_version = max(extended.ir_version, 4)
    return extended


def get_onnx_opset(onx: ModelLike, domain: str = "") -> int:
    """Return the version of the opset that `onx` imports for a domain.

    Args:
        onx: model, serialized model or path; never modified.
        domain: "" or "ai.onnx" for the standard operators.

    Raises:
        ValueError: `onx` does not import the domain.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N] x) => (float[N] y) { y = Exp(x) }''')
        >>> og.graph.get_onnx_opset(model)
        20
    """
    versions = opset_versions(read(onx).opset_import)
    if normalize_domain(domain) not in versions:
        raise unknown("domain", domain, versions)
    return versions[normalize_domain(domain)]


def _as_array(value: Any) -> np.ndarray:
    """Return an array for an array-like or an `OrtValue`."""
    return value.numpy() if hasattr(value, "ortvalue_from_numpy") else np.asarray(value)
