"""The range of the elements of a value, from the operators that compute it.

It tells probabilities, which lie between 0 and 1, from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import REORDERS, SELECTS, VIEWS, made_by
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.shapes import constant, dims, rank

Range = tuple[float, float]

_ANY: Range = (-inf, inf)
_DEPTH = 32  # nodes in a row; what is further away does not decide
_FIXED: dict[str, Range] = {
    **dict.fromkeys(("Sigmoid", "Softmax", "HardSigmoid", "Hardmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Softsign", "Sin", "Cos", "Erf"), (-1.0, 1.0)),
    **dict.fromkeys(("Softplus", "Abs", "Sqrt"), (0.0, inf)),
    "LogSoftmax": (-inf, 0.0),
}
_OF_FIRST = REORDERS | SELECTS | frozenset(  # every element is one of the operand, or an average
    "GlobalAveragePool GlobalMaxPool MaxPool ReduceMax ReduceMean ReduceMin".split()
)  # fmt: skip
_OF_ALL = frozenset("Concat Mean".split())
_ALONG = VIEWS | {"Cast", "Expand", "Tile"}  # from a sum to what it divides
_GUARDS = frozenset("Where Max Clip Add".split())  # against a sum of zero


def value_range(x: ir.Value) -> Range:
    """Return bounds of the elements of `x` for any weights and data, infinite where none follow."""
    return _range(x, _DEPTH, {})


def _range(x: ir.Value | None, depth: int, ranges: dict[ir.Value, Range]) -> Range:
    """Return the range of `x`, and keep it in `ranges`."""
    if x is None or not depth:
        return _ANY
    if x not in ranges:
        ranges[x] = _range_of_result(x, lambda v: _range(v, depth - 1, ranges))
    return ranges[x]


def _range_of_result(x: ir.Value, range_of: Callable[[ir.Value | None], Range]) -> Range:
    """Return the range of `x` from those of the operands of its node."""
    node = x.producer()
    if node is None or made_by(x, "Constant"):
        return number(x) or _ANY
    if node.domain:
        return _ANY
    op_type, inputs = node.op_type, node.inputs
    if x.dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    if op_type in _FIXED:
        return _FIXED[op_type]
    if op_type == "Clip":
        return _clip(range_of(inputs[0]), inputs)
    if sources := _sources(node, x):
        lows, highs = zip(*map(range_of, sources), strict=True)
        return min(lows), max(highs)
    share = quotient(node) if op_type in ("Div", "Mul") else None
    if share is not None and summed_axes(*share) is not None and range_of(share[0])[0] >= 0:
        return 0.0, 1.0
    if op_type == "Sub" and summed_axes(inputs[0], inputs[1], ("ReduceLogSumExp", "ReduceMax")):
        return -inf, 0.0
    if op_type in _INCREASING:
        lows, highs = zip(*map(range_of, inputs), strict=True)
        return _INCREASING[op_type](*lows), _INCREASING[op_type](*highs)
    return _ARITHMETIC[op_type](*map(range_of, inputs)) if op_type in _ARITHMETIC else _ANY


def _sources(node: ir.Node, x: ir.Value) -> Sequence[ir.Value | None]:
    """Return values such that every element of the result `x` is one of theirs, or an average.

    For other operators, there are none.
    """
    if node.op_type in ("If", "Loop", "Scan"):
        return _in_subgraphs(node, x)
    if node.op_type == "Where":
        return node.inputs[1:]
    if node.op_type == "Resize":  # cubic interpolation may exceed its operands
        return node.inputs[: node.attributes.get_string("mode", "nearest") != "cubic"]
    if node.op_type in _OF_ALL:
        return node.inputs
    return node.inputs[:1] if node.op_type in _OF_FIRST else ()


def _in_subgraphs(node: ir.Node, x: ir.Value) -> list[ir.Value | None]:
    """Return the values that an output of an If, Loop or Scan may be, and a state's initial one."""
    graphs, index = list(subgraphs(node)), x.index() or 0
    before = 2 if node.op_type == "Loop" else 0  # trip count, condition
    values: list[ir.Value | None] = [g.outputs[index + before // 2] for g in graphs]
    states = len(graphs[0].inputs) - before - node.attributes.get_int("num_scan_inputs", 0)
    if node.op_type != "If" and index < states:
        values.append(node.inputs[before + index])
    return values


def number(x: ir.Value) -> Range | None:
    """Return the range of a constant of one element; larger tensors may be weights."""
    array = constant(x)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.item()), float(array.item())


def _clip(x: Range, inputs: Sequence[ir.Value | None]) -> Range:
    """Return the range of a Clip, by those of its bounds that are constants."""
    bounds = [None if v is None else number(v) for v in (*inputs[1:], None, None)[:2]]
    low, high = (b[0] if b else end for b, end in zip(bounds, _ANY, strict=True))
    return min(max(x[0], low), high), max(min(x[1], high), low)


def quotient(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return (a, b) if the node computes a / b, or a times the Reciprocal of b; a may be 1."""
    inputs = [v for v in node.inputs if v is not None]
    if node.domain:
        return None
    if node.op_type == "Div":
        return inputs[0], inputs[1]
    if node.op_type == "Reciprocal":
        return ir.Value(name="one", const_value=ir.tensor(np.float32(1))), inputs[0]
    if node.op_type == "Mul":
        for a, b in (inputs, inputs[::-1]):
            inverse = made_by(before_casts(b), "Reciprocal")
            if inverse is not None and inverse.inputs[0] is not None:
                return a, inverse.inputs[0]
    return None


def summed_axes(
    x: ir.Value | None,
    total: ir.Value | None,
    reductions: tuple[str, ...] = ("ReduceSum", "ReduceL1"),
) -> tuple[int, ...] | None:
    """Return the axes of `x` whose reduction `total` is, broadcast against `x`, else None.

    The reduction may be guarded against zero, and then `x` too, by 1 where the sum is zero.
    """
    guarded, column = False, None
    while (node := made_by(total, *_ALONG, *_GUARDS)) is not None:
        if node.op_type in _ALONG:
            column = column or (total if node.op_type in ("Reshape", "Squeeze") else None)
            total = node.inputs[0]
        else:
            operands = node.inputs[node.op_type == "Where" :]
            rest = [v for v in operands if v is not None and not _is_guard(v)]
            if len(rest) != 1:
                return None
            guarded, total = True, rest[0]
    node = made_by(total, *reductions)
    if node is None or x is None or node.inputs[0] is None:
        return None
    base = behind_guard(x) if guarded else x
    is_of_x = before_casts(node.inputs[0]) is before_casts(base)
    return _aligned_axes(node, x, column) if is_of_x else None


def _aligned_axes(node: ir.Node, x: ir.Value, column: ir.Value | None) -> tuple[int, ...] | None:
    """Return the axes of a reduction of `x`, if the result, reshaped as `column`, is along them."""
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


def _is_guard(x: ir.Value) -> bool:
    """Return whether `x` is a number >= 0, or one that a condition chooses."""
    if (value := number(x)) is not None:
        return value[0] >= 0
    node = x.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return node.inputs[0].dtype == ir.DataType.BOOL
    return node.op_type == "Mul" and all(v is not None and _is_guard(v) for v in node.inputs)


def behind_guard(x: ir.Value) -> ir.Value:
    """Return p if `x` is p + 1 in rows whose sum is zero, else `x`."""
    node = made_by(x, "Add")
    rest = [] if node is None else [v for v in node.inputs if v is not None and not _is_guard(v)]
    return rest[0] if len(rest) == 1 else x


def before_casts(x: ir.Value) -> ir.Value:
    """Return the value that `x` is, perhaps in another dtype."""
    while (node := made_by(x, "Identity", "Cast")) is not None:
        if node.inputs[0] is None or x.dtype == ir.DataType.BOOL:
            break
        x = node.inputs[0]
    return x


def _product(a: Range, b: Range) -> Range:
    products = [x * y if x and y else 0.0 for x in a for y in b]
    return min(products), max(products)


def _quotient(a: Range, b: Range) -> Range:
    return _ANY if b[0] <= 0 <= b[1] else _product(a, (1 / b[1], 1 / b[0]))


# of the lower ends of all operands the lower end, and of the upper ends the upper one
_INCREASING: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("Add", "Sum"), lambda *xs: sum(xs)),
    "Max": lambda *xs: max(xs),
    "Min": lambda *xs: min(xs),
    "Relu": lambda x: max(x, 0.0),
    "Log": lambda x: -inf if x <= 0 else log(x),
    "Exp": lambda x: inf if x > 700 else exp(x),
}
_ARITHMETIC: dict[str, Callable[..., Range]] = {
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Neg": lambda x: (-x[1], -x[0]),
    "Mul": _product,
    "Div": _quotient,
    "Reciprocal": lambda x: _quotient((1.0, 1.0), x),
}
