"""Which axes a node lists, and which axis of an output an axis of an operand becomes.

The output axis that an axis of an operand becomes is one of these:

- an int, the axis of the output whose index i depends on index i of the operand only, if both have
  the same length: an axis of length 1 may be broadcast, and a Gather may leave out elements;
- `SUMMED`: the output is a sum over the axis, of the same function of each index;
- None: the operator mixes the axis, counts positions along it, or may do so.

If axes of several operands become the same output axis, index i of one meets index i of the others.

Examples:
    >>> import onnx_ir as ir
    >>> from onnxgrad.graph import Emit
    >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3, 4]))
    >>> op = Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20}))
    >>> turned = op.Transpose(x, perm=[2, 0, 1]).producer()
    >>> total = op.ReduceSum(x, [-3], keepdims=0).producer()
    >>> output_axes(turned, 0, 0), output_axes(total, 0, 0), output_axes(total, 0, 2)
    ([1], ['summed'], [1])
    >>> named_axes(turned), named_axes(total)
    ([2, 0, 1], [0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.records import operator_of, standard_operator
from onnxgrad.operators.shapes import Dims, constant, dims, rank, volume

SUMMED: Literal["summed"] = "summed"
OutputAxis = int | Literal["summed"] | None
OutputAxes = OutputAxis | tuple[OutputAxis, ...]  # one output axis for all outputs, or one for each


def named_axes(node: ir.Node) -> list[int] | None:
    """Return the axes that an attribute or an operand of `node` lists, all nonnegative; None if
    they are unknown.

    The node states them in this order.
    """
    given = {a.name: a.value for a in node.attributes.values()}
    return axes_named_by(node.op_type, node.inputs, given)


def axes_named_by(op_type: str, inputs: Sequence, attributes: Mapping) -> list[int] | None:
    """Return the axes that an attribute or an operand lists, as `named_axes` does for a node."""
    naming, n = standard_operator(op_type).naming, rank(inputs[0])
    if naming is None or n is None:
        return None
    stated, at = attributes.get(naming.attribute), naming.operand
    if stated is None and at is not None and at < len(inputs) and inputs[at] is not None:
        stated = constant(inputs[at])
        if stated is None:
            return None
    named = [] if stated is None else np.ravel(stated).tolist()
    named = named or naming.default(n, inputs, attributes)
    if named is None:
        return None
    n += len(named) if op_type == "Unsqueeze" else 0
    return [a % n for a in named]


# -- which axis of a result an axis becomes ------------------------------------------------------


def shared_output_axes(node: ir.Node, axes: Mapping[ir.Value, int]) -> list[OutputAxis]:
    """Return the axis of each output that all the given axes of operands become (see
    `output_axes`).

    The other operands do not depend on the axis.
    """
    found = [output_axes(node, i, axes[x]) for i, x in enumerate(node.inputs) if x and x in axes]
    agreed = [_common_output_axis(column) for column in zip(*found, strict=True)]
    return agreed or [None] * len(node.outputs)


def _common_output_axis(axes: Sequence[OutputAxis]) -> OutputAxis:
    """Return the output axis that the axes of all operands become; None if they differ, or if
    several operands are summed over it.
    """
    one = len(set(axes)) == 1 and (len(axes) == 1 or axes[0] != SUMMED)
    return axes[0] if one else None


def output_axes(node: ir.Node, operand: int, axis: int) -> list[OutputAxis]:
    """Return, for each output of a node, the axis that an axis of an operand becomes: an int,
    `SUMMED` or None.
    """
    function = operator_of(node).axes
    known = function is not None and rank(node.inputs[operand]) is not None
    answer = function(node, operand, axis) if function is not None and known else None
    return list(answer) if isinstance(answer, tuple) else [answer] * len(node.outputs)


def keeps_axis(before: Dims, axis: int, after: Dims, other: int) -> bool:
    """Return whether a Reshape from the shape `before` to `after` is proven to keep `axis`, as axis
    `other`.

    It is if two of these have the same number of elements, as all three together have: the axes in
    front, the axis, the axes behind.
    """
    pairs = (
        (before[:axis], after[:other]),
        ((before[axis],), (after[other],)),
        (before[axis + 1 :], after[other + 1 :]),
    )
    return sum(volume(a) is not None and volume(a) == volume(b) for a, b in pairs) >= 2


# -- functions for the field `axes` of several operators ------------------------------------------


def only_first_operand(
    function: Callable[[Any, int, int], OutputAxes],
) -> Callable[..., OutputAxes]:
    """Return an `axes` function of a record that is None for all operands but the first."""
    return lambda node, operand, axis: None if operand else function(node, operand, axis)


def broadcast_axis(node: Any, operand: int, axis: int) -> OutputAxis:
    """Return the output axis that an axis becomes when operands broadcast."""
    width, n = rank(node.outputs[0]), len(node.inputs[operand].shape)
    return None if width is None or width < n else axis + width - n


def axis_unless_named(node: Any, _operand: int, axis: int) -> OutputAxis:
    """Return `axis`, None if an attribute or an operand of the node lists it."""
    named = named_axes(node)
    return None if named is None or axis in named else axis


@only_first_operand
def axis_before_matrices(node: Any, _operand: int, axis: int) -> OutputAxis:
    """Return `axis` of a stack of matrices, None for the last two, the axes of a matrix."""
    return axis if axis < len(node.inputs[0].shape) - 2 else None


def first_axis_only(_node: Any, _operand: int, axis: int) -> OutputAxis:
    """Return output axis 0 for axis 0, and None for every other axis, which the operator mixes."""
    return 0 if axis == 0 else None


@only_first_operand
def reshaped_axis(node: Any, _operand: int, axis: int) -> OutputAxis:
    """Return the output axis that an axis becomes by a Reshape, None if that is not proven."""
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    same = [i for i in range(len(after)) if keeps_axis(before, axis, after, i)]
    return same[0] if len(same) == 1 else None
