"""Copies and pickles of what was trained: they train on alone, and leave the original alone."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model import without_elements
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.callbacks.events import Callbacks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,1] y)
        <float[3] scale = {1.0, 1.1, 1.2}, float[3] shift = {0.1, 0.2, 0.3},
         float[3] mean = {0.5, 0.0, 0.0}, float[3] variance = {2.0, 1.0, 1.5},
         float[3,1] w = {0.1, 0.2, 0.3}>
        { h = BatchNormalization(x, scale, shift, mean, variance)  y = MatMul(h, w) }""")


def arrays(made):
    values = made.state.values
    return copy.deepcopy([values.weights, values.slots, values.buffers, values.steps])


def weights(estimator):
    return {name: to_numpy(w) for name, w in estimator.get_state().items()}


def check(made, way):
    """Compare a copy with the original, and see that neither trains the other."""
    before, predicted = arrays(made), made.predict(X)
    one, other = WAYS[way](made), WAYS[way](made)
    np.testing.assert_equal(arrays(one), before)
    assert one.history == made.history
    np.testing.assert_array_equal(one.predict(X), predicted)
    assert one.evaluate(X, Y) == made.evaluate(X, Y)
    for further in (one, other):
        further.callbacks = Callbacks()
        further.partial_fit(X, Y, batch_size=16)
    np.testing.assert_equal(arrays(made), before)
    np.testing.assert_array_equal(made.predict(X), predicted)
    one.fit(X, Y, batch_size=16)
    np.testing.assert_equal(arrays(made), before)
    made.callbacks = Callbacks()
    made.partial_fit(X, Y, batch_size=16)
    np.testing.assert_equal(arrays(made), arrays(other))  # they go on alike
    assert made.model.SerializeToString() == other.model.SerializeToString()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param(
            {"batch_norm": "train", "optimizer": og.ema(og.adam(), 0.9)}, id="batch norm, average"
        ),
        pytest.param(
            {"optimizer": "schedule_free", "metrics": ["mae"], "callbacks": [og.EarlyStopping()]},
            id="schedule free, early stopping",
        ),
        pytest.param(
            {"learning_rate": og.cosine(0.1, steps=99), "callbacks": [og.Progress()]},
            id="cosine, progress",
        ),
        pytest.param({"large": True}, id="large"),
    ],
)
def test_a_trainer(way, options, monkeypatch):
    if options.get("large"):
        monkeypatch.setattr(without_elements, "LARGE", 1)
        monkeypatch.setattr(without_elements, "_EACH", 1)
    options = {name: value for name, value in options.items() if name != "large"}
    made = og.Trainer(model(), "mse", **options)
    check(made.fit(X, Y, validation=0.2, epochs=2), way)


class Copies(og.Callback):
    """Copies the trainer after every epoch, and trains the copies."""

    made: list[og.Trainer] = []  # noqa: RUF012  # not an attribute that is copied, too

    def __init__(self, way):
        self.way = way

    def on_epoch_end(self, trainer, state, control):
        new = WAYS[self.way](trainer)
        assert not new.state.is_running
        np.testing.assert_equal(arrays(new), arrays(trainer))
        new.callbacks = Callbacks()
        self.made.append(new.partial_fit(X, Y))


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_trains(way):
    """A copy within `fit` has the state of that moment, and does not disturb the training."""
    Copies.made.clear()
    options = {"optimizer": "adam", "batch_norm": "train"}
    whole = og.Trainer(model(), "mse", **options).fit(X, Y, epochs=3, shuffle=False)
    made = og.Trainer(model(), "mse", callbacks=[Copies(way)], **options)
    made.fit(X, Y, epochs=3, shuffle=False)
    np.testing.assert_equal(arrays(made), arrays(whole))
    assert [one.state.step for one in Copies.made] == [4, 6, 8]


