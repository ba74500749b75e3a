"""What follows a layer that gets another number of units: the axis of the units is followed.

Operators that work for any number of units stay; lengths in Reshape, Resize and the like are
corrected; what depends on the old number is refused, by name.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument, named, node_text
from onnxgrad.finetune.layers import initializer, substitute
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import constant, dims, rank, static
from onnxgrad.graph.traversal import nodes_behind, reads

# An axis of units, counted from the end; or INDEX: the value holds indices of units.
INDEX = 0


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
        self.upstream = {x for node in nodes_behind([y]) for x in reads(node)}

    def refuse(self, node: ir.Node, why: str) -> NoReturn:
        """Raise the error that a node needs the old number of units."""
        raise ValueError(
            f"{node_text(node)} follows the units of {self.layer}, of which the model has "
            f"{self.old}: {why}. Name another layer by {argument('at')}, or put a head on an "
            f"earlier value by {named('add_head')}"
        )

    def keep(self, node: ir.Node, axis: int) -> None:
        """Set the axis of the outputs of `node`."""
        for y in node.outputs:
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

    def vector(
        self, node: ir.Node, index: int, position: int, reader: ir.Node | None = None
    ) -> None:
        """Correct element `position` of the vector of lengths that `node` reads, if it is `old`.

        It is a constant, or a Concat of constants and lengths that are computed; `reader` is the
        node that messages name, if not `node`.
        """
        x, reader = node.inputs[index], reader or node
        array = constant(x)
        if array is not None and x is not None:
            if array.ndim == 1 and array[position] == self.old != self.new:
                array = array.copy()
                array[position] = self.new
                self.replace_constant(node, index, array)
            return
        producer = None if x is None else x.producer()
        if producer is None:
            self.refuse(reader, "its lengths are not constant")
        if producer.op_type in ("Cast", "Identity"):
            self.vector(producer, 0, position, reader)
        elif producer.op_type == "Concat":
            lengths = [(static(dims(part)) or (None,))[0] for part in producer.inputs]
            for i, length in enumerate(lengths):
                if length is None:
                    self.refuse(reader, "its lengths are not constant")
                if position < length:
                    if constant(producer.inputs[i]) is not None or length > 1:
                        self.vector(producer, i, position, reader)
                    return
                position -= length

    def replace_constant(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        """Let `node` read `array` instead of the constant, in its dtype and by its name."""
        x = node.inputs[index]
        assert x is not None
        dtype = x.dtype or ir.DataType.from_numpy(array.dtype)
        node.replace_input_with(index, initializer(self.op, array, dtype, str(x.name)))

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
            x.shape = ir.Shape(shape)
            x.shape[axis] = self.new
            self.axes[x] = axis
            self.changed.add(x)
            return
        array, producer = constant(x), x.producer()
        if array is not None and np.array_equal(
            array, np.broadcast_to(first := np.take(array, [0], axis), array.shape)
        ):
            self.replace_constant(node, index, first)
        elif producer is not None and producer.op_type == "OneHot":
            self.depth(producer)
        else:
            self.refuse(node, f"{x.name!r} has the shape {list(shape)}, a number for each unit")

    def depth(self, node: ir.Node) -> None:
        """Correct the depth of a OneHot."""
        length = constant(node.inputs[1])
        if length is None or length.item() != self.old:
            self.refuse(node, "its depth is not the number of units")
        self.replace_constant(node, 1, np.full(length.shape, self.new, length.dtype))
        self.changed.update(node.outputs)
