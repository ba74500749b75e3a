"""Sequences of static length, whose elements are values of the graph, become those values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.registry import lowering
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.sequence_nodes import counters, elements
from onnxgrad.graph.traversal import made_by
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.sequences import is_sequence
from onnxgrad.operators.shapes import constant, dims


@lowering("SequenceAt")
def at(op: Emit, node: Any) -> list[ir.Value] | None:
    """[a, b, c][1] = b."""
    array, values = constant(node.inputs[1]), elements(op, node.inputs[0])
    if values is None or array is None:
        return None
    index = array.item()
    return [values[index]] if -len(values) <= index < len(values) else None


@lowering("ConcatFromSequence")
def concat(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = the elements of s, concatenated; x itself if s is x split along the same axis."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    new = int_attribute(node, "new_axis")
    if before := made_by(s, "SplitToSequence"):
        x: Any = before.inputs[0]
        drops = len(before.inputs) == 1 and not int_attribute(before, "keepdims")
        shape = dims(x)
        axes = (axis, int_attribute(before, "axis"))
        same = axes[0] == axes[1] or (shape and (axes[0] - axes[1]) % len(shape) == 0)
        if shape and same and drops == bool(new):
            length = shape[axes[1]]
            if isinstance(length, int) and length > 0:
                return [x]
    values = elements(op, s)
    if not values:
        return None
    return [op.Concat(*(op.Unsqueeze(v, [axis]) if new else v for v in values), axis=axis)]


@lowering("SequenceLength")
def length(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = the number of elements of s."""
    [s] = node.inputs
    values = elements(op, s)
    return None if values is None else [op.const(np.int64(len(values)))]


@lowering("OptionalGetElement")
def element(op: Emit, node: Any) -> list[ir.Value] | None:
    """y = the value in x, or x itself if it is not an Optional."""
    [x] = node.inputs
    before = x.producer()
    if before is not None and before.op_type == "Optional":
        x = before.inputs[0]
    elif isinstance(x.type, ir.OptionalType | None):
        return None
    return None if x is None else [x]


@lowering("SequenceMap")
def sequence_map(op: Emit, node: Any) -> list[ir.Value]:
    """ys = sequences of the results of the body for each element of x, as a Loop.

    The inliner of onnx cannot expand the function body of the specification, as it has a subgraph.
    """
    body = node.attributes.pop("body").as_graph()
    inner = Emit(body, outer=op)
    index, condition = counters(op)
    with inner.at(next(iter(body), None)):
        for x, v in zip(node.inputs, body.inputs, strict=True):
            element = inner.SequenceAt(x, index) if is_sequence(x) else x
            ir.convenience.replace_all_uses_with(v, element, replace_graph_outputs=True)
    starts = [op.emit("SequenceEmpty", [], {"dtype": y.dtype}, fresh=True) for y in body.outputs]
    states = [ir.Value(name=op.name("sequence"), type=start.type) for start in starts]
    longer = [inner.SequenceInsert(s, y) for s, y in zip(states, body.outputs, strict=True)]
    body.inputs[:] = [index, condition, *states]
    inner.give([condition, *longer])
    length = op.SequenceLength(node.inputs[0])
    operands = [length, None, *starts]
    return op.emit_many("Loop", operands, {"body": body}, len(starts), fresh=True)
