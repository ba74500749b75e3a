"""What the tests cover of every operator: found by going through their models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import onnx
from onnx import defs, helper

from onnxgrad import NoGradientRule, onnx_derivative
from onnxgrad.operators import OPERATORS, add_facts
from onnxgrad.operators.records import Unsupported, cotangent_limit
from tests.support.cases import row_model
from tests.support.convolution_cases import CONVOLUTIONS, conv_model
from tests.support.packs import side_by_side
from tests.support.shipped import NOT_IN_FLOAT32, NOT_RUN, but_for, cases_of, module_names
from tests.support.table import ROWS

Key = tuple[str, str]  # domain, operator


@cache
def row_models() -> list[onnx.ModelProto]:
    """Return the model of every row of the table."""
    return [row_model(row) for row in ROWS] + [conv_model(case, "all") for case in CONVOLUTIONS]


@cache
def shipped_models(*operators: str) -> list[onnx.ModelProto]:
    """Return the shipped cases that are checked, of all operators or of the modules of some."""
    names = {name.lower() for name in operators}
    modules = [m for m in module_names() if not names or m.replace("_", "") in names]
    cases = (case for module in modules for case in cases_of(module, frozen=True))
    return [case.model for case in but_for(cases, NOT_RUN, NOT_IN_FLOAT32)]


def models_by_operator(models: list[onnx.ModelProto]) -> Counter[Key]:
    """Return how many of the models hold an operator."""
    return Counter(
        key for made in models for key in {(n.domain, n.op_type) for n in made.graph.node}
    )


def attribute_values(models: Iterable[onnx.ModelProto]) -> dict[Key, dict[str, list[Any]]]:
    """Return the values that the attributes of every operator have in models.

    Where one is left out that is its default, or None.
    """
    found: dict[Key, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for made in models:
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


@cache
def answers_by_input() -> dict[Key, dict[int, set[str]]]:
    """Return what rules answered for each input: "value", "none", or "refused"."""
    answers: dict[Key, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    before = dict(OPERATORS)
    for key, operator in before.items():
        if operator.rule is not None:
            add_facts(*key, rule=_recorded(operator.rule, answers[key]))
    try:
        for models in _packs(row_models()):
            _differentiate(models)
    finally:
        OPERATORS.update(before)
    return answers


def _packs(models: list[onnx.ModelProto]) -> list[list[onnx.ModelProto]]:
    """Return models of one opset that are differentiated together."""
    opsets: dict[int, list[onnx.ModelProto]] = defaultdict(list)
    for made in models:
        opsets[made.opset_import[0].version].append(made)
    return [same[i : i + 32] for same in opsets.values() for i in range(0, len(same), 32)]


def _differentiate(models: list[onnx.ModelProto]) -> None:
    """Differentiate models side by side, or each half where one has no gradient."""
    try:
        onnx_derivative(side_by_side(models), weights=[])
    except NoGradientRule:
        if len(models) > 1:
            _differentiate(models[: len(models) // 2])
            _differentiate(models[len(models) // 2 :])


def _recorded(function: Any, answers: dict[int, set[str]]) -> Any:
    def recorded(op, node, *gs):
        made = function(op, node, *gs[: cotangent_limit(function)])
        if not isinstance(made, Unsupported):
            for i, g in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
                kind = "none" if g is None else "refused" if isinstance(g, Unsupported) else "value"
                answers[i].add(kind)
        return made

    return recorded


def newest_schemas() -> Iterator[Any]:
    """Yield the newest schema of every operator of ai.onnx and ai.onnx.ml."""
    names = {(s.domain, s.name) for s in defs.get_all_schemas() if s.domain in ("", "ai.onnx.ml")}
    for domain, name in sorted(names):
        yield defs.get_schema(name, defs.onnx_opset_version() if not domain else 5, domain)
