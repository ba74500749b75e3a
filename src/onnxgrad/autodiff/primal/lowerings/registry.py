"""The registry of lowerings: tables from operators to the functions that rewrite them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.graph.emit import Emit

Lowering = Callable[[Emit, ir.Node], "list[ir.Value] | None"]
LOWERINGS: dict[tuple[str, str], Lowering] = {}
# applied by the sweep to nodes that have a cotangent only, as they slow down the forward pass
ON_DEMAND: dict[tuple[str, str], Lowering] = {}


def lowering(
    op_type: str, domain: str = "", on_demand: bool = False
) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of an operator.

    A lowering rewrites a node to other operators, whose rules then give its gradient. It is called
    as `f(op, node)` before differentiation, and returns one value for each output of the node, or
    None to leave the node as it is. `op` writes nodes, as in a rule.

    A later lowering replaces an earlier one.

    Args:
        op_type: name of the operator.
        domain: its domain; empty for standard operators.
        on_demand: rewrite only nodes through which a gradient goes, and leave others as they are.

    Returns:
        A decorator that returns the function unchanged.

    Examples:
        >>> import onnx
        >>> from onnxgrad import lowering, onnx_derivative
        >>> @lowering("AddExp", domain="doc.example")
        ... def add_exp(op, node):
        ...     # y = a + e^b
        ...     a, b = node.inputs
        ...     return [a + op.Exp(b)]
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20, "doc.example": 1]>
        ...     f (float[3] a, float[3] b) => (float[3] y) { y = doc.example.AddExp (a, b) }''')
        >>> gradient = onnx_derivative(model)
        >>> [node.op_type for node in gradient.graph.node]
        ['Exp', 'Mul', 'Identity']
    """

    def register(function: Lowering) -> Lowering:
        (ON_DEMAND if on_demand else LOWERINGS)[domain, op_type] = function
        return function

    return register
