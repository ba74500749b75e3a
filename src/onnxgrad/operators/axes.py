"""Which axes operators name, and where they take an axis of an operand.

The place of an axis in an output is one of these:

- an int, the axis of the output whose index i depends on index i of the operand only, if both have
  the same length: an axis of length 1 may be broadcast, and a Gather may leave out elements;
- `SUMMED`: the output is a sum over the axis, of the same function of each index;
- None: the operator mixes the axis, counts positions along it, or may do so.

Where axes of several operands have the same place, index i of one meets index i of the others.

Examples:
    >>> import onnx_ir as ir
    >>> from onnxgrad.graph import Emit
    >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3, 4]))
    >>> op = Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20}))
    >>> turned = op.Transpose(x, perm=[2, 0, 1]).producer()
    >>> total = op.ReduceSum(x, [-3], keepdims=0).producer()
    >>> places(turned, 0, 0), places(total, 0, 0), places(total, 0, 2)
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
Place = int | Literal["summed"] | None
Answer = Place | tuple[Place, ...]  # the place in all outputs, or in each


def named_axes(node: ir.Node) -> list[int] | None:
    """Return the axes that `node` names, counted from the first; None if they are not known.

    The node states them in this order.
    """
    given = {a.name: a.value for a in node.attributes.values()}
    return axes_named_by(node.op_type, node.inputs, given)


def axes_named_by(op_type: str, inputs: Sequence, attributes: Mapping) -> list[int] | None:
    """Return the axes that a node with these inputs and attributes names, as `named_axes`."""
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


# -- where an axis goes ---------------------------------------------------------------------------


def common_places(node: ir.Node, axes: Mapping[ir.Value, int]) -> list[Place]:
    """Return where an axis stands in each output of `node`, if all operands in `axes` have it.

    The other operands do not depend on the axis.
    """
    found = [places(node, i, axes[x]) for i, x in enumerate(node.inputs) if x and x in axes]
    return [_common_place(column) for column in zip(*found, strict=True)] or [None] * len(
        node.outputs
    )


def _common_place(column: Sequence[Place]) -> Place:
    """Return the place that all operands lead to; sums over several may be products of sums."""
    one = len(set(column)) == 1 and (len(column) == 1 or column[0] != SUMMED)
    return column[0] if one else None


def places(node: ir.Node, operand: int, axis: int) -> list[Place]:
    """Return the place of an axis of an operand, counted from the first, in each output."""
    function = operator_of(node).axes
    known = function is not None and rank(node.inputs[operand]) is not None
    answer = function(node, operand, axis) if function is not None and known else None
    return list(answer) if isinstance(answer, tuple) else [answer] * len(node.outputs)


def keeps_axis(before: Dims, axis: int, after: Dims, other: int) -> bool:
    """Return whether a Reshape is proven to keep `axis` as `other`.

    It is if two of these have the same number of elements, as all three together have: the axes in
    front, the axis, the axes behind.
    """
    pairs = (
        (before[:axis], after[:other]),
        ((before[axis],), (after[other],)),
        (before[axis + 1 :], after[other + 1 :]),
    )
    return sum(volume(a) is not None and volume(a) == volume(b) for a, b in pairs) >= 2


# -- places that families share -------------------------------------------------------------------


def first_operand(function: Callable[[Any, int, int], Answer]) -> Callable[..., Answer]:
    """Return the function of axes for an operator that keeps axes of its first operand only."""
    return lambda node, operand, axis: None if operand else function(node, operand, axis)


def broadcast_axis(node: Any, operand: int, axis: int) -> Place:
    """Return the place of an axis of operands that broadcast."""
    width, n = rank(node.outputs[0]), len(node.inputs[operand].shape)
    return None if width is None or width < n else axis + width - n


def axis_unless_named(node: Any, _operand: int, axis: int) -> Place:
    """Return the axis, if the operator does not name it."""
    named = named_axes(node)
    return None if named is None or axis in named else axis


@first_operand
def axis_before_matrices(node: Any, _operand: int, axis: int) -> Place:
    """Return the axis, if it is not one of the last two."""
    return axis if axis < len(node.inputs[0].shape) - 2 else None


def row_axis(_node: Any, _operand: int, axis: int) -> Place:
    """Return the axis, if it is the first: the operator mixes all others."""
    return 0 if axis == 0 else None


@first_operand
def reshaped_axis(node: Any, _operand: int, axis: int) -> Place:
    """Return the place of an axis that a Reshape is proven to keep."""
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    same = [i for i in range(len(after)) if keeps_axis(before, axis, after, i)]
    return same[0] if len(same) == 1 else None
