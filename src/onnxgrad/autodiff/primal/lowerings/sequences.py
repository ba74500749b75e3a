"""Sequences of known length, whose elements are known before it runs, become those elements."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings.registry import lowering
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.sequence_nodes import counters, elements
from onnxgrad.graph.sequences import is_sequence
from onnxgrad.graph.shapes import constant, dims


@lowering("SequenceAt")
def at(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """[a, b, c][1] = b."""
    s, i = node.inputs
    place = constant(i)
    assert s is not None
    known = None if place is None else elements(op, s)
    if known is None or place is None:
        return None
    at = int(place.reshape(()))
    return [known[at]] if -len(known) <= at < len(known) else None


@lowering("ConcatFromSequence")
def concat(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """The elements, joined: x itself where they are its pieces."""
    [s] = node.inputs
    assert s is not None
    axis = node.attributes.get_int("axis", 0)
    new = node.attributes.get_int("new_axis", 0)
    before = s.producer()
    if before is not None and before.op_type == "SplitToSequence":
        x = before.inputs[0]
        drops = len(before.inputs) == 1 and not before.attributes.get_int("keepdims", 1)
        shape = dims(x)
        axes = (axis, before.attributes.get_int("axis", 0))
        same = axes[0] == axes[1] or (shape and (axes[0] - axes[1]) % len(shape) == 0)
        if x is not None and shape and same and drops == bool(new):
            length = shape[axes[1]]
            if isinstance(length, int) and length > 0:
                return [x]
    known = elements(op, s)
    if not known:
        return None
    return [op.Concat(*(op.Unsqueeze(v, [axis]) if new else v for v in known), axis=axis)]


@lowering("SequenceLength")
def length(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """The number of elements."""
    [s] = node.inputs
    assert s is not None
    known = elements(op, s)
    return None if known is None else [op.const(np.int64(len(known)))]


@lowering("OptionalGetElement")
def element(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """What was put in, or what is no Optional."""
    [x] = node.inputs
    assert x is not None
    before = x.producer()
    if before is not None and before.op_type == "Optional":
        x = before.inputs[0]
    elif isinstance(x.type, ir.OptionalType | None):
        return None
    return None if x is None else [x]


@lowering("SequenceMap")
def sequence_map(op: Emit, node: ir.Node) -> list[ir.Value]:
    """The body, in a Loop that reads the elements and makes sequences of what it returns.

    The inliner cannot write the function body of the specification, which holds this graph.
    """
    body = node.attributes.pop("body").as_graph()
    inner = Emit(body, outer=op)
    place, going = counters(op)
    with inner.at(next(iter(body), None)):
        for x, v in zip(node.inputs, body.inputs, strict=True):
            assert x is not None
            element = inner.SequenceAt(x, place) if is_sequence(x) else x
            ir.convenience.replace_all_uses_with(v, element, replace_graph_outputs=True)
    starts = [op.emit("SequenceEmpty", [], {"dtype": y.dtype}, fresh=True) for y in body.outputs]
    made = [ir.Value(name=op.name("made"), type=start.type) for start in starts]
    longer = [inner.SequenceInsert(s, y) for s, y in zip(made, body.outputs, strict=True)]
    body.inputs[:] = [place, going, *made]
    inner.give([going, *longer])
    length = op.SequenceLength(node.inputs[0])
    operands = [length, None, *starts]
    ys = op.emit_many("Loop", operands, {"body": body}, len(starts), fresh=True)
    return [ys] if isinstance(ys, ir.Value) else ys
