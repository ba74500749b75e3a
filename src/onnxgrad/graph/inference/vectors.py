"""Long vectors in shape inference.

onnx keeps what it knows of vectors element by element, of any dtype, where one of `_KEEPERS` reads
them: 100 bytes an element. Such nodes are hidden from it where the vectors are long.
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
_BUDGET = 1 << 20  # elements, of all vectors together
_SEEN = "onnxgrad.unknown_length"  # noted at a vector whose length onnx was seen not to find


def lacks_shapes(nodes: Iterable[ir.Node]) -> bool:
    """Tell whether it takes a look without elements to tell how long the vectors are."""
    return any(
        x is not None and x.shape is None and x.producer() is not None and _SEEN not in x.meta
        for node in nodes
        if node.op_type in _KEEPERS
        for x in node.inputs
    )


class Vectors:
    """Which nodes are to be hidden, in rounds: the more shapes are known, the fewer.

    Args:
        nodes: those of a model, in order.
        shapes: what is known of values beyond their own shapes.
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
        """Return the nodes that read more elements than onnx may keep, or maybe do."""
        lengths: dict[ir.Value, int | None] = {}
        costs: dict[ir.Node, int] = {}
        unsure: list[ir.Node] = []
        for node in self.nodes:
            kept = node.op_type in _KEEPERS and node.op_type not in _TAKE_SHAPE
            read = [self._length(x, lengths) for x in node.inputs if x is not None]
            known = [n for n in read if n is not None]
            if kept and len(known) < len(read):
                unsure.append(node)
            elif kept and any(known):
                costs[node] = sum(known)
            for y in node.outputs:
                lengths[y] = self._result(node, y, read)
        total = sum(costs.values())
        for node, cost in sorted(costs.items(), key=lambda item: -item[1]):
            if total <= _BUDGET:
                break
            unsure.append(node)
            total -= cost
        return unsure

    def _length(self, x: ir.Value, lengths: dict[ir.Value, int | None]) -> int | None:
        """Return the number of elements of a vector, 0 for what is none; None may be any number."""
        if x in lengths:
            return lengths[x]
        shape = self._dims(x)
        return shape[0] if shape and len(shape) == 1 and isinstance(shape[0], int) else 0

    def _result(self, node: ir.Node, y: ir.Value, read: list[int | None]) -> int | None:
        shape = self._dims(y)
        if shape is not None and len(shape) != 1:
            return 0
        if shape and isinstance(shape[0], int):
            return shape[0]
        if node.op_type in _TAKE_SHAPE or y.meta.get(_SEEN):
            return 0
        if None in read:
            return None
        known = [n for n in read if n is not None]
        if node.op_type == "Concat":
            return sum(known)
        if node.op_type in _MAKERS and not self._stays_small(node):
            return None
        return max(known, default=0)

    def _stays_small(self, node: ir.Node) -> bool:
        """Tell whether the result of a maker has several axes, or is not known to have one."""
        if node.op_type != "Reshape":
            return False
        target = node.inputs[1] if len(node.inputs) > 1 else None
        return target is None or self._dims(target) != (1,)

    def note(self, hidden: list[ir.Node]) -> None:
        """Note, after inference without `hidden`, the vectors whose length it has not found.

        Nothing before the first of them was hidden: it will not be found later either.
        """
        after: set[ir.Value] = set()
        hide = set(hidden)
        for node in self.nodes:
            if not after.isdisjoint(x for x in node.inputs if x is not None):
                after.update(node.outputs)
                continue
            if node in hide:
                after.update(node.outputs)
            else:
                for y in node.outputs:
                    shape = self._dims(y)
                    if shape is None or (len(shape) == 1 and not isinstance(shape[0], int)):
                        y.meta[_SEEN] = True
