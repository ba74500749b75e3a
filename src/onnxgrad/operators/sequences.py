"""Types and shapes of sequences and Optionals.

onnx_ir stores the shape of the elements of a sequence as the shape of the sequence, and the shape
of its content as the shape of an Optional: None if ranks differ or are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.operators import marks, sequence_nodes
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.outputs import like_first, type_of_first
from onnxgrad.operators.records import OF_SETTINGS, OF_SHAPE, declare_operators, made_by
from onnxgrad.operators.registry import lowering, rule
from onnxgrad.operators.sequence_nodes import known_elements, loop_counters
from onnxgrad.operators.shapes import (
    Dims,
    constant,
    dims,
    is_stated,
    known_shape,
    optional_content,
    rank,
)

Operands = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]


def is_sequence(value: ir.Value) -> bool:
    """Return whether `value` is a sequence, or an Optional of one."""
    return isinstance(optional_content(value.type), ir.SequenceType)


def shared_dims(values: Sequence[ir.Value | None]) -> Dims | None:
    """Return the dimensions that all of `values` share, None for others; None if ranks differ.

    Empty sequences are ignored, as their elements have no shape.
    """
    shapes = [dims(v) for v in values if v is not None and not is_empty(v)]
    if not shapes or any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
        return None
    columns = zip(*(s for s in shapes if s is not None), strict=True)
    return tuple(c[0] if len(set(c)) == 1 and is_stated(c[0]) else None for c in columns)


def is_empty(value: ir.Value) -> bool:
    """Return whether `value` is an empty sequence whose element shape is unknown."""
    return value.shape is None and bool(value.meta.get(marks.EMPTY_SEQUENCE))


def note_empty(value: ir.Value, empty: bool) -> None:
    """Record whether a sequence is empty: then `shared_dims` ignores the shape of its elements."""
    if empty:
        value.meta[marks.EMPTY_SEQUENCE] = True
    else:
        value.meta.pop(marks.EMPTY_SEQUENCE, None)


# -- types and shapes -----------------------------------------------------------------------------


def _type_of_sequence(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    """Return the type of a sequence of tensors of the dtype of the first operand."""
    first = type_of_first(operands, attributes)
    return None if first is None else ir.SequenceType(ir.TensorType(first.dtype))


def _type_of_element(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    first = type_of_first(operands, attributes)
    return None if first is None else ir.TensorType(first.dtype)


def _type_of_empty(_operands: Operands, attributes: Attributes) -> ir.TypeProtocol:
    return ir.SequenceType(ir.TensorType(ir.DataType(attributes.get("dtype", 1))))


def _type_of_optional(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    first, stated = type_of_first(operands, attributes), attributes.get("type")
    if first is None:
        return None if stated is None else ir.OptionalType(stated.type)
    return ir.OptionalType(first)


def _shape_of_split(operands: Operands, attributes: Attributes) -> Dims:
    """Return the shape of the elements of a SplitToSequence."""
    shape = known_shape(operands[0])
    axis = int(attributes.get("axis", 0)) % len(shape)
    split = operands[1] if len(operands) > 1 else None
    if split is None:
        inner = (1,) if attributes.get("keepdims", 1) else ()
        return (*shape[:axis], *inner, *shape[axis + 1 :])
    lengths, n = constant(split), shape[axis]
    length = None
    if lengths is not None and lengths.size and (lengths == lengths.flat[0]).all():
        first = int(lengths.flat[0])
        equal = lengths.ndim > 0 or (isinstance(n, int) and first > 0 and n % first == 0)
        length = first if equal else None
    return (*shape[:axis], length, *shape[axis + 1 :])


def _shape_of_concatenated(operands: Operands, attributes: Attributes) -> Dims:
    """Return the shape of a ConcatFromSequence."""
    shape, new = known_shape(operands[0]), int(attributes.get("new_axis", 0))
    if not shape and not new:
        raise ModelError(
            "ConcatFromSequence of tensors without axes: set new_axis=1, or Unsqueeze the elements"
        )
    axis = int(attributes.get("axis", 0)) % (len(shape) + new)
    return (*shape[:axis], None, *shape[axis + 1 - new :])


def _content_type(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    return optional_content(type_of_first(operands, attributes))


declare_operators("If Loop Scan SequenceMap", "subgraphs")
declare_operators(
    "ConcatFromSequence",
    "moves sequences",
    shape=_shape_of_concatenated,
    result_type=_type_of_element,
)
declare_operators("SequenceAt", "moves sequences", shape=like_first, result_type=_type_of_element)
declare_operators(
    "SequenceConstruct",
    "moves sequences",
    shape=lambda operands, _: shared_dims(operands),
    result_type=_type_of_sequence,
)
declare_operators(
    "SplitToSequence",
    "moves sequences",
    shape=_shape_of_split,
    result_type=_type_of_sequence,
)
declare_operators("SequenceAt SplitToSequence", roles="xl")
declare_operators("SequenceErase", "sequences", shape=like_first, result_type=type_of_first)
declare_operators(
    "SequenceInsert",
    "sequences",
    shape=lambda operands, _: shared_dims(operands[:2]),
    result_type=type_of_first,
)
declare_operators("Optional", "sequences", shape=like_first, result_type=_type_of_optional)
declare_operators("OptionalGetElement", "sequences", shape=like_first, result_type=_content_type)
declare_operators("SequenceLength", "shape int64", no_gradient=OF_SHAPE)
declare_operators("OptionalHasElement", no_gradient=OF_SHAPE)
declare_operators(
    "SequenceEmpty", "shape sequences", result_type=_type_of_empty, no_gradient=OF_SETTINGS
)


# -- gradients -------------------------------------------------------------------------------------


@rule("SequenceConstruct")
def construct(op, node, g):
    """s = [a, b, ...]:  da, db, ... = the elements of ds."""
    return [op.set_type_like(op.SequenceAt(g, np.int64(i)), x) for i, x in enumerate(node.inputs)]


@rule("SequenceAt")
def sequence_at(op, node, g):
    """y = s[i]:  ds = zeros with dy at i."""
    s, i = node.inputs
    return sequence_nodes.scatter_element(op, g, i, s), None


@rule("SequenceInsert")
def insert_element(op, node, g):
    """y = s with x inserted at i:  dx = dy[i],  ds = dy without dy[i]."""
    s, x, i = (*node.inputs, None)[:3]
    if i is None:
        i = op.const(np.int64(-1))
    elif (array := op.known_value(i)) is not None:  # below zero: from the end of the shorter s
        index = int(array.reshape(()))
        i = op.const(np.int64(index if index >= 0 else index - 1))
    else:
        i = op.Where(op.Less(i, op.const(0, i.dtype)), op.Sub(i, op.const(1, i.dtype)), i)
    return (
        op.set_type_like(op.SequenceErase(g, i), s),
        op.set_type_like(op.SequenceAt(g, i), x),
        None,
    )


@rule("SequenceErase")
def erase(op, node, g):
    """y = s without s[i]:  ds = dy with zeros inserted at i."""
    s, i = (*node.inputs, None)[:2]
    i = op.const(np.int64(-1)) if i is None else i
    zeros = op.zeros_like(sequence_nodes.element_at(op, s, i))
    return op.set_type_like(
        sequence_nodes.insert_element(op, g, zeros, sequence_nodes.erased_position(op, i, g)), s
    ), None


@rule("SplitToSequence")
def split(op, node, g):
    """s = x split along an axis:  dx = the elements of ds, concatenated."""
    x, lengths = (*node.inputs, None)[:2]
    axis = int_attribute(node, "axis")
    new = int(lengths is None and not int_attribute(node, "keepdims"))
    if sequence_nodes.positive_length(x, axis):
        return op.set_type_like(op.ConcatFromSequence(g, axis=axis, new_axis=new), x), None
    empty = op.Slice(op.zeros_like(x), [0], [0], [axis])  # s may have no element
    if new:
        g = sequence_nodes.map_elements(op, lambda inner, v: inner.Unsqueeze(v, [axis]), g)
    joined = op.SequenceInsert(g, empty, np.int64(0))
    return op.set_type_like(op.ConcatFromSequence(joined, axis=axis), x), None


@rule("ConcatFromSequence")
def concat_from_sequence(op, node, g):
    """y = the elements of s, concatenated:  ds = dy split as s was."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    if int_attribute(node, "new_axis"):
        return (op.set_type_like(op.SplitToSequence(g, axis=axis, keepdims=0), s),)
    length = sequence_nodes.positive_length(s, axis)
    if length is None:
        limits = {"start": axis} if axis == -1 else {"start": axis, "end": axis + 1}
        columns = sequence_nodes.stack_results(op, lambda inner, v: inner.Shape(v, **limits), s)
        lengths = op.Reshape(columns, [-1])
    else:
        lengths = np.int64(length)
    return (op.set_type_like(op.SplitToSequence(g, lengths, axis=axis), s),)


