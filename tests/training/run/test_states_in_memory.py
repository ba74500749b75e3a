"""States share memory where nothing can see it, and are let go when they are replaced."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.training.run import runner

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 160)).astype(np.float32)
Y = RNG.standard_normal((32, 160)).astype(np.float32)


def model() -> onnx.ModelProto:
    """Return a matrix that is a group of its own, and two weights that are packed together."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[N,160] x) => (float[N,160] y) {
            h = MatMul(x, w)  z = Add(h, b)  y = Mul(z, s) }""")
    rng = np.random.default_rng(1)
    for name, shape in {"w": (160, 160), "b": (160,), "s": (160,)}.items():
        array = rng.standard_normal(shape).astype(np.float32) / 10
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


class Each(og.Callback):
    """Calls a function after every step."""

    every_steps = 1

    def __init__(self, function) -> None:
        self.function = function

    def on_step_end(self, trainer, state, control):
        self.function(state)


def trainer(function=None, **more) -> og.Trainer:
    callbacks = [] if function is None else [Each(function)]
    options = {"optimizer": "adam", "learning_rate": 0.01} | more
    return og.Trainer(model(), "mse", callbacks=callbacks, **options)


def copies(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in weights.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_array_equal(b[name], array)


def test_what_a_training_held_is_let_go_without_a_collection():
    made = trainer().fit(X, Y, validation=(X, Y), batch_size=8)
    loops = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            made.partial_fit(X, Y, batch_size=8)
            loops.append(weakref.ref(made._loop))
        assert loops[0]() is None
        assert loops[1]() is not None
    finally:
        gc.enable()


def test_weights_that_were_read_stay_as_they_were():
    read, expected = [], []

    def keep(state):
        read.append(state.weights)
        expected.append(copies(state.weights))

    made = trainer(keep).fit(X, Y, batch_size=8, epochs=3)
    made.partial_fit(X, Y)
    del made
    gc.collect()
    assert len({before["w"].tobytes() for before in expected}) == 13
    for before, after in zip(expected, read, strict=True):
        same(before, after)


def test_weights_cannot_be_modified_while_training_runs():
    def modify(state):
        for array in (*state.weights.values(), *state.slots["w"].values()):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0

    modified = trainer(modify).fit(X, Y, batch_size=8)
    same(trainer().fit(X, Y, batch_size=8).state.weights, modified.state.weights)


@pytest.mark.parametrize("name", ["w", "b"])
def test_modified_weights_are_those_that_train_on(name):
    first, second = (trainer().fit(X, Y, batch_size=8) for _ in range(2))
    first.state.weights[name][...] = 0
    second.state.weights = {name: np.zeros_like(second.state.weights[name])}
    for one in (first, second):
        one.partial_fit(X, Y)
    same(first.state.weights, second.state.weights)


def test_copies_of_a_state_stay_as_they_are():
    made = trainer().fit(X, Y, batch_size=8)
    state, expected = made.state.copy(), copies(made.state.weights)
    made.partial_fit(X, Y)
    same(expected, state.weights)
    assert any((made.state.weights[n] != a).any() for n, a in expected.items())


def test_arrays_that_are_assigned_stay_as_they_are():
    made = trainer()
    mine = copies(made.state.weights)
    before = copies(mine)
    made.state.weights = mine
    made.fit(X, Y, batch_size=8)
    same(before, mine)


def test_a_training_that_ends_before_a_step_leaves_weights_and_slots():
    made = trainer().fit(X, Y, batch_size=8)
    weights, slots = copies(made.state.weights), copies(made.state.slots["w"])
    with pytest.raises(ValueError, match="batch 0"):
        made.fit([(X[:8] * np.nan, Y[:8])], epochs=1)
    assert made.state.step == 4
    same(weights, made.state.weights)
    same(slots, made.state.slots["w"])
    made.partial_fit(X, Y)
    assert made.state.step == 5


def test_large_states_get_the_memory_of_earlier_ones(monkeypatch):
    """Unless somebody reads these still: then they stay as they were."""
    monkeypatch.setattr(runner, "_LARGE", 1000)
    plain, read, expected, places = trainer().fit(X, Y, batch_size=4, epochs=2), [], [], []

    def look(state):
        places.append(state.weights["w"].ctypes.data)
        if state.step == 5:
            read.append(state.weights)
            expected.append(copies(state.weights))

    made = trainer(look).fit(X, Y, batch_size=4, epochs=2)
    same(plain.state.weights, made.state.weights)
    same(expected[0], read[0])
    assert 3 <= len(set(places)) <= 4  # of 16 steps: by turns, and one that is read
