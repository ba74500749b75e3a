"""What the processes of a group do in each step, of threads that share one training."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad as og
from tests.support.thread_groups import run_in_threads
from tests.support.trainings import assert_close_arrays, two_layer_model

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)), RNG.normal(size=(40, 2))


def trained_mlp(**options) -> og.Trainer:
    trainer = og.Trainer(two_layer_model((3, 4, 2), dtype=np.float64), "mse", **options)
    return trainer.fit(X, Y, epochs=1, batch_size=5, validation=(X[:7], Y[:7]))


class AskWithinThread(og.callbacks.Callback):
    """Asks for evaluations in one process, for a checkpoint in the other."""

    every_steps = 1

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, trainer, state, control):
        control.evaluate = self.rank == 1 and state.step in (2, 6)
        control.save = self.rank == 0 and state.step == 5


def test_requests_within_an_epoch_are_those_of_all_after_their_step(monkeypatch, tmp_path):
    alone = trained_mlp(optimizer="adam", parallel=False)

    def train(rank):
        callbacks = [AskWithinThread(rank), og.Checkpoint(tmp_path)]
        return trained_mlp(optimizer="adam", callbacks=callbacks)

    for trainer in run_in_threads(monkeypatch, train):
        assert [entry["step"] for entry in trainer.history] == [2, 6, 8]
        assert_close_arrays(trainer.state.weights, alone.state.weights, 1e-9, 1e-12)
    assert og.callbacks.TrainState.load(tmp_path / "step-0000000005").step == 5


@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        ({"clip_norm": 0.1}, og.parallel.DataParallel()),
        ({"accumulate": 2}, og.parallel.DataParallel()),
        ({"optimizer": "adam", "clip_norm": 0.1}, og.parallel.DataParallel(shard_optimizer=True)),
    ],
)
def test_the_weights_and_slots_are_those_of_one_process(monkeypatch, options, parallel):
    alone = trained_mlp(parallel=False, **options)
    for shared in run_in_threads(
        monkeypatch, lambda rank: trained_mlp(parallel=parallel, **options)
    ):
        assert_close_arrays(shared.state.weights, alone.state.weights, 1e-9, 1e-12)
        for name, slots in alone.state.slots.items():
            assert_close_arrays(shared.state.slots[name], slots, 1e-9, 1e-12)
        assert shared.history[-1]["loss"] == pytest.approx(alone.history[-1]["loss"], rel=1e-9)
