"""A leading axis of members, pushed through every row of the table of rules."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.autodiff.members import MemberAxis
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, is_real
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from tests.support.cases import feed, model, run
from tests.support.table import ROWS

MEMBERS = 3
CHOICES = {"all": slice(None), "first": slice(1), "others": slice(1, None)}


def stacked(proto, choice):
    """Return the model of all members, the names of its stacked inputs, and the prepared one."""
    one, many = prepare(proto), prepare(proto)
    graph = many.graph
    chosen = [x for x in graph.inputs if is_real(x)][CHOICES[choice]]
    op, new = Emit(graph), {}
    for x in chosen:
        new[x] = ir.Value(name=x.name, type=x.type, shape=ir.Shape([MEMBERS, *(dims(x) or ())]))
        graph.inputs[list(graph.inputs).index(x)] = new[x]
    axis = MemberAxis(op, MEMBERS, new)
    outputs = list(graph.outputs)
    axis.push(graph)
    graph.outputs[:] = [axis.expanded(y) for y in outputs]
    tidy(many)
    return to_proto(many), [x.name for x in chosen], to_proto(one)


def cases():
    for i, row in enumerate(row for row in ROWS if row.runs):
        for j, choice in enumerate(CHOICES):
            if choice == "all" or len(row.shapes) > 1:
                known = ("lengths", "symbols")[(i + j) % 2 and not row.needs]
                marks = () if choice == "all" else pytest.mark.sweep
                yield pytest.param(row, known, choice, id=f"{row.id}-{choice}", marks=marks)


CASES = list(cases())


@pytest.mark.parametrize(("row", "known", "choice"), CASES)
def test_each_member_gets_its_own_result(row, known, choice):
    try:
        many, names, one = stacked(model(row, known), choice)
    except ValueError as e:
        assert "cannot be stacked" in str(e)  # noqa: PT017 - a row is either stacked or refused
        pytest.skip(str(e))
    if not names:
        pytest.skip("no float operand to stack")
    base = feed(row)
    members = [dict(base) for _ in range(MEMBERS)]
    for name in names:
        for k, own in enumerate(members):
            own[name] = np.asarray(base[name] * (1 - k / 64), base[name].dtype)
    both = dict(base) | {name: np.stack([own[name] for own in members]) for name in names}
    results = run(many, both)
    for k, own in enumerate(members):
        for result, expected in zip(results, run(one, own), strict=True):
            np.testing.assert_allclose(result[k], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
def test_most_rows_are_stacked():
    """The test of each row is skipped where it is refused, or has nothing to stack."""
    compared = 0
    for row, known, _ in (case.values for case in CASES if case.values[2] == "all"):
        try:
            compared += bool(stacked(model(row, known), "all")[1])
        except ValueError:
            continue
    assert compared >= 1300
