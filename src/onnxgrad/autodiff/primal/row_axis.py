"""A model of one row as a model of any number of rows, by a leading axis of rows in each value.

The model is a function of one row, whatever its nodes do with the axis of the row: a sum over all
axes, a softmax over axis 0, a scalar. So the rows of a batch are members that have other data and
the same weights: `push_row_axis` pushes their axis through the graph (`autodiff/members.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.autodiff.members import MemberAxis
from onnxgrad.autodiff.row_proofs import UnprovenRows, infer_from_rows
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import Dims, dims


def push_row_axis(model: ir.Model, axes: Mapping[str, int | None], symbol: str) -> None:
    """Let a prepared model of one row take any number of rows, in place.

    Args:
        model: a prepared model.
        axes: the axis of the row of each input, of length 1; None for an input without rows.
        symbol: the name of the number of rows in shapes.

    Raises:
        UnprovenRows: an output has no axis of length 1, or does not depend on the rows.
        UnstackableNode: a node has no form for rows.
    """
    graph, op = model.graph, Emit(model.graph)
    rows = {x: axis for x in graph.inputs if (axis := axes[str(x.name)]) is not None}
    if not rows:
        raise UnprovenRows("no input has rows")
    input_axes = {dims(x): axis for x, axis in rows.items()}
    outputs = [(str(y.name), _axis_of_row(y, input_axes)) for y in graph.outputs]
    names = {y: y.name for node in graph for y in node.outputs}
    single = {x: _value_of_one_row(op, x, axis, symbol) for x, axis in rows.items()}
    x, axis = next(iter(rows.items()))
    with op.at(next(iter(graph), None)):
        count = op.Shape(x, start=axis, end=axis + 1)
        stacked = {single[x]: _row_axis_in_front(op, x, axis) for x, axis in rows.items()}
    members = MemberAxis(op, count, stacked, symbol)
    members.push(graph)
    if lacking := [name for (name, _), y in zip(outputs, graph.outputs, strict=True) if y in names]:
        raise UnprovenRows(f"the outputs {lacking} do not depend on the rows of the inputs")
    pairs = zip(graph.outputs, outputs, strict=True)
    op.give([_row_axis_in_place(op, y, axis) for y, (_, axis) in pairs])
    _hand_on_names(op, {y: name for y, (name, _) in zip(graph.outputs, outputs, strict=True)})
    taken = {name for name, _ in outputs}
    _hand_on_names(op, {members.value_for(y): n for y, n in names.items() if n not in taken})
    lengths = {str(x.name): shape for x in graph.inputs if (shape := dims(x)) is not None}
    infer_from_rows(model, {**axes}, lengths, symbol)
    for y, (_, axis) in zip(graph.outputs, outputs, strict=True):
        if (dims(y) or ())[axis : axis + 1] != (symbol,):
            raise UnprovenRows(f"the output {y.name!r} of shape {dims(y)} has no axis of rows")


def _axis_of_row(y: ir.Value, input_axes: Mapping[Dims | None, int]) -> int:
    """Return the axis of an output that becomes the axis of rows: of a state, as of the input of
    the same shape; else the first axis of length 1.
    """
    shape = dims(y) or ()
    if 1 not in shape:
        raise UnprovenRows(f"the output {y.name!r} of shape {dims(y)} has no axis of length 1")
    return input_axes.get(shape, shape.index(1))


def _value_of_one_row(op: Emit, x: ir.Value, axis: int, symbol: str) -> ir.Value:
    """Let the input `x` have any number of rows; return the value of one row that all nodes read
    in its place.
    """
    shape = list(dims(x) or ())
    one = ir.Value(name=op.name(str(x.name)), type=x.type, shape=ir.Shape(shape))
    ir.convenience.replace_all_uses_with(x, one, replace_graph_outputs=True)
    shape[axis] = symbol
    x.shape = ir.Shape(shape)
    return one


def _row_axis_in_front(op: Emit, x: ir.Value, axis: int) -> ir.Value:
    """Return an input with its axis of rows in front, and an axis of length 1 in its place."""
    others = [i for i in range(len(dims(x) or ())) if i != axis]
    return op.Unsqueeze(op.Transpose(x, perm=[axis, *others]) if axis else x, [axis + 1])


def _row_axis_in_place(op: Emit, y: ir.Value, axis: int) -> ir.Value:
    """Return an output with its axis of rows, which is in front, on `axis`, which has length 1."""
    y = op.Squeeze(y, [axis + 1])
    others = range(axis + 1, len(dims(y) or ()))
    return op.Transpose(y, perm=[*range(1, axis + 1), 0, *others]) if axis else y


def _hand_on_names(op: Emit, names: Mapping[ir.Value, str | None]) -> None:
    """Give values the names of the values that they replace, which are no longer in the graph."""
    for y, name in names.items():
        if name and y.name != name:
            y.name = name
