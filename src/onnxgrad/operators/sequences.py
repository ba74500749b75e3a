"""Sequences and Optionals: types and shapes, rules, and nodes that compute element by element.

onnx_ir stores the shape of the elements of a sequence as the shape of the sequence, and the shape
of its content as the shape of an Optional: None if ranks differ or are not known. Emitters, the
arguments `op` and `inner`, have methods that call functions of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import ModelError, NoGradientRule
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.outputs import shape_of_first, type_of_first
from onnxgrad.operators.records import (
    OF_SETTINGS,
    OF_SHAPE,
    declare_operators,
    lowering,
    made_by,
    rule,
)
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
    """Return the shape that all of `values` have: None for dimensions that differ, None for the
    shape if the ranks differ.

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


def mark_empty(value: ir.Value, empty: bool) -> None:
    """Record whether a sequence is empty: then `shared_dims` ignores the shape of its elements."""
    if empty:
        value.meta[marks.EMPTY_SEQUENCE] = True
    else:
        value.meta.pop(marks.EMPTY_SEQUENCE, None)


# -- types and shapes -----------------------------------------------------------------------------


def _sequence_type(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    """Return the type of a sequence of tensors of the dtype of the first operand."""
    first = type_of_first(operands, attributes)
    return None if first is None else ir.SequenceType(ir.TensorType(first.dtype))


def _element_type(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    first = type_of_first(operands, attributes)
    return None if first is None else ir.TensorType(first.dtype)


def _empty_sequence_type(_operands: Operands, attributes: Attributes) -> ir.TypeProtocol:
    return ir.SequenceType(ir.TensorType(ir.DataType(attributes.get("dtype", 1))))


def _optional_type(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    first, stated = type_of_first(operands, attributes), attributes.get("type")
    if first is None:
        return None if stated is None else ir.OptionalType(stated.type)
    return ir.OptionalType(first)


def _shape_of_split_elements(operands: Operands, attributes: Attributes) -> Dims:
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


def _shape_of_concatenation(operands: Operands, attributes: Attributes) -> Dims:
    """Return the shape of a ConcatFromSequence."""
    shape, new = known_shape(operands[0]), int(attributes.get("new_axis", 0))
    if not shape and not new:
        raise ModelError(
            "ConcatFromSequence of tensors without axes: set new_axis=1, or Unsqueeze the elements"
        )
    axis = int(attributes.get("axis", 0)) % (len(shape) + new)
    return (*shape[:axis], None, *shape[axis + 1 - new :])


def _optional_content_type(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    return optional_content(type_of_first(operands, attributes))


def _declare_sequence_operator(name: str, shape: Callable, result_type: Callable) -> None:
    """Declare an operator that takes or returns a sequence or an Optional, with the functions of
    its shape and type.
    """
    declare_operators(name, "sequences", shape=shape, result_type=result_type)


declare_operators("If Loop Scan SequenceMap", "subgraphs")
declare_operators("ConcatFromSequence SequenceConstruct", "moves")
declare_operators("SequenceAt SplitToSequence", "moves", roles="xl")
_declare_sequence_operator("ConcatFromSequence", _shape_of_concatenation, _element_type)
_declare_sequence_operator("SequenceAt", shape_of_first, _element_type)
_declare_sequence_operator("SequenceConstruct", lambda v, _: shared_dims(v), _sequence_type)
_declare_sequence_operator("SplitToSequence", _shape_of_split_elements, _sequence_type)
_declare_sequence_operator("SequenceErase", shape_of_first, type_of_first)
_declare_sequence_operator("SequenceInsert", lambda v, _: shared_dims(v[:2]), type_of_first)
_declare_sequence_operator("Optional", shape_of_first, _optional_type)
_declare_sequence_operator("OptionalGetElement", shape_of_first, _optional_content_type)
declare_operators("SequenceLength", "shape int64", no_gradient=OF_SHAPE)
declare_operators("OptionalHasElement", no_gradient=OF_SHAPE)
declare_operators(
    "SequenceEmpty", "shape sequences", result_type=_empty_sequence_type, no_gradient=OF_SETTINGS
)


# -- gradients -------------------------------------------------------------------------------------


@rule("SequenceConstruct")
def sequence_construct(op, node, g):
    """s = [a, b, ...]:  da, db, ... = the elements of ds."""
    return [op.set_type_like(op.SequenceAt(g, np.int64(i)), x) for i, x in enumerate(node.inputs)]


@rule("SequenceAt")
def sequence_at(op, node, g):
    """y = s[i]:  ds = zeros with dy at i."""
    s, i = node.inputs
    return scatter_element(op, g, i, s), None


@rule("SequenceInsert")
def sequence_insert(op, node, g):
    """y = s with x inserted at i:  dx = dy[i],  ds = dy without dy[i]."""
    s, x, i = (*node.inputs, None)[:3]
    if i is None:
        i = op.const(np.int64(-1))
    # a negative index counts from the end of s, which is shorter than y
    elif (array := op.known_value(i)) is not None:
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
def sequence_erase(op, node, g):
    """y = s without s[i]:  ds = dy with zeros inserted at i."""
    s, i = (*node.inputs, None)[:2]
    i = op.const(np.int64(-1)) if i is None else i
    zeros = op.zeros_like(element_at(op, s, i))
    return op.set_type_like(insert_element(op, g, zeros, erased_position(op, i, g)), s), None


@rule("SplitToSequence")
def split_to_sequence(op, node, g):
    """s = x split along an axis:  dx = the elements of ds, concatenated."""
    x, lengths = (*node.inputs, None)[:2]
    axis = int_attribute(node, "axis")
    new = int(lengths is None and not int_attribute(node, "keepdims"))
    if positive_length(x, axis):
        return op.set_type_like(op.ConcatFromSequence(g, axis=axis, new_axis=new), x), None
    empty = op.Slice(op.zeros_like(x), [0], [0], [axis])  # s may have no element
    if new:
        g = map_elements(op, lambda inner, v: inner.Unsqueeze(v, [axis]), g)
    joined = op.SequenceInsert(g, empty, np.int64(0))
    return op.set_type_like(op.ConcatFromSequence(joined, axis=axis), x), None


@rule("ConcatFromSequence")
def concat_from_sequence(op, node, g):
    """y = the elements of s, concatenated:  ds = dy split as s was."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    if int_attribute(node, "new_axis"):
        return (op.set_type_like(op.SplitToSequence(g, axis=axis, keepdims=0), s),)
    length = positive_length(s, axis)
    if length is None:
        limits = {"start": axis} if axis == -1 else {"start": axis, "end": axis + 1}
        columns = stack_results(op, lambda inner, v: inner.Shape(v, **limits), s)
        lengths = op.Reshape(columns, [-1])
    else:
        lengths = np.int64(length)
    return (op.set_type_like(op.SplitToSequence(g, lengths, axis=axis), s),)


# -- lowerings -------------------------------------------------------------------------------------


@lowering("SequenceAt")
def lower_sequence_at(op: Any, node: Any) -> list[ir.Value] | None:
    """Return element i of a sequence whose elements are known: [a, b, c][1] = b."""
    array, values = constant(node.inputs[1]), known_elements(op, node.inputs[0])
    if values is None or array is None:
        return None
    index = array.item()
    return [values[index]] if -len(values) <= index < len(values) else None


@lowering("ConcatFromSequence")
def lower_concat_from_sequence(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the elements of s, concatenated; x itself if s is x split along the same axis."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    new = int_attribute(node, "new_axis")
    if before := made_by(s, "SplitToSequence"):
        x: Any = before.inputs[0]
        drops = len(before.inputs) == 1 and not int_attribute(before, "keepdims")
        split_axis, n = int_attribute(before, "axis"), rank(x)
        same = n and drops == bool(new) and (axis - split_axis) % n == 0
        if same and positive_length(x, split_axis):
            return [x]
    values = known_elements(op, s)
    if not values:
        return None
    return [op.Concat(*(op.Unsqueeze(v, [axis]) if new else v for v in values), axis=axis)]


@lowering("SequenceLength")
def sequence_length(op: Any, node: Any) -> list[ir.Value] | None:
    """y = the number of elements of s."""
    values = known_elements(op, node.inputs[0])
    return None if values is None else [op.const(np.int64(len(values)))]


@lowering("OptionalGetElement")
def optional_get_element(op: Any, node: Any) -> list[ir.Value] | None:
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


# -- nodes that compute with sequences, element by element ----------------------------------------


def map_elements(op: Any, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the sequence of the results of `function`, called on the elements of the sequences
    `xs`.
    """
    results = ir.Value(name=op.name("results"), type=optional_content(xs[0].type))
    start = op.emit("SequenceEmpty", [], {"dtype": xs[0].dtype})

    def append_result(inner: Any, *elements: ir.Value) -> ir.Value:
        y = function(inner, *elements)
        sequence = inner.SequenceInsert(results, y)
        sequence.shape = y.shape
        return sequence

    return _loop_over_elements(op, append_result, xs, {results: start})


def stack_results(op: Any, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the results of `function`, called on the elements of the sequences `xs`, stacked along
    a new axis 0.
    """
    y = _loop_over_elements(op, function, xs, {})
    inner = dims(y)
    y.shape = None if inner is None else ir.Shape([None, *inner])
    return y


def _loop_over_elements(
    op: Any,
    function: Callable[..., ir.Value],
    xs: Sequence[ir.Value],
    states: dict[ir.Value, ir.Value],
) -> ir.Value:
    """Return the output of a Loop over the elements of the sequences `xs`, all of one length.

    `function` is called once with the emitter of the body and one element of each of `xs`, and
    returns the second output of the body. `states` has the initial value of the state in the body,
    at most one; without it, the Loop stacks the results.
    """
    i, condition = loop_counters(op)
    graph = ir.Graph([i, condition, *states], [], nodes=[], name=op.name("of_elements"))
    with type(op)(graph, outer=op) as inner:
        elements = [inner.SequenceAt(x, i) for x in xs]
        output = function(inner, *elements)
        inner.give([condition, output])
    for element in elements:  # the function may not use all of them
        node = element.producer()
        if node is not None and not element.uses():
            graph.remove(node, safe=True)
    operands = [op.SequenceLength(xs[0]), np.bool_(True), *states.values()]
    y = op.emit("Loop", operands, {"body": graph}, fresh=True)
    y.shape = output.shape
    return y


def loop_counters(op: Any) -> tuple[ir.Value, ir.Value]:
    """Return new values for the first two inputs of a Loop's body: iteration number, condition."""
    dtypes = {"i": ir.DataType.INT64, "going": ir.DataType.BOOL}
    i, condition = (
        ir.Value(name=op.name(name), type=ir.TensorType(dtype), shape=ir.Shape(()))
        for name, dtype in dtypes.items()
    )
    return i, condition


def fill_sequence(op: Any, number: int, x: ir.Value) -> ir.Value:
    """Return a sequence like `x` whose elements are filled with `number`, 0 or 1."""
    if isinstance(x.type, ir.OptionalType):
        raise NoGradientRule(
            f"{x.name!r} is an Optional that may be empty at run time: its zero gradient cannot be "
            "written; use OptionalGetElement outside of If and Loop"
        )

    def fill_element(inner: Any, v: ir.Value) -> ir.Value:
        return inner.ones_like(v) if number else inner.zeros_like(v)

    if node := made_by(x, "SequenceConstruct"):
        return op.SequenceConstruct(*(fill_element(op, v) for v in node.inputs if v is not None))
    return map_elements(op, fill_element, x)


def add_sequences(op: Any, terms: Sequence[ir.Value]) -> ir.Value:
    """Return the sum of sequences of one length, element by element.

    Of the results of `scatter_element`, only the one element is added.
    """
    scattered = [t for t in terms if marks.SCATTERED in t.meta]
    others = [t for t in terms if marks.SCATTERED not in t.meta] or [scattered.pop(0)]
    y = others[0]
    if len(others) > 1:
        y = map_elements(op, lambda inner, *elements: inner.total(list(elements)), *others)
    for term in scattered:
        position, g = term.meta[marks.SCATTERED]
        old = op.set_type_like(op.SequenceAt(y, position), g)
        y = op.set_type_like(_replace_element(op, y, position, op.total([old, g])), terms[0])
    return y


def scatter_element(op: Any, g: ir.Value, position: ir.Value, x: ir.Value) -> ir.Value:
    """Return a sequence of zeros like the sequence `x`, with `g` at `position`."""
    y = _replace_element(op, op.zeros_like(x), position, g)
    y = op.set_type_like(op.copy_of(y), x)  # a copy, as its `meta` is set
    y.meta[marks.SCATTERED] = position, g
    return y


def _replace_element(op: Any, sequence: ir.Value, position: ir.Value, x: ir.Value) -> ir.Value:
    rest = op.SequenceErase(sequence, position)
    return insert_element(op, rest, x, erased_position(op, position, rest))


def insert_element(op: Any, sequence: ir.Value, x: ir.Value, position: ir.Value | None) -> ir.Value:
    """Return `sequence` with `x` inserted at `position`, or at its end for None."""
    return op.SequenceInsert(sequence, x, *([] if position is None else [position]))


def element_at(op: Any, sequence: ir.Value, position: ir.Value) -> ir.Value:
    """Return the element of `sequence` at `position`, from an existing SequenceAt if there is one.

    The backward pass of a Loop uses values stored in each iteration; a new SequenceAt would require
    the iterations to be computed again.
    """
    for node in sequence.consumers():
        if node.op_type == "SequenceAt" and node.inputs[1] is position and node.graph is op.graph:
            return node.outputs[0]
    return op.SequenceAt(sequence, position)


def erased_position(op: Any, position: ir.Value, rest: ir.Value) -> ir.Value | None:
    """Return the position in the sequence `rest` at which to insert the element that was erased at
    `position`.

    None is the end. A negative position counts from the end, and `rest` is one element shorter than
    the sequence to which `position` refers.
    """
    array = constant(position)
    if array is not None:
        i = int(array.reshape(()))
        return op.const(np.int64(i)) if i >= 0 else op.const(np.int64(i + 1)) if i < -1 else None
    wide = op.Cast(position, to=ir.DataType.INT64)
    from_end = op.Add(wide, op.Add(op.SequenceLength(rest), np.int64(1)))
    return op.Where(op.Less(wide, np.int64(0)), from_end, wide)


_MANY = 64  # elements of a sequence that are written one by one

_CHANGES = ("Identity", "SequenceInsert", "SequenceErase")


def known_elements(op: Any, sequence: ir.Value) -> list[ir.Value] | None:
    """Return the elements of a sequence whose length and elements are known statically, else None.

    Follows Identity, SequenceInsert and SequenceErase back to the node that creates the sequence.
    """
    changes: list[ir.Node] = []  # the last one first
    node = sequence.producer()
    while node is not None and not node.domain and node.op_type in _CHANGES:
        changes.append(node)
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.domain:
        return None
    if node.op_type == "SequenceConstruct":
        items = [v for v in node.inputs if v is not None]
    elif node.op_type == "SequenceEmpty":
        items = []
    elif node.op_type == "SplitToSequence" and (pieces := _elements_of_split(op, node)) is not None:
        items = pieces
    else:
        return None
    return items if all(_apply_sequence_node(items, node) for node in reversed(changes)) else None


def _apply_sequence_node(items: list[ir.Value], node: ir.Node) -> bool:
    """Apply an Identity, SequenceInsert or SequenceErase to the list `items`; return False if its
    position is not a valid constant.
    """
    if node.op_type == "Identity":
        return True
    inserts = node.op_type == "SequenceInsert"
    index = next(iter(node.inputs[1 + inserts :]), None)
    constant_index = constant(index)
    if index is not None and constant_index is None:
        return False
    last = len(items) if inserts else -1
    i = last if constant_index is None else int(constant_index.reshape(()))
    if not -len(items) <= i < len(items) + inserts:
        return False  # out of range: onnxruntime raises an error when it runs
    if inserts:
        items.insert(i, node.inputs[1])  # type: ignore[arg-type]
    else:
        del items[i]
    return True


def _elements_of_split(op: Any, node: ir.Node) -> list[ir.Value] | None:
    """Return the elements of a SplitToSequence; None if their number is not static.

    Also None if `op` does not write into the graph of `node`.
    """
    x, split = (*node.inputs, None)[:2]
    assert x is not None
    axis, shape = int_attribute(node, "axis"), dims(x)
    n = None if shape is None else shape[axis]
    lengths = constant(split)
    if node.graph is not op.graph or (split is not None and lengths is None):
        return None
    if lengths is not None and lengths.ndim:
        parts = lengths.tolist()
    else:
        size = 1 if lengths is None else int(lengths)
        if not isinstance(n, int) or size < 1:
            return None
        parts = [min(size, n - i) for i in range(0, n, size)]
    if not 1 <= len(parts) <= _MANY or (isinstance(n, int) and sum(parts) != n):
        return None
    pieces = [x] if len(parts) == 1 else op.split(x, parts, axis)
    squeeze = split is None and not int_attribute(node, "keepdims")
    return [op.Squeeze(piece, [axis]) for piece in pieces] if squeeze else pieces


def positive_length(x: ir.Value, axis: int) -> int | None:
    """Return the static positive length of a tensor, or of all elements of a sequence, or None."""
    shape = dims(x)
    length = None if shape is None else shape[axis]
    return length if isinstance(length, int) and length > 0 else None
