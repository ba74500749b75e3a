"""Every operator of PyTorch's own tests, by both exporters: its gradient is that of autograd.

The table `opinfo.csv` says what comes out of each sample, and why where that is another gradient.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
from tests.support import opinfo_cases as opinfo  # noqa: E402  # which imports torch

TABLE = opinfo.table()
CASES = [
    (name, exporter)
    for name, row in TABLE.items()
    for exporter in opinfo.EXPORTERS
    if set(row[exporter]) - {"n", "x"}
]
SHARE = {"dynamo": 60, "torchscript": 15}  # of the cases of an exporter, one of so many is in CI


def in_ci(name: str, exporter: str) -> bool:
    """Return whether a case is drawn for CI."""
    drawn = hashlib.sha256(f"{name} {exporter}".encode()).digest()
    return int.from_bytes(drawn[:8]) % SHARE[exporter] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        pytest.param(*case, id="-".join(case), marks=[pytest.mark.sweep] * (not in_ci(*case)))
        for case in CASES
    ],
)
def test_gradient(name, exporter):
    found = opinfo.examined(name, exporter)
    letters = "".join(letter for letter, _ in found)
    assert re.fullmatch(TABLE[name][exporter].replace("?", "[ax]"), letters), found


def test_the_table_has_every_operator():
    assert sorted(TABLE) == sorted(opinfo.operators())
    for name, row in TABLE.items():
        letters = Counter(row["dynamo"] + row["torchscript"])
        assert letters, name
        assert letters.keys() <= opinfo.OUTCOMES.keys(), name
        assert bool(row["why"]) == bool(letters.keys() & {"f", "r", "d", "?"}), name


def test_how_many_samples_are_compared():
    counts = Counter(
        "".join(row[exporter] for row in TABLE.values() for exporter in opinfo.EXPORTERS)
    )
    assert counts["a"] >= 1070
    assert counts["d"] == 8  # of four operators
    assert not counts["r"]
