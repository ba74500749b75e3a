"""The learning rate range test, and the curves of a training."""

import copy
import pickle

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.trainings import linear_model

W = np.float32(
    [[0.3, -0.2, 0.1], [0.5, 0.4, -0.6], [0.2, 0.1, -0.1], [0.7, -0.3, 0.2]],
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3))).argmax(1)


def trainer_of_rates(loss="cross_entropy", **options):
    return og.Trainer(linear_model(W), loss, **options)


@pytest.fixture
def figures():
    """Draw without a screen, and close all figures at the end."""
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def test_losses_are_those_of_a_loop_in_pytorch():
    torch = pytest.importorskip("torch")
    trainer = trainer_of_rates(optimizer="sgd", seed=4)
    found = og.schedules.lr_range_test(trainer, X, Y, start=1e-4, end=1.0, steps=20, batch_size=16)
    assert len(found.rates) == 20
    np.testing.assert_allclose(found.rates, np.geomspace(1e-4, 1.0, 20))
    w = torch.tensor(W, requires_grad=True)
    order = [np.random.default_rng([4, epoch]).permutation(50) for epoch in range(5)]
    batches = [o[i : i + 16] for o in order for i in range(0, 50, 16)][:20]
    losses, smoothed = [], []
    for t, (rate, rows) in enumerate(zip(np.geomspace(1e-4, 1.0, 20), batches, strict=True)):
        loss = torch.nn.functional.cross_entropy(torch.tensor(X[rows]) @ w, torch.tensor(Y[rows]))
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - rate * gradient).detach().requires_grad_()
        losses.append(loss.item())
        weights = 0.9 ** np.arange(t, -1, -1) * [len(b) for b in batches[: t + 1]]
        smoothed.append(np.average(losses, weights=weights))
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(found.smoothed, smoothed, rtol=1e-5)
    assert not found.diverged


def test_losses_of_ignored_labels_and_weighted_outputs():
    torch = pytest.importorskip("torch")
    labels = np.where(np.arange(50) % 3 == 0, -100, Y)
    trainer = trainer_of_rates({"y": "cross_entropy"}, optimizer="sgd", loss_weights={"y": 0.5})
    found = og.schedules.lr_range_test(
        trainer, X, labels, start=1e-9, end=1e-8, steps=2, batch_size=25
    )
    order = np.random.default_rng([0, 0]).permutation(50)
    for rows, loss in zip((order[:25], order[25:]), found.losses, strict=True):
        logits, label = torch.tensor(X[rows] @ W), torch.tensor(labels[rows])
        assert loss == pytest.approx(
            0.5 * torch.nn.functional.cross_entropy(logits, label).item(), rel=1e-5
        )


def test_the_trainer_stays_as_it_was(tmp_path):
    events = []

    class Watch(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            events.append(state.step)

    callbacks = [og.Checkpoint(tmp_path), Watch()]
    trainer = trainer_of_rates(callbacks=callbacks, learning_rate=0.01)
    trainer.fit(X, Y, epochs=2, batch_size=10)
    before, seen, files = copy.deepcopy(trainer.state), len(events), sorted(tmp_path.rglob("*"))
    og.schedules.lr_range_test(trainer, X, Y, steps=30, batch_size=10)
    after = trainer.state
    assert (after.step, after.epoch, after.history) == (before.step, before.epoch, before.history)
    assert after.weights["w"].tobytes() == before.weights["w"].tobytes()
    for slot, array in before.slots["w"].items():
        assert after.slots["w"][slot].tobytes() == array.tobytes()
    assert trainer._job.learning_rate == og.schedules.constant(0.01)
    assert len(events) == seen
    assert sorted(tmp_path.rglob("*")) == files
    untouched = trainer_of_rates(learning_rate=0.01)
    untouched.fit(X, Y, epochs=2, batch_size=10).partial_fit(X, Y, batch_size=10)
    trainer.partial_fit(X, Y, batch_size=10)
    assert trainer.state.weights["w"].tobytes() == untouched.state.weights["w"].tobytes()


def test_it_ends_where_the_loss_diverges_or_is_not_finite():
    y = (X @ W + 1).astype(np.float32)
    trainer = trainer_of_rates("squared_error", optimizer="sgd")
    found = og.schedules.lr_range_test(trainer, X, y, start=1e-3, end=1e3, steps=60, batch_size=10)
    assert found.diverged
    assert len(found.losses) < 60
    beyond = found.smoothed > 4 * np.minimum.accumulate(found.smoothed)
    assert np.flatnonzero(beyond).tolist() == [len(found.losses) - 1]  # the first one is the last
    far = og.schedules.lr_range_test(
        trainer, X, y, start=1e-3, end=1e30, steps=10, diverges=1e300, batch_size=10
    )
    assert far.diverged
    assert np.isfinite(far.losses).all()
    with pytest.raises(og.ConvergenceError):
        og.schedules.lr_range_test(trainer, X * np.float32(1e30), y, steps=5)


def test_suggestion_is_the_steepest_descent(figures):
    rates = np.geomspace(1e-4, 1, 41)
    losses = 1 / (1 + np.exp(6 * (np.log10(rates) + 2)))  # steepest at 1e-2
    found = og.schedules.RangeTest(rates, losses, losses, False)
    assert found.suggestion == pytest.approx(1e-2)
    assert og.schedules.RangeTest(rates, -losses, -losses, False).suggestion is None
    assert og.schedules.RangeTest(rates[:2], losses[:2], losses[:2], False).suggestion is None
    axes = found.plot()
    assert axes.get_xscale() == "log"
    assert [line.get_label() for line in axes.get_lines()][2] == "suggestion 0.01"


def test_arguments_are_checked():
    wrong = {"start": 0.0, "end": 1e-9, "steps": 1, "smoothing": 1.0, "diverges": 1.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            og.schedules.lr_range_test(trainer_of_rates(), X, Y, **{name: value})
    stack = og.TrainerStack(linear_model(W), "cross_entropy", learning_rate=[0.1, 0.2])
    with pytest.raises(ValueError, match=naming("Trainer", "TrainerStack")):
        og.schedules.lr_range_test(stack, X, Y)


def test_curves_of_a_trainer(figures):
    trainer = trainer_of_rates()
    with pytest.raises(ValueError, match="no epoch"):
        og.plot.plot_history(trainer)
    trainer.fit(X, Y, validation=0.2, epochs=3)
    axes = og.plot.plot_history(trainer)
    train, validation = axes.get_lines()
    assert train.get_xdata().tolist() == [1, 2, 3]
    assert train.get_ydata().tolist() == [entry["loss"] for entry in trainer.history]
    assert validation.get_label() == "validation"
    again = pickle.loads(pickle.dumps(trainer.history))
    assert len(og.plot.plot_history(again, ax=axes).get_lines()) == 4


def test_curves_over_steps_and_of_members(figures):
    class Often(og.callbacks.Callback):
        every_steps = 1

        def on_step_end(self, trainer, state, control):
            control.evaluate = True

    trainer = trainer_of_rates(callbacks=[Often()])
    trainer.fit(X, Y, validation=(X, Y), batch_size=25, epochs=2)
    axes = og.plot.plot_history(trainer)
    train, validation = axes.get_lines()
    assert axes.get_xlabel() == "step"
    assert train.get_xdata().tolist() == [2, 4]
    assert validation.get_xdata().tolist() == [1, 2, 3, 4]
    stack = og.TrainerStack(linear_model(W), "cross_entropy", learning_rate=[0.1, 0.2])
    assert len(og.plot.plot_history(stack.fit(X, Y, epochs=2)).get_lines()) == 2
