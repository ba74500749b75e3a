"""Every operator of PyTorch's own tests, by both exporters: its gradient is that of autograd.

The table `opinfo.csv` says what comes out of each sample, and why where that is another gradient.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
from tests.support import opinfo_cases as opinfo  # noqa: E402  # which imports torch
from tests.support.running import in_sweep  # noqa: E402

TABLE = opinfo.expected_outcomes()
CASES = [
    (name, exporter)
    for name, row in TABLE.items()
    for exporter in opinfo.EXPORTERS
    if set(row[exporter]) - {"n", "x"}
]
# the rows of the rules check the same gradients
QUICK = [("masked_softmax", "torchscript"), ("nn_functional_mse_loss", "torchscript"),
         ("nn_functional_conv3d", "torchscript"), ("cumsum", "torchscript")]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "exporter"), [case if case in QUICK else in_sweep(*case) for case in CASES]
)
def test_gradient(name, exporter):
    found = opinfo.examine(name, exporter)
    letters = "".join(letter for letter, _ in found)
    assert re.fullmatch(TABLE[name][exporter].replace("?", "[ax]"), letters), found


def test_the_table_has_every_operator():
    assert sorted(TABLE) == sorted(opinfo.torch_operators())
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