def test_what_a_copy_lacks():
    made = og.Trainer(model(), "mse").fit(X, Y)
    one = copy.deepcopy(made)
    for read in (lambda: one.progress, lambda: one.gradient_norms):
        with pytest.raises(og.NotFittedError, match="by this object: call fit first"):
            read()
    assert one.failed_step() is None
    data = np.zeros((20000, 3), np.float32)
    heavy = og.Trainer(model(), "mse").fit(data, data[:, :1])
    assert len(pickle.dumps(heavy)) < len(pickle.dumps(made)) + 1000  # no data


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_that_were_used(way, tmp_path):
    used = [
        *(og.EarlyStopping(), og.Checkpoint(tmp_path / "a"), og.History(tmp_path / "b.csv")),
        *(og.Progress(), og.NanWatch(), og.Recorder(tmp_path / "c", seconds=0)),
    ]
    made = og.Trainer(model(), "mse", callbacks=used).fit(X, Y, validation=0.2, epochs=2)
    new = WAYS[way](made)
    assert [type(c) for c in new.callbacks.callbacks] == [type(c) for c in used]
    new.callbacks = Callbacks([c for c in new.callbacks.callbacks if c.checkpoints is None])
    assert new.fit(X, Y, validation=0.2).state.epoch == 1


def test_what_cannot_be_pickled_is_named():
    made = og.Trainer(model(), "mse", metrics=[lambda prediction, label: 1.0]).fit(X, Y)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(made)
    assert copy.deepcopy(made).evaluate(X, Y) == made.evaluate(X, Y)


@pytest.mark.parametrize("way", WAYS)
def test_a_stack(way):
    made = og.TrainerStack(model(), "mse", learning_rate=[0.1, 0.2]).fit(X, Y, validation=0.2)
    before, loss = copy.deepcopy(made.state.weights), made.evaluate(X, Y)
    one = WAYS[way](made)
    np.testing.assert_array_equal(one.predict(X), made.predict(X))
    np.testing.assert_equal(one.history, made.history)
    one.fit(X, Y, epochs=2)
    np.testing.assert_equal(made.state.weights, before)
    np.testing.assert_equal(made.evaluate(X, Y), loss)
    np.testing.assert_equal(one.state.weights, made.fit(X, Y, epochs=2).state.weights)


@pytest.mark.parametrize("way", [*WAYS, "clone", "joblib"])
def test_estimators(way, tmp_path):
    clone = pytest.importorskip("sklearn.base").clone
    joblib = pytest.importorskip("joblib")

    def through_a_file(one):
        joblib.dump(one, tmp_path / "one")
        return joblib.load(tmp_path / "one")

    function = {**WAYS, "clone": clone, "joblib": through_a_file}[way]
    options = {"max_iter": 3, "random_state": 0}
    seeds = [
        og.OrtGradientOptimizer(og.add_loss_output(model()), **options),
        og.OrtGradientForwardBackwardOptimizer(model(), **options),
    ]
    for made in seeds:
        fitted = weights(made.fit(X, Y))
        _ = made.train_function_  # sessions
        one = function(made)
        if way == "clone":
            with pytest.raises(og.NotFittedError):
                one.get_state()
        else:
            np.testing.assert_equal(weights(one), fitted)
        np.testing.assert_equal(weights(one.fit(X, Y)), weights(made.fit(X, Y)))
        assert one.train_function_ is not made.train_function_
    regressor = og.OnnxRegressor(max_iter=3, tol=None, random_state=0).fit(X, Y.ravel())
    one = function(regressor)
    if way != "clone":
        np.testing.assert_array_equal(one.predict(X), regressor.predict(X))
    one.fit(X, Y.ravel())
    np.testing.assert_array_equal(one.predict(X), regressor.fit(X, Y.ravel()).predict(X))


def test_a_trainer_through_joblib_and_clone(tmp_path):
    joblib = pytest.importorskip("joblib")
    clone = pytest.importorskip("sklearn.base").clone
    made = og.Trainer(model(), "mse").fit(X, Y)
    joblib.dump(made, tmp_path / "trainer")
    np.testing.assert_array_equal(joblib.load(tmp_path / "trainer").predict(X), made.predict(X))
    with pytest.raises(TypeError, match="Trainer"):  # it has no `get_params`
        clone(made)


def test_a_lock_in_a_callback_stays_an_error():
    class Locked(og.Callback):
        def __init__(self):
            self.lock = threading.Lock()

    made = og.Trainer(model(), "mse", callbacks=[Locked()]).fit(X, Y)
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(made)
