"""Every row of the table once: its gradient, the shapes that it states, a leading axis of members.

Rows run in packs of one model. `pytest -k Softmax tests/operators/test_row_packs.py` selects
the packs that have a row of Softmax; a pack that fails runs its rows singly, and names those that
are wrong. `pytest -m sweep -k "Softmax and axis" tests/operators/test_rules.py` runs one row.
"""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad import check_gradient
from onnxgrad.operators import add_facts
from onnxgrad.operators.records import rule
from tests.support.cases import Row, row_feed, row_model
from tests.support.packs import Pack, Part, failures
from tests.support.row_packs import (
    SINGLE,
    Kind,
    check_pack,
    kind_of,
    lengths_or_symbols,
    pack_parameters,
    row_packs,
)
from tests.support.running import in_sweep
from tests.support.table import ROWS

PACKS = row_packs(lengths_or_symbols)


@pytest.mark.parametrize("pack", pack_parameters(PACKS))
def test_rows(pack):
    assert failures(pack.parts(), check_pack(pack.kind)) == []


def test_every_row_is_in_a_pack():
    assert sorted(row.id for pack in PACKS for row in pack.rows) == sorted(r.id for r in ROWS)
    kinds = [kind_of(row) for row in ROWS]
    assert sum(kind.shapes for kind in kinds) >= 1400
    assert sum(kind.members for kind in kinds) >= 1300
    assert sum(kind.runtime == "float32" for kind in kinds) <= 60


def single_rows() -> list:
    """Return the rows that `check_gradient` compares; without its state, an operator is shorter."""
    rows = [row for row in ROWS if SINGLE.match(row.id)]
    return [in_sweep(row) if row.id.endswith("-") else row for row in rows]


@pytest.mark.parametrize("row", single_rows(), ids=lambda row: row.id)
def test_rows_without_a_kernel_in_float64(row):
    report = check_gradient(row_model(row, "symbols"), feed=row_feed(row))
    assert report.ok, str(report)


# -- that packs find what single rows find -------------------------------------------------------

ALL_CHECKS = Kind(20, "float64", "", shapes=True, members=True)


def parts_of(*rows: Row) -> list[Part]:
    return [Part(row.id, row_model(row), row_feed(row), tuple(row.shapes)) for row in rows]


def large(x):
    return 1e6 * np.abs(x)


def small(x):
    return 1e-6 * x


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("Sin", lambda op, node, g: op.Mul(g, op.Sin(node.inputs[0]))),
        ("Sin", lambda op, node, g: op.Mul(op.Mul(g, op.Cos(node.inputs[0])), 1.0001)),
        ("Sin", lambda op, node, g: op.ReduceSum(op.Mul(g, op.Cos(node.inputs[0])))),
        ("Sin", lambda op, node, g: None),
        ("Exp", lambda op, node, g: op.Mul(g, node.outputs[0])),
    ],
    ids=["another function", "a digit", "a shape", "nothing", "right"],
)
def test_a_wrong_rule_is_found_beside_rows_of_another_scale(operator, wrong):
    rule(operator)(wrong)
    rows = [
        Row("large", "y = Mul(x, x)", {"x": (2, 3)}, large),
        Row("small", f"y = {operator}(x)", {"x": (2, 3)}, small),
        Row("right", "y = Cos(x)", {"x": (2, 3)}),
    ]
    found = failures(parts_of(*rows), check_pack(ALL_CHECKS))
    assert {line.split(":")[0] for line in found} == (set() if operator == "Exp" else {"small"})


def test_a_wrong_statement_of_a_shape_is_found():
    pack = Pack(parts_of(Row("sine", "y = Sin(x)", {"x": (2, 3)})), "float64")
    pack.check_shapes(pack.primal)
    pack.primal.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    with pytest.raises(AssertionError, match="r0_y"):
        pack.check_shapes(pack.primal)


def test_a_wrong_member_is_found():
    add_facts("", "Neg", members=lambda axis, node: [axis.op.Abs(axis.value_for(node.inputs[0]))])
    rows = [Row(name, f"y = {name}(x)", {"x": (2, 3)}) for name in ("Sin", "Neg", "Exp")]
    [line] = failures(parts_of(*rows), check_pack(ALL_CHECKS))
    assert line.startswith("Neg")
