"""What the tests cover of every operator: found by going through their models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import onnx
from onnx import defs, helper

from onnxgrad import NoGradientRule, onnx_derivative
from onnxgrad.autodiff.registry import Unsupported, taken_gradients
from onnxgrad.graph.operators import OPERATORS, add
from tests.autodiff.rules.test_convolution import model as model_of_convolution
from tests.autodiff.rules.test_shipped import FROZEN, NOT_IN_FLOAT32, NOT_RUN, but_for
from tests.support.cases import model
from tests.support.convolution_cases import CASES
from tests.support.table import ROWS

Key = tuple[str, str]  # domain, operator


@cache
def rows() -> list[onnx.ModelProto]:
    """Return the model of every row of the table."""
    return [model(row) for row in ROWS] + [model_of_convolution(case, "all") for case in CASES]


def shipped() -> list[onnx.ModelProto]:
    """Return the shipped cases that are checked."""
    return [case.model for case in but_for(FROZEN, NOT_RUN, NOT_IN_FLOAT32)]


def counts(models: list[onnx.ModelProto]) -> Counter[Key]:
    """Return how many of the models hold an operator."""
    return Counter(
        key for made in models for key in {(n.domain, n.op_type) for n in made.graph.node}
    )


def attributes() -> dict[Key, dict[str, list[Any]]]:
    """Return the values that the attributes of every operator have in the tests.

    Where one is left out that is its default, or None.
    """
    found: dict[Key, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for made in (*rows(), *shipped()):
        opset = next((o.version for o in made.opset_import if not o.domain), 0)
        for node in made.graph.node:
            given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if not node.domain:
                schema = defs.get_schema(node.op_type, opset, "")
                stated = {n: a.default_value for n, a in schema.attributes.items()}
                defaults = {
                    n: helper.get_attribute_value(a) if a.name else None for n, a in stated.items()
                }
                given = defaults | given
            for name, value in given.items():
                value = value.decode() if isinstance(value, bytes) else value
                found[node.domain, node.op_type][name].append(value)
    return found


def in_gradients() -> dict[Key, set[str]]:
    """Return the operators in the gradients of the rows, each with the operators of such rows."""
    return _differentiated()[0]


def by_input() -> dict[Key, dict[int, set[str]]]:
    """Return what rules answered for each input: "value", "none", or "refused"."""
    return _differentiated()[1]


@cache
def _differentiated() -> tuple[dict[Key, set[str]], dict[Key, dict[int, set[str]]]]:
    """Return what `in_gradients` and `by_input` do: every row is differentiated once."""
    found: dict[Key, set[str]] = defaultdict(set)
    answers: dict[Key, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    before = dict(OPERATORS)
    for key, operator in before.items():
        if operator.rule is not None:
            add(*key, rule=_recorded(operator.rule, answers[key]))
    try:
        for made in rows():
            try:
                gradient = onnx_derivative(made, weights=[])
            except NoGradientRule:
                continue
            for node in gradient.graph.node:
                found[node.domain, node.op_type].add(made.graph.node[-1].op_type)
    finally:
        OPERATORS.update(before)
    return found, answers


def _recorded(function: Any, answers: dict[int, set[str]]) -> Any:
    def recorded(op, node, *gs):
        made = function(op, node, *gs[: taken_gradients(function)])
        if not isinstance(made, Unsupported):
            for i, g in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
                kind = "none" if g is None else "refused" if isinstance(g, Unsupported) else "value"
                answers[i].add(kind)
        return made

    return recorded


def operators() -> Iterator[Any]:
    """Yield the newest schema of every operator of ai.onnx and ai.onnx.ml."""
    names = {(s.domain, s.name) for s in defs.get_all_schemas() if s.domain in ("", "ai.onnx.ml")}
    for domain, name in sorted(names):
        yield defs.get_schema(name, defs.onnx_opset_version() if not domain else 5, domain)
