"""Registration of the rules and lowerings of the package, in the records of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxgrad.operators.records import add_facts

Rule: TypeAlias = Callable[..., Any]  # (op, node, *gradients of the outputs) -> one per input

Lowering: TypeAlias = Callable[..., Any]  # (op, node) -> one value per output, or None


@dataclass(frozen=True)
class Unsupported:
    """What a rule returns in place of a gradient that it does not cover.

    If that gradient is needed, `NoGradientRule` is raised; otherwise nothing happens.

    Attributes:
        reason: why, and what to do instead; it becomes part of the error message.

    Examples:
        A rule that covers one of two modes:

        >>> from onnxgrad import rule
        >>> from onnxgrad.graph import Unsupported
        >>> @rule("Wave", domain="doc.example")
        ... def wave(op, node, g):
        ...     # y = sin x:  dx = g cos x
        ...     if node.attributes.get_string("kind", "sine") != "sine":
        ...         return (Unsupported("only kind='sine' has a gradient"),)
        ...     return (g * op.Cos(node.inputs[0]),)
    """

    reason: str


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of operators; users call `onnxgrad.rule`."""
    return recording_decorator(add_facts, op_types, domain, "rule")


def subgraph_rule(op_type: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of an operator with subgraphs."""
    return recording_decorator(add_facts, [op_type], "", "subgraph_rule")


def lowering(
    *op_types: str, domain: str = "", on_demand: bool = False
) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as a lowering; users call `onnxgrad.lowering`."""
    return recording_decorator(add_facts, op_types, domain, "lowering", on_demand=on_demand)


def members_of(*op_types: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the form of operators for members: see `member_forms`."""
    return recording_decorator(add_facts, op_types, "", "members")


def recording_decorator(
    record: Callable[..., None], op_types: Iterable[str], domain: str, field: str, **others: Any
) -> Callable[[Rule], Rule]:
    """Return the decorator that records its function as a field of these operators."""

    def register(function: Rule) -> Rule:
        for name in op_types:
            record(domain, name, **{field: function}, **others)
        return function

    return register


def elementwise(
    along: Callable[..., ir.Value] = lambda op, node, v: v, **slopes: Callable[..., Any]
) -> None:
    """Register rules of y = f(x) by their slopes f'(x): `Tanh=lambda op, x, y: 1 - y * y`.

    `along(op, node, v)` returns y or its cotangent in a shape that broadcasts to the shape of x.
    """
    for name, slope in slopes.items():
        rule(name)(_by_slope(slope, along))


def _by_slope(slope: Callable[..., Any], along: Callable[..., ir.Value]) -> Rule:
    def multiply(op: Any, node: Any, g: ir.Value) -> Any:
        """y = f(x):  dx = g f'(x)."""
        y = along(op, node, node.outputs[0])
        return (along(op, node, g) * slope(op, node.inputs[0], y),)

    return multiply


@cache
def taken_gradients(function: Rule) -> int:
    """Return the number of cotangents that a rule takes; outputs beyond it must not have one."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 30
    return len(parameters)
