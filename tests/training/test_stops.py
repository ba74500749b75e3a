"""What a stop means for its epoch, for a resume, for `partial_fit` and for a second `fit`."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og

pytestmark = [
    pytest.mark.filterwarnings("ignore:EarlyStopping never counted"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = (X @ np.float32([[0.5], [-1], [2]]) + 0.5 * RNG.normal(size=(64, 1))).astype(np.float32)
OTHER = (X @ np.float32([[5], [5], [5]])).astype(np.float32)  # of another law
SIZE, STEPS, EPOCHS = 16, 4, 5
VALIDATION = X[:16], Y[:16]


def batches():
    return [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, 64, SIZE)]


class Unknown:
    """Batches whose number is unknown."""

    def __iter__(self):
        return iter(batches())


FORMS = {"arrays": (X, Y), "list": (batches(),), "unknown": (Unknown(),)}


def trainer(*callbacks, rate=None, optimizer="adam", start=None):
    model = start or onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        f (float[N,3] x) => (float[N,1] y) <float[3,1] w = {1,2,3}> { y = MatMul(x, w) }""")
    rate = rate or og.plateau(0.2, 0.5, 0, threshold=0.05)
    return og.Trainer(model, "mse", optimizer=optimizer, learning_rate=rate, callbacks=callbacks)


def fit(made, form="arrays", **more):
    options = {"epochs": EPOCHS, "batch_size": SIZE, "validation": VALIDATION, **more}
    return made.fit(*FORMS[form], **options)


class StopAt(og.Callback):
    """Sets `control.stop` in one event, at one step."""

    every_steps = 1

    def __init__(self, event, step):
        self.event, self.step = event, step

    def __getattribute__(self, name):
        if not name.startswith("on_") or name == "on_not_finite":
            return super().__getattribute__(name)

        def stop(trainer, state, control):
            if name == self.event and state.step == self.step:
                control.stop = True

        return stop


def same(one, two):
    np.testing.assert_equal(one.state.weights, two.state.weights)
    np.testing.assert_equal(one.state.slots, two.state.slots)
    assert one.history == two.history
    assert one.state.schedule == two.state.schedule


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("event", "step", "finished"),
    [
        ("on_train_begin", 0, 0),
        ("on_epoch_begin", 4, 1),
        ("on_step_end", 3, 0),
        ("on_step_end", 4, 1),  # the last one of the first epoch
        ("on_step_end", 7, 1),
        ("on_step_end", 8, 2),
        ("on_step_end", 20, 5),
        ("on_evaluate", 8, 2),
        ("on_epoch_end", 4, 1),
        ("on_save", 8, 2),
    ],
)
def test_a_stopped_training_is_resumed_as_if_it_had_not_stopped(
    event, step, finished, form, tmp_path
):
    def made(folder, *callbacks):
        return trainer(*callbacks, og.EarlyStopping(patience=99), og.Checkpoint(tmp_path / folder))

    whole = fit(made("whole"), form)
    stopped = fit(made("parts", StopAt(event, step)), form)
    assert stopped.state.epoch == finished
    assert len(stopped.history) == finished
    assert all("validation_loss" in entry for entry in stopped.history)
    assert stopped.history == whole.history[:finished]
    if step:
        assert (stopped.state.step, stopped.state.stop_reason) == (step, "callback")
    resumed = fit(made("parts"), form, resume=tmp_path / "parts")
    same(resumed, whole)


@pytest.mark.parametrize("form", FORMS)
def test_the_epoch_of_a_stop_at_its_end_is_not_thrown_away(form):
    """The witness is a training of as many epochs."""
    stopped = fit(trainer(StopAt("on_step_end", 8), og.EarlyStopping(), rate=0.05), form)
    shorter = fit(trainer(og.EarlyStopping(), rate=0.05), form, epochs=2)
    assert stopped.evaluate(*VALIDATION) == shorter.evaluate(*VALIDATION)
    same(stopped, shorter)


STOPPING = {
    "validation": lambda: og.EarlyStopping(patience=1, min_delta=100),
    "loss": lambda: og.EarlyStopping("loss", patience=1, min_delta=100),
    "not restored": lambda: og.EarlyStopping(patience=1, min_delta=100, restore=False),
    "not stopped": lambda: og.EarlyStopping(patience=99),
    "within": lambda: StopAt("on_step_end", 6),
    "at the end": lambda: StopAt("on_step_end", 8),
}


@pytest.mark.parametrize("optimizer", ["adam", og.ema(og.adam(), 0.9), "schedule_free"], ids=str)
@pytest.mark.parametrize("stopping", STOPPING)
class TestAfterAStop:
    """The witness is a trainer without callbacks that has the same state."""

    def stopped(self, stopping, optimizer):
        made = fit(trainer(STOPPING[stopping](), rate=0.1, optimizer=optimizer))
        expected = "max_iter" if stopping == "not stopped" else "callback"
        assert made.state.stop_reason == expected
        assert made.state.epoch < EPOCHS or expected == "max_iter"
        return made

    def test_partial_fit_trains_and_keeps_it(self, stopping, optimizer):
        made, plain = self.stopped(stopping, optimizer), trainer(rate=0.1, optimizer=optimizer)
        plain.state = made.state.copy()
        epoch, step = made.state.epoch, made.state.step
        seen = []
        for count in (1, 2, 3):
            made.partial_fit(X, OTHER, batch_size=SIZE)
            plain.partial_fit(X, OTHER, batch_size=SIZE)
            same(made, plain)
            assert (made.state.epoch, made.state.step) == (epoch + count, step + count * STEPS)
            seen.append(made.evaluate(X, OTHER)["loss"])
        assert seen == sorted(seen, reverse=True)  # no piece was thrown away

    def test_a_second_fit_begins_anew(self, stopping, optimizer):
        made = self.stopped(stopping, optimizer)
        plain = trainer(rate=0.1, optimizer=optimizer)
        plain.state.weights = made.state.weights
        same(fit(made, epochs=1), fit(plain, epochs=1))
        assert made.state.epoch == 1


@pytest.mark.parametrize("monitor", ["validation_loss", "loss"])
def test_early_stopping_stops_again_where_it_had_stopped(monitor, tmp_path):
    def made(patience):
        stopping = og.EarlyStopping(monitor, patience=patience, min_delta=100)
        return trainer(stopping, og.Checkpoint(tmp_path), rate=0.1)

    stopped = fit(made(1))
    assert stopped.state.epoch < EPOCHS
    same(fit(made(1), resume=tmp_path), stopped)
    assert fit(made(99), resume=tmp_path).state.epoch == EPOCHS


def test_callbacks_know_a_further_call():
    seen = []

    class Further(og.Callback):
        def on_train_begin(self, trainer, state, control):
            seen.append(state.further)

    made = fit(trainer(Further(), rate=0.1))
    made.partial_fit(X, Y)
    assert not made.state.further
    fit(made)
    assert seen == [False, True, False]


def test_partial_fit_says_that_it_has_no_validation_data():
    made = trainer(rate=og.plateau(0.1))
    with pytest.raises(ValueError, match=r"\['validation_loss'\]: partial_fit has none, call fit"):
        made.partial_fit(X, Y)
