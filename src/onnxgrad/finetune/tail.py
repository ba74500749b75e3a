"""What follows a layer that gets another number of units: the axis of the units is followed.

Operators that work for any number of units stay; lengths in Reshape, Resize and the like are
corrected; what depends on the old number is refused, by name.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument, named
from onnxgrad.finetune.layers import initializer, known_value, shown, substitute
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, rank, static
from onnxgrad.graph.traversal import reads

# An axis of units, counted from the end; or INDEX: the value holds indices of units.
INDEX = 0
_MICROSOFT = frozenset("Gelu QuickGelu FastGelu".split())


class Tail:
    """The values behind a layer, and the axis of its units in each.

    Args:
        op: emitter of the graph, whose shapes are inferred.
        layer: the layer as messages show it.
        y: its result.
        axis: of the units, counted from the end.
        old: the number of units in the file.
        new: the new number.

    Attributes:
        axes: `{value: axis}` of the values that have an axis of units, or INDEX.
        changed: values whose shapes change.
    """

    def __init__(self, op: Emit, layer: str, y: ir.Value, axis: int, old: int, new: int) -> None:
        self.op, self.layer, self.old, self.new = op, layer, old, new
        self.axes: dict[ir.Value, int] = {y: axis}
        self.changed: set[ir.Value] = {y}
        self.upstream = _upstream(y)

    def refuse(self, node: ir.Node, why: str) -> NoReturn:
        """Raise the error that a node needs the old number of units."""
        raise ValueError(
            f"{shown(node)} follows the units of {self.layer}, of which the model has {self.old}: "
            f"{why}. Name another layer by {argument('at')}, or put a head on an earlier value by "
            f"{named('add_head')}"
        )

    def keep(self, node: ir.Node, axis: int, outputs: int | None = None) -> None:
        """Set the axis of the first `outputs` outputs of `node`, by default all."""
        for y in node.outputs[:outputs]:
            self.axes[y] = axis
            self.changed.add(y)

    def rank(self, node: ir.Node, index: int = 0) -> int:
        """Return the rank of an operand, or refuse."""
        n = rank(node.inputs[index])
        if n is None:
            self.refuse(node, "the rank of its operand is unknown")
        return n

    def bypass(self, node: ir.Node) -> None:
        """Remove `node`: its operand takes the uses of its result."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        new = substitute(self.op, y, x)
        self.axes[new] = self.axes[x]
        self.changed.add(new)

    # -- constants that hold the old number ----------------------------------------------------

    def vector(self, node: ir.Node, index: int, position: int) -> None:
        """Correct element `position` of the vector of lengths that `node` reads, if it is `old`.

        It is a constant, or a Concat of constants and lengths that are computed.
        """
        self._vector(node, index, position, node)

    def _vector(self, node: ir.Node, index: int, position: int, reader: ir.Node) -> None:
        x = node.inputs[index]
        array = known_value(x)
        if array is not None and x is not None:
            if array.ndim == 1 and array[position] == self.old != self.new:
                array = array.copy()
                array[position] = self.new
                assert x.dtype is not None
                new = initializer(self.op, array, x.dtype, str(x.name))
                node.replace_input_with(index, new)
            return
        producer = None if x is None else x.producer()
        if producer is None:
            self.refuse(reader, "its lengths are not constant")
        if producer.op_type in ("Cast", "Identity"):
            self._vector(producer, 0, position, reader)
        elif producer.op_type == "Concat":
            lengths = [(static(dims(part)) or (None,))[0] for part in producer.inputs]
            for i, length in enumerate(lengths):
                if length is None:
                    self.refuse(reader, "its lengths are not constant")
                if position < length:
                    part = producer.inputs[i]
                    if part is not None and (known_value(part) is not None or length > 1):
                        self._vector(producer, i, position, reader)
                    return
                position -= length

    def operand(self, node: ir.Node, index: int, axis: int) -> None:
        """Make the operand fit the new number of units, as it is broadcast against them."""
        x = node.inputs[index]
        shape = dims(x)
        if x is None or shape is None:
            self.refuse(node, f"the rank of {getattr(x, 'name', '')!r} is unknown")
        length = shape[axis] if len(shape) >= -axis else 1
        if length == 1 or not isinstance(length, int):
            return
        if length != self.old:
            self.refuse(node, f"{x.name!r} has the shape {list(shape)}")
        if x.is_graph_input() and x.const_value is None and x not in self.upstream:  # labels
            x.shape = ir.Shape(_with(shape, axis, self.new))
            self.axes[x] = axis
            self.changed.add(x)
            return
        array, producer = known_value(x), x.producer()
        if array is not None and np.array_equal(
            array, np.broadcast_to(first := np.take(array, [0], axis), array.shape)
        ):
            assert x.dtype is not None
            node.replace_input_with(index, initializer(self.op, first, x.dtype, str(x.name)))
        elif producer is not None and producer.op_type == "OneHot":
            self.depth(producer)
        else:
            self.refuse(node, f"{x.name!r} has the shape {list(shape)}, a number for each unit")

    def depth(self, node: ir.Node) -> None:
        """Correct the depth of a OneHot."""
        length = known_value(node.inputs[1])
        if length is None or length.item() != self.old:
            self.refuse(node, "its depth is not the number of units")
        old = node.inputs[1]
        assert old is not None
        new = np.full(length.shape, self.new, length.dtype)
        dtype = ir.DataType.from_numpy(length.dtype)
        node.replace_input_with(1, initializer(self.op, new, dtype, str(old.name)))
        for y in node.outputs:
            self.changed.add(y)


def _upstream(y: ir.Value) -> set[ir.Value]:
    """Return the values that `y` is computed from."""
    stack, seen = [y], set[ir.Value]()
    while stack:
        node = stack.pop().producer()
        new = [] if node is None else [v for v in reads(node) if v not in seen]
        seen.update(new)
        stack += new
    return seen


def _with(shape: tuple, axis: int, length: int) -> list:
    changed = list(shape)
    changed[axis] = length
    return changed
