"""Replace the activation behind the last layer, such as a Softmax, by another one."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import node_text
from onnxgrad.finetune.layers import replace_value
from onnxgrad.finetune.unit_axes import INDEX, UnitAxes
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.value_range import value_range
from onnxgrad.operators.shapes import constant, dims, rank
from onnxgrad.reporting import logger

ACTIVATIONS = {"softmax": "Softmax", "log_softmax": "LogSoftmax", "sigmoid": "Sigmoid"}
_ANY_AXIS = 13  # the opset from which Softmax normalizes over its axis, and not over later axes


def change_activation(units: UnitAxes, activation: str | None) -> None:
    """Replace, remove or add the activation behind the units of a layer, in place.

    Args:
        units: of a layer, followed to the outputs.
        activation: "same", None (scores), or a key of `ACTIVATIONS`.

    Raises:
        ValueError: the outputs are probabilities, and what computes them is not recognized.
    """
    for node in list(units.op.graph):
        _fuse_softmax(units, node)
    present = [node for node in units.op.graph if _is_activation(units, node)]
    for node in present:
        wanted = ACTIVATIONS.get(activation or "")
        if activation == "same":
            wanted = _activation_for_new_units(units, node)
        elif wanted != node.op_type and not units.holds_only_units(node.inputs[0]):
            units.refuse(node, f"activation={activation!r}: other values share the axis of units")
        if wanted is None:
            units.bypass(node)
        elif wanted != node.op_type and (x := node.inputs[0]) is not None:
            _replace_by_activation(units, node, wanted, x)
    if activation == "same" or (activation is not None and present):
        return
    floats = (y for y in units.op.graph.outputs if y.dtype is None or y.dtype.is_floating_point())
    # a copy, as the loop replaces outputs
    for y in [y for y in floats if units.axes.get(y, INDEX) != INDEX]:
        low, high = value_range(y)
        if low >= 0 and high <= 1:
            raise ValueError(
                f"activation={activation!r}: {y.name!r} holds probabilities, and the operators "
                'that compute them are not recognized: keep them with activation="same"'
            )
        if activation is not None and not units.holds_only_units(y):
            raise ValueError(
                f"activation={activation!r}: {y.name!r} holds other values along the axis of "
                "units, and no activation of the units is recognized: pass None or 'same'"
            )
        if activation is not None:
            _append_activation(units, y, ACTIVATIONS[activation])


def write_activation(op: Emit, op_type: str, x: ir.Value, axis: int) -> ir.Value:
    """Write the activation `op_type` of `x` along the negative axis `axis`, and return its result.

    Raises:
        ValueError: before opset 13, the rank of `x` is unknown.
    """
    n = rank(x)
    if op_type == "Sigmoid":
        return op.set_type_like(op.emit("Sigmoid", [x], {}, fresh=True), x)
    if op.opset >= _ANY_AXIS:
        return op.set_type_like(op.emit(op_type, [x], {"axis": axis}, fresh=True), x)
    if n is None:
        raise ValueError(f"the rank of {x.name!r} is unknown: convert the model to opset 13")
    perm = list(range(n))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    if axis == -1:
        y = op.emit(op_type, [x], {"axis": n - 1}, fresh=True)
    else:
        y = op.emit(op_type, [op.Transpose(x, perm=perm)], {"axis": n - 1}, fresh=True)
        y = op.emit("Transpose", [y], {"perm": perm}, fresh=True)
    return op.set_type_like(y, x)


def _fuse_softmax(units: UnitAxes, node: ir.Node) -> None:
    """Replace exp(x) / sum exp(x) over units by a Softmax node, so that losses find the logits."""
    if node.op_type != "Div" or node.domain or node.inputs[0] not in units.axes:
        return
    axis = units.axes[node.inputs[0]]
    powers = node.inputs[0].producer()
    total = _operand_of_reduction(node.inputs[1], "ReduceSum", axis)
    if powers is None or powers.op_type != "Exp" or total is not node.inputs[0]:
        return
    x = powers.inputs[0]
    shift = None if x is None else x.producer()
    if shift is not None and shift.op_type == "Sub" and shift.inputs[0] is not None:
        top = _operand_of_reduction(shift.inputs[1], "ReduceMax", axis)
        x = shift.inputs[0] if top is shift.inputs[0] else x
    if x is None or x not in units.axes:
        return
    _replace_by_activation(units, node, "Softmax", x)


def _operand_of_reduction(value: ir.Value | None, op_type: str, axis: int) -> ir.Value | None:
    """Return x if `value` is the reduction `op_type` (such as ReduceSum) of x along `axis`; else
    None.

    Nodes may broadcast the result of the reduction to `value`.
    """
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Expand", "Reshape", "Identity", "Unsqueeze"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != op_type or node.domain or node.inputs[0] is None:
        return None
    shape = dims(node.inputs[0])
    stated = node.attributes.get_ints("axes", ())
    if len(node.inputs) > 1 and (axes := constant(node.inputs[1])) is not None:
        stated = axes.ravel().tolist()
    named = [a - len(shape) if shape is not None and a >= 0 else a for a in stated]
    return node.inputs[0] if named == [axis] else None


def _is_activation(units: UnitAxes, node: ir.Node) -> bool:
    axis = units.axes.get(node.inputs[0], INDEX) if node.inputs and node.inputs[0] else INDEX
    if node.domain or axis == INDEX or node.op_type not in ACTIVATIONS.values():
        return False
    if node.op_type == "Sigmoid":
        return True
    shape = dims(node.inputs[0])
    before = units.op.opset < _ANY_AXIS
    along = node.attributes.get_int("axis", 1 if before else -1)
    if shape is None:
        return along == axis
    along = along - len(shape) if along >= 0 else along
    return along == axis and not (before and any(d != 1 for d in shape[len(shape) + axis + 1 :]))


def _activation_for_new_units(units: UnitAxes, node: ir.Node) -> str:
    """Return the operator of the activation that fits the new number of units, given the present
    activation `node`.
    """
    if not units.holds_only_units(node.inputs[0]):
        return node.op_type
    if units.new == 1 and node.op_type == "Softmax":
        logger.info("%s becomes a Sigmoid: there is one unit", node_text(node))
        return "Sigmoid"
    if units.new == 1 and node.op_type == "LogSoftmax":
        raise ValueError(
            f"{node_text(node)} is 0 for one unit: pass two units, activation='sigmoid' or None"
        )
    alone = not units.several and not units.spans  # in a detector, a box may have several classes
    if units.old == 1 < units.new and node.op_type == "Sigmoid" and alone:
        logger.info("%s becomes a Softmax over %d units", node_text(node), units.new)
        return "Softmax"
    return node.op_type


def _replace_by_activation(units: UnitAxes, node: ir.Node, op_type: str, x: ir.Value) -> None:
    """Replace `node` by an activation node `op_type` that reads `x`, in place."""
    with units.op.at(node):
        z = write_activation(units.op, op_type, x, units.axes[x])
    units.copy_axis_and_span(replace_value(units.op, node.outputs[0], z), x)


def _append_activation(units: UnitAxes, y: ir.Value, op_type: str) -> None:
    """Append an activation node to the graph output `y`; the result of the node becomes the output
    and takes its name.
    """
    op, outputs = units.op, units.op.graph.outputs
    z = write_activation(op, op_type, y, units.axes[y])
    z.name, y.name = y.name, op.name(f"{y.name}_scores")
    outputs[list(outputs).index(y)] = z
    units.copy_axis_and_span(z, y)
    units.changed.add(y)
