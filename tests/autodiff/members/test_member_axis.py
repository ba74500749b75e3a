"""A leading axis of members, pushed through one row of every operator of the table of rules.

Every row is checked by `tests/autodiff/rules/test_row_packs.py`, all rows singly by the sweep.
"""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.shapes import is_real
from tests.support.cases import row_feed, row_model
from tests.support.members import assert_own_results, stack_members
from tests.support.models import parse_model
from tests.support.packs import Pack, failures
from tests.support.row_packs import first_rows, kind_of, lengths_or_symbols, row_packs
from tests.support.table import ROWS

CHOICES = {"all": slice(None), "first": slice(1), "others": slice(1, None)}
FIRST = [row for row in first_rows() if kind_of(row).members]


@pytest.mark.parametrize("pack", row_packs(lengths_or_symbols, FIRST), ids=lambda pack: pack.id)
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
