"""Long vectors in shape inference.

onnx stores the elements of a vector of any dtype if one of the operators `_KEEPERS` reads it, with
100 bytes for each element. Nodes that read long vectors are therefore hidden from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxgrad.graph.shapes import Dims, dims

_KEEPERS = frozenset("Add Cast Concat Gather Mul Shape Size Slice Squeeze Sub Unsqueeze".split())
_TAKE_SHAPE = frozenset(("Shape", "Size"))
# operators that make long vectors of short ones; through others a length stays what it is, or falls
_MAKERS = frozenset(
    "CenterCropPad Compress ConcatFromSequence ConstantOfShape Expand GatherElements GatherND "
    "NonZero OneHot Pad Range Reshape Resize Tile Upsample".split()
)
_BUDGET = 1 << 20  # elements of all vectors together
_SEEN = "onnxgrad.unknown_length"  # `meta` key of a vector whose length onnx does not infer


def lacks_shapes(nodes: Iterable[ir.Node]) -> bool:
    """Return whether the lengths of vectors have to be inferred first, without their elements."""
    return any(
        x is not None and x.shape is None and x.producer() is not None and _SEEN not in x.meta
        for node in nodes
        if node.op_type in _KEEPERS
        for x in node.inputs
    )


class Vectors:
    """Selects the nodes to hide, in rounds: fewer as more shapes are inferred.

    Args:
        nodes: those of a model, in order.
        shapes: inferred shapes, for values whose own shape is unknown.
    """

    def __init__(self, nodes: list[ir.Node], shapes: Mapping[ir.Value, Dims]) -> None:
        self.nodes = [n for n in nodes if not n.domain]
        self.shapes = shapes

    def _dims(self, x: ir.Value) -> Dims | None:
        shape = dims(x)
        if shape is None or (len(shape) == 1 and not isinstance(shape[0], int)):
            return self.shapes.get(x, shape)
        return shape

    def too_long(self) -> list[ir.Node]:
        """Return the nodes to hide: they read vectors of unknown length, or exceed the budget."""
        lengths: dict[ir.Value, int | None] = {}
        costs: dict[ir.Node, int] = {}
        hidden: list[ir.Node] = []
        for node in self.nodes:
            stores = node.op_type in _KEEPERS and node.op_type not in _TAKE_SHAPE
            operands = [self._length(x, lengths) for x in node.inputs if x is not None]
            bounds = [n for n in operands if n is not None]
            if stores and len(bounds) < len(operands):
                hidden.append(node)
            elif stores and any(bounds):
                costs[node] = sum(bounds)
            for y in node.outputs:
                lengths[y] = self._result(node, y, operands)
        total = sum(costs.values())
        for node, cost in sorted(costs.items(), key=lambda item: -item[1]):
            if total <= _BUDGET:
                break
            hidden.append(node)
            total -= cost
        return hidden

    def _length(self, x: ir.Value, lengths: dict[ir.Value, int | None]) -> int | None:
        """Return a bound of the length of a vector: 0 for other tensors, None for no bound."""
        if x in lengths:
            return lengths[x]
        shape = self._dims(x)
        return shape[0] if shape and len(shape) == 1 and isinstance(shape[0], int) else 0

    def _result(self, node: ir.Node, y: ir.Value, operands: list[int | None]) -> int | None:
        """Return `_length` of a result, given those of the operands of its node."""
        shape = self._dims(y)
        if shape is not None and len(shape) != 1:
            return 0
        if shape and isinstance(shape[0], int):
            return shape[0]
        if node.op_type in _TAKE_SHAPE or y.meta.get(_SEEN):
            return 0
        if None in operands:
            return None
        bounds = [n for n in operands if n is not None]
        if node.op_type == "Concat":
            return sum(bounds)
        if node.op_type in _MAKERS and not self._stays_small(node):
            return None
        return max(bounds, default=0)

    def _stays_small(self, node: ir.Node) -> bool:
        """Return whether `node`, one of `_MAKERS`, is a Reshape not proven to return a vector."""
        if node.op_type != "Reshape":
            return False
        target = node.inputs[1] if len(node.inputs) > 1 else None
        return target is None or self._dims(target) != (1,)

    def note(self, hidden: list[ir.Node]) -> None:
        """Mark the vectors whose length onnx did not infer in a pass without the `hidden` nodes.

        Only vectors that do not depend on a hidden node: for them, a later pass cannot do better.
        """
        dependent: set[ir.Value] = set()
        hidden_nodes = set(hidden)
        for node in self.nodes:
            if not dependent.isdisjoint(x for x in node.inputs if x is not None):
                dependent.update(node.outputs)
                continue
            if node in hidden_nodes:
                dependent.update(node.outputs)
            else:
                for y in node.outputs:
                    shape = self._dims(y)
                    if shape is None or (len(shape) == 1 and not isinstance(shape[0], int)):
                        y.meta[_SEEN] = True
