"""Callbacks of `Trainer`: their list, early stopping, the history, norms and times."""

from __future__ import annotations

import csv
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.training.callbacks.base import Callback, Callbacks, TrainingControl
from onnxgrad.training.callbacks.diagnostics import Norms, Timing
from onnxgrad.training.callbacks.early_stopping import EarlyStopping, better_direction
from onnxgrad.training.callbacks.history import History
from tests.support.errors import naming
from tests.support.fake_trainer import State, Trainer
from tests.support.models import initializer_arrays
from tests.support.running import in_sweep
from tests.support.trainings import linear_model

X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
Y = X @ np.float32([[2], [3]])

# -- the list of callbacks ------------------------------------------------------------------------


class Recorder(Callback):
    """Notes events in a common list, and fails in one of them."""

    def __init__(self, name, events, fails="", error=None):
        self.name, self.events = name, events
        self.fails, self.error = fails, error or ValueError("wrong")

    def __getattribute__(self, event):
        if not event.startswith("on_"):
            return super().__getattribute__(event)

        def note(trainer, state, control):
            self.events.append((self.name, event.removeprefix("on_"), state.stop_reason))
            if event == f"on_{self.fails}":
                raise self.error

        return note


def test_events_come_in_order():
    events = []
    Trainer([0.5]).fit(Recorder("a", events), Recorder("b", events), epochs=1)
    names = ["train_begin", "epoch_begin", "step_end", "step_end", "evaluate", "epoch_end"]
    expected = [(who, name, None) for name in names for who in "ab"]
    assert events == [*expected, ("a", "train_end", "max_iter"), ("b", "train_end", "max_iter")]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails", ["epoch_begin", "step_end", "epoch_end"])
def test_an_error_in_an_event_ends_all_callbacks_and_is_raised(fails, error):
    events = []
    with pytest.raises(type(error)) as caught:
        Trainer().fit(Recorder("a", events, fails, error), Recorder("b", events))
    assert caught.value is error
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
    assert events[-2:] == [("a", "train_end", reason), ("b", "train_end", reason)]


def test_an_error_at_the_beginning_ends_those_that_began():
    events = []
    with pytest.raises(ValueError, match="wrong"):
        Trainer().fit(Recorder("a", events), Recorder("b", events, "train_begin"))
    assert [e[:2] for e in events] == [
        ("a", "train_begin"),
        ("b", "train_begin"),
        ("a", "train_end"),
    ]


def test_errors_at_the_end_are_all_told():
    events = []
    first, second = (Recorder(n, events, "train_end", OSError(n)) for n in "ab")
    with pytest.raises(OSError, match="a") as caught:
        Trainer().fit(first, second, Recorder("c", events))
    assert events[-1][:2] == ("c", "train_end")
    assert caught.value.__notes__ == ["Recorder-2.on_train_end failed, too: OSError: b"]


def test_what_is_no_callback():
    with pytest.raises(ValueError, match=r"class.* EarlyStopping\(\)"):
        Callbacks([EarlyStopping])
    with pytest.raises(ValueError, match=naming("Callback", "print")):
        Callbacks([print])
    with pytest.raises(ValueError, match=r"pass \[Timing\(...\)\]"):
        Callbacks(Timing())
    timing = Timing()
    with pytest.raises(ValueError, match="twice"):
        Callbacks([timing, timing])
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=naming("every_steps", "Norms", repr(wrong))):
            Callbacks([Norms(every_steps=wrong)])


def test_keys_are_unique_and_the_same_again():
    run = Callbacks([Timing(), Norms(), Timing(), Timing()])
    assert [c.key for c in run.callbacks] == ["Timing", "Norms", "Timing-2", "Timing-3"]
    assert [c.key for c in Callbacks(run.callbacks).callbacks] == [c.key for c in run.callbacks]


