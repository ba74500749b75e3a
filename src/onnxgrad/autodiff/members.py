"""A leading axis of members, pushed through a graph and the bodies of its nodes: K models in one.

Each value that depends on a stacked one gets a leading axis of length K; a value that depends on
data alone is not changed, and is computed once. A node becomes one node for all members if its
operator has a form for it (`operators/member_forms`), else K nodes, each on the slices of a member.
The members may also be the rows of a batch, whose number is known when the graph runs
(`primal/row_axis.py`): then each node needs a form.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Self

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import captured, dependents, reads, subgraphs
from onnxgrad.operators.member_forms import write_for_members
from onnxgrad.operators.records import member_form
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import Dim, dims, rank, static


class UnstackableNode(ValueError):
    """A node that cannot be written for all members."""


class MemberAxis:
    """The values of a graph that have a leading axis of members: copies of one model, stacked.

    Args:
        op: writes into the graph.
        count: the number of members, K; or an int64 tensor of shape [1] that holds it.
        stacked: `{value: the value that replaces it, of shape (K, ...)}`.
        symbol: the name of K in shapes, if `count` is a tensor.
    """

    def __init__(
        self,
        op: Emit,
        count: int | ir.Value,
        stacked: Mapping[ir.Value, ir.Value],
        symbol: str | None = None,
    ) -> None:
        self.op, self.count, self._of = op, count, dict(stacked)
        self.length: Dim = count if isinstance(count, int) else symbol
        self._same: dict[ir.Value, ir.Value] = {}  # replacements that all members share

    def __contains__(self, x: ir.Value | None) -> bool:
        return x in self._of

    def value_for(self, x: ir.Value) -> ir.Value:
        """Return the value that replaces `x`: all members' values, stacked, or `x` if they are
        equal.
        """
        return self._of[x] if x in self._of else self._same.get(x, x)

    def replace_shared(self, x: ir.Value, new: ir.Value) -> ir.Value:
        """Replace `x` by `new`, which is the same for all members; return `new`."""
        self._same[x] = self.op.set_type_like(new, x)
        ir.convenience.replace_all_uses_with(x, new, replace_graph_outputs=True)
        return new

    def values_for(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Return the values, stacked over members, that replace `values`: see `value_for`."""
        return [self.value_for(v) for v in values]

    def shares_operands(self, values: Iterable[ir.Value | None]) -> bool:
        """Return whether all members of the `TrainerStack` have the same `values`."""
        return not any(x in self for x in values)

    def write_node(self, node: ir.Node, inputs: list, **changed: Any) -> list[ir.Value]:
        """Write a copy of `node` for all members, with these inputs and changed attributes."""
        attributes, count = attributes_of(node) | changed, len(node.outputs)
        outputs = self.op.emit_many(node.op_type, inputs, attributes, count, node.domain)
        return [self.set_member_type(y, old) for y, old in zip(outputs, node.outputs, strict=True)]

    def set_member_type(self, y: ir.Value, like: ir.Value) -> ir.Value:
        """Set the type of `y` to the type of `like` with a leading axis of members; return `y`."""
        shape = dims(like)
        y.type = like.type
        if shape is not None and static(dims(y)) is None:  # a static shape is known already
            y.shape = ir.Shape([self.length, *shape])
        return y

    def shape_in_front(self, lengths: Sequence[int | ir.Value]) -> list[int] | ir.Value:
        """Return the target of a Reshape to (K, *lengths); -1 stands for K where it is inferred."""
        known = all(isinstance(n, int) and n > 0 for n in lengths)
        inferred = known and not isinstance(self.count, int)
        return self.op.vector(-1 if inferred else self.count, *lengths)

    def expanded_value(self, x: ir.Value) -> ir.Value:
        """Return `x` with a leading axis of members, repeated along it if all members share `x`."""
        if x in self._of:
            return self._of[x]
        front = self.op.vector(self.count)
        target = self.op.Concat(front, self.member_shape(x), axis=0)
        return self.set_member_type(self.op.Expand(self.value_for(x), target), x)

    def member_shape(self, x: ir.Value) -> ir.Value:
        """Return the shape that `x` has in one model of the stack, int64 of shape [rank]."""
        lengths = static(dims(x))
        if lengths is not None:
            return self.op.const(list(lengths))
        return self.op.Shape(self.value_for(x), start=int(x in self._of))

    def aligned_value(self, x: ir.Value, n: int) -> ir.Value:
        """Return the value for `x` in a shape that broadcasts with stacked values of `n` axes per
        member.
        """
        y, own = self.value_for(x), rank(x)
        if x not in self._of or own == n:
            return y
        if own is None:
            raise ValueError(f"the rank of {printable(x.name)} is unknown: declare input shapes")
        shape = dims(x) or ()
        y = self.op.Unsqueeze(y, list(range(1, 1 + n - own)))
        y.type, y.shape = x.type, ir.Shape([self.length, *[1] * (n - own), *shape])
        return y

    def value_of_member(self, x: ir.Value, k: int) -> ir.Value:
        """Return the value that `x` has in member number `k` of the `TrainerStack`."""
        if x not in self._of:
            return x
        assert isinstance(self.count, int)
        # slices of one Split, whose gradient is one Concat
        attributes = {"axis": 0, "num_outputs": self.count}
        parts = self.op.emit_many("Split", [self._of[x]], attributes, outputs=self.count)
        for part in parts:
            part.type, shape = x.type, dims(x)
            part.shape = None if shape is None else ir.Shape([1, *shape])
        return self.op.set_type_like(self.op.Squeeze(parts[k], [0]), x)

    def stack_values(self, values: list[ir.Value], like: ir.Value) -> ir.Value:
        """Return one value stacked from `values`, a value of type `like` for each member."""
        parts = [self.op.Unsqueeze(v, [0]) for v in values]
        return self.set_member_type(self.op.Concat(*parts, axis=0), like)

    def set_stacked(self, x: ir.Value, new: ir.Value) -> None:
        """Record that `new`, which has the axis of members, replaces `x`."""
        self._of[x] = new

    def for_body(self, op: Emit) -> Self:
        """Return a copy of this record whose nodes are written by `op`, the emitter of a body."""
        inner = copy.copy(self)
        inner.op = op
        return inner

    def push(self, graph: ir.Graph) -> None:
        """Replace every node that depends on stacked values by nodes for all members.

        Outputs of the graph are replaced, too.

        Raises:
            UnstackableNode: a node that depends on them cannot be written for all members, as it
                has sequences, or subgraphs that run for some members only; or it has no form for
                members of which only the graph knows the number.
        """
        for node in list(graph):
            if not any(x in self for x in reads(node)):
                continue
            count = len(self.op.written)
            with self.op.at(node):
                outputs = None if _has_sequences(node) else write_for_members(self, node)
                if outputs is None:
                    outputs = self._write_for_each_member(node)
            for new in self.op.written[count:]:
                # the node should read the value of all members
                if any(x in self for x in new.inputs):
                    raise RuntimeError(f"{new.op_type} reads a value of one member only: {new}")
            for old, y in zip(node.outputs, outputs, strict=True):
                if old not in self._same:
                    self._of[old] = y
        graph.outputs[:] = self.values_for(graph.outputs)
        drop_unused(graph)

    def _write_for_each_member(self, node: ir.Node) -> list[ir.Value]:
        """Write a copy of `node` for each member, and return its results stacked over members."""
        kind = "sequences" if _has_sequences(node) else "subgraphs" * any(subgraphs(node))
        if kind:
            raise UnstackableNode(
                f"{printable(node.op_type)} (node {printable(node.name)}) has {kind} that depend "
                "on the weights, which cannot be stacked: train the members one after the other, "
                "each by a Trainer"
            )
        if not isinstance(self.count, int):
            raise UnstackableNode(
                f"{printable(node.op_type)} (output {printable(node.outputs[0].name)}) has no form "
                "for a stack of rows"
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


# -- Scan, Loop and If: the axis is pushed through their bodies -----------------------------------

Outputs = list[ir.Value] | None


class _BodyCopy:
    """A copy of a subgraph of `node`, through which the axis of members is pushed.

    `inputs` and `outputs` are the values of the copy before the axis is pushed.
    """

    def __init__(self, m: MemberAxis, node: ir.Node, attribute: str) -> None:
        original = node.attributes[attribute].as_graph()
        self.graph = original.clone(allow_outer_scope_values=True)
        self.m = m.for_body(Emit(self.graph, outer=m.op))
        self.inputs, self.outputs = list(self.graph.inputs), list(self.graph.outputs)
        self._outside = [v for v in captured(node) if v in m]

    def reached_outputs(self, inputs: Iterable[ir.Value]) -> list[bool]:
        """Return whether each output of the body differs between members if `inputs` do."""
        values = dependents(self.graph, [*inputs, *self._outside])
        return [y in values or y in self.m for y in self.outputs]

    def carried_states(self, starts: Sequence, first: int, behind: int, others: list) -> list[bool]:
        """Return for each state of a loop whether it differs between members, at first or in a
        later iteration.

        Args:
            starts: the initial values of the states.
            first: the index of the first state among the inputs.
            behind: the same among the outputs.
            others: further inputs that have the axis.
        """
        stacked, n = [x in self.m for x in starts], len(starts)
        while True:
            inputs = compress(self.inputs[first : first + n], stacked)
            after = self.reached_outputs([*inputs, *others])[behind : behind + n]
            if not any(b and not a for a, b in zip(stacked, after, strict=True)):
                return stacked
            stacked = [a or b for a, b in zip(stacked, after, strict=True)]

    def push_axis(self, inputs: Iterable[ir.Value], stacked: Sequence[bool]) -> ir.Graph:
        """Give `inputs`, and the outputs that `stacked` marks, the axis of members; return the
        body.
        """
        for x in inputs:
            new = self.m.set_member_type(ir.Value(name=x.name), x)
            self.graph.inputs[self.inputs.index(x)] = new
            self.m.set_stacked(x, new)
        self.m.push(self.graph)
        with self.m.op.at(None):
            self.m.op.give(_member_values(self.m, self.outputs, stacked))
        return self.graph


def _member_values(
    m: MemberAxis, values: Sequence[ir.Value], stacked: Sequence[bool]
) -> list[ir.Value]:
    """Return the values that replace `values`, with the axis of members where `stacked` is true."""
    pairs = zip(values, stacked, strict=True)
    return [m.expanded_value(x) if axis else m.value_for(x) for x, axis in pairs]


def _new_node_outputs(
    m: MemberAxis, node: ir.Node, outputs: Sequence[ir.Value], stacked: Sequence[bool]
) -> list[ir.Value]:
    """Return the new node's outputs; an output equal for all members replaces the old output in
    place.
    """
    return [
        m.set_member_type(new, old) if axis else m.replace_shared(old, new)
        for old, new, axis in zip(node.outputs, outputs, stacked, strict=True)
    ]


@member_form("Scan")
def push_through_scan(m: MemberAxis, node: Any) -> Outputs:
    """Write one Scan for all members of a `TrainerStack`; the scanned axis moves behind the axis of
    members.
    """
    attributes, body = attributes_of(node), _BodyCopy(m, node, "body")
    n = len(node.inputs) - attributes["num_scan_inputs"]
    sliced = [x in m for x in node.inputs[n:]]
    elements = list(compress(body.inputs[n:], sliced))
    carried = body.carried_states(node.inputs[:n], 0, 0, elements)
    inputs = [*compress(body.inputs[:n], carried), *elements]
    stacked = [*carried, *body.reached_outputs(inputs)[n:]]
    attributes["body"] = body.push_axis(inputs, stacked)
    for kind, which in (("input", sliced), ("output", stacked[n:])):
        axes = node.attributes.get_ints(f"scan_{kind}_axes", (0,) * len(which))
        pairs = zip(axes, which, strict=True)
        attributes[f"scan_{kind}_axes"] = [a + int(axis and a >= 0) for a, axis in pairs]
    operands = [*_member_values(m, node.inputs[:n], carried), *m.values_for(node.inputs[n:])]
    outputs = m.op.emit_many("Scan", operands, attributes, len(stacked), fresh=True)
    return _new_node_outputs(m, node, outputs, stacked)


@member_form("Loop")
def push_through_loop(m: MemberAxis, node: Any) -> Outputs:
    """Write one Loop for all members of a `TrainerStack`, with one number of iterations."""
    attributes, body = attributes_of(node), _BodyCopy(m, node, "body")
    (trip, goes, *starts), n = node.inputs, len(node.inputs) - 2
    carried = body.carried_states(starts, 2, 1, [])
    inputs = list(compress(body.inputs[2:], carried))
    ends, *after = body.reached_outputs(inputs)
    stacks = node.outputs[n:]
    if ends or trip in m or goes in m or any(rank(y) is None for y in stacks):
        return None
    stacked = [*carried, *after[n:]]
    attributes["body"] = body.push_axis(inputs, [False, *stacked])
    operands = [trip, goes, *_member_values(m, starts, carried)]
    outputs = m.op.emit_many("Loop", operands, attributes, len(stacked), fresh=True)
    for i, (y, axis) in enumerate(zip(stacks, stacked[n:], strict=True), n):
        if axis:  # (iterations, members, ...)
            outputs[i].type = y.type
            outputs[i] = m.op.Transpose(outputs[i], perm=[1, 0, *range(2, 1 + (rank(y) or 0))])
    return _new_node_outputs(m, node, outputs, stacked)


@member_form("If")
def push_through_if(m: MemberAxis, node: Any) -> Outputs:
    """Write one If for all members of a `TrainerStack`, which share its condition."""
    if node.inputs[0] in m:
        return None
    branches = {name: _BodyCopy(m, node, name) for name in ("then_branch", "else_branch")}
    reached = zip(*(body.reached_outputs([]) for body in branches.values()), strict=True)
    stacked = [any(axis) for axis in reached]
    attributes = {name: body.push_axis([], stacked) for name, body in branches.items()}
    outputs = m.op.emit_many("If", m.values_for(node.inputs), attributes, len(stacked), fresh=True)
    return _new_node_outputs(m, node, outputs, stacked)
