"""States share memory where nothing can see it, and are let go when they are replaced."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.training.run import states
from tests.support.models import parse_model

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 160)).astype(np.float32)
Y = RNG.standard_normal((32, 160)).astype(np.float32)


def matrix_with_factors() -> onnx.ModelProto:
    """Return a matrix that is a group of its own, and two weights that are packed together."""
    rng = np.random.default_rng(1)
    shapes = {"w": (160, 160), "b": (160,), "s": (160,)}
    return parse_model(
        """f (float[N,160] x) => (float[N,160] y) {
            h = MatMul(x, w)  z = Add(h, b)  y = Mul(z, s) }""",
        **{n: rng.standard_normal(shape).astype(np.float32) / 10 for n, shape in shapes.items()},
    )


class Each(og.callbacks.Callback):
    """Calls a function after every step."""

    every_steps = 1

    def __init__(self, function) -> None:
        self.function = function

    def on_step_end(self, trainer, state, control):
        self.function(state)


def watched_trainer(function=None, **more) -> og.Trainer:
    callbacks = [] if function is None else [Each(function)]
    options = {"optimizer": "adam", "learning_rate": 0.01, "train": ["w", "b", "s"]} | more
    return og.Trainer(matrix_with_factors(), "mse", callbacks=callbacks, **options)


def test_what_a_training_held_is_let_go_without_a_collection():
    made = watched_trainer().fit(X, Y, validation=(X, Y), batch_size=8)
    loops = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            made.partial_fit(X, Y, batch_size=8)
            loops.append(weakref.ref(made._last_loop))
        assert loops[0]() is None
        assert loops[1]() is not None
    finally:
        gc.enable()


def test_weights_that_were_read_stay_as_they_were():
    read, expected = [], []

    def keep(state):
        read.append(state.weights)
        expected.append(copy.deepcopy(state.weights))

    made = watched_trainer(keep).fit(X, Y, batch_size=8, epochs=3)
    made.partial_fit(X, Y)
    del made
    gc.collect()
    assert len({before["w"].tobytes() for before in expected}) == 13
    for before, after in zip(expected, read, strict=True):
        np.testing.assert_equal(before, after)


def test_weights_cannot_be_modified_while_training_runs():
    def modify(state):
        for array in (*state.weights.values(), *state.slots["w"].values()):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0

    modified = watched_trainer(modify).fit(X, Y, batch_size=8)
    np.testing.assert_equal(
        watched_trainer().fit(X, Y, batch_size=8).state.weights, modified.state.weights
    )


@pytest.mark.parametrize("name", ["w", "b"])
def test_modified_weights_are_those_that_train_on(name):
    first, second = (watched_trainer().fit(X, Y, batch_size=8) for _ in range(2))
    first.state.weights[name][...] = 0
    second.state.weights = {name: np.zeros_like(second.state.weights[name])}
    for one in (first, second):
        one.partial_fit(X, Y)
    np.testing.assert_equal(first.state.weights, second.state.weights)


def test_copies_of_a_state_stay_as_they_are():
    made = watched_trainer().fit(X, Y, batch_size=8)
    state, expected = made.state.copy(), copy.deepcopy(made.state.weights)
    made.partial_fit(X, Y)
    np.testing.assert_equal(expected, state.weights)
    assert any((made.state.weights[n] != a).any() for n, a in expected.items())


def test_arrays_that_are_assigned_stay_as_they_are():
    made = watched_trainer()
    mine = copy.deepcopy(made.state.weights)
    before = copy.deepcopy(mine)
    made.state.weights = mine
    made.fit(X, Y, batch_size=8)
    np.testing.assert_equal(before, mine)


def test_a_training_that_ends_before_a_step_leaves_weights_and_slots():
    made = watched_trainer().fit(X, Y, batch_size=8)
    weights, slots = copy.deepcopy(made.state.weights), copy.deepcopy(made.state.slots["w"])
    with pytest.raises(ValueError, match="batch 0"):
        made.fit([(X[:8] * np.nan, Y[:8])], epochs=1)
    assert made.state.step == 4
    np.testing.assert_equal(weights, made.state.weights)
    np.testing.assert_equal(slots, made.state.slots["w"])
    made.partial_fit(X, Y)
    assert made.state.step == 5


def test_large_states_get_the_memory_of_earlier_ones(monkeypatch):
    """Unless somebody reads these still: then they stay as they were."""
    monkeypatch.setattr(states, "LARGE_STATE", 1000)
    plain, read, expected, places = watched_trainer().fit(X, Y, batch_size=4, epochs=2), [], [], []

    def look(state):
        places.append(state.weights["w"].ctypes.data)
        if state.step == 5:
            read.append(state.weights)
            expected.append(copy.deepcopy(state.weights))

    made = watched_trainer(look).fit(X, Y, batch_size=4, epochs=2)
    np.testing.assert_equal(plain.state.weights, made.state.weights)
    np.testing.assert_equal(expected[0], read[0])
    assert 3 <= len(set(places)) <= 4  # of 16 steps: by turns, and one that is read
