"""A leading axis of members, pushed through a graph: K copies of a model in one.

Each value that depends on a stacked one gets a leading axis of length K; a value that depends on
data alone is not changed, and is computed once. A node becomes one node for all members if its
operator has a form for it (`operators/member_forms`), else K nodes, each on the slices of a member.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Self

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.operators.member_forms import write_for_members
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import dims, rank, static


class MemberAxis:
    """The values of a graph that have a leading axis of members.

    Args:
        op: writes into the graph.
        count: the number of members, K.
        stacked: `{value: the value that replaces it, of shape (K, ...)}`.
    """

    def __init__(self, op: Emit, count: int, stacked: Mapping[ir.Value, ir.Value]) -> None:
        self.op, self.count, self._of = op, count, dict(stacked)
        self._same: dict[ir.Value, ir.Value] = {}  # what replaces values that all members share

    def __contains__(self, x: ir.Value | None) -> bool:
        return x in self._of

    def value_for(self, x: ir.Value) -> ir.Value:
        """Return the value of all members for `x`, or `x` itself if all have the same."""
        return self._of[x] if x in self._of else self._same.get(x, x)

    def replace_shared(self, x: ir.Value, new: ir.Value) -> ir.Value:
        """Replace `x` by `new`, which is the same for all members; return `new`."""
        self._same[x] = self.op.set_type_like(new, x)
        ir.convenience.replace_all_uses_with(x, new, replace_graph_outputs=True)
        return new

    def values_for(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Return what replaces each of `values`."""
        return [self.value_for(v) for v in values]

    def shares_operands(self, values: Iterable[ir.Value | None]) -> bool:
        """Return whether all members have the same `values`."""
        return not any(x in self for x in values)

    def write_node(self, node: ir.Node, inputs: list, **changed: Any) -> list[ir.Value]:
        """Write a node with other inputs and attributes; its outputs get the leading axis."""
        attributes, count = attributes_of(node) | changed, len(node.outputs)
        outputs = self.op.emit_many(node.op_type, inputs, attributes, count, node.domain)
        return [self.set_member_type(y, old) for y, old in zip(outputs, node.outputs, strict=True)]

    def set_member_type(self, y: ir.Value, like: ir.Value) -> ir.Value:
        """Set type and shape of `y` as of `like`, with the leading axis; return `y`."""
        shape = dims(like)
        y.type = like.type
        if shape is not None and static(dims(y)) is None:  # else it is known already
            y.shape = ir.Shape([self.count, *shape])
        return y

    def expanded(self, x: ir.Value) -> ir.Value:
        """Return `x` with the leading axis, repeated if all members have the same value."""
        if x in self._of:
            return self._of[x]
        target = self.op.Concat([self.count], self.shape(x), axis=0)
        return self.set_member_type(self.op.Expand(self.value_for(x), target), x)

    def shape(self, x: ir.Value) -> ir.Value:
        """Return the shape of `x` for one member, int64 of shape [rank]."""
        lengths = static(dims(x))
        if lengths is not None:
            return self.op.const(list(lengths))
        return self.op.Shape(self.value_for(x), start=int(x in self._of))

    def aligned(self, x: ir.Value, n: int) -> ir.Value:
        """Return what replaces `x`, so that it broadcasts with values of `n` axes of a member."""
        y, own = self.value_for(x), rank(x)
        if x not in self._of or own == n:
            return y
        if own is None:
            raise ValueError(f"the rank of {printable(x.name)} is unknown")
        shape = dims(x) or ()
        y = self.op.Unsqueeze(y, list(range(1, 1 + n - own)))
        y.type, y.shape = x.type, ir.Shape([self.count, *[1] * (n - own), *shape])
        return y

    def value_of_member(self, x: ir.Value, k: int) -> ir.Value:
        """Return the value of member `k` for `x`."""
        if x not in self._of:
            return x
        # slices of one Split, whose gradient is one Concat
        attributes = {"axis": 0, "num_outputs": self.count}
        parts = self.op.emit_many("Split", [self._of[x]], attributes, outputs=self.count)
        for part in parts:
            part.type, shape = x.type, dims(x)
            part.shape = None if shape is None else ir.Shape([1, *shape])
        return self.op.set_type_like(self.op.Squeeze(parts[k], [0]), x)

    def stack_values(self, values: list[ir.Value], like: ir.Value) -> ir.Value:
        """Return the values of the members, one after the other, along the leading axis."""
        parts = [self.op.Unsqueeze(v, [0]) for v in values]
        return self.set_member_type(self.op.Concat(*parts, axis=0), like)

    def set_stacked(self, x: ir.Value, new: ir.Value) -> None:
        """Let `new`, of all members, stand for `x`."""
        self._of[x] = new

    def for_body(self, op: Emit) -> Self:
        """Return the same values for the nodes that `op` writes, in a body."""
        inner = copy.copy(self)
        inner.op = op
        return inner

    def push(self, graph: ir.Graph) -> None:
        """Write every node that depends on stacked values for all members, and drop the old ones.

        Outputs of the graph are replaced, too.

        Raises:
            ValueError: a node that depends on them cannot be written for all members, as it has
                sequences, or subgraphs that run for some members only.
        """
        for node in list(graph):
            if not any(x in self for x in reads(node)):
                continue
            count = len(self.op.written)
            with self.op.at(node):
                outputs = None if _has_sequences(node) else write_for_members(self, node)
                if outputs is None:
                    outputs = self._one_by_one(node)
            for new in self.op.written[count:]:
                if any(x in self for x in new.inputs):  # its name stands for another value by now
                    raise RuntimeError(f"{new.op_type} reads a value of one member: {new}")
            for old, y in zip(node.outputs, outputs, strict=True):
                if old not in self._same:
                    self._of[old] = y
        graph.outputs[:] = self.values_for(graph.outputs)
        drop_unused(graph)

    def _one_by_one(self, node: ir.Node) -> list[ir.Value]:
        """Write a node for each member, and stack the results."""
        kind = "sequences" if _has_sequences(node) else "subgraphs" * any(subgraphs(node))
        if kind:
            raise ValueError(
                f"{printable(node.op_type)} (node {printable(node.name)}) has {kind} that depend "
                "on the weights, which cannot be stacked: train the members one after the other, "
                "each by a Trainer"
            )
        members = []
        for k in range(self.count):
            inputs = [None if x is None else self.value_of_member(x, k) for x in node.inputs]
            members.append(self.op.copy_node(node, inputs))
        columns = zip(node.outputs, zip(*members, strict=True), strict=True)
        return [
            self.stack_values(list(new), y) if y.uses() or y.is_graph_output() else y
            for y, new in columns
        ]


def _has_sequences(node: ir.Node) -> bool:
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    return any(v.type is not None and not isinstance(v.type, ir.TensorType) for v in values)
