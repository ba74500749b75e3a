"""A leading axis of members, pushed through a part of the rows of rules, and through bodies.

Every row is checked by `tests/operators/test_row_packs.py`, all rows singly by the sweep.
"""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.autodiff.members import UnstackableNode
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.operators.shapes import dims, is_real
from tests.support.cases import row_feed, row_model
from tests.support.members import assert_own_results, stack_members
from tests.support.models import operator_names, parse_model
from tests.support.packs import Pack, failures
from tests.support.row_packs import (
    first_rows,
    kind_of,
    lengths_or_symbols,
    pack_parameters,
    row_packs,
)
from tests.support.running import in_sweep
from tests.support.table import ROWS

CHOICES = {"all": slice(None), "first": slice(1), "others": slice(1, None)}
SOME = {row.id: row for row in (*first_rows(), *ROWS[::5]) if kind_of(row).members}


@pytest.mark.parametrize("pack", pack_parameters(row_packs(lengths_or_symbols, [*SOME.values()])))
def test_each_member_gets_its_own_result(pack):
    def check(parts):
        made = Pack(parts, pack.kind.runtime)
        made.check_members(made.prepared)
        return []

    assert failures(pack.parts(), check) == []


def rows_with_choices() -> list:
    chosen = []
    for i, row in enumerate(row for row in ROWS if row.runs):
        for j, choice in enumerate(CHOICES):
            if choice == "all" or len(row.shapes) > 1:
                known = ("lengths", "symbols")[(i + j) % 2 and not row.needs]
                chosen.append(pytest.param(row, known, choice, id=f"{row.id}-{choice}"))
    return chosen


@pytest.mark.sweep
@pytest.mark.parametrize(("row", "known", "choice"), rows_with_choices())
def test_each_member_of_some_inputs_gets_its_own_result(row, known, choice):
    made = row_model(row, known)
    many = prepare(made)
    names = [x.name for x in many.graph.inputs if is_real(x)][CHOICES[choice]]
    if not names:
        pytest.skip("no float operand to stack")
    try:
        stacked = stack_members(many, names)
    except ValueError as error:  # a row is either stacked or refused
        assert "cannot be stacked" in str(error)  # noqa: PT017
        assert not kind_of(row).members
    else:
        assert_own_results(stacked, made, names, row_feed(row))


@pytest.mark.parametrize(
    "row", [row if i % 9 == 0 else in_sweep(row) for i, row in enumerate(r for r in ROWS if r.runs)]
)
def test_the_graph_reads_the_number_of_members(row):
    """A node is written for all members, or refused by its operator and output."""
    made = row_model(row)
    prepared = prepare(made)
    names = [x.name for x in prepared.graph.inputs if is_real(x)]
    if not names or any(0 in (dims(x) or ()) for x in prepared.graph.inputs):
        pytest.skip("no float operand to stack, or none with elements")
    try:
        stacked = stack_members(prepared, names, "members")
    except UnstackableNode as error:
        assert "no form" in str(error) or "cannot be stacked" in str(error)  # noqa: PT017
    else:
        assert_own_results(stacked, made, names, row_feed(row))


@pytest.mark.parametrize("operator", ["Expand", "Reshape", "Tile"])
def test_members_may_have_shapes_of_their_own(operator):
    """The second operand differs between members: it has a leading axis itself."""
    made = parse_model(
        "f (float[2, 1] x, float[2] w) => (float[a, b] y) "
        f"{{ n = Cast<to=7>(w)  y = {operator}(x, n) }}"
    )
    feed = {"x": np.array([[1.0], [2.0]]), "w": np.array([2.5, 1.5])}
    names = ["x", "w"]
    assert_own_results(stack_members(prepare(made), names), made, names, feed)


RECURRENT = [row for row in ROWS if row.id in ("RNN", "GRU linear", "LSTM coupled")]


@pytest.mark.parametrize("row", RECURRENT, ids=lambda row: row.id)
def test_members_of_a_scan(row):
    """What is recurrent becomes a Scan, whose body is written for all members."""
    made = row_model(row)
    prepared = prepare(made, on_demand=True)
    names = [x.name for x in prepared.graph.inputs if is_real(x)]
    stacked = stack_members(prepared, names)
    assert "Scan" in operator_names(stacked)
    assert_own_results(stacked, made, names, row_feed(row))


BODIES = {
    "If": """y = If(q) <then_branch = t () => (float[2,3] a) { a = Mul(x, w) },
        else_branch = f () => (float[2,3] b) { b = Sub(x, w) }>""",
    "If of data alone": """y = If(q) <then_branch = t () => (float[2,3] a) { a = Exp(d) },
        else_branch = f () => (float[2,3] b) { b = Sub(d, w) }>""",
    "Loop": """y = Loop(n, , x) <body = b (int64 i, bool c, float[2,3] u) => (bool k, float[2,3] v)
        { k = Identity(c)  e = Mul(u, w)  v = Add(e, d) }>""",
    "Loop of data at first": """y = Loop(n, , d) <body = b (int64 i, bool c, float[2,3] u)
        => (bool k, float[2,3] v) { k = Identity(c)  v = Mul(u, w) }>""",
    "Scan": """s, y = Scan<num_scan_inputs=1, body = b (float[3] u, float[3] row)
        => (float[3] v, float[3] z) { e = Mul(u, w)  v = Add(e, row)  z = Tanh(v) }>(w, x)""",
    "Scan of another axis": """s, y = Scan<num_scan_inputs=1, scan_input_axes=[1],
        scan_output_axes=[1], body = b (float[2] u, float[2] column)
        => (float[2] v, float[2] z) { v = Mul(u, column)  z = Tanh(v) }>(first, x)""",
}


@pytest.mark.parametrize("symbol", [None, "members"])
@pytest.mark.parametrize("name", BODIES)
def test_members_in_bodies(name, symbol):
    """Bodies are written for all members, or the model is refused."""
    inputs = "float[2,3] x, float[3] w, float[2] first, float[2,3] d, bool q, int64 n"
    made = parse_model(f"g ({inputs}) => (float[2,3] y) {{ {BODIES[name]} }}", opset=20)
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3), "w": (3,), "first": (2,), "d": (2, 3)}
    feed = {n: rng.standard_normal(s) for n, s in shapes.items()}
    names = ["x", "w", "first"]
    stacked = stack_members(prepare(made), names, symbol)
    for q in (True, False):
        assert_own_results(stacked, made, names, feed | {"q": np.array(q), "n": np.array(2)})