def test_stops_are_at_multiples():
    run = Callbacks([Norms(every_steps=6), Norms(every_steps=4), Timing()])
    stops, step = [], 0
    while step < 24:
        step += run.steps_until_stop(step)
        stops.append(step)
    assert stops == [4, 6, 8, 12, 16, 18, 20, 24]
    assert Callbacks([Timing()]).steps_until_stop(3) is None


# -- early stopping -------------------------------------------------------------------------------


def test_stops_and_restores():
    stopping = EarlyStopping(patience=2)
    trainer = Trainer([0.5, 0.3, 0.4, 0.3, 0.1]).fit(stopping, epochs=5)
    state = trainer.state
    assert (state.epoch, state.stop_reason) == (4, "callback")
    assert state.weights["w"].tolist() == [8, 8]
    assert state.buffers["mean"].tolist() == [-8]
    entry = {"best": 0.3, "step": 8, "epoch": 2, "waiting": 2, "stopped": True, "restored": 8}
    assert state.callbacks["EarlyStopping"] == entry


def test_does_not_restore_if_told_so_or_if_the_last_is_best():
    trainer = Trainer([0.1, 0.2]).fit(EarlyStopping(restore=False), epochs=2)
    assert trainer.state.weights["w"].tolist() == [8, 8]
    assert not trainer.state.kept
    trainer = Trainer([0.2, 0.1]).fit(EarlyStopping(), epochs=2)
    assert trainer.state.callbacks["EarlyStopping"]["restored"] is None


@pytest.mark.parametrize(
    ("options", "stops_after"),
    [
        ({"patience": 1}, 3),
        ({"patience": 1, "min_delta": 0.15}, 2),
        ({"monitor": "validation_accuracy", "patience": 1}, 3),
        ({"monitor": "validation_accuracy", "patience": 1, "mode": "min"}, 2),
        ({"monitor": "loss", "patience": 2}, 4),
    ],
)
def test_when_it_stops(options, stops_after):
    trainer = Trainer([0.5, 0.4, 0.45, 0.1, 0.1], losses=[3, 1, 2, 2, 0]).fit(
        EarlyStopping(**options), epochs=5
    )
    assert trainer.state.epoch == stops_after


def test_nan_is_no_improvement():
    trainer = Trainer([np.nan, 0.5, np.nan, np.nan, 0.1]).fit(EarlyStopping(patience=2), epochs=5)
    assert trainer.state.epoch == 4
    assert trainer.state.callbacks["EarlyStopping"]["best"] == 0.5


def test_goes_on_counting_where_training_resumes():
    losses = [0.3, 0.5, 0.4, 0.6, 0.1]
    trainer = Trainer(losses)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(EarlyStopping(patience=3), epochs=5, fail=(12, KeyboardInterrupt()))
    assert trainer.state.weights["w"].tolist() == [12, 12]  # not restored, to go on from there
    state = trainer.state.through_a_file()
    resumed = Trainer(losses).fit(EarlyStopping(patience=3), epochs=5, resume=state)
    assert resumed.state.epoch == 4
    assert resumed.state.weights["w"].tolist() == [4, 4]
    again = Trainer(losses).fit(
        EarlyStopping(patience=3), epochs=5, resume=resumed.state.through_a_file()
    )
    assert again.state.epoch == 4
    assert again.calls == []


@pytest.mark.parametrize(
    "optimizer",
    [
        og.optimizers.adam(),
        og.optimizers.ema(og.optimizers.adam(), 0.99, debias=True),
        in_sweep(og.optimizers.swa(og.optimizers.adam(), start=15)),
        in_sweep(og.optimizers.lookahead(og.optimizers.adam(), every=3)),
        og.optimizers.schedule_free(),
    ],
    ids=str,
)
def test_what_is_exported_is_what_was_best(optimizer):
    """Also where the weights are averages, which depend on slots and on the number of steps."""
    seen = []

    class See(Callback):
        def on_evaluate(self, trainer, state, control):
            values = trainer.evaluated()
            seen.append({name: array.copy() for name, array in values.items()})

    stopping = EarlyStopping(patience=2, min_delta=1e6)  # so that the first is the best
    options = {"optimizer": optimizer, "learning_rate": 0.1, "callbacks": [stopping, See()]}
    trainer = og.Trainer(linear_model([[0], [0]]), "squared_error", **options)
    trainer.fit(X, Y, epochs=5, batch_size=10, validation=(X, Y))
    assert len(seen) == 3
    np.testing.assert_array_equal(initializer_arrays(trainer.model)["w"], seen[0]["w"])
    assert not np.array_equal(seen[0]["w"], seen[2]["w"])
    best = trainer.history[0]["validation_loss"]
    assert trainer.evaluate(X, Y)["loss"] == pytest.approx(best)
    steps = [entry["step"] for entry in trainer.partial_fit(X, Y, batch_size=10).history]
    assert steps == sorted(set(steps))
    assert trainer.state.step == steps[-1]


