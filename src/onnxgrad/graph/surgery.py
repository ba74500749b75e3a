"""Cutting and reading models: choose inputs and outputs, list the trainable tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onnxgrad.errors import unknown
from onnxgrad.graph import shapes
from onnxgrad.graph.prepare import to_proto
from onnxgrad.graph.read import ModelLike, read, to_ir
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.weights import sites


def get_train_initializer(onx: ModelLike) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """Return the float tensors that are trained when none is named, in graph order.

    They are the float initializers, the float `Constant` nodes of more than one element (inside
    branches too), under the name of the node's output, and the coefficients that `ai.onnx.ml`
    linear operators hold as attributes, as `<node>.coefficients` and `<node>.intercepts`, flat as
    the attribute is.

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
        ValueError: an unknown name, or outputs that depend on an input that was not chosen.
        ModelError: `onx` cannot be read.
    """
    model = to_ir(read(onx))
    shapes.infer(model)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph)
    declared = list(graph.inputs)
    for name in (*(outputs or ()), *(inputs or ())):
        if name not in values:
            raise unknown("tensor", name, [str(v.name) for v in (*graph.outputs, *declared)])
    if outputs is not None:
        graph.outputs[:] = [values[name] for name in outputs]
    if inputs is not None:
        graph.inputs[:] = [_as_input(values[name]) for name in inputs]
    tidy(model)
    lost = [v.name for v in declared if v not in graph.inputs and v.uses()]
    if lost:
        raise ValueError(f"the outputs also depend on {lost}: add to `inputs`")
    return to_proto(model)


def _as_input(value: ir.Value) -> ir.Value:
    """Return an input that takes the place of `value`."""
    if value.producer() is None:
        return value
    made = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.name = None
    ir.convenience.replace_all_uses_with(value, made, replace_graph_outputs=True)
    return made
