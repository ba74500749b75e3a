"""Member forms: functions that write one node for all K members (models) of a `TrainerStack`.

A member form takes the `MemberAxis` of `autodiff/members` and a node, and returns the new outputs,
or None to write the node once for each member. The member form of most operators follows from their
record. The record of some states one (`members`), and files of operators register more by the
decorator `member_form`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import named_axes, output_axes
from onnxgrad.operators.records import Operator, operator_of
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import dims, rank

MemberForm = Callable[[Any, Any], list[ir.Value] | None]


def write_for_members(m: Any, node: ir.Node) -> list[ir.Value] | None:
    """Return the outputs of one node for all members of a `TrainerStack`; None if each member needs
    a node of its own.
    """
    operator = operator_of(node)
    return (operator.members or _default_member_form(operator))(m, node)


def _default_member_form(operator: Operator) -> MemberForm:
    """Return the function that writes one node for all members of a `TrainerStack`, chosen by the
    other fields of an operator's record.
    """
    if "elementwise" in operator.traits:
        return broadcast_operands
    if operator.naming is not None:
        return shift_named_axes
    return write_each_member if operator.axes is None or "random" in operator.traits else join_rows


def write_each_member(_m: Any, _node: ir.Node) -> None:
    """Return None, so that each member of a `TrainerStack` gets a copy of the node."""


def broadcast_operands(m: Any, node: Any) -> list[ir.Value] | None:
    """Write one elementwise node for all members of a `TrainerStack`, which are stacked along the
    first axis.
    """
    n, operator = rank(node.outputs[0]), operator_of(node)
    if n is None or any(x is not None and rank(x) is None for x in node.inputs):
        return None
    first, *others = node.inputs
    if "unary" not in operator.traits:
        return m.write_node(node, [m.aligned_value(x, n) for x in node.inputs])
    has_settings = not {"c", "l"}.isdisjoint(operator.roles[1:])  # settings are scalars
    if has_settings and not m.shares_operands(others):
        return None
    aligned = [None if x is None else m.aligned_value(x, n) for x in others]
    return m.write_node(node, [m.expanded_value(first), *aligned])


def shift_named_axes(m: Any, node: Any) -> list[ir.Value] | None:
    """Write one node for all members of a `TrainerStack`, with each axis that it lists one higher;
    only its first operand may differ between members.
    """
    first, *others = node.inputs
    return (
        _write_with_shifted_axes(m, node, [m.value_for(first), *others])
        if m.shares_operands(others)
        else None
    )


def shift_all_operands(m: Any, node: Any) -> list[ir.Value] | None:
    """Write one node for all members of a `TrainerStack`, with each axis that it lists one higher;
    all operands may differ between members.
    """
    return _write_with_shifted_axes(m, node, [m.expanded_value(x) for x in node.inputs])


def _write_with_shifted_axes(m: Any, node: Any, inputs: list) -> list[ir.Value] | None:
    """Write the node with the given inputs, and with each axis that it lists one higher."""
    naming, named = operator_of(node).naming, named_axes(node)
    if naming is None:
        return m.write_node(node, inputs)
    if not named:
        return None
    shifted = [a + 1 for a in named]
    value = {"axis": shifted[0], "perm": [0, *shifted]}.get(naming.attribute, shifted)
    if naming.operand is None:
        return m.write_node(node, inputs, **{naming.attribute: value})
    inputs += [None] * (naming.operand + 1 - len(inputs))
    inputs[naming.operand] = np.array(value)
    return m.write_node(node, inputs)


def join_rows(m: Any, node: Any) -> list[ir.Value] | None:
    """Write one node that computes row by row, on the joined rows of all members of a
    `TrainerStack`.

    The other operands are the same for all members and for all rows.
    """
    (x, *others), y = node.inputs, node.outputs[0]
    if len(node.outputs) != 1 or not rank(x) or not rank(y) or not m.shares_operands(others):
        return None
    by_rows = [(i, a) for i, v in enumerate(others, 1) for a in range(rank(v) or 0)]
    if output_axes(node, 0, 0) != [0] or any(output_axes(node, i, a) == [0] for i, a in by_rows):
        return None
    op, new = m.op, m.value_for(x)
    lengths = [op.dim(new, i) for i in range(2, 1 + (rank(x) or 0))]
    joined = _set_type_with_unknown_rows(op.Reshape(new, op.vector(-1, *lengths)), x)
    result = op.emit(node.op_type, [joined, *others], attributes_of(node), node.domain)
    _set_type_with_unknown_rows(result, y)
    lengths = [op.dim(result, i) for i in range(1, rank(y) or 0)]
    return [m.set_member_type(op.Reshape(result, op.vector(m.count, -1, *lengths)), y)]


def _set_type_with_unknown_rows(value: ir.Value, like: ir.Value) -> ir.Value:
    """Set the type and shape of `value` to the type and shape of `like`, with an unknown number of
    rows.
    """
    value.type, value.shape = like.type, ir.Shape([None, *(dims(like) or ())[1:]])
    return value
