"""Pruning of trials, with Optuna itself."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.trainings import linear_model

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)

MODEL = linear_model([[0], [0]])
X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.float32([[2], [3]])
RATES = [0.1, 0.05, 0.0001]


class AtThreshold(optuna.pruners.BasePruner):
    """Prunes from a step on, in the trial with this number."""

    def __init__(self, number, step):
        self.number, self.step = number, step

    def prune(self, study, trial):
        return trial.number == self.number and trial.last_step >= self.step


def last_validation_loss(trial, callback=None, **options):
    rate = RATES[trial.number % len(RATES)]
    own = og.callbacks.OptunaPruning(trial, **options)
    callbacks = [own] if callback is None else [callback, own]
    trainer = og.Trainer(
        MODEL, "squared_error", optimizer="sgd", learning_rate=rate, callbacks=callbacks
    )
    trial.set_user_attr("losses", [])
    try:
        trainer.fit(X, Y, validation=(X, Y), epochs=4, batch_size=10)
    finally:
        trial.set_user_attr("losses", [e["validation_loss"] for e in trainer.history])
    return trainer.history[-1]["validation_loss"]


def test_median_pruner_ends_the_bad_trial():
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    study.optimize(last_validation_loss, n_trials=3)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED"]
    for trial in study.trials:
        values = list(trial.intermediate_values.values())
        assert values == trial.user_attrs["losses"]
        assert list(trial.intermediate_values) == list(range(1, len(values) + 1))
    assert len(study.trials[2].intermediate_values) == 1


def test_evaluations_within_epochs_have_the_step_of_the_training():
    class Often(og.callbacks.Callback):
        every_steps = 2

        def on_step_end(self, trainer, state, control):
            control.evaluate = state.step % 2 == 0

    study = optuna.create_study(pruner=AtThreshold(0, 6))
    study.optimize(lambda t: last_validation_loss(t, Often(), every="evaluation"), n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "PRUNED"
    assert list(trial.intermediate_values) == [2, 4, 6]


def test_other_callbacks_end_before_it_is_raised(tmp_path):
    study = optuna.create_study(pruner=AtThreshold(0, 2))
    study.optimize(lambda t: last_validation_loss(t, og.Checkpoint(tmp_path)), n_trials=1)
    assert study.trials[0].state.name == "PRUNED"
    assert list(tmp_path.iterdir())
    assert len(study.trials[0].user_attrs["losses"]) == 2  # the last epoch stays in the history


def test_directions():
    study = optuna.create_study(direction="maximize")
    with pytest.raises(ValueError, match="direction='minimize'"):
        study.optimize(last_validation_loss, n_trials=1)
    several = optuna.create_study(directions=["minimize", "minimize"])
    with pytest.raises(ValueError, match="objectives"):
        several.optimize(lambda t: (last_validation_loss(t), 0.0), n_trials=1)
    up = optuna.create_study(direction="maximize")

    def objective(trial):
        pruning = og.callbacks.OptunaPruning(trial, "validation_r2")
        trainer = og.Trainer(MODEL, "squared_error", metrics=["r2"], callbacks=[pruning])
        trainer.fit(X, Y, validation=(X, Y), epochs=2)
        return trainer.history[-1]["validation_r2"]

    up.optimize(objective, n_trials=1)
    assert len(up.trials[0].intermediate_values) == 2


def test_resumed_training_reports_what_its_trial_lacks(tmp_path):
    study = optuna.create_study()

    def fit(trial, epochs, resume=None):
        own = [og.Checkpoint(tmp_path), og.callbacks.OptunaPruning(trial)]
        trainer = og.Trainer(MODEL, "squared_error", optimizer="sgd", callbacks=own)
        trainer.fit(X, Y, validation=(X, Y), epochs=epochs, resume=resume)
        return [entry["validation_loss"] for entry in trainer.history]

    first = study.ask()
    fit(first, 2)
    losses = fit(first, 3, tmp_path)
    study.tell(first, losses[-1])
    assert study.trials[0].intermediate_values == dict(enumerate(losses, 1))
    second = study.ask()
    losses = fit(second, 4, tmp_path)
    study.tell(second, losses[-1])
    assert study.trials[1].intermediate_values == dict(enumerate(losses, 1))


def test_unknown_monitor_and_stacks():
    study = optuna.create_study()
    with pytest.raises(ValueError, match="validation_accuracy"):
        study.optimize(lambda t: last_validation_loss(t, monitor="validation_accuracy"), n_trials=1)
    with pytest.raises(ValueError, match="every"):
        og.callbacks.OptunaPruning(study.ask(), every="step")
    pruning = og.callbacks.OptunaPruning(study.ask())
    with pytest.raises(ValueError, match="one model"):
        og.TrainerStack(MODEL, "squared_error", learning_rate=[0.1, 0.2], callbacks=[pruning])
    fixed = optuna.trial.FixedTrial({})
    og.Trainer(MODEL, "squared_error", callbacks=[og.callbacks.OptunaPruning(fixed, "loss")]).fit(
        X, Y
    )
