"""The range of the elements of a value, from the operators that compute it.

It tells probabilities, which lie between 0 and 1, from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log

import onnx_ir as ir

from onnxgrad.graph.shapes import constant

Range = tuple[float, float]

_ANY: Range = (-inf, inf)
_DEPTH = 32  # nodes in a row; what is further away does not decide
_FIXED: dict[str, Range] = {
    **dict.fromkeys(("Sigmoid", "Softmax", "HardSigmoid", "Hardmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Softsign", "Sin", "Cos", "Erf"), (-1.0, 1.0)),
    **dict.fromkeys(("Softplus", "Abs", "Sqrt"), (0.0, inf)),
    "LogSoftmax": (-inf, 0.0),
}
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
        return _number(x) or _ANY
    if node.domain:
        return _ANY
    op_type, inputs = node.op_type, node.inputs
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
    if op_type == "Div" and _is_share(inputs[0], inputs[1]) and range_of(inputs[0])[0] >= 0:
        return 0.0, 1.0
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


def _number(x: ir.Value) -> Range | None:
    """Return the range of a constant of one element; larger tensors may be weights."""
    array = constant(x)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.item()), float(array.item())


def _clipped(x: Range, inputs: Sequence[ir.Value | None]) -> Range:
    bounds = [None if v is None else _number(v) for v in (*inputs[1:], None, None)[:2]]
    low, high = (b[0] if b else end for b, end in zip(bounds, _ANY, strict=True))
    return min(max(x[0], low), high), max(min(x[1], high), low)


def _is_share(x: ir.Value | None, total: ir.Value | None) -> bool:
    """Return whether `total` sums `x`, perhaps with a guard against zero."""
    node = None if total is None else total.producer()
    while node is not None and node.op_type in ("Where", "Max", "Clip", "Add"):
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
        rest = [v for v in operands if v is not None and _number(v) is None]
        numbers = [r[0] for v in operands if v is not None and (r := _number(v)) is not None]
        if len(rest) != 1 or min(numbers, default=0.0) < 0:
            return False
        node = rest[0].producer()
    return node is not None and node.op_type in ("ReduceSum", "ReduceL1") and node.inputs[0] is x


def _product(a: Range, b: Range) -> Range:
    products = [x * y if x and y else 0.0 for x in a for y in b]
    return min(products), max(products)


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
    "Neg": lambda x: (-x[1], -x[0]),
    "Relu": lambda x: (max(x[0], 0.0), max(x[1], 0.0)),
    "Max": lambda *xs: (max(x[0] for x in xs), max(x[1] for x in xs)),
    "Min": lambda *xs: (min(x[0] for x in xs), min(x[1] for x in xs)),
    "Log": _log,
    "Exp": _exp,
}
_ARITHMETIC["Sum"] = _ARITHMETIC["Add"]
