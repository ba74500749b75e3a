"""A leading axis of members, pushed through a graph: K copies of a model in one.

Each value that depends on the stacked weights gets a leading axis of length K; what depends on data
alone stays as it is, and is computed once. A node whose operator has a rule in `member_rules`
becomes one node for all members; any other is written K times, each on the slices of one member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, rank, static
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import reads, subgraphs


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

    def of(self, x: ir.Value) -> ir.Value:
        """Return the value of all members for `x`, or `x` itself if all have the same."""
        return self._of[x] if x in self._of else self._same.get(x, x)

    def share(self, x: ir.Value, new: ir.Value) -> ir.Value:
        """Replace `x` by `new`, which is the same for all members; return `new`."""
        self._same[x] = self.op.set_type_like(new, x)
        ir.convenience.replace_all_uses_with(x, new, replace_graph_outputs=True)
        return new

    def all_of(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Return what replaces each of `values`."""
        return [self.of(v) for v in values]

    def typed(self, y: ir.Value, like: ir.Value) -> ir.Value:
        """Set the type of `y` to that of `like`, and its shape to that with the leading axis."""
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
        return self.typed(self.op.Expand(self.of(x), target), x)

    def shape(self, x: ir.Value) -> ir.Value:
        """Return the shape of `x` for one member, int64 of shape [rank]."""
        lengths = static(dims(x))
        if lengths is not None:
            return self.op.const(list(lengths))
        return self.op.Shape(self.of(x), start=int(x in self._of))

    def aligned(self, x: ir.Value, n: int) -> ir.Value:
        """Return what replaces `x`, so that it broadcasts with values of `n` axes of a member."""
        y, own = self.of(x), rank(x)
        if x not in self._of or own == n:
            return y
        if own is None:
            raise ValueError(f"the rank of {printable(x.name)} is unknown")
        shape = dims(x) or ()
        y = self.op.Unsqueeze(y, list(range(1, 1 + n - own)))
        y.type, y.shape = x.type, ir.Shape([self.count, *[1] * (n - own), *shape])
        return y

    def member(self, x: ir.Value, k: int) -> ir.Value:
        """Return the value of member `k` for `x`."""
        if x not in self._of:
            return x
        # slices of one Split, whose gradient is one Concat
        attributes = {"axis": 0, "num_outputs": self.count}
        parts = self.op.emit_many("Split", [self._of[x]], attributes, outputs=self.count)
        for part in parts:
            part.type, part.shape = x.type, ir.Shape([1, *(dims(x) or ())])
        return self.op.set_type_like(self.op.Squeeze(parts[k], [0]), x)

    def stack(self, values: list[ir.Value], like: ir.Value) -> ir.Value:
        """Return the values of the members, one after the other, along the leading axis."""
        parts = [self.op.Unsqueeze(v, [0]) for v in values]
        return self.typed(self.op.Concat(*parts, axis=0), like)

    # -- the push -----------------------------------------------------------------------------

    def push(self, graph: ir.Graph, rules: Mapping) -> None:
        """Write every node that depends on stacked values for all members, and drop the old ones.

        Outputs of the graph are replaced, too.

        Raises:
            ValueError: a node with subgraphs, or a sequence, depends on them.
        """
        for node in list(graph):
            if self._of.keys().isdisjoint(reads(node)):
                continue
            self._refuse(node)
            count = len(self.op.written)
            with self.op.at(node):
                outputs = self._written(node, rules)
            self._check(self.op.written[count:])
            for old, new in zip(node.outputs, outputs, strict=True):
                if old not in self._same:
                    self._of[old] = new
        graph.outputs[:] = self.all_of(graph.outputs)
        drop_unused(graph)

    def _check(self, written: Iterable[ir.Node]) -> None:
        """Raise if a new node reads a value that is replaced, and whose name stands for another."""
        for node in written:
            if not self._of.keys().isdisjoint(node.inputs):
                raise RuntimeError(f"{node.op_type} reads a value of one member: {node}")

    def _refuse(self, node: ir.Node) -> None:
        values = [v for v in (*node.inputs, *node.outputs) if v is not None]
        what = ""
        if any(subgraphs(node)):
            what = "subgraphs"
        elif any(v.type is not None and not isinstance(v.type, ir.TensorType) for v in values):
            what = "sequences"
        elif node.attributes.get_int("training_mode", 0) and len(node.outputs) > 1:
            what = "running statistics"  # which onnxruntime overwrites in place
        if what:
            raise ValueError(
                f"{printable(node.op_type)} (node {printable(node.name)}) has {what} that depend "
                "on the weights, which cannot be stacked: train the members one after the other, "
                "each by a Trainer"
            )

    def _written(self, node: ir.Node, rules: Mapping) -> list[ir.Value]:
        rule = None if node.domain else rules.get(node.op_type)
        outputs = None if rule is None else rule(self, node)
        return self._one_by_one(node) if outputs is None else outputs

    def _one_by_one(self, node: ir.Node) -> list[ir.Value]:
        """Write a node for each member, and stack the results."""
        members = []
        for k in range(self.count):
            inputs = [None if x is None else self.member(x, k) for x in node.inputs]
            members.append(self.op.again(node, inputs))
        return [
            self.stack([outputs[i] for outputs in members], y) if _used(y) else y
            for i, y in enumerate(node.outputs)
        ]


def _used(y: ir.Value) -> bool:
    return bool(y.uses()) or y.is_graph_output()
