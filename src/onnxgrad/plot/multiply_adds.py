"""Counts of multiply-adds of nodes: an a * b that is added to a sum counts as one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod

import onnx_ir as ir

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import operator_of
from onnxgrad.operators.shapes import UnknownShapeError, constant, dims, static

_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


@dataclass
class Work:
    """Counts multiply-adds, and collects the nodes whose count is unknown."""

    parameters: Collection[ir.Value]  # weights; one that is added counts as a bias
    uncounted: dict[str, None] = field(default_factory=dict)  # sentences, in order

    def count_node(self, node: ir.Node) -> int:
        """Return the multiply-adds of `node` and of its subgraphs.

        The iterations of a Scan count, a Loop of unknown length as one, and the branch of an If
        that has more.
        """
        inner = [sum(map(self.count_node, graph)) for graph in subgraphs(node)]
        try:
            if inner:
                return self._count_subgraphs(node, inner)
            if (count := operator_of(node).work) is not None:
                return count(node, _static_lengths)
            if node.op_type == "Add" and any(x in self.parameters for x in node.inputs):
                return prod(_static_lengths(node.outputs[0]))
        except UnknownShapeError:
            self._note_uncounted(node, "its shapes are not static")
            return 0
        if node.domain not in _STANDARD:
            self._note_uncounted(node, f"an operator of {node.domain!r}")
        return 0

    def _count_subgraphs(self, node: ir.Node, inner: list[int]) -> int:
        if node.op_type == "If" or not any(inner):
            return max(inner)
        trips = _iteration_count(node)
        if trips is None:
            self._note_uncounted(node, "counted once, as its length is not known")
        return sum(inner) * (1 if trips is None else trips)

    def _note_uncounted(self, node: ir.Node, reason: str) -> None:
        self.uncounted[f"{node.op_type} (node {node.name!r}): {reason}"] = None


def _iteration_count(node: ir.Node) -> int | None:
    if node.op_type == "Loop":
        limit = constant(node.inputs[0])
        return None if limit is None else int(limit.item())
    count = node.attributes.get_int("num_scan_inputs", 0)
    axes = node.attributes.get_ints("scan_input_axes", ()) or [0] * count
    for x, axis in zip(node.inputs[len(node.inputs) - count :], axes, strict=True):
        shape = dims(x)
        if shape is not None and isinstance(length := shape[axis], int):
            return length
    return None


def _static_lengths(value: ir.Value | None) -> tuple[int, ...]:
    """Return the static shape of a value."""
    shape = static(dims(value))
    if shape is None:
        raise UnknownShapeError
    return shape
