"""Trainings that are killed, interrupted, or cannot write: each resumes, ends as a whole one."""

import errno
import importlib.util
import os
import resource
import shutil
import signal
import sys
import threading
import tracemalloc

import numpy as np
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.training.callbacks.checkpoint import checkpoints
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.paths import ROOT
from tests.support.running import PATIENCE, in_sweep
from tests.support.trainings import ActAtStep, assert_equal_trainings, default_signal_handlers

STEPS = 10  # an epoch


def benchmark_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kills", [2, in_sweep(5)])
def test_killed_at_random_moments(kills):
    kill = benchmark_script("kill_and_resume")
    counts = kill.Harness(epochs=2, units=96, seed=os.getpid()).run(kills, "KILL", burst=1)
    assert counts.wrong == []
    assert counts.kills == kills


def training_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 4)).astype(np.float32)
    return X, (X @ rng.normal(size=(4, 3)) + rng.normal(size=(100, 3))).argmax(axis=1)


def build_trainer(*callbacks):
    """Return a trainer whose schedule, dropout, slots and early stopping all have a state."""
    rng = np.random.default_rng(1)
    model = parse_model(
        "mlp (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w1) r = Tanh(h) y = MatMul(r, w2) }",
        w1=rng.normal(size=(4, 8)).astype(np.float32),
        w2=rng.normal(size=(8, 3)).astype(np.float32),
    )
    return og.Trainer(
        model,
        "cross_entropy",
        learning_rate=og.schedules.plateau(0.1, patience=0),
        dropout={"r": 0.3},
        metrics=["accuracy"],
        callbacks=[og.EarlyStopping(patience=9), Halfway(), *callbacks],
    )


def fit_rows(trainer, **options):
    X, y = training_rows()
    return trainer.fit(X, y, **{"epochs": 4, "batch_size": 10, "validation": (X, y), **options})


class Halfway(og.callbacks.Callback):
    """Evaluates within epochs, and counts the events that it gets."""

    def on_train_begin(self, trainer, state, control):
        self.every_steps = STEPS // 2

    def on_step_end(self, trainer, state, control):
        if state.step % STEPS == STEPS // 2:
            control.evaluate = True
            entry = self.entry(state)
            entry["steps"] = [*entry.get("steps", []), state.step]

    def on_epoch_end(self, trainer, state, control):
        self.entry(state)["epochs"] = self.entry(state).get("epochs", 0) + 1


def assert_same_end(one, two):
    """Assert that two trainings have the same results bit for bit."""
    assert_equal_trainings(one, two)
    for key in ("EarlyStopping", "Halfway"):
        assert one.state.callbacks[key] == two.state.callbacks[key]
    assert one.model.SerializeToString() == two.model.SerializeToString()


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return fit_rows(build_trainer())


def breaking(event, step, act):
    """Return a callback that breaks off in an event of its own accord, from a step on."""
    return ActAtStep(event, step, act, every_steps=None)


def raising_signals(*names):
    """Return what sends signals to this process, as a callback or without arguments."""

    def send(*_):
        for name in names:
            signal.raise_signal(getattr(signal, name))

    return send


def divide_by_zero(*_):
    raise ZeroDivisionError


@pytest.fixture
def handlers():
    with default_signal_handlers():
        yield


ACTS = {
    "error": (divide_by_zero, ZeroDivisionError),
    "INT": (raising_signals("SIGINT"), KeyboardInterrupt),
    "TERM": (raising_signals("SIGTERM"), SystemExit),
}


@pytest.mark.parametrize(
    ("event", "step", "act"),
    [
        ("step_end", 0, "error"),
        in_sweep("save", 0, "error"),
        *((event, 13, "INT") for event in ("step_end", "evaluate")),
        *(in_sweep(event, 13, "INT") for event in ("epoch_end", "save")),
        *((event, 20, "error") for event in ("epoch_end", "save")),
        *(in_sweep(event, 20, "error") for event in ("step_end", "evaluate")),
        ("epoch_begin", 20, "TERM"),
        in_sweep("step_end", 40, "TERM"),
        ("epoch_end", 40, "TERM"),
    ],
)
def test_broken_off_in_an_event(whole, handlers, new_threads, tmp_path, event, step, act):
    do, error = ACTS[act]
    callbacks = og.Checkpoint(tmp_path, every_steps=3), breaking(event, step, do)
    trainer = build_trainer(*callbacks)
    with pytest.raises(error) as raised:
        fit_rows(trainer)
    assert error is not SystemExit or raised.value.code == 143
    assert trainer.state.stop_reason == ("error" if act == "error" else "interrupted")
    assert not trainer.state.is_running
    assert not new_threads()
    saved = checkpoints(tmp_path)
    if saved:
        assert og.callbacks.TrainState.load(saved[-1]).step == trainer.state.step
    assert_same_end(
        fit_rows(build_trainer(og.Checkpoint(tmp_path, every_steps=3)), resume=tmp_path), whole
    )


