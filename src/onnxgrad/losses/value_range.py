"""The range of the elements of a value, from the operators that compute it.

It tells probabilities, which lie between 0 and 1, from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.operators import VIEWS
from onnxgrad.graph.shapes import constant, dims, rank

Range = tuple[float, float]

_ANY: Range = (-inf, inf)
_DEPTH = 32  # nodes in a row; what is further away does not decide
_FIXED: dict[str, Range] = {
    **dict.fromkeys(("Sigmoid", "Softmax", "HardSigmoid", "Hardmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Softsign", "Sin", "Cos", "Erf"), (-1.0, 1.0)),
    **dict.fromkeys(("Softplus", "Abs", "Sqrt"), (0.0, inf)),
    "LogSoftmax": (-inf, 0.0),
}
_GUARDS = frozenset("Where Max Clip Add".split())  # against a sum of zero
_UNION = frozenset(  # every element is one of the operands, or an average of several
    "Cast Concat Expand Flatten Gather GatherElements GatherND GlobalAveragePool GlobalMaxPool "
    "Identity MaxPool Mean ReduceMax ReduceMean ReduceMin Reshape Slice Split Squeeze Tile "
    "Transpose Unsqueeze Where".split()
)
_JOINED = frozenset("Concat Mean".split())  # of all operands; of the others, the first counts


def value_range(x: ir.Value) -> Range:
    """Return bounds of the elements of `x` for any weights and data, infinite where none follow.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad import Emit
        >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N"]))
        >>> with Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20})) as op:
        ...     y = 1.0 - 0.5 * (op.Sigmoid(x) + op.Relu(op.Tanh(x)))
        >>> value_range(y)
        (0.0, 1.0)
    """
    return _range(x, _DEPTH, {})


def _range(x: ir.Value | None, depth: int, ranges: dict[ir.Value, Range]) -> Range:
    """Return the range of `x`, and keep it in `ranges`."""
    if x is None or not depth:
        return _ANY
    if x not in ranges:
        ranges[x] = _computed(x, lambda v: _range(v, depth - 1, ranges))
    return ranges[x]


def _computed(x: ir.Value, range_of: Callable[[ir.Value | None], Range]) -> Range:
    """Return the range of `x` from those of the operands of its node."""
    node = x.producer()
    if node is None or (node.op_type == "Constant" and not node.domain):
        return number(x) or _ANY
    if node.domain:
        return _ANY
    op_type, inputs = node.op_type, node.inputs
    if x.dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    if op_type in ("If", "Loop", "Scan"):
        lows, highs = zip(*map(range_of, _in_subgraphs(node, x)), strict=True)
        return min(lows), max(highs)
    if op_type in _FIXED:
        return _FIXED[op_type]
    if op_type == "Clip":
        return _clipped(range_of(inputs[0]), inputs)
    if op_type in _UNION:
        used = inputs[1:] if op_type == "Where" else inputs if op_type in _JOINED else inputs[:1]
        lows, highs = zip(*map(range_of, used), strict=True)
        return min(lows), max(highs)
    if op_type == "Resize":  # cubic interpolation may exceed its operands
        cubic = node.attributes.get_string("mode", "nearest") == "cubic"
        return _ANY if cubic else range_of(inputs[0])
    share = quotient(node) if op_type in ("Div", "Mul") else None
    if share is not None and summed_axes(*share) is not None and range_of(share[0])[0] >= 0:
        return 0.0, 1.0
    if op_type == "Sub" and summed_axes(inputs[0], inputs[1], ("ReduceLogSumExp", "ReduceMax")):
        return -inf, 0.0
    if op_type not in _ARITHMETIC:
        return _ANY
    return _ARITHMETIC[op_type](*map(range_of, inputs))


def _in_subgraphs(node: ir.Node, x: ir.Value) -> list[ir.Value | None]:
    """Return the values that an output of an If, Loop or Scan may be, and a state's initial one."""
    graphs = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    index, before = x.index() or 0, 2 if node.op_type == "Loop" else 0  # trip count, condition
    values: list[ir.Value | None] = [g.outputs[index + before // 2] for g in graphs]
    states = len(graphs[0].inputs) - (
        node.attributes.get_int("num_scan_inputs", 0) if node.op_type == "Scan" else before
    )
    if node.op_type != "If" and index < states:
        values.append(node.inputs[before + index])
    return values


def number(x: ir.Value) -> Range | None:
    """Return the range of a constant of one element; larger tensors may be weights."""
    array = constant(x)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.item()), float(array.item())


def _clipped(x: Range, inputs: Sequence[ir.Value | None]) -> Range:
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
        one = ir.Value(name="one")
        one.const_value = ir.tensor(np.float32(1))
        return one, inputs[0]
    if node.op_type == "Mul":
        for a, b in (inputs, inputs[::-1]):
            inverse = stripped(b).producer()
            if inverse is not None and inverse.op_type == "Reciprocal" and inverse.inputs[0]:
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
    node = None if total is None else total.producer()
    while node is not None and not node.domain:
        if node.op_type in VIEWS or node.op_type in ("Cast", "Expand", "Tile"):
            column = column or (total if node.op_type in ("Reshape", "Squeeze") else column)
            total = node.inputs[0]
        elif node.op_type in _GUARDS:
            operands = [v for v in node.inputs[node.op_type == "Where" :] if v is not None]
            rest = [v for v in operands if not _is_guard(v)]
            if len(rest) != 1:
                return None
            guarded, total = True, rest[0]
        else:
            break
        node = None if total is None else total.producer()
    if node is None or x is None or node.op_type not in reductions or node.inputs[0] is None:
        return None
    base = behind_guard(x) if guarded else x
    if stripped(node.inputs[0]) is not stripped(base):
        return None
    return _aligned_axes(node, x, column)


def _aligned_axes(node: ir.Node, x: ir.Value, column: ir.Value | None) -> tuple[int, ...] | None:
    """Return the axes of a reduction of `x`, if the result, reshaped as `column`, is along them."""
    n, axes = rank(x), constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if len(node.inputs) > 1 and node.inputs[1] is not None and axes is None:
        return None
    kept = node.attributes.get_int("keepdims", 1)
    if n is None:
        return None if axes is None or not kept else tuple(int(a) for a in axes.ravel())
    along = tuple(range(n)) if axes is None else tuple(int(a) % n for a in axes.ravel())
    if len(along) == n or (kept and column is None):
        return along
    shape = dims(column if column is not None else node.outputs[0])
    aligned = shape is not None and len(shape) == n and all(shape[a] == 1 for a in along)
    return along if aligned else None


def _is_guard(x: ir.Value) -> bool:
    """Return whether `x` is a number >= 0, or one that a condition chooses."""
    if (value := number(x)) is not None:
        return value[0] >= 0
    node = x.producer()
    if node is None or node.domain or node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return node.inputs[0].dtype == ir.DataType.BOOL
    return node.op_type == "Mul" and all(v is not None and _is_guard(v) for v in node.inputs)


def behind_guard(x: ir.Value) -> ir.Value:
    """Return p if `x` is p + 1 in rows whose sum is zero, else `x`."""
    node = x.producer()
    if node is None or node.domain or node.op_type != "Add":
        return x
    rest = [v for v in node.inputs if v is not None and not _is_guard(v)]
    return rest[0] if len(rest) == 1 else x


def stripped(x: ir.Value) -> ir.Value:
    """Return the value that `x` is, perhaps in another dtype."""
    node = x.producer()
    while node is not None and not node.domain and node.op_type in ("Identity", "Cast"):
        if node.inputs[0] is None or x.dtype == ir.DataType.BOOL:
            break
        x = node.inputs[0]
        node = x.producer()
    return x


def _product(a: Range, b: Range) -> Range:
    products = [x * y if x and y else 0.0 for x in a for y in b]
    return min(products), max(products)


def _inverse(x: Range) -> Range:
    return _quotient((1.0, 1.0), x)


def _quotient(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        return _ANY
    return _product(a, (1 / b[1], 1 / b[0]))


def _log(x: Range) -> Range:
    low, high = (-inf if v <= 0 else inf if v == inf else log(v) for v in x)
    return low, high


def _exp(x: Range) -> Range:
    low, high = (inf if v > 700 else exp(v) for v in x)
    return low, high


_ARITHMETIC: dict[str, Callable[..., Range]] = {
    "Add": lambda *xs: (sum(x[0] for x in xs), sum(x[1] for x in xs)),
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Mul": _product,
    "Div": _quotient,
    "Reciprocal": _inverse,
    "Neg": lambda x: (-x[1], -x[0]),
    "Relu": lambda x: (max(x[0], 0.0), max(x[1], 0.0)),
    "Max": lambda *xs: (max(x[0] for x in xs), max(x[1] for x in xs)),
    "Min": lambda *xs: (min(x[0] for x in xs), min(x[1] for x in xs)),
    "Log": _log,
    "Exp": _exp,
}
_ARITHMETIC["Sum"] = _ARITHMETIC["Add"]
