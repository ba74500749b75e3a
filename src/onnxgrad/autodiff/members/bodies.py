"""How Scan, Loop and If take the axis of members: it is pushed through their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.members.axis import MemberAxis
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import captured, dependents
from onnxgrad.operators.registry import members_of
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import rank

Outputs = list[ir.Value] | None


class _Body:
    """A copy of a body of a node; the node keeps its own, which goes when the node does.

    `inputs` and `outputs` are the values of the copy before the axis is pushed.
    """

    def __init__(self, m: MemberAxis, node: ir.Node, attribute: str) -> None:
        original = node.attributes[attribute].as_graph()
        self.graph = original.clone(allow_outer_scope_values=True)
        self.m = m.for_body(Emit(self.graph, outer=m.op))
        self.inputs, self.outputs = list(self.graph.inputs), list(self.graph.outputs)
        self._outside = [v for v in captured(node) if v in m]

    def reached(self, inputs: Iterable[ir.Value]) -> list[bool]:
        """Return which outputs depend on members, if these inputs do."""
        values = dependents(self.graph, [*inputs, *self._outside])
        return [y in values or y in self.m for y in self.outputs]

    def carried(self, starts: Sequence, first: int, behind: int, others: list) -> list[bool]:
        """Return which states have the axis: they begin with it, or get it in an iteration.

        Args:
            starts: the initial values of the states.
            first: the index of the first state among the inputs.
            behind: the same among the outputs.
            others: further inputs that have the axis.
        """
        stacked, n = [x in self.m for x in starts], len(starts)
        while True:
            inputs = compress(self.inputs[first : first + n], stacked)
            after = self.reached([*inputs, *others])[behind : behind + n]
            if not any(b and not a for a, b in zip(stacked, after, strict=True)):
                return stacked
            stacked = [a or b for a, b in zip(stacked, after, strict=True)]

    def push(self, inputs: Iterable[ir.Value], stacked: Sequence[bool]) -> ir.Graph:
        """Give these inputs the axis, and the outputs that are `stacked`; return the graph."""
        for x in inputs:
            new = self.m.set_member_type(ir.Value(name=x.name), x)
            self.graph.inputs[self.inputs.index(x)] = new
            self.m.set_stacked(x, new)
        self.m.push(self.graph)
        with self.m.op.at(None):
            pairs = zip(self.outputs, stacked, strict=True)
            self.m.op.give(
                [self.m.expanded(y) if axis else self.m.value_for(y) for y, axis in pairs]
            )
        return self.graph


def _state_operands(
    m: MemberAxis, values: Sequence[ir.Value], stacked: Sequence[bool]
) -> list[ir.Value]:
    pairs = zip(values, stacked, strict=True)
    return [m.expanded(x) if axis else m.value_for(x) for x, axis in pairs]


def _output_values(
    m: MemberAxis, node: ir.Node, outputs: Sequence[ir.Value], stacked: Sequence[bool]
) -> list[ir.Value]:
    """Return the outputs of the new node; an output that all members share replaces the old one."""
    return [
        m.set_member_type(new, old) if axis else m.replace_shared(old, new)
        for old, new, axis in zip(node.outputs, outputs, stacked, strict=True)
    ]


@members_of("Scan")
def scan_of_members(m: MemberAxis, node: Any) -> Outputs:
    """Write a Scan whose slices hold all members: the scanned axis is one further behind."""
    attributes, body = attributes_of(node), _Body(m, node, "body")
    n = len(node.inputs) - attributes["num_scan_inputs"]
    sliced = [x in m for x in node.inputs[n:]]
    elements = list(compress(body.inputs[n:], sliced))
    carried = body.carried(node.inputs[:n], 0, 0, elements)
    inputs = [*compress(body.inputs[:n], carried), *elements]
    stacked = [*carried, *body.reached(inputs)[n:]]
    attributes["body"] = body.push(inputs, stacked)
    for kind, which in (("input", sliced), ("output", stacked[n:])):
        axes = node.attributes.get_ints(f"scan_{kind}_axes", (0,) * len(which))
        pairs = zip(axes, which, strict=True)
        attributes[f"scan_{kind}_axes"] = [a + int(axis and a >= 0) for a, axis in pairs]
    operands = [*_state_operands(m, node.inputs[:n], carried), *m.values_for(node.inputs[n:])]
    outputs = m.op.emit_many("Scan", operands, attributes, len(stacked), fresh=True)
    return _output_values(m, node, outputs, stacked)


@members_of("Loop")
def loop_of_members(m: MemberAxis, node: Any) -> Outputs:
    """Write a Loop of as many iterations for all members, which stacks along the first axis."""
    attributes, body = attributes_of(node), _Body(m, node, "body")
    (trip, goes, *starts), n = node.inputs, len(node.inputs) - 2
    carried = body.carried(starts, 2, 1, [])
    inputs = list(compress(body.inputs[2:], carried))
    ends, *after = body.reached(inputs)
    stacks = node.outputs[n:]
    if ends or trip in m or goes in m or any(rank(y) is None for y in stacks):
        return None
    stacked = [*carried, *after[n:]]
    attributes["body"] = body.push(inputs, [False, *stacked])
    operands = [trip, goes, *_state_operands(m, starts, carried)]
    outputs = m.op.emit_many("Loop", operands, attributes, len(stacked), fresh=True)
    for i, (y, axis) in enumerate(zip(stacks, stacked[n:], strict=True), n):
        if axis:  # (iterations, members, ...)
            outputs[i].type = y.type
            outputs[i] = m.op.Transpose(outputs[i], perm=[1, 0, *range(2, 1 + (rank(y) or 0))])
    return _output_values(m, node, outputs, stacked)


@members_of("If")
def branches_of_members(m: MemberAxis, node: Any) -> Outputs:
    """Write an If with one condition for all members."""
    if node.inputs[0] in m:
        return None
    branches = {name: _Body(m, node, name) for name in ("then_branch", "else_branch")}
    reached = zip(*(body.reached([]) for body in branches.values()), strict=True)
    stacked = [any(axis) for axis in reached]
    attributes = {name: body.push([], stacked) for name, body in branches.items()}
    outputs = m.op.emit_many("If", m.values_for(node.inputs), attributes, len(stacked), fresh=True)
    return _output_values(m, node, outputs, stacked)
