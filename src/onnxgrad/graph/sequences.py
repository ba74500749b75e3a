"""Sequences in graphs: their types, and the nodes that add them up, element by element.

onnx_ir keeps the shape of the elements of a sequence as the shape of the sequence, and the shape of
what an Optional holds as that of the Optional: None where it differs in rank, or is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import ModelError, NoGradientRule
from onnxgrad.graph.shapes import Dims, constant, dims, is_stated

if TYPE_CHECKING:
    from onnxgrad.graph.emit import Emit

_EMPTY = "onnxgrad.empty"  # noted at a sequence that has no element
_PLACE = "onnxgrad.place"  # noted at a sequence of zeros but for one element: where, and what it is
OPERATORS = frozenset(
    "SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceAt SplitToSequence "
    "ConcatFromSequence Optional OptionalGetElement Identity".split()
)


def is_sequence(value: ir.Value) -> bool:
    """Tell whether `value` is a sequence, or an Optional of one."""
    return isinstance(content(value.type), ir.SequenceType)


def content(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Return the type of what an Optional of type `kind` holds; any other type as it is."""
    return kind.elem_type if isinstance(kind, ir.OptionalType) else kind


# -- types ---------------------------------------------------------------------------------------


def output_type(
    op_type: str, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> ir.TypeProtocol | None:
    """Return the type of the output of one of `OPERATORS`; None where it is not known."""
    first = operands[0].type if operands and operands[0] is not None else None
    if op_type == "SequenceEmpty":
        return ir.SequenceType(ir.TensorType(ir.DataType(attributes.get("dtype", 1))))
    if op_type == "Optional" and first is None:
        given = attributes.get("type")
        return None if given is None else ir.OptionalType(given.type)
    if first is None:
        return None
    if op_type in ("SequenceConstruct", "SplitToSequence"):
        return ir.SequenceType(ir.TensorType(first.dtype))
    if op_type in ("SequenceAt", "ConcatFromSequence"):
        return ir.TensorType(first.dtype)
    if op_type == "Optional":
        return ir.OptionalType(first)
    return content(first) if op_type == "OptionalGetElement" else first


def output_shape(
    op_type: str, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of the output of one of `OPERATORS`, or that of its elements."""
    if not operands or operands[0] is None:
        return None
    shape = dims(operands[0])
    if op_type == "SequenceConstruct":
        return joined(operands)
    if op_type == "SequenceInsert":
        return joined(operands[:2])
    if op_type in ("SplitToSequence", "ConcatFromSequence") and shape is not None:
        return (_pieces if op_type == "SplitToSequence" else _whole)(shape, operands, attributes)
    return shape


def joined(values: Sequence[ir.Value | None]) -> Dims | None:
    """Return what the shapes of `values` have in common; a sequence without elements has any."""
    shapes = [dims(v) for v in values if v is not None and not is_empty(v)]
    if not shapes or any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
        return None
    columns = zip(*(s for s in shapes if s is not None), strict=True)
    return tuple(c[0] if len(set(c)) == 1 and is_stated(c[0]) else None for c in columns)


def is_empty(value: ir.Value) -> bool:
    """Tell whether `value` is a sequence of which no element is known to exist."""
    return value.shape is None and bool(value.meta.get(_EMPTY))


def note_empty(value: ir.Value, empty: bool) -> None:
    """Note whether a sequence has no element, so that it tells nothing about their shape."""
    if empty:
        value.meta[_EMPTY] = True
    else:
        value.meta.pop(_EMPTY, None)


def _pieces(
    shape: Dims, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of the pieces of a SplitToSequence."""
    axis = int(attributes.get("axis", 0)) % len(shape)
    given = operands[1] if len(operands) > 1 else None
    if given is None:
        inner = (1,) if attributes.get("keepdims", 1) else ()
        return (*shape[:axis], *inner, *shape[axis + 1 :])
    lengths, n = constant(given), shape[axis]
    length = None
    if lengths is not None and lengths.size and (lengths == lengths.flat[0]).all():
        first = int(lengths.flat[0])
        even = lengths.ndim > 0 or (isinstance(n, int) and first > 0 and n % first == 0)
        length = first if even else None
    return (*shape[:axis], length, *shape[axis + 1 :])


def _whole(
    shape: Dims, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of a ConcatFromSequence of elements of this shape."""
    new = int(attributes.get("new_axis", 0))
    if not shape and not new:
        raise ModelError("ConcatFromSequence of tensors without axes: correct the node")
    axis = int(attributes.get("axis", 0)) % (len(shape) + new)
    return (*shape[:axis], None, *shape[axis + 1 - new :])


# -- nodes ---------------------------------------------------------------------------------------


def mapped(op: Emit, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the sequence of `function(inner, *elements)` over the elements of sequences `xs`."""
    made = ir.Value(name=op.name("made"), type=content(xs[0].type))
    start = op.emit("SequenceEmpty", [], {"dtype": xs[0].dtype})

    def grown(inner: Emit, y: ir.Value) -> ir.Value:
        longer = inner.SequenceInsert(made, y)
        longer.shape = y.shape
        return longer

    return _loop(op, function, xs, grown, [(made, start)])


def stacked(op: Emit, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the tensor of all `function(inner, *elements)`, which are of one shape."""
    y = _loop(op, function, xs, lambda inner, y: y, [])
    inner = dims(y)
    y.shape = None if inner is None else ir.Shape([None, *inner])
    return y


def _loop(
    op: Emit,
    function: Callable[..., ir.Value],
    xs: Sequence[ir.Value],
    result: Callable[[Emit, ir.Value], ir.Value],
    states: list[tuple[ir.Value, ir.Value]],
) -> ir.Value:
    """Run `function` on the elements of sequences; return what a Loop makes of the `result`s."""
    place, going = counters(op)
    inputs = [place, going, *(state for state, _ in states)]
    graph = ir.Graph(inputs, [], nodes=[], name=op.name("of_elements"))
    with type(op)(graph, outer=op) as inner:
        elements = [inner.SequenceAt(x, place) for x in xs]
        made = result(inner, function(inner, *elements))
        inner.give([going, made])
    for element in elements:  # a function may ask for less
        node = element.producer()
        if node is not None and not element.uses():
            graph.remove(node, safe=True)
    operands = [op.SequenceLength(xs[0]), np.bool_(True), *(start for _, start in states)]
    y = op.emit("Loop", operands, {"body": graph}, fresh=True)
    y.shape = made.shape
    return y


def counters(op: Emit) -> tuple[ir.Value, ir.Value]:
    """Return new values for the number of the iteration and the condition that a Loop hands in."""
    kinds = {"i": ir.TensorType(ir.DataType.INT64), "going": ir.TensorType(ir.DataType.BOOL)}
    place, going = (ir.Value(name=op.name(n), type=t, shape=ir.Shape(())) for n, t in kinds.items())
    return place, going


def filled(op: Emit, number: int, x: ir.Value) -> ir.Value:
    """Return a sequence of tensors full of one number, as long as `x`, of the shapes there."""
    if isinstance(x.type, ir.OptionalType):
        raise NoGradientRule(
            f"{x.name!r} is an Optional, of which it is known only at run time whether it holds "
            "anything: its gradient cannot be zero; use OptionalGetElement outside of If and Loop"
        )
    node = x.producer()
    if node is not None and node.op_type == "SequenceConstruct":
        made = (_of_tensor(op, number, v) for v in node.inputs if v is not None)
        return op.SequenceConstruct(*made)
    return mapped(op, lambda inner, v: _of_tensor(inner, number, v), x)


def _of_tensor(op: Emit, number: int, x: ir.Value) -> ir.Value:
    return op.ones_like(x) if number else op.zeros_like(x)


def total(op: Emit, terms: Sequence[ir.Value]) -> ir.Value:
    """Add up sequences of one length. Those of zeros but for one element cost that element only."""
    single = [t for t in terms if _PLACE in t.meta]
    others = [t for t in terms if _PLACE not in t.meta] or [single.pop(0)]
    y = others[0]
    if len(others) > 1:
        y = mapped(op, lambda inner, *elements: inner.total(list(elements)), *others)
    for term in single:
        place, g = term.meta[_PLACE]
        old = op.like(op.SequenceAt(y, place), g)
        y = op.like(_replaced(op, y, place, op.total([old, g])), terms[0])
    return y


def placed(op: Emit, g: ir.Value, place: ir.Value, x: ir.Value) -> ir.Value:
    """Return zeros like the sequence `x` but for `g` at `place`."""
    y = _replaced(op, op.zeros_like(x), place, g)
    y = op.like(op.emit("Identity", [y], {}, fresh=True), x)  # a value of its own, to note it at
    y.meta[_PLACE] = place, g
    return y


def _replaced(op: Emit, sequence: ir.Value, place: ir.Value, x: ir.Value) -> ir.Value:
    """Return `sequence` with `x` in place of what is at `place`."""
    rest = op.SequenceErase(sequence, place)
    return put(op, rest, x, hole(op, place, rest))


def put(op: Emit, sequence: ir.Value, x: ir.Value, place: ir.Value | None) -> ir.Value:
    """Return `sequence` with `x` at `place`, or at its end."""
    return op.SequenceInsert(sequence, x, *([] if place is None else [place]))


def element(op: Emit, sequence: ir.Value, place: ir.Value) -> ir.Value:
    """Return the element of a sequence at `place`, by a node that is already there if there is one.

    A loop keeps what was read in each iteration, but has to run again for what was not.
    """
    for node in sequence.consumers():
        if node.op_type == "SequenceAt" and node.inputs[1] is place and node.graph is op.graph:
            return node.outputs[0]
    return op.SequenceAt(sequence, place)


def hole(op: Emit, place: ir.Value, rest: ir.Value) -> ir.Value | None:
    """Return where to put back what was at `place` before `rest` was left; None is the end.

    Places below zero count from the end, of which there is one less to count from now.
    """
    known = constant(place)
    if known is not None:
        at = int(known.reshape(()))
        return (
            op.value(np.int64(at)) if at >= 0 else op.value(np.int64(at + 1)) if at < -1 else None
        )
    return _counted(op, place, op.Add(op.SequenceLength(rest), np.int64(1)))


def _counted(op: Emit, place: ir.Value, length: ir.Value) -> ir.Value:
    """Return `place`, counted from the beginning."""
    wide = op.Cast(place, to=ir.DataType.INT64)
    return op.Where(op.Less(wide, np.int64(0)), op.Add(wide, length), wide)


# -- what is known before it runs ----------------------------------------------------------------

_MANY = 64  # elements of a sequence that are written one by one
_CHANGES = ("Identity", "SequenceInsert", "SequenceErase")


def elements(op: Emit, sequence: ir.Value) -> list[ir.Value] | None:
    """Return the elements of a sequence whose length and makers are known, else None."""
    changes: list[ir.Node] = []  # inserts and removals, the last one first
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
    elif node.op_type == "SplitToSequence" and (pieces := _split(op, node)) is not None:
        items = pieces
    else:
        return None
    return items if all(_change(items, node) for node in reversed(changes)) else None


def _change(items: list[ir.Value], node: ir.Node) -> bool:
    """Do to `items` what `node` does to a sequence; tell whether it is known what that is."""
    if node.op_type == "Identity":
        return True
    insert = node.op_type == "SequenceInsert"
    index = next(iter(node.inputs[1 + insert :]), None)
    constant_index = constant(index)
    if index is not None and constant_index is None:
        return False
    last = len(items) if insert else -1
    at = last if constant_index is None else int(constant_index.reshape(()))
    if not -len(items) <= at < len(items) + insert:
        return False  # onnxruntime says what is wrong
    if insert:
        items.insert(at, node.inputs[1])  # type: ignore[arg-type]
    else:
        del items[at]
    return True


def _split(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Return the pieces of a SplitToSequence, of known number and in the graph that is written."""
    x, given = (*node.inputs, None)[:2]
    assert x is not None
    axis = node.attributes.get_int("axis", 0)
    shape = dims(x)
    n = None if shape is None else shape[axis]
    lengths = constant(given)
    if node.graph is not op.graph or (given is not None and lengths is None):
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
    pieces = [x] if len(parts) == 1 else op.emit("Split", [x, parts], {"axis": axis}, len(parts))
    for piece, length in zip(pieces, parts, strict=True):
        if shape is not None and piece is not x:
            i = axis % len(shape)
            piece.shape = ir.Shape([*shape[:i], length, *shape[i + 1 :]])
    drop = given is None and not node.attributes.get_int("keepdims", 1)
    return [op.Squeeze(piece, [axis]) for piece in pieces] if drop else list(pieces)


def even(sequence: ir.Value, axis: int) -> int | None:
    """Return the length that all elements of a sequence have along an axis, if it is known."""
    shape = dims(sequence)
    length = None if shape is None else shape[axis]
    return length if isinstance(length, int) and length > 0 else None
