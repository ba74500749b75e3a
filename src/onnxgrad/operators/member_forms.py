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
from onnxgrad.operators.shapes import Dims, dims, rank

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

    The rows are on the axis 0, or on another axis that becomes one axis of each output. Operands
    without rows are the same for all members.
    """
    joined = _axes_of_joined_rows(m, node)
    if joined is None:
        return None
    axes, outputs = joined
    used = [y for y in node.outputs if y.uses() or y.is_graph_output()]
    inputs = [
        x if axis is None else _join_axis(m, x, axis)
        for x, axis in zip(node.inputs, axes, strict=True)
    ]
    results = m.op.emit_many(
        node.op_type, inputs, attributes_of(node), len(node.outputs), node.domain
    )
    return [
        _divide_axis(m, result, y, axis) if y in used else y
        for result, y, axis in zip(results, node.outputs, outputs, strict=True)
    ]


def _axes_of_joined_rows(m: Any, node: Any) -> tuple[list[int | None], list[int]] | None:
    """Return the axes of the rows of the operands (None: the operand has none), and of the outputs;
    None if the node does not compute row by row.
    """
    used = (y for y in node.outputs if y.uses() or y.is_graph_output())
    if any(rank(v) is None for v in (*node.inputs, *used) if v is not None):
        return None
    for first, length in enumerate(dims(node.inputs[0]) or ()):
        found = output_axes(node, 0, first)
        outputs = [axis for axis in found if isinstance(axis, int)]
        if len(outputs) < len(found):
            continue
        axes: list[int | None] = [first]
        for i, x in enumerate(node.inputs[1:], 1):
            by_rows = [a for a in range(rank(x) or 0) if output_axes(node, i, a) == outputs]
            axes.append(by_rows[0] if by_rows else None)
        pairs = list(zip(node.inputs, axes, strict=True))
        agree = all((dims(x) or ())[a] == length for x, a in pairs if a is not None)
        apart = [x for x, axis in pairs if axis is None]
        return (axes, outputs) if agree and m.shares_operands(apart) else None
    return None


def _join_axis(m: Any, x: ir.Value, axis: int) -> ir.Value:
    """Return the operand `x` of all members, with the axis of members joined with `axis`."""
    new, shape, n = m.expanded_value(x), dims(x) or (), rank(x) or 0
    if axis:
        new = m.op.Transpose(new, perm=[*range(1, axis + 1), 0, *range(axis + 1, n + 1)])
    lengths = [m.op.dim(new, i) for i in (*range(axis), *range(axis + 2, n + 1))]
    joined = m.op.Reshape(new, m.op.vector(*lengths[:axis], -1, *lengths[axis:]))
    return _set_type_with_unknown_rows(joined, x, axis, shape)


def _divide_axis(m: Any, result: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    """Return the output of all members from the output of joined rows, which are on `axis`."""
    shape, n = dims(y) or (), rank(y) or 0
    _set_type_with_unknown_rows(result, y, axis, shape)
    lengths = [m.op.dim(result, i) for i in range(n) if i != axis]
    own = length if isinstance(length := shape[axis], int) and length else -1  # 0 copies a length
    if axis == 0:
        return m.set_member_type(m.op.Reshape(result, m.shape_in_front([own, *lengths])), y)
    target = m.op.vector(*lengths[:axis], m.count, own, *lengths[axis:])
    divided = m.op.Reshape(result, target)
    divided.type = y.type
    divided.shape = ir.Shape([*shape[:axis], m.length, *shape[axis:]])
    perm = [axis, *range(axis), *range(axis + 1, n + 1)]
    return m.set_member_type(m.op.Transpose(divided, perm=perm), y)


def _set_type_with_unknown_rows(
    value: ir.Value, like: ir.Value, axis: int, shape: Dims
) -> ir.Value:
    """Set the type of `value` to the type of `like`, and the shape to `shape` with an unknown
    number of rows on `axis`.
    """
    value.type, value.shape = like.type, ir.Shape([*shape[:axis], None, *shape[axis + 1 :]])
    return value
