"""Nodes that compute with sequences, element by element.

`op` and `inner` are emitters, whose own methods call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.records import made_by
from onnxgrad.operators.shapes import constant, dims, optional_content


def map_elements(op: Any, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return the sequence of `function(inner, *elements)`, for the elements of sequences `xs`."""
    results = ir.Value(name=op.name("results"), type=optional_content(xs[0].type))
    start = op.emit("SequenceEmpty", [], {"dtype": xs[0].dtype})

    def longer(inner: Any, *elements: ir.Value) -> ir.Value:
        y = function(inner, *elements)
        sequence = inner.SequenceInsert(results, y)
        sequence.shape = y.shape
        return sequence

    return _loop_over_elements(op, longer, xs, {results: start})


def stack_results(op: Any, function: Callable[..., ir.Value], *xs: ir.Value) -> ir.Value:
    """Return `function(inner, *elements)` for all elements of `xs`, stacked along a new axis 0."""
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

    def fill(inner: Any, v: ir.Value) -> ir.Value:
        return inner.ones_like(v) if number else inner.zeros_like(v)

    if node := made_by(x, "SequenceConstruct"):
        return op.SequenceConstruct(*(fill(op, v) for v in node.inputs if v is not None))
    return map_elements(op, fill, x)


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
    y = op.set_type_like(op.copy_of(y), x)  # a new value, as its `meta` is set
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
    """Return the position in `rest` at which to insert an element erased at `position`.

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
    elif node.op_type == "SplitToSequence" and (pieces := _split_elements(op, node)) is not None:
        items = pieces
    else:
        return None
    return items if all(_apply_change(items, node) for node in reversed(changes)) else None


def _apply_change(items: list[ir.Value], node: ir.Node) -> bool:
    """Apply a node of `_CHANGES` to `items`; return False if its index is no valid constant."""
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


def _split_elements(op: Any, node: ir.Node) -> list[ir.Value] | None:
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
