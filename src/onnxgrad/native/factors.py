"""Common factors: h a + h b becomes h (a + b), with one pass over memory less.

The gradient of x f(x), as of GELU and SiLU, is such a sum, h the cotangent. The results differ by
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, equal
from onnxgrad.graph.tidy import drop_unused

_DEPTH = 8  # of a product that is taken apart


def factor_out(op: Emit, target: Any) -> None:
    """Multiply sums of two float32 products by their common factor of full shape, once."""
    order = {node: i for i, node in enumerate(op.graph)}
    changed = False
    for node in list(op.graph):
        if node.domain or node.op_type != "Add" or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        changed |= _factored(op, node, order)
    if changed:
        drop_unused(op.graph)


def _factored(op: Emit, node: ir.Node, order: Mapping[ir.Node, int]) -> bool:
    """Rewrite one Add, if its operands have a common factor; return whether they do."""
    (y,) = node.outputs
    left, right = (_factors(x) for x in node.inputs)
    common = [h for h in left if h in right and equal(dims(h), dims(y))]
    if min(len(left), len(right)) < 2 or not common:
        return False
    h = common[0]
    with op.at(node):
        rests = []
        for factors in (left, right):
            factors.remove(h)
            rests.append(_product(op, factors, order, order[node]))
        result = op.set_type_like(h * (rests[0] + rests[1]), y)
    result.name, y.name = y.name, op.name(str(y.name))
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    return True


def _factors(x: ir.Value | None, depth: int = _DEPTH) -> list[Any]:
    """Return the factors of a product that only one node reads; a pair is a scalar to divide by."""
    node = None if x is None else x.producer()
    single = x is not None and len(x.uses()) == 1 and not x.is_graph_output()
    if node is None or node.domain or not single or not depth:
        return [x]
    if node.op_type == "Mul":
        return [factor for v in node.inputs for factor in _factors(v, depth - 1)]
    if node.op_type == "Div" and dims(node.inputs[1]) == ():
        return [*_factors(node.inputs[0], depth - 1), ("/", node.inputs[1])]
    return [x]


def _product(op: Emit, factors: list[Any], order: Mapping[ir.Node, int], end: int) -> ir.Value:
    """Return the product of `factors`; a quotient that an earlier node has computed is used."""
    values = [v for v in factors if not isinstance(v, tuple)]
    for _, divisor in (v for v in factors if isinstance(v, tuple)):
        quotients = {x: _quotient(x, divisor, order, end) for x in values}
        x = next((x for x in values if quotients[x] is not None), None)
        if x is not None:
            values[values.index(x)] = quotients[x]
        else:
            values[-1] = values[-1] / divisor
    result = values[0]
    for v in values[1:]:
        result = result * v
    return result


def _quotient(
    x: ir.Value, divisor: ir.Value, order: Mapping[ir.Node, int], end: int
) -> ir.Value | None:
    """Return the output of a node before position `end` that divides `x` by `divisor`, if any."""
    for node, i in x.uses():
        divides = node.op_type == "Div" and not node.domain and i == 0
        if divides and node.inputs[1] is divisor and order.get(node, end) < end:
            return node.outputs[0]
    return None