def test_members_that_had_stopped_do_not_go_on(tmp_path):
    def fit(patience, resume=None):
        callbacks = [og.Checkpoint(tmp_path / "state")]
        if patience:
            callbacks.append(EarlyStopping(patience=patience, min_delta=1e6))
        options = {"learning_rate": [0.1, 0.2], "callbacks": callbacks}
        stack = og.TrainerStack(linear_model([[0], [0]]), "squared_error", **options)
        return stack.fit(X, Y, epochs=5, batch_size=10, validation=(X, Y), resume=resume)

    first = fit(1)
    assert len(first.history) == 2
    assert len(fit(1, tmp_path / "state").history) == 2
    with pytest.raises(ValueError, match=naming("patience=3", "member 0", "patience=1")):
        fit(3, tmp_path / "state")
    with pytest.raises(ValueError, match=naming("frozen", "resume=")):
        fit(None, tmp_path / "state")


def test_a_checkpoint_has_the_state_of_the_last_step_not_the_restored_one(tmp_path):
    def fit(epochs, folder, resume=None):
        callbacks = [EarlyStopping(patience=9, min_delta=1e6), og.Checkpoint(folder)]
        options = {"learning_rate": 0.1, "callbacks": callbacks}
        trainer = og.Trainer(linear_model([[0], [0]]), "squared_error", **options)
        data = {"validation": (X, Y), "batch_size": 10}
        return trainer.fit(X, Y, epochs=epochs, resume=resume, **data)

    whole = fit(4, tmp_path / "whole")
    fit(2, tmp_path / "part")
    resumed = fit(4, tmp_path / "part", resume=tmp_path / "part")
    assert resumed.history == whole.history


def test_names_what_the_history_has():
    with pytest.raises(ValueError, match=naming("'validation_acuracy'", "'validation_accuracy'")):
        Trainer([0.5]).fit(EarlyStopping("validation_acuracy", mode="max"))
    with pytest.raises(ValueError, match=r"Valid: 'loss', 'learning_rate'.*validation="):
        Trainer().fit(EarlyStopping(), epochs=2)
    with pytest.warns(UserWarning, match="never counted"):
        Trainer().fit(EarlyStopping(), epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience"),
        ({"min_delta": -1}, "min_delta"),
        ({"mode": "lowest"}, "mode"),
    ],
)
def test_early_stopping_checks_its_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**options)


def test_which_is_better():
    metrics = [
        SimpleNamespace(name="gap", higher_is_better=False),
        SimpleNamespace(name="size", higher_is_better=None),
    ]
    names = ("loss", "validation_log_loss", "validation_balanced_accuracy", "validation_gap")
    assert [better_direction(name, metrics) for name in names] == ["min", "min", "max", "min"]
    for name in ("validation_size", "validation_loss_accuracy"):
        with pytest.raises(ValueError, match="cannot tell"):
            better_direction(name, metrics)
    trainer = Trainer([1])
    trainer.metrics = metrics
    with pytest.raises(ValueError, match="cannot tell"):
        trainer.fit(EarlyStopping("validation_size"))


