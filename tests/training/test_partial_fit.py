"""`Trainer.partial_fit`: training in pieces, and what is kept from call to call."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad import Trainer
from onnxgrad.schedules import cosine
from onnxgrad.training.recipe import Recipe
from tests.support.running import PATIENCE, in_sweep
from tests.support.trainings import ActAtStep, interrupt_training, linear_model

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 2)).astype(np.float32)
Y = X @ np.float32([[2], [3]])


def piece_trainer(**options) -> Trainer:
    return Trainer(linear_model(np.zeros((2, 1))), "squared_error", **options)


@pytest.fixture
def builds(monkeypatch):
    """Count the steps that are built."""
    counted, step = [], Recipe.step
    monkeypatch.setattr(Recipe, "step", lambda *a, **b: counted.append(1) or step(*a, **b))
    return counted


def test_pieces_are_one_training(builds):
    """Slots, steps and schedule go on: the weights are those of one `fit` of the same batches."""
    batches = [(X[i : i + 20], Y[i : i + 20]) for i in (0, 20, 40)]
    options = {"optimizer": "adam", "learning_rate": cosine(0.1, steps=6)}
    once = piece_trainer(**options).fit(batches, epochs=2)
    builds.clear()
    pieces = piece_trainer(**options)
    for x, y in 2 * batches:
        pieces.partial_fit(x, y)
    np.testing.assert_array_equal(pieces.state.weights["w"], once.state.weights["w"])
    assert pieces.state.step == 6
    assert [entry["epoch"] for entry in pieces.history] == [1, 2, 3, 4, 5, 6]
    assert len(builds) == 1


def test_the_step_is_built_again_when_it_differs(builds):
    trainer = piece_trainer(optimizer="sgd", learning_rate=0.1)
    trainer.partial_fit(X, Y).partial_fit(X[:30], Y[:30]).fit(X, Y)
    assert len(builds) == 1
    trainer.partial_fit(X, Y, sample_weight=np.ones(60))
    assert len(builds) == 2
    trainer._change_job(loss="absolute_error")
    before = trainer.state.weights["w"].copy()
    trainer.partial_fit(X[:1], Y[:1], sample_weight=np.ones(1))
    assert len(builds) == 3
    expected = before - 0.1 * np.sign(X[:1] @ before - Y[:1]) * X[:1].T
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=1e-5)


def test_what_it_refuses():
    trainer = piece_trainer(learning_rate=cosine(0.1))
    for _ in range(2):  # the second time, it does not say that it is running
        with pytest.raises(ValueError, match="steps"):
            trainer.partial_fit(X, Y)
    with pytest.raises(ValueError, match="batch_size"):
        trainer.partial_fit(X, Y, batch_size=0)
    assert trainer.state.step == 0


@pytest.mark.parametrize("refused", ["data", "a schedule"])
def test_what_is_refused_leaves_the_state_as_it_was(refused, tmp_path):
    callbacks = [ActAtStep("step_end", 2, interrupt_training)]
    trainer = piece_trainer(learning_rate=0.1, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, batch_size=20)
    trainer.state.save(tmp_path / "before")
    job = trainer._job
    if refused == "a schedule":
        trainer._change_job(learning_rates=[cosine(0.1)])
    with pytest.raises(ValueError, match="NaN" if refused == "data" else "steps"):
        trainer.partial_fit(X * np.nan if refused == "data" else X, Y)
    trainer.state.save(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (trainer.state.position, trainer.state.stop_reason) == (2, "interrupted")
    trainer._job = job
    assert trainer.partial_fit(X, Y).state.step == 4  # it trains on


def test_one_of_several_threads_trains():
    """The others are refused before they build anything."""
    trainer, entered, results = piece_trainer(), threading.Barrier(3), []

    def train():
        entered.wait(PATIENCE)
        try:
            results.append(len(trainer.fit(X, Y, epochs=300).history))
        except RuntimeError as e:
            results.append(str(e))

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert 300 in results
    assert all(r == 300 or "fit is running" in r for r in results)
    assert len(results) == 3
    assert len(trainer.history) == 300
    pickle.loads(pickle.dumps(trainer)).fit(X, Y)


@pytest.mark.parametrize(
    "optimizer",
    [og.optimizers.ema(og.optimizers.adam(), 0.9), in_sweep(og.optimizers.schedule_free())],
    ids=str,
)
def test_a_second_fit_begins_with_the_averages(optimizer):
    trainer = piece_trainer(optimizer=optimizer, learning_rate=0.1).fit(X, Y, epochs=3)
    before = trainer.evaluate(X, Y)["loss"]
    assert trainer.fit(X, Y, batch_size=len(X)).history[0]["loss"] == pytest.approx(before)
