"""Cutting and reading models: choose inputs and outputs, list the trainable tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onnxgrad.errors import unknown
from onnxgrad.graph.inference import infer
from onnxgrad.graph.prepare import to_proto
from onnxgrad.graph.read import ModelLike, non_tensor, once, read, tensor_behind, to_ir
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.weights import sites


def get_train_initializer(onx: ModelLike) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """Return the float tensors that are trained when none is named, in graph order.

    They are the float initializers, the float `Constant` nodes of more than one element (inside
    branches too), under the name of the node's output, and the coefficients that linear models and
    support vector machines of `ai.onnx.ml` hold as attributes, as `<node>.coefficients`,
    `<node>.intercepts`, `<node>.rho`, `<node>.prob_a` and `<node>.prob_b`, flat as the attribute
    is.

    Returns:
        `{name: (value, tensor)}`.
    """
    found = {}
    for site in sites(read(onx)):
        if site.default:
            tensor = TensorProto()
            tensor.CopyFrom(site.read())
            tensor.name = site.name
            found[site.name] = (site.array(), tensor)
    return found


def select_model_inputs_outputs(
    onx: ModelLike, outputs: Sequence[str] | None = None, inputs: Sequence[str] | None = None
) -> ModelProto:
    """Return the part of `onx` between `inputs` and `outputs`, without the nodes it needs no more.

    Args:
        onx: model, serialized model or path; never modified.
        outputs: names of any tensors of the graph; None keeps the outputs.
        inputs: names of any tensors of the graph; None keeps the inputs, all of them.

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
    infer(model)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    declared = list(graph.inputs)
    for names in (outputs or (), inputs or ()):
        for name in once("tensor", names):
            if name not in values:
                raise unknown("tensor", name, [str(v.name) for v in (*graph.outputs, *declared)])
    if outputs is not None:
        graph.outputs[:] = [values[name] for name in outputs]
    if inputs is not None:
        graph.inputs[:] = [as_input(graph, values[name]) for name in inputs]
    tidy(model)
    lost = [v.name for v in declared if v not in graph.inputs and v.uses()]
    if lost:
        raise ValueError(f"the outputs also depend on {lost}: add to `inputs`")
    return to_proto(model)


def as_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return an input that takes the place of `value`."""
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
