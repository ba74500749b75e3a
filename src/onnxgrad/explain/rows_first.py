"""Move the rows of a model's inputs and outputs to the first axis."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.operators.shapes import dims


def move_rows_first(proto: ModelProto, axes: Mapping[str, int]) -> ModelProto:
    """Return a model whose inputs and outputs in `axes` have their rows on the first axis."""
    moved = {name: axis for name, axis in axes.items() if axis != 0}
    if not moved:
        return proto
    model = to_ir(proto)
    graph = model.graph
    op, head = Emit(graph), next(iter(graph), None)
    listed = {str(v.name): v for v in (*graph.outputs, *graph.inputs)}
    for name, axis in moved.items():
        if name not in listed:
            raise unknown("input or output in batch_axes", name, listed)
        value = listed[name]
        shape = dims(value)
        if shape is None or not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"batch_axes[{name!r}] is {axis}, and {name!r} has the shape {shape}: give the "
                "index of its axis of rows"
            )
        axis %= len(shape)
        others = [i for i in range(len(shape)) if i != axis]
        back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        value.name = op.name(name)
        if value.is_graph_input():
            rows = ir.Value(
                name=name, type=value.type, shape=ir.Shape([shape[i] for i in (axis, *others)])
            )
            with op.at(head):
                whole = op.set_type_like(op.Transpose(rows, perm=back), value)
            graph.inputs[list(graph.inputs).index(value)] = rows
            ir.convenience.replace_all_uses_with(value, whole, replace_graph_outputs=True)
        else:
            rows = op.Transpose(value, perm=[axis, *others])
            rows.name = name
            graph.outputs[list(graph.outputs).index(value)] = rows
    return to_proto(model)
