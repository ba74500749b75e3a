"""The values behind a layer whose unit count changes, with the axis of units in each value.

Operators that work for any number of units stay; lengths in Reshape, Resize, Split and the like are
corrected; nodes that depend on the old number are refused, by name. Units may share their axis with
other values, as scores with the coordinates of boxes behind a Concat: their `UnitSpan` says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument, named, node_text
from onnxgrad.finetune.layers import Layer, add_initializer, replace_value
from onnxgrad.finetune.locate import nodes_text
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.operators.shapes import constant, dims, rank, static

# In place of an axis of units, which is negative: the value holds indices of units.
INDEX = 0


class UnitSpan(NamedTuple):
    """The index of the first unit on an axis that units share with other values, and the length of
    the axis, in the file.
    """

    start: int
    length: int


class UnitAxes:
    """The nodes and values behind replaced layers, with a record of which axis of each value holds
    the units of the layers.

    Args:
        op: emitter of the graph, whose shapes are inferred.
        layers: the layers, which standard operators compute.
        new: the new number of units.

    Attributes:
        layers: the layers as messages show them.
        old: the number of units of each in the file.
        axes: `{value: axis}` of the values that have an axis of units, counted from the end, or
            INDEX.
        spans: `{value: span}` of the values in which the units share their axis.
        changed: values whose shapes change.
    """

    def __init__(self, op: Emit, layers: Sequence[Layer], new: int) -> None:
        self.op, self.layers = op, nodes_text([layer.node for layer in layers])
        self.old, self.new, self.several = layers[0].units, new, len(layers) > 1
        self.axes = {layer.y: layer.axis for layer in layers}
        self.spans: dict[ir.Value, UnitSpan] = {}
        self.changed = {y for layer in layers for y in (layer.y, *layer.node.outputs)}
        self._biases = {(layer.add, layer.addend) for layer in layers}  # the biases get new values
        self.upstream = {x for node in nodes_behind(self.axes) for x in reads(node)}

    def span(self, value: ir.Value) -> UnitSpan:
        """Return the index of the first unit on the axis of units in `value`, and the length of
        that axis.
        """
        return self.spans.get(value, UnitSpan(0, self.old))

    def holds_only_units(self, value: ir.Value | None) -> bool:
        """Return whether the axis of units in `value` holds the units alone, and no other
        values.
        """
        return value not in self.spans

    def new_length(self, value: ir.Value) -> int:
        """Return the length that the axis of units in `value` has with the new number of units."""
        return self.span(value).length + self.new - self.old

    def set_span(self, value: ir.Value, span: UnitSpan) -> None:
        """Record the first unit's index on the axis of units in `value`, and the axis length."""
        self.spans.pop(value, None)
        if span != UnitSpan(0, self.old):
            self.spans[value] = span

    def copy_axis_and_span(self, value: ir.Value, other: ir.Value) -> None:
        """Record that `value` has the units on the same axis, at the same indices, as `other`."""
        self.axes[value] = self.axes[other]
        self.set_span(value, self.span(other))
        self.changed.add(value)

    def new_boundary(self, span: UnitSpan, position: int) -> int | None:
        """Return the index `position` on an axis of units, moved for the new number of units; None
        if it lies between the first and the last unit.
        """
        if position <= span.start:
            return position
        behind = position >= span.start + self.old
        return position + self.new - self.old if behind else None

    def refuse(self, node: ir.Node, why: str) -> NoReturn:
        """Raise `ValueError` for `node`, which works only with the old number of units, for the
        reason `why`.
        """
        raise ValueError(
            f"{node_text(node)} follows the units of {self.layers}, of which the model has "
            f"{self.old}: {why}. Name another layer by {argument('at')}, or put a head on an "
            f"earlier value by {named('add_head')}"
        )

    def record_axis(self, node: ir.Node, axis: int) -> None:
        """Record `axis` as the axis of units in all results of `node`."""
        for y in node.outputs:
            self.axes[y] = axis
            self.changed.add(y)

    def rank(self, node: ir.Node, index: int = 0) -> int:
        """Return the rank of operand `index` of `node`; raise `ValueError` if the rank is
        unknown.
        """
        n = rank(node.inputs[index])
        if n is None:
            self.refuse(node, "the rank of its operand is unknown")
        return n

    def bypass(self, node: ir.Node) -> None:
        """Let the readers of the result of `node` read its first operand, in place, which makes
        `node` unused.
        """
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        self.copy_axis_and_span(replace_value(self.op, y, x), x)

    # -- constants that hold the old number ----------------------------------------------------

    def correct_length(
        self, node: ir.Node, index: int, position: int, reader: ir.Node | None = None
    ) -> None:
        """Set the new length of the axis of units at `position` in operand `index` of `node`, a
        vector of lengths as Reshape reads.

        It is the old length of the axis of the units, or computed: 0 or -1. The vector is a
        constant, or a Concat of constants and lengths that are computed; `reader` is the node that
        messages name, if not `node`, and whose first operand has the units.
        """
        x, reader = node.inputs[index], reader or node
        array, data = constant(x), reader.inputs[0]
        if array is not None and x is not None and data is not None:
            old, new = self.span(data).length, self.new_length(data)
            if array.ndim == 1 and array[position] == old != new:
                array = array.copy()
                array[position] = new
                self.replace_constant(node, index, array)
            return
        producer = None if x is None else x.producer()
        if producer is None:
            self.refuse(reader, "its lengths are not constant")
        if producer.op_type in ("Cast", "Identity"):
            self.correct_length(producer, 0, position, reader)
        elif producer.op_type == "Concat":
            lengths = [(static(dims(part)) or (None,))[0] for part in producer.inputs]
            for i, length in enumerate(lengths):
                if length is None:
                    self.refuse(reader, "its lengths are not constant")
                if position < length:
                    if constant(producer.inputs[i]) is not None or length > 1:
                        self.correct_length(producer, i, position, reader)
                    return
                position -= length

    def replace_constant(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        """Replace the constant that is operand `index` of `node` by `array`, cast to the dtype of
        the constant.
        """
        x = node.inputs[index]
        assert x is not None
        dtype = x.dtype or ir.DataType.from_numpy(array.dtype)
        node.replace_input_with(index, add_initializer(self.op, array, dtype, str(x.name)))

    def resize_operand(self, node: ir.Node, index: int, axis: int) -> None:
        """Resize operand `index` of `node`, which is broadcast against the units, to the new number
        of units.
        """
        x = node.inputs[index]
        shape = dims(x)
        if x is None or shape is None:
            self.refuse(node, f"the rank of {getattr(x, 'name', '')!r} is unknown")
        length = shape[axis] if len(shape) >= -axis else 1
        if length == 1 or not isinstance(length, int) or (node, index) in self._biases:
            return
        like = next(v for v in node.inputs if v is not None and self.axes.get(v) == axis)
        span, new = self.span(like), self.new_length(like)
        if length != span.length:
            self.refuse(node, f"{x.name!r} has the shape {list(shape)}")
        # an input of labels
        if x.is_graph_input() and x.const_value is None and x not in self.upstream:
            x.shape = ir.Shape(shape)
            x.shape[axis] = new
            self.copy_axis_and_span(x, like)
            return
        array, producer = constant(x), x.producer()
        resized = None if array is None else self._constant_for_new_units(array, axis, span)
        if resized is not None:
            self.replace_constant(node, index, resized)
        elif producer is not None and producer.op_type == "OneHot":
            self.correct_depth(producer)
        else:
            self.refuse(node, f"{x.name!r} has the shape {list(shape)}, a number for each unit")

    def _constant_for_new_units(
        self, array: np.ndarray, axis: int, span: UnitSpan
    ) -> np.ndarray | None:
        """Return the constant `array`, resized for the new number of units; None if the units have
        different numbers in it.
        """
        before, units, behind = np.split(array, [span.start, span.start + self.old], axis)
        first = np.take(units, [0], axis)
        if not np.array_equal(units, np.broadcast_to(first, units.shape)):
            return None
        if span == UnitSpan(0, self.old):
            return first
        return np.concatenate([before, np.repeat(first, self.new, axis), behind], axis)

    def correct_depth(self, node: ir.Node) -> None:
        """Set the depth of the OneHot `node`, which must be the old number of units, to the new
        number of units.
        """
        length = constant(node.inputs[1])
        if length is None or length.item() != self.old:
            self.refuse(node, "its depth is not the number of units")
        self.replace_constant(node, 1, np.full(length.shape, self.new, length.dtype))
        self.changed.update(node.outputs)
