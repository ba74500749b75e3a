"""Cutting, reading and changing models: inputs and outputs, constants, opsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import non_tensor, tensor_behind, to_ir, to_proto
from onnxgrad.model.normalize import names
from onnxgrad.model.read import ModelLike, once, read
from onnxgrad.model.weights import constant_refs, replace
from onnxgrad.reporting import level_of, logger, reporting


def get_train_initializer(onx: ModelLike) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """Return the float tensors that `onnx_derivative` takes for weights when none is named.

    They are in graph order: the float initializers, the float `Constant` nodes of more than one
    element (inside branches too), under the name of the node's output, and the coefficients that
    linear models and support vector machines of `ai.onnx.ml` hold as attributes, as
    `<node>.coefficients`, `<node>.intercepts`, `<node>.rho`, `<node>.prob_a` and `<node>.prob_b`,
    flat as the attribute is. What decides sizes is left out: the ends of a Range, the scales of a
    Resize.

    Trainers choose by role among all: see `trainable`.

    Returns:
        `{name: (value, tensor)}`.
    """
    found = {}
    for ref in constant_refs(read(onx)):
        if ref.default:
            tensor = TensorProto()
            tensor.CopyFrom(ref.read())
            tensor.name = ref.name
            found[ref.name] = (ref.array(), tensor)
    return found


def select_model_inputs_outputs(
    onx: ModelLike,
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    infer_shapes: bool = True,
    verbose: int = 0,
) -> ModelProto:
    """Return the part of `onx` between `inputs` and `outputs`, without the nodes it needs no more.

    Args:
        onx: model, serialized model or path; never modified.
        outputs: names of any tensors of the graph; None keeps the outputs.
        inputs: names of any tensors of the graph; None keeps the inputs, all of them.
        infer_shapes: False declares the shapes that `onx` states, and no others. The types of new
            inputs and outputs are inferred in any case.
        verbose: 1 reports the number of nodes through `logging`, to stderr where it is not
            configured; 2 every node, kept or removed.

    Raises:
        ValueError: an unknown name, one named twice, an output that is no tensor, or outputs that
            depend on an input that was not chosen.
        ModelError: `onx` cannot be read.
    """
    proto = read(onx)
    for y in proto.graph.output:
        if non_tensor(y) and (outputs is None or y.name in outputs):
            behind = tensor_behind(proto, y.name)
            hint = f", {behind!r} for one" if behind else ""
            raise ValueError(f"{y.name!r} is no tensor: name outputs that are{hint}")
    model = to_ir(proto)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    stated = {v: v.shape.copy() if v.shape else v.shape for v in values.values()}
    infer(model)
    if not infer_shapes:
        for value, shape in stated.items():
            value.shape = shape
    declared, nodes = list(graph.inputs), list(graph)
    for chosen in (outputs or (), inputs or ()):
        for name in once("tensor", chosen):
            if name not in values:
                raise unknown("tensor", name, [str(v.name) for v in (*graph.outputs, *declared)])
    if outputs is not None:
        graph.outputs[:] = [values[name] for name in outputs]
    if inputs is not None:
        graph.inputs[:] = [as_input(graph, values[name]) for name in inputs]
    tidy(model)
    name_rest(graph)
    lost = [v.name for v in declared if v not in graph.inputs and v.uses()]
    if lost:
        raise ValueError(f"the outputs also depend on {lost}: add to `inputs`")
    _report(nodes, graph, verbose)
    return to_proto(model)


def _report(nodes: Sequence[ir.Node], graph: ir.Graph, verbose: int) -> None:
    """Log which of `nodes` are still in `graph`."""
    with reporting(level_of(verbose)):
        for node in nodes:
            outputs = ", ".join(str(y.name) for y in node.outputs)
            fate = "kept" if node.graph is graph else "removed"
            logger.debug("%s %s -> %s: %s", node.op_type, node.name, outputs, fate)
        logger.info("%d of %d nodes are kept", sum(1 for _ in graph), len(nodes))


def as_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return an input that takes the place of `value`, which has no name then: see `name_rest`."""
    if value.dtype is None:
        raise ValueError(f"the type of {value.name!r} is not known: it cannot become an input")
    if value.producer() is None:
        if not value.is_graph_input():
            graph.initializers.pop(str(value.name))
        return value
    made = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.name = None
    ir.convenience.replace_all_uses_with(value, made, replace_graph_outputs=True)
    return made


def name_rest(graph: ir.Graph) -> None:
    """Name the values without one: replaced by an input, of nodes kept for another output."""
    nameless = [y for node in graph for y in node.outputs if y.name is None]
    if nameless:
        op = Emit(graph)
        for y in nameless:
            y.name = op.name("unused")


def replace_initializers_into_onnx(model: ModelLike, results: Mapping[str, Any]) -> ModelProto:
    """Return `model` with new values for some of its constants, written to where they are kept.

    Args:
        model: model, serialized model or path; never modified.
        results: `{name: value}`, of arrays or `OrtValue`, of the shape that the constant has, such
            as `trained_coef_`. Any constant has a name: initializers, `Constant` nodes (inside
            branches too), coefficients of `ai.onnx.ml` operators (see `get_train_initializer`).
            Floats are rounded to the dtype of the constant.

    Raises:
        ValueError: an unknown name, a value of another shape, or one that the dtype of the constant
            cannot hold.
        ModelError: `model` cannot be read.
    """
    return replace(read(model), {name: _array(value) for name, value in results.items()})


def add_initializer(model: ModelLike, name: str, value: Any) -> ModelProto:
    """Return `model` with one more initializer.

    Args:
        model: model, serialized model or path; never modified.
        name: its name, which no other value of the model has, branches included.
        value: array or `OrtValue`; the initializer has its shape and dtype.

    Raises:
        ValueError: the name is taken or empty, or ONNX has no such dtype.
        ModelError: `model` cannot be read.
    """
    made = ModelProto()
    made.CopyFrom(read(model, promised=[name]))
    if not name:
        raise ValueError("an initializer needs a name")
    if name in names(made.graph):
        raise ValueError(f"the model has a value called {name!r} already: choose another name")
    array = _array(value)
    try:
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    except (KeyError, NotImplementedError, TypeError, ValueError) as e:
        raise ValueError(f"{name!r}: ONNX has no tensors of {array.dtype}") from e
    made.ir_version = max(made.ir_version, 4)  # before that, initializers had to be inputs too
    return made


def get_onnx_opset(onx: ModelLike, domain: str = "") -> int:
    """Return the version of the opset that `onx` imports for a domain; "" is "ai.onnx".

    Raises:
        ValueError: `onx` does not import the domain.
        ModelError: `onx` cannot be read.
    """
    versions: dict[str, int] = {}
    for entry in read(onx).opset_import:
        known = "" if entry.domain == "ai.onnx" else entry.domain
        versions[known] = max(entry.version, versions.get(known, 0))
    asked = "" if domain == "ai.onnx" else domain
    if asked not in versions:
        raise unknown("domain", domain, versions)
    return versions[asked]


def _array(value: Any) -> np.ndarray:
    """Return an array or an `OrtValue` as an array."""
    return value.numpy() if hasattr(value, "ortvalue_from_numpy") else np.asarray(value)
