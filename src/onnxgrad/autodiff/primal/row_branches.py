"""Ifs whose condition depends on the row, in a model of one row: both branches, and a selection.

y = If(c, f, h) becomes y = Where(c, f(Where(c, x, 0)), h(Where(c, 0, x))), which is the same for
one row, and can be computed for all rows of a batch at once. The zeros keep what a row holds out of
the branch that it does not take. A node of a branch whose value or slope is infinite or undefined
at some finite operands, such as a Log, gets another number there (`Operator.finite_at`), so that no
gradient of a weight is multiplied by infinity or NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.bodies import inline_branch
from onnxgrad.autodiff.row_proofs import UnprovenRows
from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes, reads, subgraphs
from onnxgrad.operators.records import numbers_of_finite_slopes
from onnxgrad.operators.shapes import constant, dims, equal, is_real, rank
from onnxgrad.runtime.session import count_multiply_adds

# multiply-adds of a row, beyond one for each weight, in branches that all rows compute: more take
# longer than the calls for each row, of which most may not take the branch
SELECTED_WORK = 2e6
_BOOL = ir.DataType.BOOL


def select_row_branches(graph: ir.Graph, inputs: Iterable[ir.Value]) -> None:
    """Replace each If whose condition depends on `inputs` by both branches and a selection.

    Raises:
        UnprovenRows: the outputs of the branches may differ in shape, the gradient of a branch may
            be infinite or NaN for a row that does not take it, or branches take too much work to be
            computed for all rows.
    """
    if not any(map(_is_conditional, graph)):
        return
    op, differing = Emit(graph), set(inputs)
    conditions: dict[ir.Node, ir.Value] = {}  # by node of a branch: whether a row takes the branch
    waiting = deque(graph)
    while waiting:
        node = waiting.popleft()
        if _is_conditional(node) and node.inputs[0] in differing:
            written = _write_both_branches(op, node, differing, conditions)
            waiting.extendleft(reversed(written))
            continue
        if node in conditions:
            _guard_operands(op, node, conditions[node], differing)
        if not differing.isdisjoint(reads(node)):
            differing.update(node.outputs)


def _is_conditional(node: ir.Node) -> bool:
    return node.op_type == "If" and not node.domain


def _write_both_branches(
    op: Emit, node: ir.Node, differing: set[ir.Value], conditions: dict[ir.Node, ir.Value]
) -> list[ir.Node]:
    """Replace an If by the nodes of its branches and a selection; return the new nodes.

    `conditions` gets the condition of each node of the branches.
    """
    _require_little_work(node)
    count, both, outer = len(op.written), [], conditions.get(node)
    with op.at(node):
        is_then = op.Reshape(node.inputs[0], [1])
        for name, own in (("then_branch", is_then), ("else_branch", op.Not(is_then))):
            taken = own if outer is None else op.And(outer, own)
            branch = node.attributes[name].as_graph()
            nodes, guards = list(branch), dict[ir.Value, ir.Value]()
            for inner in all_nodes(branch):
                for i, x in enumerate(inner.inputs):
                    if x is not None and x in differing:
                        guards[x] = guards.get(x) or _guarded_value(op, x, taken, 0)
                        inner.replace_input_with(i, guards[x])
            both.append(inline_branch(op, node, branch))
            conditions |= dict.fromkeys(nodes, taken)
        for y, a, b in zip(node.outputs, *both, strict=True):
            if not equal(dims(a), dims(b)):
                raise UnprovenRows(
                    f"If (output {y.name!r}): its branches return the shapes {dims(a)} and "
                    f"{dims(b)}, not one shape for all rows"
                )
            selected = op.set_type_like(_selected_value(op, is_then, a, b), a)
            ir.convenience.replace_all_uses_with(y, selected, replace_graph_outputs=True)
            selected.name, y.name = y.name, op.name(str(y.name))
    written = op.written[count:]
    assert isinstance(node.graph, ir.Graph)
    node.graph.remove(node, safe=True)
    return written


def _require_little_work(node: ir.Node) -> None:
    """Raise `UnprovenRows` if the branches of an If are better left to the rows that take them.

    A product that reads each weight once is faster for many rows at once; a convolution is not.
    """
    nodes = [n for branch in subgraphs(node) for n in all_nodes(branch)]
    weights = {x for n in nodes for x in n.inputs if x is not None and x.const_value is not None}
    work = count_multiply_adds(nodes) - sum(x.const_value.size for x in weights if x.const_value)
    if work > SELECTED_WORK:
        raise UnprovenRows(
            f"If (output {node.outputs[0].name!r}): its branches take {work:.2g} multiply-adds "
            "beyond one for each weight, too many to compute both for all rows"
        )


def _guard_operands(op: Emit, node: ir.Node, taken: ir.Value, differing: set[ir.Value]) -> None:
    """Replace, in place, operands of a node of a branch for the rows that do not take the branch.

    The node must have a finite value and a finite gradient there.
    """
    reason = _reason_against_selection(node)
    if reason:
        raise UnprovenRows(
            f"{printable(node.op_type)} (output {node.outputs[0].name!r}) in a branch of an If "
            f"{reason}: its gradient may not be finite for rows that do not take the branch"
        )
    with op.at(node):
        for i, number in numbers_of_finite_slopes(node):
            x = node.inputs[i] if i < len(node.inputs) else None
            if x is not None and constant(x) is None:
                guarded = _guarded_value(op, x, taken, number)
                node.replace_input_with(i, guarded)
                differing.add(guarded)


def _reason_against_selection(node: ir.Node) -> str:
    """Return why a node of a branch cannot run for rows that do not take it; "" if it can."""
    if node.domain:
        return f"is of the domain {node.domain!r}"
    if any(subgraphs(node)):
        return "has subgraphs"
    if node.attributes.get_float("epsilon", 1.0) == 0:
        return "has the attribute epsilon=0"
    for x in (x for x in node.inputs if x is not None and is_real(x)):
        array = constant(x)
        if array is not None and not np.isfinite(array).all():
            return f"reads the constant {x.name!r}, which is not finite"
    return ""


def _guarded_value(op: Emit, x: ir.Value, taken: ir.Value, number: float) -> ir.Value:
    """Return `x` for a row that takes a branch, and `number` for other rows."""
    n, dtype = rank(x), x.dtype
    if n is None or dtype is None or not (dtype == _BOOL or is_real(x) or dtype.is_integer()):
        raise UnprovenRows(f"a branch of an If reads {x.name!r}, which no number can replace")
    taken = op.Reshape(taken, [1] * n)
    guarded = op.And(x, taken) if dtype == _BOOL else op.Where(taken, x, number)
    return op.set_type_like(guarded, x)


def _selected_value(op: Emit, is_then: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return `a` for a row with the condition `is_then`, and `b` for other rows."""
    taken = op.Reshape(is_then, [1] * (rank(a) or 0))
    if a.dtype == _BOOL:  # onnxruntime has no Where for it
        return op.Or(op.And(taken, a), op.And(op.Not(taken), b))
    return op.emit("Where", [taken, a, b], {}, fresh=True)
