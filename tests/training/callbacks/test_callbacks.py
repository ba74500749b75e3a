"""What a callback of `fit` sees and may do, and what is left however training ends."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad import ConvergenceError, ConvergenceWarning, add_loss_output
from onnxgrad.compat import (
    LearningRateSGD,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from tests.support.running import in_sweep
from tests.support.small_models import two_column_model
from tests.support.trainings import linear_model

RATE = 0.05
CONSTANT = LearningRateSGD(RATE, learning_rate="constant")
START = {"w": np.float32([[0.1], [0.2]]), "b": np.float32([0.3])}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 2)).astype(np.float32)
Y = (2 * X[:, :1] - X[:, 1:] + 3).astype(np.float32)
BATCHES = [(X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10)]


DEFAULTS = {"learning_rate": CONSTANT, "random_state": 0, "max_iter": 5}


def inner_momentum_trainer(**options) -> OrtGradientOptimizer:
    model = add_loss_output(two_column_model(), lambda op, f, y: 0.5 * (f - y) * (f - y))
    return OrtGradientOptimizer(model, None, **DEFAULTS | options)


def outer_momentum_trainer(**options) -> OrtGradientForwardBackwardOptimizer:
    return OrtGradientForwardBackwardOptimizer(two_column_model(), **DEFAULTS | options)


BOTH_TRAINERS = pytest.mark.parametrize("make", [inner_momentum_trainer, outer_momentum_trainer])


def copied_arrays(state) -> dict[str, np.ndarray]:
    return {n: np.array(v if isinstance(v, np.ndarray) else v.numpy()) for n, v in state.items()}


def assert_weights(made, w, b) -> None:
    state = copied_arrays(made.get_state())
    np.testing.assert_allclose(state["w"], w, rtol=1e-5)
    np.testing.assert_allclose(state["b"], b, rtol=1e-5)


def assert_equal_states(made, other) -> None:
    state, expected = copied_arrays(made.get_state()), copied_arrays(other.get_state())
    assert state.keys() == expected.keys()
    for name, w in expected.items():
        np.testing.assert_array_equal(state[name], w)


def momentum_steps(epochs: int):
    """Yield w, b and the velocity of b after every batch, in float64: momentum 0.9."""
    w, b = START["w"].astype(float), START["b"].astype(float)
    vw, vb = np.zeros_like(w), np.zeros_like(b)
    for x, y in BATCHES * epochs:
        d = (x @ w + b - y) / len(x)
        vw, vb = 0.9 * vw + x.T @ d, 0.9 * vb + d.sum(0)
        w, b = w - RATE * vw, b - RATE * vb
        yield w, b, vb


@BOTH_TRAINERS
def test_whatever_reads_the_state_reads_that_of_the_moment(make):
    made, expected, seen = (
        make(training_optimizer_name="momentum", max_iter=2),
        momentum_steps(2),
        [],
    )

    def look(progress):
        w, b, velocity = next(expected)
        trained = {t.name: t for t in made.get_trained_onnx().graph.initializer}
        for state in (
            copied_arrays(made.get_state()),
            copied_arrays(made.trained_coef_),
            {n: numpy_helper.to_array(t) for n, t in trained.items() if n in START},
            copied_arrays(pickle.loads(pickle.dumps(made)).get_state()),
            copied_arrays(copy.deepcopy(made).get_state()),
        ):
            np.testing.assert_allclose(state["w"], w, rtol=1e-5)
            np.testing.assert_allclose(state["b"], b, rtol=1e-5)
        seen.append((made.n_steps_, made.n_iter_, len(made.train_losses_), made.stop_reason_))
        assert made.learning_rate_ == RATE
        if make is outer_momentum_trainer:
            full, slots = made.get_full_state(["weight", "grad"])
            np.testing.assert_allclose(full["w"].numpy(), w, rtol=1e-5)
            np.testing.assert_allclose(slots["b"]["velocity"].numpy(), velocity, rtol=1e-4)
            np.testing.assert_allclose(made.predict(X), X @ w + b, rtol=1e-3, atol=1e-5)
            each = ((X @ w + b - Y) ** 2)[:, 0] / 2
            np.testing.assert_allclose(made.losses(X, Y), each, rtol=1e-3, atol=1e-5)
            assert made.score(X, Y) == pytest.approx(-each.mean(), rel=1e-4)

    made.fit(BATCHES, callback=look)
    assert seen == [(i + 1, i // 4, i // 4, None) for i in range(8)]
    assert (made.n_steps_, made.n_iter_, made.stop_reason_) == (8, 2, "max_iter")
    assert next(expected, None) is None


@BOTH_TRAINERS
def test_a_copy_of_the_moment_goes_its_own_way(make):
    made, kept = make(warm_start=True, max_iter=2, training_optimizer_name="adam"), []
    made.fit(BATCHES, callback=lambda p: kept.append(copy.deepcopy(made)))
    first_epoch = kept[3]
    assert first_epoch.n_iter_ == 0  # before the end of the first epoch was noted
    first_epoch.set_params(max_iter=1).fit(BATCHES)
    assert_equal_states(first_epoch, made)


@BOTH_TRAINERS
def test_a_state_set_by_a_callback_is_what_training_goes_on_from(make):
    made = make(max_iter=1)

    def to_zero(progress):
        if progress.rows == 20:
            made.set_state({name: np.zeros_like(w) for name, w in START.items()})

    made.fit(BATCHES, callback=to_zero)
    w, b = np.zeros((2, 1)), np.zeros(1)
    for x, y in BATCHES[2:]:
        d = (x @ w + b - y) / len(x)
        w, b = w - RATE * x.T @ d, b - RATE * d.sum(0)
    assert_weights(made, w, b)


@BOTH_TRAINERS
@pytest.mark.parametrize("answer", [False, in_sweep("stop"), in_sweep(np.False_)])
def test_a_callback_stops(make, answer):
    made, seen = make(), []

    def third(progress):
        seen.append(copied_arrays(made.get_state()))
        return answer if len(seen) == 3 else None

    assert made.fit(BATCHES, callback=third) is made
    assert (made.stop_reason_, made.n_steps_, made.n_iter_) == ("callback", 3, 0)
    assert made.train_losses_ == []
    np.testing.assert_array_equal(copied_arrays(made.get_state())["w"], seen[-1]["w"])
    assert made.fit(X, Y).stop_reason_ == "max_iter"


@BOTH_TRAINERS
def test_a_callback_stops_at_the_end_of_an_epoch_or_at_a_validation(make):
    plain = make(max_iter=2).fit(X, Y)
    made = make().fit(X, Y, callback=lambda p: not (p.epoch == 1 and p.rows == 40))
    assert made.train_losses_ == plain.train_losses_
    assert (made.n_iter_, made.stop_reason_) == (2, "callback")
    validated = make(validation_every=1).fit(
        X, Y, X_val=X, y_val=Y, callback=lambda p: p.validation_loss is None
    )
    assert len(validated.validation_losses_) == 1
    assert (validated.n_iter_, validated.stop_reason_) == (1, "callback")
    assert_equal_states(made, plain)


@BOTH_TRAINERS
def test_a_callback_that_goes_on(make):
    for answer in (True, None, np.True_):
        made = make().fit(X, Y, callback=lambda p, answer=answer: answer)
        assert (made.n_iter_, made.stop_reason_) == (5, "max_iter")


@BOTH_TRAINERS
@pytest.mark.parametrize("answer", [0, 1, *map(in_sweep, ["go", [], 0.5])])
def test_another_answer_of_a_callback_is_refused(make, answer):
    made, seen = make(), []

    def second(progress):
        seen.append(copied_arrays(made.get_state()))
        return answer if len(seen) == 2 else None

    with pytest.raises(ValueError, match=r"callback.* None .*True"):
        made.fit(BATCHES, callback=second)
    assert made.stop_reason_ == "error"
    np.testing.assert_array_equal(copied_arrays(made.get_state())["w"], seen[-1]["w"])


@BOTH_TRAINERS
@pytest.mark.parametrize(
    ("error", "reason"), [(ZeroDivisionError, "error"), (KeyboardInterrupt, "interrupted")]
)
def test_an_error_in_a_callback_keeps_the_last_slice(make, error, reason):
    made, expected = make(training_optimizer_name="momentum"), list(momentum_steps(1))

    def third(progress):
        if progress.rows == 30:
            raise error

    with pytest.raises(error):
        made.fit(BATCHES, callback=third)
    w, b, _ = expected[2]
    assert_weights(made, w, b)
    assert (made.stop_reason_, made.n_steps_) == (reason, 3)
    if make is outer_momentum_trainer:
        np.testing.assert_allclose(made.predict(X), X @ w + b, rtol=1e-3, atol=1e-5)


@BOTH_TRAINERS
def test_fit_in_its_own_callback_is_refused(make):
    made = make()
    with pytest.raises(RuntimeError, match="running"):
        made.fit(X, Y, callback=lambda p: made.fit(X, Y))
    assert made.fit(X, Y).n_iter_ == 5


# -- errors inside of fit ------------------------------------------------------------------------


def bad_batches(after: int):
    return [*BATCHES[:after], (X[:10], np.full((10, 1), np.nan))]


@BOTH_TRAINERS
def test_a_fit_that_finishes_no_slice_changes_nothing(make):
    """A bad first batch, and a rate under which the first batch overflows."""
    made = make(training_optimizer_name="momentum").fit(X, Y)
    state, losses = copied_arrays(made.get_state()), list(made.train_losses_)
    with pytest.raises(ValueError, match="NaN"):
        made.fit(bad_batches(0))
    assert made.stop_reason_ == "error"
    made.set_params(learning_rate=LearningRateSGD(1e38))
    with pytest.raises(ConvergenceError):
        made.fit(X, 1000 * Y)
    assert made.stop_reason_ == "not finite"
    assert (made.train_losses_, made.n_iter_) == (losses, 5)
    for name, w in copied_arrays(made.get_state()).items():
        np.testing.assert_array_equal(w, state[name])
    made.set_params(learning_rate=CONSTANT, warm_start=True).fit(X, Y)
    straight = make(training_optimizer_name="momentum", max_iter=10).fit(X, Y)
    assert made.train_losses_ == straight.train_losses_  # same slots, same order of rows


@BOTH_TRAINERS
def test_a_bad_batch_keeps_the_state_of_those_before(make):
    made = make(training_optimizer_name="momentum").fit(X, Y)
    with pytest.raises(ValueError, match="NaN"):
        made.fit(bad_batches(2))
    w, b, _ = list(momentum_steps(1))[1]
    assert_weights(made, w, b)


@BOTH_TRAINERS
@pytest.mark.parametrize("broken", ["Runner.load", "Runner.__init__", "Evaluator.__init__"])
def test_a_fit_that_cannot_be_prepared_changes_nothing(make, broken, monkeypatch):
    made = make().fit(X, Y)
    state = copied_arrays(made.get_state())

    def fail(*args, **options):
        raise MemoryError

    room = "evaluator" if broken.startswith("Evaluator") else "run.runner"
    monkeypatch.setattr(f"onnxgrad.training.{room}.{broken}", fail)
    with pytest.raises(MemoryError):
        made.fit(X, Y, X_val=X, y_val=Y)
    monkeypatch.undo()
    assert (made.n_iter_, made.stop_reason_) == (5, "max_iter")
    np.testing.assert_array_equal(copied_arrays(made.get_state())["w"], state["w"])
    assert made.fit(X, Y).n_iter_ == 5


@BOTH_TRAINERS
def test_weights_that_cannot_be_read_from_the_device_keep_those_read_last(make, monkeypatch):
    made, seen = make(), []

    def fail(*args):
        raise MemoryError

    def third(progress):
        if progress.rows == 30:
            return False
        seen.append(copied_arrays(made.get_state()))
        if progress.rows == 20:
            monkeypatch.setattr("onnxgrad.training.run.runner.Runner.unpacked", fail)

    with pytest.raises(MemoryError):
        made.fit(BATCHES, callback=third)
    monkeypatch.undo()
    np.testing.assert_array_equal(copied_arrays(made.get_state())["w"], seen[-1]["w"])
    assert made.fit(X, Y).n_iter_ == 5


# -- validation ----------------------------------------------------------------------------------

HUGE = np.full((3, 2), 1e30, np.float32)


@BOTH_TRAINERS
def test_a_validation_loss_that_is_not_finite(make):
    made, plain = make(validation_every=2), make(max_iter=2).fit(X, Y)
    with pytest.raises(ConvergenceError, match=r"validation loss .*epoch 2 "):
        made.fit(X, Y, X_val=HUGE, y_val=Y[:3])
    assert made.stop_reason_ == "not finite"
    assert made.train_losses_ == plain.train_losses_
    assert made.validation_losses_ == []
    assert_equal_states(made, plain)


def test_a_validation_loss_that_is_not_finite_as_a_warning():
    made = outer_momentum_trainer(validation_every=1, exc=False)
    with pytest.warns(ConvergenceWarning, match=r"validation loss .*epoch 1 ") as seen:
        assert made.fit(X, Y, X_val=HUGE, y_val=Y[:3]) is made
    assert seen[0].filename == __file__
    assert (made.stop_reason_, made.n_iter_, made.validation_losses_) == ("not finite", 1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.fit(X, Y, X_val=X, y_val=Y).stop_reason_ == "max_iter"


def test_the_steps_of_sgd_are_counted_on_by_a_warm_start():
    made = inner_momentum_trainer(warm_start=True, max_iter=1).fit(BATCHES)
    assert made.fit(BATCHES).n_steps_ == 8


class Saver(og.callbacks.Callback):
    """Has a method of its own that is called as that of a checkpoint once was."""

    saved = 0

    def save(self, state):
        self.saved += 1

    def on_epoch_end(self, trainer, state, control):
        control.save = True


def test_a_method_of_ones_own_called_save_is_not_called(tmp_path):
    model = linear_model([[1], [2]])
    x, own = np.ones((4, 2), np.float32), Saver()
    trainer = og.Trainer(model, "mse", callbacks=[own, og.Checkpoint(tmp_path / "c")])
    trainer.fit(x, x[:, :1], epochs=2)
    assert own.saved == 0
    assert len(list((tmp_path / "c").iterdir())) == 2
    with pytest.raises(ValueError, match="Checkpoint"):
        og.Trainer(model, "mse", callbacks=[Saver()]).fit(x, x[:, :1])