@pytest.mark.parametrize(("number", "act"), [(3, "INT"), in_sweep(4, "TERM"), in_sweep(8, "error")])
def test_broken_off_in_an_evaluation(whole, handlers, tmp_path, monkeypatch, number, act):
    do, error = ACTS[act]
    trainer, calls = build_trainer(og.Checkpoint(tmp_path, every_steps=7)), []
    metric = type(trainer.metrics[0])
    update = metric.update

    def updating(*arguments):
        update(*arguments)
        calls.append(None)
        if len(calls) == number:  # in the middle of the metrics of an evaluation
            do()

    monkeypatch.setattr(metric, "update", updating)
    with pytest.raises(error):
        fit_rows(trainer)
    monkeypatch.undo()
    assert og.callbacks.TrainState.load(checkpoints(tmp_path)[-1]).pending
    assert_same_end(fit_rows(build_trainer(og.Checkpoint(tmp_path)), resume=tmp_path), whole)


@pytest.mark.parametrize("names", [("SIGTERM", "SIGINT", "SIGTERM"), in_sweep(("SIGINT",) * 3)])
def test_interrupted_while_a_checkpoint_is_written(whole, handlers, tmp_path, monkeypatch, names):
    sync, calls = os.fsync, []

    def syncing(descriptor):
        calls.append(descriptor)
        if len(calls) >= 7:  # also those of the last checkpoint, which follows
            raising_signals(*names)()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", syncing)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        fit_rows(build_trainer(og.Checkpoint(tmp_path, every_steps=3)))
    assert raised.type is (KeyboardInterrupt if names[0] == "SIGINT" else SystemExit)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    assert og.callbacks.TrainState.load(checkpoints(tmp_path)[-1]).stop_reason == "interrupted"
    assert_same_end(fit_rows(build_trainer(og.Checkpoint(tmp_path)), resume=tmp_path), whole)


def test_a_signal_while_the_last_checkpoint_is_written_ends_the_process(handlers, tmp_path):
    last = breaking("train_end", 0, raising_signals("SIGTERM"))
    last.checkpoints = tmp_path / "others"  # as one that writes checkpoints
    trainer = build_trainer(og.Checkpoint(tmp_path), last)
    with pytest.raises(SystemExit):
        fit_rows(trainer, epochs=1)
    assert trainer.state.stop_reason == "max_iter"
    assert og.callbacks.TrainState.load(checkpoints(tmp_path)[-1]).epoch == 1


def test_an_error_does_not_hide_a_signal(handlers, tmp_path):
    last = breaking("train_end", 0, raising_signals("SIGTERM"))
    last.checkpoints = tmp_path  # as one that writes checkpoints
    with pytest.raises(SystemExit) as raised:
        fit_rows(build_trainer(breaking("step_end", 3, divide_by_zero), last), epochs=1)
    assert isinstance(raised.value.__context__, ZeroDivisionError)


# -- the disk -------------------------------------------------------------------------------------


