"""What a stop means for its epoch, for a resume, for `partial_fit` and for a second `fit`."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.trainings import (
    ActAtStep,
    assert_equal_trainings,
    linear_model,
    stop_training,
)

pytestmark = pytest.mark.filterwarnings("ignore:EarlyStopping never counted")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = (X @ np.float32([[0.5], [-1], [2]]) + 0.5 * RNG.normal(size=(64, 1))).astype(np.float32)
OTHER = (X @ np.float32([[5], [5], [5]])).astype(np.float32)  # of another law
SIZE, STEPS, EPOCHS = 16, 4, 5
VALIDATION = X[:16], Y[:16]
BATCHES = [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, 64, SIZE)]


class UncountedBatches:
    """Batches whose number is unknown."""

    def __iter__(self):
        return iter(BATCHES)


FORMS = {"arrays": (X, Y), "list": (BATCHES,), "unknown": (UncountedBatches(),)}


def stopping_trainer(*callbacks, rate=None, optimizer="adam"):
    rate = rate or og.schedules.plateau(0.2, 0.5, 0, threshold=0.05)
    options = {"optimizer": optimizer, "learning_rate": rate, "callbacks": callbacks}
    return og.Trainer(linear_model([[1], [2], [3]]), "mse", **options)


def fit_form(made, form="arrays", **more):
    options = {"epochs": EPOCHS, "batch_size": SIZE, "validation": VALIDATION, **more}
    return made.fit(*FORMS[form], **options)


@pytest.fixture(scope="module")
def whole_trainings():
    """Trainings that nothing stops, by the form of their data."""
    return {form: fit_form(stopping_trainer(og.EarlyStopping(patience=99)), form) for form in FORMS}


EVENTS = [
    ("train_begin", 0, 0),
    ("epoch_begin", 4, 1),
    ("step_end", 3, 0),
    ("step_end", 4, 1),  # the last one of the first epoch
    ("step_end", 7, 1),
    ("step_end", 8, 2),
    ("step_end", 20, 5),
    ("evaluate", 8, 2),
    ("epoch_end", 4, 1),
    ("save", 8, 2),
]
OTHER_FORMS = {"list": ("step_end", 4, 1), "unknown": ("step_end", 3, 0)}
CASES = [
    (form, *event) if event == OTHER_FORMS.get(form, event) else in_sweep(form, *event)
    for form in FORMS
    for event in EVENTS
]


@pytest.mark.parametrize(("form", "event", "step", "finished"), CASES)
def test_a_stopped_training_is_resumed_as_if_it_had_not_stopped(
    form, event, step, finished, whole_trainings, tmp_path
):
    def checkpointed(*callbacks):
        kept = og.EarlyStopping(patience=99), og.Checkpoint(tmp_path / "parts")
        return stopping_trainer(*callbacks, *kept)

    whole = whole_trainings[form]
    stopped = fit_form(checkpointed(ActAtStep(event, step, stop_training)), form)
    assert stopped.state.epoch == finished
    assert stopped.history == whole.history[:finished]
    assert all("validation_loss" in entry for entry in stopped.history)
    if step:
        assert (stopped.state.step, stopped.state.stop_reason) == (step, "callback")
    resumed = fit_form(checkpointed(), form, resume=tmp_path / "parts")
    assert_equal_trainings(resumed, whole)


@pytest.mark.parametrize("form", ["arrays", "unknown", in_sweep("list")])
def test_the_epoch_of_a_stop_at_its_end_is_not_thrown_away(form):
    """The witness is a training of as many epochs."""
    stopping = ActAtStep("step_end", 8, stop_training)
    stopped = fit_form(stopping_trainer(stopping, og.EarlyStopping(), rate=0.05), form)
    shorter = fit_form(stopping_trainer(og.EarlyStopping(), rate=0.05), form, epochs=2)
    assert stopped.evaluate(*VALIDATION) == shorter.evaluate(*VALIDATION)
    assert_equal_trainings(stopped, shorter)


STOPPING = {
    "validation": lambda: og.EarlyStopping(patience=1, min_delta=100),
    "loss": lambda: og.EarlyStopping("loss", patience=1, min_delta=100),
    "not restored": lambda: og.EarlyStopping(patience=1, min_delta=100, restore=False),
    "not stopped": lambda: og.EarlyStopping(patience=99),
    "within": lambda: ActAtStep("step_end", 6, stop_training),
    "at the end": lambda: ActAtStep("step_end", 8, stop_training),
}
OPTIMIZERS = {
    "adam": "adam",
    "ema": og.optimizers.ema(og.optimizers.adam(), 0.9),
    "schedule_free": "schedule_free",
}
STOPPED_BY = [
    *((stopping, "adam") for stopping in STOPPING),
    ("validation", "ema"),
    ("within", "schedule_free"),
]


@pytest.mark.parametrize(
    ("stopping", "optimizer"),
    [
        case if case in STOPPED_BY else in_sweep(*case)
        for case in [(stopping, optimizer) for optimizer in OPTIMIZERS for stopping in STOPPING]
    ],
)
def test_partial_fit_goes_on_after_a_stop_and_a_second_fit_begins_anew(stopping, optimizer):
    """The witness is a trainer without callbacks that has the same state."""
    options = {"rate": 0.1, "optimizer": OPTIMIZERS[optimizer]}
    made, plain = stopping_trainer(STOPPING[stopping](), **options), stopping_trainer(**options)
    fit_form(made)
    expected = "max_iter" if stopping == "not stopped" else "callback"
    assert made.state.stop_reason == expected
    assert made.state.epoch < EPOCHS or expected == "max_iter"
    plain.state = made.state.copy()
    epoch, step, seen = made.state.epoch, made.state.step, []
    for count in (1, 2, 3):
        for one in (made, plain):
            one.partial_fit(X, OTHER, batch_size=SIZE)
        assert_equal_trainings(made, plain)
        assert (made.state.epoch, made.state.step) == (epoch + count, step + count * STEPS)
        seen.append(made.evaluate(X, OTHER)["loss"])
    assert seen == sorted(seen, reverse=True)  # no piece was thrown away
    anew = stopping_trainer(**options)
    anew.state.weights = made._job.weights_to_begin(
        made.state
    )  # the averages, where the optimizer averages
    assert_equal_trainings(fit_form(made, epochs=1), fit_form(anew, epochs=1))
    assert made.state.epoch == 1


@pytest.mark.parametrize("monitor", ["validation_loss", "loss"])
def test_early_stopping_stops_again_where_it_had_stopped(monitor, tmp_path):
    def patient(patience):
        stopping = og.EarlyStopping(monitor, patience=patience, min_delta=100)
        return stopping_trainer(stopping, og.Checkpoint(tmp_path), rate=0.1)

    stopped = fit_form(patient(1))
    assert stopped.state.epoch < EPOCHS
    assert_equal_trainings(fit_form(patient(1), resume=tmp_path), stopped)
    assert fit_form(patient(99), resume=tmp_path).state.epoch == EPOCHS


def test_callbacks_know_a_further_call():
    seen = []

    class Further(og.callbacks.Callback):
        def on_train_begin(self, trainer, state, control):
            seen.append(state.further)

    made = fit_form(stopping_trainer(Further(), rate=0.1))
    made.partial_fit(X, Y)
    assert not made.state.further
    fit_form(made)
    assert seen == [False, True, False]


def test_partial_fit_says_that_it_has_no_validation_data():
    made = stopping_trainer(rate=og.schedules.plateau(0.1))
    with pytest.raises(ValueError, match=naming("['validation_loss']", "partial_fit", "call fit")):
        made.partial_fit(X, Y)
