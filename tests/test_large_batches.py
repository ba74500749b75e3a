"""Batches of many rows are computed in parts, which add up to what the whole batch gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.training.run import row_parts
from onnxgrad.training.run.process_runner import Together
from onnxgrad.training.run.row_parts import rows_at_once

pytest.importorskip("torch")
import parallel_worker as worker  # noqa: E402

PROVEN = ["double", "double_large", "double_average", "weighted", "masked", "half", "share", "sgd"]


@pytest.fixture
def sizes(monkeypatch):
    """Let every batch be large; return the rows of the parts that are computed."""
    found: list[list[int]] = []
    parts_of = Together._parts

    def parts(self, data):
        parts = parts_of(self, data)
        found.append([len(next(iter(part.values()))) for part in parts])
        return parts

    def divide(rows: int = 4) -> list[list[int]]:
        monkeypatch.setattr(Together, "_parts", parts)
        monkeypatch.setattr(row_parts, "_BYTES", 1)
        monkeypatch.setattr(row_parts, "_PER_WEIGHT", rows)  # as a layer has one for each weight
        return found

    return divide


@pytest.mark.parametrize("job", ["double", "double_large", "weighted", "half", "share", "sgd"])
def test_parts_train_what_the_whole_batch_trains(job, sizes):
    whole = worker.results(worker.trained(job, False))
    found = sizes()
    parts = worker.results(worker.trained(job, False))
    assert max(map(len, found)) > 1
    tolerance = 2e-3 if job == "half" else 1e-9 if job.startswith("double") else 2e-4
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, tolerance, tolerance, err_msg=name)
