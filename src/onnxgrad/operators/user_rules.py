"""Rules and lowerings of users, which take the place of the rule and lowering of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from onnxgrad.operators.records import Lowering, Operator, Rule, add_facts, recording_decorator


def rule(
    *op_types: str,
    domain: str = "",
    shape: Callable[..., Any] | None = None,
    axes: Callable[..., Any] | None = None,
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the named operators.

    A rule is called as `f(op, node, g)`. It takes one cotangent `g` for each output, None where the
    output has none. A rule of fewer cotangents fails if an output beyond them has one.

    It returns one gradient for each input: a value of the shape and dtype of the input, None for no
    gradient, or `Unsupported(reason)`. Another number of gradients, dtype or shape, where the shape
    is known, is a `ValueError` when a model is differentiated. Nodes of gradients that nobody needs
    are removed later.

    `op` writes nodes: `op.MatMul(a, b)`, `op.Softmax(x, axis=-1)`, `a * b`. `op.sum_to(g, x)`
    undoes broadcasting. `node` has `inputs`, `outputs` and `attributes`.

    The last rule or lowering of an operator holds, before the ones of the package. A local function
    that has one stays a call; others are differentiated through their nodes.

    Args:
        op_types: names of operators or local functions.
        domain: their domain; empty for standard operators.
        shape: `(inputs, attributes)` -> the shape of the output, None if it is unknown, or a list
            with the shape of each output. A shape, as `inputs[0].shape`, has lengths, names of
            lengths, and None for unknown lengths; `attributes` is a dict of values that are stated.
            Without it, the gradient computes shapes of the output when it runs, unless a local
            function or a schema tells them.
        axes: `(node, operand, axis)` -> the axis of the output whose index i depends on no other
            index of that axis of an operand than i; "summed" if the output is a sum over the axis;
            None if the operator mixes indices, which is assumed without `axes`. They prove that
            rows stay apart, and let a `TrainerStack` write one node for all members.

    Returns:
        A decorator that returns the function unchanged.

    Examples:
        >>> import onnx
        >>> from onnxgrad import onnx_derivative, rule
        >>> @rule("Square", domain="doc.example")
        ... def square(op, node, g):
        ...     # y = x^2:  dx = 2 g x
        ...     return (2.0 * g * node.inputs[0],)
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20, "doc.example": 1]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = doc.example.Square (x) }
        ...     <domain: "doc.example", opset_import: ["": 20]>
        ...     Square (a) => (b) { b = Mul(a, a) }''')
        >>> gradient = onnx_derivative(model)
        >>> [node.op_type for node in gradient.graph.node]
        ['Mul', 'Mul']
    """
    return recording_decorator(_set_user_rule, op_types, domain, "rule", shape=shape, axes=axes)


def lowering(
    op_type: str,
    domain: str = "",
    on_demand: bool = False,
    shape: Callable[..., Any] | None = None,
    axes: Callable[..., Any] | None = None,
) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of an operator.

    A lowering rewrites a node to other operators, whose rules then give its gradient. It is called
    as `f(op, node)` before differentiation, and returns one value for each output of the node, or
    None to leave the node unchanged. `op` writes nodes, as in a rule.

    The last rule or lowering of an operator holds, before the ones of the package.

    Args:
        op_type: name of the operator.
        domain: its domain; empty for standard operators.
        on_demand: rewrite only nodes through which a gradient goes, and nodes whose results have
            no known type.
        shape, axes: as in `rule`.

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
    facts = {"on_demand": on_demand, "shape": shape, "axes": axes}
    return recording_decorator(_set_user_rule, [op_type], domain, "lowering", **facts)


def _set_user_rule(domain: str, name: str, **stated: Any) -> None:
    """Set fields of the record of an operator for a user, and forget the rule and lowering that it
    had.
    """
    forgotten = {f.name: f.default for f in fields(Operator) if "of_rule" in f.metadata}
    known = {name: value for name, value in stated.items() if value is not None}
    add_facts(domain, name, **forgotten | {"of_user": True} | known)
