"""The range of the elements of a value, derived from the operators that compute the value.

The range tells probabilities, which lie between 0 and 1, from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import VIEWS, made_by, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.records import ValueRange
from onnxgrad.operators.shapes import constant, dims, rank

_UNBOUNDED: ValueRange = (-inf, inf)
_DEPTH = 32  # most consecutive nodes that a search visits


def value_range(x: ir.Value) -> ValueRange:
    """Return bounds (low, high) of the elements of `x` for any data, infinite where unknown."""
    return _cached_value_range(x, _DEPTH, {})


def _cached_value_range(
    x: ir.Value | None, depth: int, ranges: dict[ir.Value, ValueRange]
) -> ValueRange:
    """Return the bounds (low, high) of the elements of `x`, and cache them in `ranges`."""
    if x is None or not depth:
        return _UNBOUNDED
    if x not in ranges:
        ranges[x] = _range_of_result(x, lambda v: _cached_value_range(v, depth - 1, ranges))
    return ranges[x]


def _range_of_result(x: ir.Value, range_of: Callable[[ir.Value | None], ValueRange]) -> ValueRange:
    """Return (low, high) of the result `x` of a node, from the ranges of the node's operands."""
    node = x.producer()
    if node is None or made_by(x, "Constant"):
        return constant_range(x) or _UNBOUNDED
    if x.dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    if sources := [*moved_operands(node), *_subgraph_values_of_output(node, x)]:
        lows, highs = zip(*map(range_of, sources), strict=True)
        return min(lows), max(highs)
    share = quotient_operands(node)
    if share is not None and summed_axes(*share) is not None and range_of(share[0])[0] >= 0:
        return 0.0, 1.0
    inputs = node.inputs
    if made_by(x, "Sub") and summed_axes(inputs[0], inputs[1], ("ReduceLogSumExp", "ReduceMax")):
        return -inf, 0.0
    known = operator_of(node).value_range
    if known is None or x.index():
        return _UNBOUNDED
    return known(node, [range_of(v) for v in inputs]) if callable(known) else known


def moved_operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the operands of a node that only moves, casts, selects or repeats elements; else ().

    Each element of the results is an element of these operands. There are none if a node computes
    elements.
    """
    if operator_of(node).traits.isdisjoint(("reorders", "selects")):
        return ()
    return node.inputs if node.op_type == "Concat" else node.inputs[:1]


def _subgraph_values_of_output(node: ir.Node, x: ir.Value) -> list[ir.Value | None]:
    """Return the values of the bodies that become the output `x` of an If, Loop or Scan."""
    graphs, index = list(subgraphs(node)), x.index() or 0
    if not graphs or node.domain:
        return []
    before = 2 if node.op_type == "Loop" else 0  # trip count, condition
    values: list[ir.Value | None] = [g.outputs[index + before // 2] for g in graphs]
    states = len(graphs[0].inputs) - before - node.attributes.get_int("num_scan_inputs", 0)
    if node.op_type != "If" and index < states:
        values.append(node.inputs[before + index])
    return values


def constant_range(x: ir.Value) -> ValueRange | None:
    """Return (value, value) for a scalar constant, else None: larger tensors may be weights."""
    array = constant(x)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.item()), float(array.item())


def quotient_operands(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return (a, b) if a node computes a / b, as Div, Reciprocal (a = 1) or Mul by a Reciprocal."""
    inputs = [v for v in node.inputs if v is not None]
    if node.domain:
        return None
    if node.op_type == "Div":
        return inputs[0], inputs[1]
    if node.op_type == "Reciprocal":
        return ir.Value(name="one", const_value=ir.tensor(np.float32(1))), inputs[0]
    if node.op_type == "Mul":
        for a, b in (inputs, inputs[::-1]):
            inverse = made_by(value_before_casts(b), "Reciprocal")
            if inverse is not None and inverse.inputs[0] is not None:
                return a, inverse.inputs[0]
    return None


def summed_axes(
    x: ir.Value | None,
    total: ir.Value | None,
    reductions: tuple[str, ...] = ("ReduceSum", "ReduceL1"),
) -> tuple[int, ...] | None:
    """Return the axes over which `total` sums `x`, if `total` is broadcast to `x`; else None.

    `reductions` are the operators that count as a sum. The sum may be guarded against zero, and
    then `x`, too, by 1 where the sum is zero.
    """
    guarded, column = False, None
    while (node := None if total is None else total.producer()) is not None:
        # the results are the elements of the operand in their order, or copies
        is_copy = node.op_type in ("Expand", "Tile")
        if moved_operands(node) and (is_copy or node.op_type in VIEWS | {"Cast"}):
            column = column or (total if node.op_type in ("Reshape", "Squeeze") else None)
            total = node.inputs[0]
        elif made_by(total, "Where", "Max", "Clip", "Add"):  # each may guard `total` against zero
            operands = node.inputs[node.op_type == "Where" :]
            rest = [v for v in operands if v is not None and not _is_zero_guard(v)]
            if len(rest) != 1:
                return None
            guarded, total = True, rest[0]
        else:
            break
    node = made_by(total, *reductions)
    if node is None or x is None or node.inputs[0] is None:
        return None
    base = strip_zero_guard(x) if guarded else x
    is_of_x = value_before_casts(node.inputs[0]) is value_before_casts(base)
    return _reduced_axes(node, x, column) if is_of_x else None


def _reduced_axes(node: ir.Node, x: ir.Value, column: ir.Value | None) -> tuple[int, ...] | None:
    """Return the axes over which the node reduces `x`, if the node's result is broadcast to `x`
    along these axes; else None.
    """
    n, kept = rank(x), int_attribute(node, "keepdims")
    if n is None:
        stated = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return None if stated is None or not kept else tuple(int(a) for a in stated.ravel())
    along = named_axes(node)
    if along is None or len(along) == n or (kept and column is None):
        return None if along is None else tuple(along)
    shape = dims(column if column is not None else node.outputs[0])
    is_aligned = shape is not None and len(shape) == n and all(shape[a] == 1 for a in along)
    return tuple(along) if is_aligned else None


def _is_zero_guard(x: ir.Value) -> bool:
    """Return whether `x` guards a sum against zero: a constant >= 0, perhaps times a boolean."""
    if (value := constant_range(x)) is not None:
        return value[0] >= 0
    node = x.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return node.inputs[0].dtype == ir.DataType.BOOL
    return node.op_type == "Mul" and all(v is not None and _is_zero_guard(v) for v in node.inputs)


def strip_zero_guard(x: ir.Value) -> ir.Value:
    """Return p if `x` is p plus a number that keeps `x` from being zero, such as 1 where a sum is
    0; else return `x`.
    """
    node = made_by(x, "Add")
    rest = (
        [] if node is None else [v for v in node.inputs if v is not None and not _is_zero_guard(v)]
    )
    return rest[0] if len(rest) == 1 else x


def value_before_casts(x: ir.Value) -> ir.Value:
    """Return the value from which only Cast and Identity nodes compute `x`; `x` itself if there are
    none.
    """
    while (node := made_by(x, "Identity", "Cast")) is not None:
        if node.inputs[0] is None or x.dtype == ir.DataType.BOOL:
            break
        x = node.inputs[0]
    return x
