"""The gradient of every node case that the onnx package ships.

Twice: with the operands that are no variables as constants, and with all operands fed.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

from onnxgrad import check_gradient
from onnxgrad.graph.operators import OPERATORS, Operator
from tests.support.shipped import FLOATS, Case, cases, errors

PREVIEW = {"ai.onnx.preview", "ai.onnx.preview.training"}

# patterns of names, and why
NOT_RUN = {
    "test_scan_sum": "of opset 8, refused: onnx converts it into another function",
    "mod_float_edge_cases_fmod_0": "by numbers near zero: a jump lies within every step",
    "dequantizelinear_float4e2m1": "onnxruntime has no kernel for this type",
    "dequantizelinear_(u?int[24]|e4m3fn.*|e5m2)-fed": "numpy arrays of this type cannot be fed",
}
NOT_IN_FLOAT32 = {"^test_softmax_large_number": "a step that float32 resolves at 10000 is too long"}
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


def differentiable(node: onnx.NodeProto) -> bool:
    operator = OPERATORS.get((node.domain, node.op_type), Operator())
    return not operator.no_gradient and node.domain not in PREVIEW


FROZEN, FED = (cases(frozen, differentiable) for frozen in (True, False))


def but_for(chosen: list[Case], *excepted: dict[str, str]) -> list[Case]:
    patterns = [p for patterns in excepted for p in patterns]
    return [c for c in chosen if not any(re.search(p, name(c)) for p in patterns)]


def name(case: Case) -> str:
    return f"{case.name}-{'frozen' if case.frozen else 'fed'}"


@pytest.mark.sweep
@pytest.mark.parametrize("case", but_for(FROZEN + FED, NOT_RUN, NOT_IN_FLOAT32), ids=name)
def test_gradient_on_onnxruntime(case):
    found = errors(case)
    assert max(found.values()) < 0.02, found


TWICE = set(map(name, but_for(FROZEN, NOT_TWICE)))


@pytest.mark.parametrize("case", but_for(FROZEN, NOT_RUN, NOT_IN_FLOAT64, LONG), ids=name)
def test_gradient_of_every_case(case):
    """Of the first order, where every other input is a constant: the rest are below."""
    found = report(case, 1)
    assert found.ok, str(found)
    assert found.computed.startswith("float64")


@pytest.mark.sweep
@pytest.mark.parametrize("case", but_for(FROZEN + FED, NOT_RUN, NOT_IN_FLOAT64), ids=name)
def test_gradient_in_float64(case):
    """Of the first order and, where every other input is a constant, of the second one."""
    found = report(case, 2 if name(case) in TWICE else 1)
    assert found.ok, str(found)
    if name(case) in TWICE and not found.computed.startswith("float64"):
        # onnx.reference knows no negative pads, which gradients of the second order have
        found = report(case, 1)
        assert found.ok, str(found)
    assert found.computed.startswith("float64")


def report(case: Case, order: int):
    taken = {x.name for x in case.model.graph.input}
    feed = {n: a for n, a in case.arrays.items() if n in taken}
    return check_gradient(case.model, case.variables, weights=[], feed=feed, order=order)


@pytest.mark.sweep
@pytest.mark.parametrize(("chosen", "bar"), [(FROZEN, 770), (FED, 762)], ids=["frozen", "fed"])
def test_enough_agree(chosen, bar):
    """Every case not excepted has a test of its own above; here they are counted."""
    agreeing = but_for(chosen, NOT_RUN, NOT_IN_FLOAT32)
    on_onnxruntime = sum(c.forward[1] for c in agreeing)
    assert on_onnxruntime >= bar
    assert len(agreeing) >= bar + 45  # the others agree on the reference of onnx


# -- function bodies ----------------------------------------------------------------------------


def expanded() -> list:
    """Return the cases that are the function body of another one, made of operators with rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return [c for c in found if "_expanded" in c.name and applies(c)]


def applies(case) -> bool:
    graph, arrays = case.model.graph, case.data_sets[0][0]
    operators = [OPERATORS.get((n.domain, n.op_type), Operator()) for n in graph.node]
    types = [[v.type.tensor_type.elem_type for v in vs] for vs in (graph.input, graph.output)]
    return (
        all(one.rule or one.no_gradient for one in operators)
        and any(one.rule for one in operators)
        and not any(FLOATS.isdisjoint(of) for of in types)
        and all(isinstance(a, (np.ndarray, np.generic)) for a in arrays)
        and not re.search("dropout|bernoulli", case.name)  # random
        and "_empty_set" not in case.name  # infinite
    )


@pytest.mark.sweep
@pytest.mark.parametrize("case", expanded(), ids=lambda c: c.name)
def test_function_body(case):
    names, rng = [x.name for x in case.model.graph.input], np.random.default_rng(0)
    arrays = {n: np.asarray(a) for n, a in zip(names, case.data_sets[0][0], strict=True)}
    for name, a in arrays.items():  # away from kinks and ties
        if np.issubdtype(a.dtype, np.floating):
            arrays[name] = np.asarray(a + 0.01 * (1 + rng.random(a.shape)), a.dtype)
    found = check_gradient(case.model, feed=arrays)
    assert found.ok, str(found)
