"""Nodes on sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.sequences import content
from onnxgrad.graph.shapes import constant, dims
from onnxgrad.graph.writer import Writer

_PLACE = "onnxgrad.place"  # noted at a sequence of zeros but for one element: where, and what it is


def mapped(op: Writer, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the sequence of `function(inner, *elements)` over the elements of sequences `xs`."""
    made = ir.Value(name=op.name("made"), type=content(xs[0].type))
    start = op.emit("SequenceEmpty", [], {"dtype": xs[0].dtype})

    def grown(inner: Writer, y: ir.Value) -> ir.Value:
        longer = inner.SequenceInsert(made, y)
        longer.shape = y.shape
        return longer

    return _loop(op, function, xs, grown, [(made, start)])


def stacked(op: Writer, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the tensor of all `function(inner, *elements)`, which are of one shape."""
    y = _loop(op, function, xs, lambda inner, y: y, [])
    inner = dims(y)
    y.shape = None if inner is None else ir.Shape([None, *inner])
    return y


def _loop(
    op: Writer,
    function: Callable[..., ir.Value],
    xs: Sequence[ir.Value],
    result: Callable[[Writer, ir.Value], ir.Value],
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


def counters(op: Writer) -> tuple[ir.Value, ir.Value]:
    """Return new values for the number of the iteration and the condition that a Loop hands in."""
    kinds = {"i": ir.TensorType(ir.DataType.INT64), "going": ir.TensorType(ir.DataType.BOOL)}
    place, going = (ir.Value(name=op.name(n), type=t, shape=ir.Shape(())) for n, t in kinds.items())
    return place, going


def filled(op: Writer, number: int, x: ir.Value) -> ir.Value:
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


def _of_tensor(op: Writer, number: int, x: ir.Value) -> ir.Value:
    return op.ones_like(x) if number else op.zeros_like(x)


def total(op: Writer, terms: Sequence[ir.Value]) -> ir.Value:
    """Add up sequences of one length. Those of zeros but for one element cost that element only."""
    single = [t for t in terms if _PLACE in t.meta]
    others = [t for t in terms if _PLACE not in t.meta] or [single.pop(0)]
    y = others[0]
    if len(others) > 1:
        y = mapped(op, lambda inner, *elements: inner.total(list(elements)), *others)
    for term in single:
        place, g = term.meta[_PLACE]
        old = op.set_type_like(op.SequenceAt(y, place), g)
        y = op.set_type_like(_replaced(op, y, place, op.total([old, g])), terms[0])
    return y


def placed(op: Writer, g: ir.Value, place: ir.Value, x: ir.Value) -> ir.Value:
    """Return zeros like the sequence `x` but for `g` at `place`."""
    y = _replaced(op, op.zeros_like(x), place, g)
    y = op.set_type_like(op.copy_of(y), x)  # a value of its own, to note it at
    y.meta[_PLACE] = place, g
    return y


def _replaced(op: Writer, sequence: ir.Value, place: ir.Value, x: ir.Value) -> ir.Value:
    """Return `sequence` with `x` in place of what is at `place`."""
    rest = op.SequenceErase(sequence, place)
    return put(op, rest, x, hole(op, place, rest))


def put(op: Writer, sequence: ir.Value, x: ir.Value, place: ir.Value | None) -> ir.Value:
    """Return `sequence` with `x` at `place`, or at its end."""
    return op.SequenceInsert(sequence, x, *([] if place is None else [place]))


def element(op: Writer, sequence: ir.Value, place: ir.Value) -> ir.Value:
    """Return the element of a sequence at `place`, by a node that is already there if there is one.

    A loop keeps what was read in each iteration, but has to run again for what was not.
    """
    for node in sequence.consumers():
        if node.op_type == "SequenceAt" and node.inputs[1] is place and node.graph is op.graph:
            return node.outputs[0]
    return op.SequenceAt(sequence, place)


def hole(op: Writer, place: ir.Value, rest: ir.Value) -> ir.Value | None:
    """Return where to put back what was at `place` before `rest` was left; None is the end.

    Places below zero count from the end, of which there is one less to count from now.
    """
    known = constant(place)
    if known is not None:
        at = int(known.reshape(()))
        return (
            op.const(np.int64(at)) if at >= 0 else op.const(np.int64(at + 1)) if at < -1 else None
        )
    return _counted(op, place, op.Add(op.SequenceLength(rest), np.int64(1)))


def _counted(op: Writer, place: ir.Value, length: ir.Value) -> ir.Value:
    """Return `place`, counted from the beginning."""
    wide = op.Cast(place, to=ir.DataType.INT64)
    return op.Where(op.Less(wide, np.int64(0)), op.Add(wide, length), wide)


_MANY = 64  # elements of a sequence that are written one by one

_CHANGES = ("Identity", "SequenceInsert", "SequenceErase")


def elements(op: Writer, sequence: ir.Value) -> list[ir.Value] | None:
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


def _split(op: Writer, node: ir.Node) -> list[ir.Value] | None:
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
    pieces = (
        [x] if len(parts) == 1 else op.emit_many("Split", [x, parts], {"axis": axis}, len(parts))
    )
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
