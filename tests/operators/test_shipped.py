"""The gradient of every node case that the onnx package ships.

Twice: with the operands that are no variables as constants, and with all operands fed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from onnxgrad import check_gradient
from onnxgrad.operators import OPERATORS, Operator
from tests.support.packs import Part, failures, gradients_on
from tests.support.row_packs import WITHOUT_FLOAT64
from tests.support.shipped import (
    FLOATS,
    NOT_IN_FLOAT32,
    NOT_RUN,
    ShippedCase,
    but_for,
    cases_of,
    module_names,
    raw_cases,
    relative_errors,
)

# patterns of names, and why
NOT_IN_FLOAT64 = {
    "training_dropout": "random",
    "convtranspose_(output|kernel)_shape": "wrong in onnx.reference; no kernel in onnxruntime",
    "downsample_scales_(linear|cubic)_align_corners": "of another length in onnx.reference",
    "maxunpool_export_with_output_shape": "onnx.reference moves the places, onnxruntime does not",
}
LONG = {"(average|lp)pool_3d_default": "onnx.reference takes 20 seconds; smaller ones are checked"}
NOT_TWICE = {
    "(average|lp)pool_3d_default": "onnx.reference takes minutes; smaller ones are in the table",
    "reduce_(max|min)_empty_set": "shares of the extremum of nothing are 0 / 0",
    "test_rnn_seq_length|simple_rnn_bidirectional": "saturated: tanh'' is rounded away",
    "roialign_mode_max": "its gradient needs RoiAlign itself, without a kernel at opset 22",
}


SINGLY = {"causal_conv_with_state", "linear_attention"}  # without a kernel in float64
MODULES = [name for name in module_names() if name not in SINGLY]
FEWER = {"GlobalMaxPool", "RoiAlign", "Upsample", "Swish"}  # float64 in older opsets only
NO_FLOAT64 = WITHOUT_FLOAT64 | FEWER


def shipped_part(case: ShippedCase) -> Part:
    taken = {x.name for x in case.model.graph.input}
    feed = {name: a for name, a in case.arrays.items() if name in taken}
    return Part(case.id, case.model, feed, tuple(case.variables))


MANY = 24  # modules of a pack
POOLS = ("averagepool", "lppool", "maxpool")  # slow in onnx.reference, and rows check the same


@pytest.mark.newest  # onnxruntime 1.31 gives NaN for rows of Attention that are masked as a whole
@pytest.mark.parametrize("first", range(0, len(MODULES), MANY), ids=lambda i: f"from {MODULES[i]}")
def test_gradient_of_every_case(first):
    """Of the first order, where every other input is a constant: the rest are below."""
    check_first_order([m for m in MODULES[first : first + MANY] if m not in POOLS])


@pytest.mark.sweep
@pytest.mark.parametrize("module", POOLS)
def test_gradient_of_every_pool(module):
    check_first_order([module])


def check_first_order(modules: Sequence[str]) -> None:
    packs = defaultdict(list)
    for module in modules:
        for case in but_for(cases_of(module, frozen=True), NOT_RUN, NOT_IN_FLOAT64, LONG):
            opsets = tuple((o.domain, o.version) for o in case.model.opset_import)
            packs[opsets, runtime_of(case)].append(shipped_part(case))
    wrong = []
    for (_, runtime), parts in packs.items():
        wrong += failures(parts, gradients_on(runtime, "reference", "mixed", "float32"))
    assert wrong == []


def runtime_of(case: ShippedCase) -> str:
    """Return where most cases of an operator run."""
    name = case.node.op_type
    if name in NO_FLOAT64:
        return "reference"
    return "mixed" if name == "LayerNormalization" else "float64"


@pytest.mark.parametrize(
    ("module", "step"), [("causal_conv_with_state", 1), ("linear_attention", 5)]
)
def test_gradient_of_cases_without_a_kernel_in_float64(module, step):
    for case in cases_of(module, frozen=True)[::step]:
        found = gradient_report(case, 1)
        assert found.ok, f"{case.id}: {found}"


def gradient_report(case: ShippedCase, order: int):
    part = shipped_part(case)
    return check_gradient(case.model, case.variables, weights=[], feed=part.feed, order=order)


def cases_twice(module: str) -> list[ShippedCase]:
    return [*cases_of(module, frozen=True), *cases_of(module, frozen=False)]


@pytest.mark.sweep
@pytest.mark.parametrize("module", module_names())
def test_gradient_on_onnxruntime(module):
    for case in but_for(cases_twice(module), NOT_RUN, NOT_IN_FLOAT32):
        found = relative_errors(case)
        assert max(found.values()) < 0.02, (case.id, found)


@pytest.mark.sweep
@pytest.mark.parametrize("module", module_names())
def test_gradient_in_float64(module):
    """Of the first order and, where every other input is a constant, of the second one."""
    for case in but_for(cases_twice(module), NOT_RUN, NOT_IN_FLOAT64):
        twice = case.frozen and case in but_for([case], NOT_TWICE)
        found = gradient_report(case, 2 if twice else 1)
        assert found.ok, f"{case.id}: {found}"
        if twice and not found.computed.startswith("float64"):
            # onnx.reference knows no negative pads, which gradients of the second order have
            found = gradient_report(case, 1)
            assert found.ok, f"{case.id}: {found}"
        assert found.computed.startswith("float64"), case.id


@pytest.mark.sweep
@pytest.mark.parametrize(("frozen", "bar"), [(True, 770), (False, 762)], ids=["frozen", "fed"])
def test_enough_agree(frozen, bar):
    """Every case not excepted is compared above; here they are counted."""
    every = (case for module in module_names() for case in cases_of(module, frozen))
    agreeing = but_for(every, NOT_RUN, NOT_IN_FLOAT32)
    load_on_onnxruntime = sum(c.forward[1] for c in agreeing)
    assert load_on_onnxruntime >= bar
    assert len(agreeing) >= bar + 45  # the others agree on the reference of onnx


# -- function bodies ----------------------------------------------------------------------------


def is_body_of_rules(case) -> bool:
    """Return whether a case is the function body of another one, of operators with rules."""
    graph, arrays = case.model.graph, case.data_sets[0][0]
    operators = [OPERATORS.get((n.domain, n.op_type), Operator()) for n in graph.node]
    types = [[v.type.tensor_type.elem_type for v in vs] for vs in (graph.input, graph.output)]
    return (
        "_expanded" in case.name
        and all(one.rule or one.no_gradient for one in operators)
        and any(one.rule for one in operators)
        and not any(FLOATS.isdisjoint(of) for of in types)
        and all(isinstance(a, (np.ndarray, np.generic)) for a in arrays)
        and not re.search("dropout|bernoulli", case.name)  # random
        and "_empty_set" not in case.name  # infinite
    )


@pytest.mark.sweep
@pytest.mark.parametrize("module", module_names())
def test_function_bodies(module):
    for case in filter(is_body_of_rules, raw_cases(module)):
        names, rng = [x.name for x in case.model.graph.input], np.random.default_rng(0)
        arrays = {n: np.asarray(a) for n, a in zip(names, case.data_sets[0][0], strict=True)}
        for name, a in arrays.items():  # away from kinks and ties
            if np.issubdtype(a.dtype, np.floating):
                arrays[name] = np.asarray(a + 0.01 * (1 + rng.random(a.shape)), a.dtype)
        found = check_gradient(case.model, feed=arrays)
        assert found.ok, f"{case.name}: {found}"
