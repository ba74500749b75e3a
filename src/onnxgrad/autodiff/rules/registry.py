"""Where rules are kept: from an operator to the function that writes its gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import onnx_ir as ir

Rule: TypeAlias = Callable[..., Any]  # (op, node, *gradients of the outputs) -> one per input

RULES: dict[tuple[str, str], Rule] = {}
NON_DIFFERENTIABLE: dict[
    tuple[str, str], str
] = {}  # operators without gradient, each with a word why
# Operators that hold graphs: (op, node, gradients of the outputs, values that depend on what is
# asked for) -> pairs of what the node reads, around its graphs too, and a gradient of it
SUBGRAPH_RULES: dict[str, Callable[..., list[tuple[ir.Value, ir.Value]]]] = {}


@dataclass(frozen=True)
class Unsupported:
    """Returned by a rule in place of a gradient that it cannot give: an error if it is needed.

    Attributes:
        reason: why, and what to do; it becomes part of the `NoGradientRule`.
    """

    reason: str


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the function below as the rule of the named operators.

    It is called as `f(op, node, g)`, with one `g` per output that it takes, None where no gradient
    arrives, and returns one gradient per input, of that input's shape and dtype: a value, None for
    none, or `Unsupported(reason)`. It never asks which are wanted: what nobody uses is removed
    afterwards. `op` writes nodes: `op.MatMul(a, b)`, `op.Softmax(x, axis=-1)`, `a * b`;
    `op.sum_to(g, x)` undoes broadcasting. `node` has `inputs`, `outputs` and `attributes`.

    A later rule takes the place of an earlier one. Local functions of a model that have a rule stay
    functions; the others are differentiated through their nodes.

    Args:
        op_types: names of the operators, or of local functions.
        domain: their domain; empty for the standard operators.
    """

    def register(function: Rule) -> Rule:
        for name in op_types:
            RULES[domain, name] = function
        return function

    return register


def elementwise(**slopes: Callable[[Any, ir.Value, ir.Value], Any]) -> None:
    """Register y = f(x) by its slope: `Tanh=lambda op, x, y: 1 - y * y`."""
    for name, slope in slopes.items():
        rule(name)(_by_slope(slope))


def _by_slope(slope: Callable[[Any, ir.Value, ir.Value], Any]) -> Rule:
    def multiply(op: Any, node: Any, g: ir.Value) -> Any:
        """y = f(x):  dx = g f'(x)."""
        return (g * slope(op, node.inputs[0], node.outputs[0]),)

    return multiply


def constant(reasons: Mapping[str, str], domain: str = "") -> None:
    """Declare operators without gradient, each with a word why."""
    NON_DIFFERENTIABLE.update({(domain, name): why for name, why in reasons.items()})


@cache
def taken_gradients(function: Rule) -> int:
    """Return how many output gradients a rule takes; those beyond must not arrive."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 30
    return len(parameters)
