"""`Draft`: a small model under construction, from declared inputs to a `ModelProto`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import printable, printable_lines
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.model.opsets import WORKING_OPSET, newest_opset
from onnxgrad.model.validate import checker_context
from onnxgrad.operators.shapes import constant

OLDEST_OPSET = 14

Shape = Sequence[int | str | None]


class Draft:
    """A small model under construction: `input` declares an input, `op` writes nodes, and `model`
    returns the `ModelProto`.

    Args:
        name: name of the graph.
        opset: 14 to the newest that onnxruntime loads; None is 18.
        dtype: numpy dtype of the floats.

    Raises:
        ValueError: an opset out of range, or a dtype that is not floating.
    """

    def __init__(self, name: str, opset: int | None = None, dtype: Any = np.float32) -> None:
        opset = WORKING_OPSET if opset is None else operator.index(opset)
        if not OLDEST_OPSET <= opset <= newest_opset():
            raise ValueError(
                f"opset={opset}: pass an opset from {OLDEST_OPSET} to {newest_opset()}"
            )
        self.dtype = ir.DataType.from_numpy(np.dtype(dtype))
        if not self.dtype.is_floating_point():
            raise ValueError(f"dtype={np.dtype(dtype)}: pass a float dtype, such as float32")
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.op = Emit(self.graph)
        self._defaults: dict[ir.Value, float] = {}

    def input(
        self, name: str, shape: Shape | None = None, default: float | None = None
    ) -> ir.Value:
        """Declare and return a new float input; with `default`, the input is optional, of shape
        (1,), and holds `default` if nothing is fed.
        """
        value = ir.Value(name=name, type=ir.TensorType(self.dtype))
        value.shape = None if shape is None else ir.Shape(shape)
        self.add(value)
        if default is not None:
            self._defaults[value] = default
        return value

    def add(self, value: ir.Value) -> None:
        """Append an input; raise `ValueError` if another input has the same name."""
        if value.name in [x.name for x in self.graph.inputs]:
            raise ValueError(
                f"two inputs have the name {value.name!r}: give one of them a new name"
            )
        self.op.name(str(value.name))
        self.graph.inputs.append(value)

    def model(
        self, outputs: Mapping[str, ir.Value], finish: Callable[[ir.Model], None] = tidy
    ) -> ModelProto:
        """Return the `ModelProto` that computes `outputs`, `{output name: value}`.

        `finish` removes nodes that the outputs do not need. `finish` of `autodiff.forms` makes
        gradients cheaper, too.

        Raises:
            ValueError: an output has the name of an input, or the opset lacks an operator.
        """
        protected = set(self.graph.inputs)
        for name, value in outputs.items():
            named = self.op.name_output(value, name, value, protected)
            if named.name != name:
                raise ValueError(
                    f"an input and an output have the name {name!r}: give the input another name"
                )
            self.graph.outputs.append(named)
        model = ir.Model(self.graph, ir_version=8, producer_name="onnxgrad")
        finish(model)
        infer(model)
        # after `infer`: fed arrays may have other shapes
        for value, number in self._defaults.items():
            value.const_value = ir.tensor(np.full(1, number, self.dtype.numpy()), name=value.name)
            self.graph.initializers.add(value)
        opset = self.graph.opset_imports[""]
        if opset < WORKING_OPSET:
            _move_axes_to_attributes(self.graph)
        proto = to_proto(model)
        try:
            for node in proto.graph.node:
                onnx.checker.check_node(node, checker_context("", opset))
        except onnx.checker.ValidationError as e:
            raise ValueError(
                f"{printable(self.graph.name)} cannot be written in opset {opset}: "
                f"pass opset={WORKING_OPSET} ({printable_lines(e)})"
            ) from e
        return proto


def _move_axes_to_attributes(graph: ir.Graph) -> None:
    """Turn the operand `axes` of ReduceMean, ReduceMax and the like into an attribute, which opsets
    before 18 require, in place.

    ReduceSum has had them as an operand since opset 13.
    """
    for node in graph:
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and node.inputs[1:]:
            axes = constant(node.inputs[1])
            assert axes is not None
            node.resize_inputs(1)
            node.attributes["axes"] = ir.AttrInt64s("axes", axes.tolist())
