"""A value that follows from the call takes two places: its `Feed`, and the node that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.optimizers import Chain, Optimizer, UpdateInputs
from onnxgrad.training.step import update
from onnxgrad.training.step.inputs import FEEDS, Feed
from tests.support.trainings import two_layer_model

EPOCH = 2  # batches


@dataclass(frozen=True)
class MoreInputs(UpdateInputs):
    warm: ir.Value


@dataclass(frozen=True)
class ByWarmth(Optimizer):
    elementwise = True

    def update(self, op: Any, u: Any, slots: Any, inputs: Any) -> Any:
        return u * inputs.warm, {}


@pytest.fixture
def warm(monkeypatch):
    """Let optimizers read 1 in the first epoch, and 0 in the others."""
    feed = Feed("warm", ir.DataType.FLOAT, lambda call: call.step_indices < EPOCH)
    monkeypatch.setitem(FEEDS, feed.name, feed)
    monkeypatch.setattr(update, "UpdateInputs", MoreInputs)


@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("warm")
def test_optimizer_reads_another_value(monkeypatch, members, accumulate, in_place):
    if in_place:
        monkeypatch.setattr("onnxgrad.model.weights.LARGE", 0)
    X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    model, y = two_layer_model((6, 5, 4), "Tanh"), np.arange(16) % 4
    made = {"optimizer": Chain((ByWarmth(), og.optimizers.momentum())), "accumulate": accumulate}
    kind = og.Trainer if members is None else og.TrainerStack
    made |= {} if members is None else {"learning_rate": [0.1, 0.2]}

    def trained(epochs):
        trainer = kind(model, "cross_entropy", **made)
        trainer.fit(X, y, epochs=epochs, batch_size=8, shuffle=False)
        return trainer.state

    def velocities(state):
        return {name: slots["velocity"] for name, slots in state.slots.items()}

    first, third = trained(1), trained(3)
    for name, velocity in velocities(first).items():
        # without a gradient, velocities shrink by the momentum in each of the last four steps
        np.testing.assert_allclose(velocities(third)[name], velocity * 0.9**4, rtol=1e-5)
        assert np.abs(velocity).max() > 0
