"""The inputs and outputs of a model, as tests compare them."""

from __future__ import annotations

import onnx


def input_names(model: onnx.ModelProto) -> list[str]:
    """Return the names of the inputs, in their order."""
    return [x.name for x in model.graph.input]


def output_names(model: onnx.ModelProto) -> list[str]:
    """Return the names of the outputs, in their order."""
    return [y.name for y in model.graph.output]


def output_shape(model: onnx.ModelProto, name: str) -> list[str | int]:
    """Return the lengths and symbols that the model states for an output."""
    (output,) = (y for y in model.graph.output if y.name == name)
    return [d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim]
