"""Copies and pickles of what was trained: they train on alone, and leave the original alone."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.model import weights as model_weights
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.callbacks.base import Callbacks
from tests.support.running import in_sweep
from tests.support.trainings import normalized_model

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


def state_arrays(made):
    values = made.state.values
    return copy.deepcopy([values.weights, values.slots, values.buffers, values.steps])


def estimator_weights(estimator):
    return {name: to_numpy(w) for name, w in estimator.get_state().items()}


TRAINERS = {
    "defaults": {},
    "batch norm, average": {
        "batch_norm": "train",
        "optimizer": og.optimizers.ema(og.optimizers.adam(), 0.9),
    },
    "schedule free, early stopping": {
        "optimizer": "schedule_free",
        "metrics": ["mae"],
        "callbacks": [og.EarlyStopping()],
    },
    "cosine, progress": {
        "learning_rate": og.schedules.cosine(0.1, steps=99),
        "callbacks": [og.Progress()],
    },
    "large": {},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer(name, monkeypatch):
    """Neither a copy nor the original trains the other, and both go on alike."""
    if name == "large":
        monkeypatch.setattr(model_weights, "LARGE", 1)
        monkeypatch.setattr(model_weights, "TENSOR_BYTES", 1)
    made = og.Trainer(normalized_model(), "mse", **TRAINERS[name])
    made.fit(X, Y, validation=0.2, epochs=2)
    before, predicted, others = state_arrays(made), made.predict(X), []
    for way in WAYS.values():
        one, other = way(made), way(made)
        np.testing.assert_equal(state_arrays(one), before)
        assert one.history == made.history
        np.testing.assert_array_equal(one.predict(X), predicted)
        assert one.evaluate(X, Y) == made.evaluate(X, Y)
        for further in (one, other):
            further._change_job(callbacks=Callbacks())
            further.partial_fit(X, Y, batch_size=16)
        np.testing.assert_equal(state_arrays(made), before)
        np.testing.assert_array_equal(made.predict(X), predicted)
        one.fit(X, Y, batch_size=16)
        np.testing.assert_equal(state_arrays(made), before)
        others.append(other)
    made._change_job(callbacks=Callbacks())
    made.partial_fit(X, Y, batch_size=16)
    for other in others:
        np.testing.assert_equal(state_arrays(other), state_arrays(made))
        assert made.model.SerializeToString() == other.model.SerializeToString()


class Copies(og.callbacks.Callback):
    """Copies the trainer after every epoch, and trains the copies."""

    made: list[og.Trainer] = []  # noqa: RUF012  # not an attribute that is copied, too

    def __init__(self, way):
        self.way = way

    def on_epoch_end(self, trainer, state, control):
        new = WAYS[self.way](trainer)
        assert not new.state.is_running
        np.testing.assert_equal(state_arrays(new), state_arrays(trainer))
        new._change_job(callbacks=Callbacks())
        self.made.append(new.partial_fit(X, Y))


@pytest.mark.parametrize("way", ["deepcopy", in_sweep("copy"), in_sweep("pickle")])
def test_a_trainer_that_trains(way):
    """A copy within `fit` has the state of that moment, and does not disturb the training."""
    Copies.made.clear()
    options = {"optimizer": "adam", "batch_norm": "train"}
    whole = og.Trainer(normalized_model(), "mse", **options).fit(X, Y, epochs=3, shuffle=False)
    made = og.Trainer(normalized_model(), "mse", callbacks=[Copies(way)], **options)
    made.fit(X, Y, epochs=3, shuffle=False)
    np.testing.assert_equal(state_arrays(made), state_arrays(whole))
    assert [one.state.step for one in Copies.made] == [4, 6, 8]


def test_what_a_copy_lacks():
    made = og.Trainer(normalized_model(), "mse").fit(X, Y)
    one = copy.deepcopy(made)
    for read in (lambda: one.progress, lambda: one.gradient_norms):
        with pytest.raises(og.NotFittedError, match="call fit"):
            read()
    assert one.failed_step() is None
    data = np.zeros((20000, 3), np.float32)
    heavy = og.Trainer(normalized_model(), "mse").fit(data, data[:, :1])
    assert len(pickle.dumps(heavy)) < len(pickle.dumps(made)) + 1000  # no data


@pytest.mark.parametrize("way", ["pickle", in_sweep("copy"), in_sweep("deepcopy")])
def test_callbacks_that_were_used(way, tmp_path):
    used = [
        *(
            og.EarlyStopping(),
            og.Checkpoint(tmp_path / "a"),
            og.callbacks.History(tmp_path / "b.csv"),
        ),
        *(og.Progress(), og.callbacks.NanWatch(), og.callbacks.Recorder(tmp_path / "c", seconds=0)),
    ]
    made = og.Trainer(normalized_model(), "mse", callbacks=used).fit(X, Y, validation=0.2, epochs=2)
    new = WAYS[way](made)
    assert [type(c) for c in new._job.callbacks.callbacks] == [type(c) for c in used]
    kept = Callbacks([c for c in new._job.callbacks.callbacks if c.checkpoints is None])
    new._change_job(callbacks=kept)
    assert new.fit(X, Y, validation=0.2).state.epoch == 1


def test_what_cannot_be_pickled_is_named():
    made = og.Trainer(normalized_model(), "mse", metrics=[lambda prediction, label: 1.0]).fit(X, Y)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(made)
    assert copy.deepcopy(made).evaluate(X, Y) == made.evaluate(X, Y)


@pytest.mark.parametrize("way", ["copy", "pickle", in_sweep("deepcopy")])
def test_a_stack(way):
    made = og.TrainerStack(normalized_model(), "mse", learning_rate=[0.1, 0.2]).fit(
        X, Y, validation=0.2
    )
    before, loss = copy.deepcopy(made.state.weights), made.evaluate(X, Y)
    one = WAYS[way](made)
    np.testing.assert_array_equal(one.predict(X), made.predict(X))
    np.testing.assert_equal(one.history, made.history)
    one.fit(X, Y, epochs=2)
    np.testing.assert_equal(made.state.weights, before)
    np.testing.assert_equal(made.evaluate(X, Y), loss)
    np.testing.assert_equal(one.state.weights, made.fit(X, Y, epochs=2).state.weights)


@pytest.mark.parametrize("way", ["pickle", "clone", *map(in_sweep, ("copy", "deepcopy", "joblib"))])
def test_estimators(way, tmp_path):
    clone = pytest.importorskip("sklearn.base").clone
    joblib = pytest.importorskip("joblib")

    def through_a_file(one):
        joblib.dump(one, tmp_path / "one")
        return joblib.load(tmp_path / "one")

    function = {**WAYS, "clone": clone, "joblib": through_a_file}[way]
    options = {"max_iter": 3, "random_state": 0}
    seeds = [
        og.compat.OrtGradientOptimizer(og.add_loss_output(normalized_model()), **options),
        og.compat.OrtGradientForwardBackwardOptimizer(normalized_model(), **options),
    ]
    for made in seeds:
        fitted = estimator_weights(made.fit(X, Y))
        _ = made.train_function_  # sessions
        one = function(made)
        if way == "clone":
            with pytest.raises(og.NotFittedError):
                one.get_state()
        else:
            np.testing.assert_equal(estimator_weights(one), fitted)
        np.testing.assert_equal(estimator_weights(one.fit(X, Y)), estimator_weights(made.fit(X, Y)))
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
    made = og.Trainer(normalized_model(), "mse").fit(X, Y)
    joblib.dump(made, tmp_path / "trainer")
    np.testing.assert_array_equal(joblib.load(tmp_path / "trainer").predict(X), made.predict(X))
    with pytest.raises(TypeError, match="Trainer"):  # it has no `get_params`
        clone(made)


def test_a_lock_in_a_callback_stays_an_error():
    class Locked(og.callbacks.Callback):
        def __init__(self):
            self.lock = threading.Lock()

    made = og.Trainer(normalized_model(), "mse", callbacks=[Locked()]).fit(X, Y)
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(made)
