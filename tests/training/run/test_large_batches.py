"""Batches of many rows are computed in parts, which add up to what the whole batch gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.optimizers import ParamGroup, param_groups
from onnxgrad.training.run import row_parts, stages
from onnxgrad.training.run.row_parts import rows_per_part
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.trainings import assert_close_arrays


@pytest.fixture
def sizes(monkeypatch):
    """Let every batch be large; return the rows of the parts that are computed."""
    found: list[list[int]] = []

    def noted(rows, most):
        size = rows_per_part(rows, most)
        found.append([size] * (rows // size) + [rows % size] * (rows % size > 0))
        return size

    def divide(rows: int = 4) -> list[list[int]]:
        monkeypatch.setattr(stages, "rows_per_part", noted)
        monkeypatch.setattr(row_parts, "FORWARD_BYTES", 1)
        monkeypatch.setattr(
            row_parts, "WORK_PER_WEIGHT", rows
        )  # as a layer has one for each weight
        return found

    return divide


@pytest.fixture(scope="module")
def worker():
    """The jobs that processes train together, of which this one trains alone."""
    pytest.importorskip("torch")
    from tests.support import parallel_worker

    return parallel_worker


def train_alone(worker, job: str, **options) -> og.Trainer:
    return worker.train_job(worker.job_file(job), job, False, **options)


@pytest.mark.parametrize(
    "job", ["double", "double_large", "weighted", "half", in_sweep("share"), in_sweep("sgd")]
)
def test_parts_train_what_the_whole_batch_trains(job, sizes, worker):
    whole = worker.training_arrays(train_alone(worker, job))
    found = sizes()
    parts = worker.training_arrays(train_alone(worker, job))
    assert max(map(len, found)) > 1
    tolerance = 2e-3 if job == "half" else 1e-9 if job.startswith("double") else 2e-4
    assert_close_arrays(parts, whole, tolerance, tolerance)


def test_tokens_whose_labels_are_ignored_count_in_no_part(sizes):
    rng = np.random.default_rng(0)
    proto = parse_model(
        """g (int64[N,T] x) => (float[N,T,5] y) { e = Gather(table, x)  y = MatMul(e, w) }""",
        table=rng.normal(size=(7, 4)).astype(np.float32),
        w=rng.normal(size=(4, 5)).astype(np.float32),
    )
    X, y = rng.integers(0, 7, (23, 6)), rng.integers(0, 5, (23, 6))
    y[:9] = -100  # parts without a label that counts

    def trained() -> og.Trainer:
        own = {"loss_options": {"ignore_index": -100}, "optimizer": "sgd", "learning_rate": 0.3}
        trainer = og.Trainer(proto, "cross_entropy", **own)
        return trainer.fit(X, y, batch_size=23, epochs=4, shuffle=False)

    whole, found = trained(), sizes(1)
    parts = trained()
    assert 1 < max(found[0]) < 9
    assert_close_arrays(parts.state.weights, whole.state.weights, 1e-5, 1e-6)


def test_losses_of_two_outputs_are_means_over_counts_of_their_own(sizes):
    rng = np.random.default_rng(0)
    shapes = {"u": (3, 5), "v": (5, 2), "w": (5, 4)}
    proto = parse_model(
        """g (double[N,3] x) => (double[N,2] y, double[N,4] z) {
            h = MatMul(x, u)  r = Tanh(h)  y = MatMul(r, v)  z = MatMul(r, w) }""",
        **{name: rng.normal(size=shape) for name, shape in shapes.items()},
    )
    X, labels = rng.normal(size=(23, 3)), {"y": rng.normal(size=(23, 2))}
    labels["z"] = rng.normal(size=(23, 4))

    def trained() -> og.Trainer:
        own = {"loss_weights": {"y": 1.0, "z": 0.3}, "optimizer": "sgd", "learning_rate": 0.1}
        trainer = og.Trainer(proto, {"y": "mse", "z": "huber"}, **own)
        return trainer.fit(X, labels, batch_size=23, epochs=3, shuffle=False)

    whole, found = trained(), sizes(1)
    parts = trained()
    assert max(map(len, found)) > 1
    assert_close_arrays(parts.state.weights, whole.state.weights, 1e-12, 1e-12)
    assert parts.history[-1]["loss"] == pytest.approx(whole.history[-1]["loss"], rel=1e-12)


class NormsOfSteps(og.callbacks.Callback):
    """The norms of gradients after every step."""

    gradient_norms = True
    every_steps = 1

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_end(self, trainer, state, control):
        self.seen.append(list(trainer.gradient_norms.values()))


def sequence_model(dtype: str = "double", rows: str = "N, T") -> onnx.ModelProto:
    """Return a model of sequences whose rows are on the axis N."""
    proto = parse_model(f"""g ({dtype}[{rows}, 3] x) => ({dtype}[{rows}, 2] y) {{
        a = MatMul(x, u) b = Tanh(a) c = MatMul(b, v) d = Tanh(c) y = MatMul(d, w) }}""")
    rng = np.random.default_rng(0)
    kinds = {"double": 11, "float": 1, "bfloat16": 16}
    for name, shape in {"u": (3, 4), "v": (4, 4), "w": (4, 2)}.items():
        array = rng.normal(size=shape).ravel()
        proto.graph.initializer.append(onnx.helper.make_tensor(name, kinds[dtype], shape, array))
    return proto


PAIRS = {
    "recompute": {"recompute": "all"},
    "averages": {"optimizer": og.optimizers.ema(og.optimizers.adamw(), decay=0.5)},
    "clipped": {"clip_norm": 0.05},
    "another loss": {"loss": {"y": "huber"}},
    "frozen": {"train": ["v"]},
    "groups": {
        "optimizer": param_groups({"w": ParamGroup(rate=10.0)}, default=og.optimizers.adamw())
    },
}


def trained_sequences(proto, batch: int = 23, by_rows: int = 0, **options):
    rng, norms = np.random.default_rng(1), NormsOfSteps()
    X, y = rng.normal(size=(46, 5, 3)), rng.normal(size=(46, 5, 2))
    if by_rows:
        X, y = X.swapaxes(0, by_rows), y.swapaxes(0, by_rows)
    own = {"loss": "mse", "optimizer": "adamw", "learning_rate": 0.01} | options
    trainer = og.Trainer(proto, callbacks=[norms], **own)
    trainer.fit(X, y, batch_size=batch, epochs=3, shuffle=False)
    evaluated = trainer.evaluated()
    return {**evaluated, "norms": np.array(norms.seen), "p": trainer.predict(X)}


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(pair, sizes):
    whole = trained_sequences(sequence_model(), **PAIRS[pair])
    found = sizes(20)
    parts = trained_sequences(sequence_model(), **PAIRS[pair])
    assert len(found) == 6
    assert 1 < max(map(len, found)) < 23  # parts, of several rows each
    assert_close_arrays(parts, whole, 1e-9, 1e-12)


def test_rows_on_the_second_axis(sizes):
    first, found = trained_sequences(sequence_model()), sizes(20)
    axes = {"x": 1, "label": 1}
    second = trained_sequences(sequence_model(rows="T, N"), by_rows=1, batch_axes=axes)
    assert max(map(len, found)) > 1
    for name in "uvw":
        np.testing.assert_allclose(second[name], first[name], 1e-9)


def test_weights_in_bfloat16(sizes):
    whole = trained_sequences(sequence_model("bfloat16"))
    found = sizes(20)
    parts = trained_sequences(sequence_model("bfloat16"))
    assert max(map(len, found)) > 1
    exact = trained_sequences(sequence_model())
    for name in "uvw":
        np.testing.assert_allclose(parts[name], whole[name], 0, 0.02)
        np.testing.assert_allclose(parts[name], exact[name], 0, 0.05)


@pytest.mark.parametrize("job", ["images", "accumulate"])
def test_other_batches_stay_whole(job, sizes, worker):
    """Statistics of batches need all rows, and micro-batches divide them already."""
    whole = worker.training_arrays(train_alone(worker, job, epochs=2))
    assert not sizes()
    parts = worker.training_arrays(train_alone(worker, job, epochs=2))
    assert not sizes()
    np.testing.assert_equal(parts, whole)


def test_a_training_in_parts_goes_on_bit_for_bit(sizes, worker, tmp_path):
    sizes()
    whole = train_alone(worker, "sgd", epochs=4)
    checkpoint = og.Checkpoint(tmp_path / "run", every_steps=9)
    train_alone(worker, "sgd", callbacks=[checkpoint], epochs=2)
    again = train_alone(worker, "sgd", epochs=4, resume=tmp_path / "run")
    np.testing.assert_equal(again.state.weights, whole.state.weights)


@pytest.mark.parametrize("rows", [1, 7, 64, 577, 1000, 24499])
def test_the_last_part_is_small(rows):
    most = 64
    size = rows_per_part(rows, most)
    assert min(rows, most // 2) <= size <= most
    assert rows % size <= rows // size  # fewer rows than there are parts