# -- the history as a file ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_history_is_on_the_disk_after_every_epoch(tmp_path, suffix):
    path = tmp_path / "new" / f"history.{suffix}"
    seen = []

    class Look(Callback):
        def on_epoch_end(self, trainer, state, control):
            seen.append(rows_of_history(path))

    trainer = Trainer([0.5, np.nan])
    trainer.fit(History(path), Look(), epochs=2)
    assert [len(rows) for rows in seen] == [1, 2]
    assert [row["loss"] for row in seen[-1]] == [1.0, 0.5]
    state = trainer.state.through_a_file()
    state.history[0].pop("validation_accuracy")  # as if a metric were added
    Trainer([0.5, np.nan, 0.2]).fit(History(path), epochs=3, resume=state)
    rows = rows_of_history(path)
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert rows[0].get("validation_accuracy", "") == ""
    assert rows[2]["validation_loss"] == 0.2
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def rows_of_history(path):
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open(newline="") as file:
        return [{k: float(v) if v else "" for k, v in row.items()} for row in csv.DictReader(file)]


def test_history_takes_numbers_of_numpy_and_lists(tmp_path):
    state = State(
        history=[{"step": 1, "loss": np.float32(0.5), "per_class": np.array([1, np.inf])}]
    )
    for suffix in ("csv", "json"):
        History(tmp_path / f"a.{suffix}").on_epoch_end(None, state, TrainingControl())
    assert json.loads((tmp_path / "a.json").read_text()) == [
        {"step": 1, "loss": 0.5, "per_class": [1.0, None]}
    ]
    assert (tmp_path / "a.csv").read_text() == 'step,loss,per_class\n1,0.5,"[1.0, inf]"\n'


def test_history_refuses_other_files(tmp_path):
    with pytest.raises(ValueError, match=r"'\.jsn'.*'\.json'"):
        History(tmp_path / "a.jsn")
    (tmp_path / "a.csv").mkdir()
    trainer = Trainer()
    with pytest.raises(OSError, match="folder"):
        trainer.fit(History(tmp_path / "a.csv"))
    assert trainer.calls == []


# -- norms and times ------------------------------------------------------------------------------


def test_norms_of_every_third_step_and_of_epochs():
    norms = Norms(every_steps=3, keep=3)
    state = Trainer([1, 1, 1]).fit(norms, epochs=3).state
    assert Callbacks([norms]).gradient_norms
    records = state.callbacks["Norms"]["records"]
    assert [r["step"] for r in records] == [8, 9, 12]  # of 3, 4, 6, 8, 9 and 12
    assert records[1]["weight_norms"] == {"w": pytest.approx(9 * 2**0.5)}
    assert records[1]["gradient_norms"] == {"w": pytest.approx(1 / 9)}
    assert [e["gradient_norm"] for e in state.history] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    json.dumps(state.callbacks)


def test_norms_of_all_weights_together():
    state = State(weights={"a": np.float16([3e4, 3e4]), "b": np.float32([[1e5]])}, step=1)
    trainer = SimpleNamespace(gradient_norms={"a": 3.0, "b": 4.0})
    Norms(every_steps=1).on_step_end(trainer, state, TrainingControl())
    [record] = state.callbacks["Norms"]["records"]
    assert record["gradient_norm"] == 5.0
    assert record["weight_norm"] == pytest.approx((2 * 9e8 + 1e10) ** 0.5)


def test_timing_adds_up(caplog):
    with caplog.at_level(logging.INFO, "onnxgrad"):
        state = Trainer([1, 1]).fit(Timing(), epochs=2).state
    assert [e["seconds_waiting"] for e in state.history] == [0.4, 0.4]
    assert [e["seconds_computing"] for e in state.history] == [0.2, 0.2]
    assert state.callbacks["Timing"]["seconds_waiting"] == pytest.approx(0.8)
    assert "waiting for data" in caplog.text
    resumed = Trainer([1, 1, 1]).fit(Timing(), epochs=3, resume=state.through_a_file()).state
    assert resumed.callbacks["Timing"]["seconds_waiting"] == pytest.approx(1.2)