def test_a_full_disk(whole, tmp_path):
    folder, elsewhere = tmp_path / "full", tmp_path / "elsewhere"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved = og.callbacks.TrainState()
    saved.save(tmp_path / "saved")

    def fill(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # files end after 500 bytes

    trainer = build_trainer(og.Checkpoint(folder, every_steps=3), breaking("step_end", 14, fill))
    try:
        with pytest.raises(OSError, match=r"full.step-0000000015") as raised:
            fit_rows(trainer)
        with pytest.raises(OSError, match="saved"):
            trainer.state.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert "Checkpoint.on_train_end" in raised.value.__notes__[0]
    assert not [*folder.glob(".*"), *tmp_path.glob(".*")]
    assert og.callbacks.TrainState.load(tmp_path / "saved").step == 0  # it is not replaced
    assert [og.callbacks.TrainState.load(p).step for p in checkpoints(folder)] == [9, 12]
    assert trainer.state.step == 15
    trainer.state.save(elsewhere)
    assert_same_end(fit_rows(build_trainer(), resume=elsewhere), whole)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    trainer = build_trainer(og.Checkpoint(tmp_path / "file" / "a"))
    weights = trainer.state.weights
    with pytest.raises(OSError, match=r"file"):
        fit_rows(trainer)
    np.testing.assert_equal(trainer.state.weights, weights)


def test_a_folder_that_is_removed_while_training(whole, tmp_path):
    remove = breaking("step_end", 17, lambda _: shutil.rmtree(tmp_path / "a"))
    trainer = fit_rows(
        build_trainer(og.Checkpoint(tmp_path / "a", monitor="validation_loss"), remove)
    )
    assert_same_end(trainer, whole)
    assert [og.callbacks.TrainState.load(p).epoch for p in checkpoints(tmp_path / "a")][-2:] == [
        3,
        4,
    ]


@pytest.mark.parametrize("leftover", ["partial", "removed", "replaced"])
def test_what_a_crash_leaves_behind(whole, tmp_path, leftover):
    with pytest.raises(ZeroDivisionError):
        fit_rows(
            build_trainer(og.Checkpoint(tmp_path, keep=1), breaking("step_end", 25, divide_by_zero))
        )
    (path,) = checkpoints(tmp_path)
    hidden = tmp_path / f".{path.name}.0123.{leftover}"
    if leftover == "replaced":  # the crash came between two renames
        path.rename(hidden)
    else:
        hidden.mkdir()
        (hidden / "state.json").write_text("half")
    assert_same_end(
        fit_rows(build_trainer(og.Checkpoint(tmp_path, keep=1)), resume=tmp_path), whole
    )
    assert not list(tmp_path.glob(".*"))


def test_an_incomplete_copy_is_refused(tmp_path):
    fit_rows(build_trainer(og.Checkpoint(tmp_path)), epochs=1)
    (path,) = checkpoints(tmp_path)
    copy = shutil.copytree(path, tmp_path.parent / f"{tmp_path.name}-copy" / path.name)
    assert fit_rows(build_trainer(), epochs=1, resume=copy.parent).state.step == STEPS
    (copy / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"incomplete.*weights\.safetensors"):
        fit_rows(build_trainer(), resume=copy.parent)


# -- other runs in the same folder ----------------------------------------------------------------


def test_checkpoints_of_a_later_step_are_not_mixed_with_new_ones(tmp_path):
    fit_rows(build_trainer(og.Checkpoint(tmp_path)), epochs=2)
    names = [p.name for p in checkpoints(tmp_path)]
    with pytest.raises(ValueError, match=naming("step 0", "step-0000000020", "resume=")):
        fit_rows(build_trainer(og.Checkpoint(tmp_path)))
    with pytest.raises(ValueError, match=naming("step 10", "step-0000000020")):
        fit_rows(build_trainer(og.Checkpoint(tmp_path)), resume=tmp_path / names[0])
    assert [p.name for p in checkpoints(tmp_path)] == names


def test_two_callbacks_in_one_folder_are_refused(tmp_path):
    one = og.Checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=naming("another callback", "a")):
        build_trainer(one, og.Checkpoint(tmp_path / "b" / ".." / "a"))
    fit_rows(build_trainer(one, og.Checkpoint(tmp_path / "b", every_steps=4)), epochs=1)
    assert len(checkpoints(tmp_path / "b")) == 2


def test_a_finished_training_that_is_resumed_stays_as_it_is(whole, tmp_path):
    fit_rows(build_trainer(og.Checkpoint(tmp_path)))
    assert_same_end(fit_rows(build_trainer(og.Checkpoint(tmp_path)), resume=tmp_path), whole)
    assert_same_end(
        fit_rows(build_trainer(og.Checkpoint(tmp_path)), resume=tmp_path, epochs=1), whole
    )


# -- threads --------------------------------------------------------------------------------------


def test_one_training_at_a_time_and_in_any_thread(whole):
    trainer, entered, go = build_trainer(), threading.Event(), threading.Event()

    def wait(control):
        entered.set()
        go.wait(PATIENCE)

    trainer._job.callbacks.callbacks.append(breaking("epoch_end", 0, wait))
    thread = threading.Thread(target=fit_rows, args=(trainer,))
    thread.start()
    assert entered.wait(PATIENCE)
    with pytest.raises(RuntimeError, match=naming("running", "its end")):
        fit_rows(trainer)
    go.set()
    thread.join(PATIENCE)
    assert_same_end(trainer, whole)


# -- a long training ------------------------------------------------------------------------------


@pytest.mark.sweep
def test_memory_and_sessions_stay_the_same_in_a_long_training(tmp_path, monkeypatch):
    million = benchmark_script("million_steps")
    monkeypatch.setattr(ort.InferenceSession, "__init__", ort.InferenceSession.__init__)
    monkeypatch.setattr(million, "EVERY", 10)
    million.Sessions.counted()
    slopes = []
    while len(slopes) < 2 and not any(slope < 2.5 for slope in slopes):
        before = million.Sessions.count
        try:
            sampler = million.train(20_000, 1000, million.traced, tmp_path / str(len(slopes)))
        finally:
            tracemalloc.stop()
        assert sampler.sessions == [before + 2] * 10  # the second one evaluates
        assert million.Sessions.count == before + 2
        slopes.append(million.slope(sampler.samples[8:])[0])
    # bytes a step; a float in a list at every call of the runtime would be 3.2 more, in every run:
    # what is collected late, as on a busy machine, is in some
    assert min(slopes) < 2.5