# -- lowerings -------------------------------------------------------------------------------------


@lowering("SequenceAt")
def lower_at(op: Any, node: Any) -> list[ir.Value] | None:
    """[a, b, c][1] = b."""
    array, values = constant(node.inputs[1]), known_elements(op, node.inputs[0])
    if values is None or array is None:
        return None
    index = array.item()
    return [values[index]] if -len(values) <= index < len(values) else None


@lowering("ConcatFromSequence")
def lower_concat(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the elements of s, concatenated; x itself if s is x split along the same axis."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    new = int_attribute(node, "new_axis")
    if before := made_by(s, "SplitToSequence"):
        x: Any = before.inputs[0]
        drops = len(before.inputs) == 1 and not int_attribute(before, "keepdims")
        split_axis, n = int_attribute(before, "axis"), rank(x)
        same = n and drops == bool(new) and (axis - split_axis) % n == 0
        if same and sequence_nodes.positive_length(x, split_axis):
            return [x]
    values = known_elements(op, s)
    if not values:
        return None
    return [op.Concat(*(op.Unsqueeze(v, [axis]) if new else v for v in values), axis=axis)]


@lowering("SequenceLength")
def length(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the number of elements of s."""
    values = known_elements(op, node.inputs[0])
    return None if values is None else [op.const(np.int64(len(values)))]


@lowering("OptionalGetElement")
def element_at(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the value in x, or x itself if it is not an Optional."""
    [x] = node.inputs
    if before := made_by(x, "Optional"):
        x = before.inputs[0]
    elif isinstance(x.type, ir.OptionalType | None):
        return None
    return None if x is None else [x]


@lowering("SequenceMap")
def sequence_map(op: Any, node: Any) -> list[ir.Value]:
    """ys = sequences of the results of the body for each element of x, as a Loop.

    The inliner of onnx cannot expand the function body of the specification, as it has a subgraph.
    """
    body = node.attributes.pop("body").as_graph()
    inner = op.inside(body)
    index, condition = loop_counters(op)
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
