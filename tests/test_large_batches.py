"""Batches of many rows are computed in parts, which add up to what the whole batch gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.training.run import row_parts
from onnxgrad.training.run.process_runner import Together
from onnxgrad.training.run.row_parts import rows_at_once

pytest.importorskip("torch")
import parallel_worker as worker


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


def test_tokens_whose_labels_are_ignored_count_in_no_part(sizes):
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (int64[N,T] x) => (float[N,T,5] y) <float[7,4] table, float[4,5] w> {
            e = Gather(table, x)  y = MatMul(e, w) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"table": (7, 4), "w": (4, 5)}.items():
        array = rng.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    X, y = rng.integers(0, 7, (23, 6)), rng.integers(0, 5, (23, 6))
    y[:9] = -100  # parts without a label that counts

    def trained() -> og.Trainer:
        own = {"loss_options": {"ignore_index": -100}, "optimizer": "sgd", "learning_rate": 0.3}
        trainer = og.Trainer(proto, "cross_entropy", **own)
        return trainer.fit(X, y, batch_size=23, epochs=4, shuffle=False)

    whole, found = trained(), sizes(1)
    parts = trained()
    assert 1 < max(found[0]) < 9
    for name, array in whole.state.weights.items():
        np.testing.assert_allclose(parts.state.weights[name], array, 1e-5, 1e-6)


@pytest.mark.parametrize("job", ["images", "accumulate"])
def test_other_batches_stay_whole(job, sizes):
    """Statistics of batches need all rows, and micro-batches divide them already."""
    whole = worker.results(worker.trained(job, False, epochs=2))
    assert not sizes()
    parts = worker.results(worker.trained(job, False, epochs=2))
    assert not sizes()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)


def test_a_training_in_parts_goes_on_bit_for_bit(sizes, tmp_path):
    sizes()
    whole = worker.trained("sgd", False, epochs=4)
    checkpoint = og.Checkpoint(tmp_path / "run", every_steps=9)
    worker.trained("sgd", False, callbacks=[checkpoint], epochs=2)
    again = worker.trained("sgd", False, epochs=4, resume=tmp_path / "run")
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(again.state.weights[name], array)


@pytest.mark.parametrize("rows", [1, 7, 64, 577, 1000, 24499])
def test_the_last_part_is_small(rows):
    most = 64
    size = rows_at_once(rows, most)
    assert min(rows, most // 2) <= size <= most
    assert rows % size <= rows // size  # fewer rows than there are parts
