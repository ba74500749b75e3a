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
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.training import saving
from onnxgrad.training.callbacks.checkpoint import checkpoints
from tests.support.paths import ROOT
from tests.support.running import PATIENCE

BENCHMARKS = ROOT / "benchmarks"
STEPS = 10  # an epoch


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_at_random_moments():
    kill = script("kill_and_resume")
    counts = kill.Harness(epochs=2, units=96, seed=os.getpid()).run(5, "KILL", burst=1)
    assert counts.wrong == []
    assert counts.kills == 5


def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 4)).astype(np.float32)
    return X, (X @ rng.normal(size=(4, 3)) + rng.normal(size=(100, 3))).argmax(axis=1)


def build(*callbacks):
    """Return a trainer whose schedule, dropout, slots and early stopping all have a state."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        mlp (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w1)  r = Tanh(h)  y = MatMul(r, w2) }
        """)
    rng = np.random.default_rng(1)
    for name, shape in (("w1", (4, 8)), ("w2", (8, 3))):
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return og.Trainer(
        model,
        "cross_entropy",
        learning_rate=og.plateau(0.1, patience=0),
        dropout={"r": 0.3},
        metrics=["accuracy"],
        callbacks=[og.EarlyStopping(patience=9), Halfway(), *callbacks],
    )


def fit(trainer, **options):
    X, y = rows()
    return trainer.fit(X, y, **{"epochs": 4, "batch_size": 10, "validation": (X, y), **options})


class Halfway(og.Callback):
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


def equal(one, two):
    """Assert that two trainings have the same results bit for bit."""
    a, b = one.state, two.state
    assert a.history == b.history
    assert (a.step, a.epoch, a.position, a.pending) == (b.step, b.epoch, b.position, b.pending)
    assert a.schedule == b.schedule
    for key in ("EarlyStopping", "Halfway"):
        assert a.callbacks[key] == b.callbacks[key]
    for x, y in ((a.weights, b.weights), (saving.flat(a.slots), saving.flat(b.slots))):
        assert x.keys() == y.keys()
        for name, array in x.items():
            np.testing.assert_array_equal(array, y[name])
    assert one.model.SerializeToString() == two.model.SerializeToString()


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return fit(build())


class Breaking(og.Callback):
    """Calls `act` in an event from a step on, once."""

    def __init__(self, event, step, act):
        self.step, self.act, self.done = step, act, False
        setattr(self, event, self._event)

    def _event(self, trainer, state, control):
        if state.step >= self.step and not self.done:
            self.done = True
            self.act()


def signals(*names):
    def send():
        for name in names:
            signal.raise_signal(getattr(signal, name))

    return send


def fail():
    raise ZeroDivisionError


@pytest.fixture
def handlers():
    """Let signals raise what they raise by default, also where pytest has handlers."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    assert {number: signal.getsignal(number) for number in own} == own
    for number, handler in before.items():
        signal.signal(number, handler)


ACTS = {
    "error": (fail, ZeroDivisionError),
    "INT": (signals("SIGINT"), KeyboardInterrupt),
    "TERM": (signals("SIGTERM"), SystemExit),
}


@pytest.mark.parametrize(
    ("event", "step", "act"),
    [
        *((event, 0, "error") for event in ("step_end", "save")),
        *((event, 13, "INT") for event in ("step_end", "evaluate", "epoch_end", "save")),
        *((event, 20, "error") for event in ("step_end", "evaluate", "epoch_end", "save")),
        ("epoch_begin", 20, "TERM"),
        ("step_end", 40, "TERM"),
        ("epoch_end", 40, "TERM"),
    ],
)
def test_broken_off_in_an_event(whole, handlers, new_threads, tmp_path, event, step, act):
    do, error = ACTS[act]
    callbacks = og.Checkpoint(tmp_path, every_steps=3), Breaking(f"on_{event}", step, do)
    trainer = build(*callbacks)
    with pytest.raises(error) as raised:
        fit(trainer)
    assert error is not SystemExit or raised.value.code == 143
    assert trainer.state.stop_reason == ("error" if act == "error" else "interrupted")
    assert not trainer.state.is_running
    assert not new_threads()
    saved = checkpoints(tmp_path)
    if saved:
        assert og.TrainState.load(saved[-1]).step == trainer.state.step
    equal(fit(build(og.Checkpoint(tmp_path, every_steps=3)), resume=tmp_path), whole)


@pytest.mark.parametrize(("number", "act"), [(3, "INT"), (4, "TERM"), (8, "error")])
def test_broken_off_in_an_evaluation(whole, handlers, tmp_path, monkeypatch, number, act):
    do, error = ACTS[act]
    trainer, calls = build(og.Checkpoint(tmp_path, every_steps=7)), []
    metric = type(trainer.metrics[0])
    update = metric.update

    def updating(*arguments):
        update(*arguments)
        calls.append(None)
        if len(calls) == number:  # in the middle of the metrics of an evaluation
            do()

    monkeypatch.setattr(metric, "update", updating)
    with pytest.raises(error):
        fit(trainer)
    monkeypatch.undo()
    assert og.TrainState.load(checkpoints(tmp_path)[-1]).pending
    equal(fit(build(og.Checkpoint(tmp_path)), resume=tmp_path), whole)


@pytest.mark.parametrize("names", [("SIGINT",) * 3, ("SIGTERM", "SIGINT", "SIGTERM")])
def test_interrupted_while_a_checkpoint_is_written(whole, handlers, tmp_path, monkeypatch, names):
    write, calls = saving._write_synced, []

    def writing(path, data):
        calls.append(path)
        if len(calls) >= 7:  # also those of the last checkpoint, which follows
            signals(*names)()
        write(path, data)

    monkeypatch.setattr(saving, "_write_synced", writing)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        fit(build(og.Checkpoint(tmp_path, every_steps=3)))
    assert raised.type is (KeyboardInterrupt if names[0] == "SIGINT" else SystemExit)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    assert og.TrainState.load(checkpoints(tmp_path)[-1]).stop_reason == "interrupted"
    equal(fit(build(og.Checkpoint(tmp_path)), resume=tmp_path), whole)


def test_a_signal_while_the_last_checkpoint_is_written_ends_the_process(handlers, tmp_path):
    last = Breaking("on_train_end", 0, signals("SIGTERM"))
    last.checkpoints = tmp_path / "others"  # as one that writes checkpoints
    trainer = build(og.Checkpoint(tmp_path), last)
    with pytest.raises(SystemExit):
        fit(trainer, epochs=1)
    assert trainer.state.stop_reason == "max_iter"
    assert og.TrainState.load(checkpoints(tmp_path)[-1]).epoch == 1


def test_an_error_does_not_hide_a_signal(handlers, tmp_path):
    last = Breaking("on_train_end", 0, signals("SIGTERM"))
    last.checkpoints = tmp_path  # as one that writes checkpoints
    with pytest.raises(SystemExit) as raised:
        fit(build(Breaking("on_step_end", 3, fail), last), epochs=1)
    assert isinstance(raised.value.__context__, ZeroDivisionError)


# -- the disk -------------------------------------------------------------------------------------


def test_a_full_disk(whole, tmp_path):
    folder, elsewhere = tmp_path / "full", tmp_path / "elsewhere"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # files end after 500 bytes

    trainer = build(og.Checkpoint(folder, every_steps=3), Breaking("on_step_end", 14, fill))
    try:
        with pytest.raises(OSError, match=r"full.step-0000000015") as raised:
            fit(trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert "Checkpoint.on_train_end failed, too" in raised.value.__notes__[0]
    assert not list(folder.glob(".*"))
    assert [og.TrainState.load(p).step for p in checkpoints(folder)] == [9, 12]
    assert trainer.state.step == 15
    trainer.state.save(elsewhere)
    equal(fit(build(), resume=elsewhere), whole)


def test_an_error_of_writing_names_the_folder(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = og.TrainState()
    state.save(tmp_path / "s")
    monkeypatch.setattr(saving, "_write_synced", full)
    with pytest.raises(OSError, match=r"No space left on device.*tmp.*s'") as raised:
        state.save(tmp_path / "s")
    assert raised.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    og.TrainState.load(tmp_path / "s")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    trainer = build(og.Checkpoint(tmp_path / "file" / "a"))
    weights = trainer.state.weights
    with pytest.raises(OSError, match=r"file"):
        fit(trainer)
    assert trainer.state.weights.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(trainer.state.weights[name], array)


def test_a_folder_that_is_removed_while_training(whole, tmp_path):
    remove = Breaking("on_step_end", 17, lambda: shutil.rmtree(tmp_path / "a"))
    trainer = fit(build(og.Checkpoint(tmp_path / "a", monitor="validation_loss"), remove))
    equal(trainer, whole)
    assert [og.TrainState.load(p).epoch for p in checkpoints(tmp_path / "a")][-2:] == [3, 4]


@pytest.mark.parametrize("leftover", ["partial", "removed", "replaced"])
def test_what_a_crash_leaves_behind(whole, tmp_path, leftover):
    with pytest.raises(ZeroDivisionError):
        fit(build(og.Checkpoint(tmp_path, keep=1), Breaking("on_step_end", 25, fail)))
    (path,) = checkpoints(tmp_path)
    hidden = tmp_path / f".{path.name}.0123.{leftover}"
    if leftover == "replaced":  # the crash came between two renames
        path.rename(hidden)
    else:
        hidden.mkdir()
        (hidden / "state.json").write_text("half")
    equal(fit(build(og.Checkpoint(tmp_path, keep=1)), resume=tmp_path), whole)
    assert not list(tmp_path.glob(".*"))


def test_an_incomplete_copy_is_refused(tmp_path):
    fit(build(og.Checkpoint(tmp_path)), epochs=1)
    (path,) = checkpoints(tmp_path)
    copy = shutil.copytree(path, tmp_path.parent / f"{tmp_path.name}-copy" / path.name)
    assert fit(build(), epochs=1, resume=copy.parent).state.step == STEPS
    (copy / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"incomplete.*weights\.safetensors"):
        fit(build(), resume=copy.parent)


# -- other runs in the same folder ----------------------------------------------------------------


def test_checkpoints_of_a_later_step_are_not_mixed_with_new_ones(tmp_path):
    fit(build(og.Checkpoint(tmp_path)), epochs=2)
    names = [p.name for p in checkpoints(tmp_path)]
    with pytest.raises(ValueError, match=r"begins at step 0.*step-0000000020.*resume="):
        fit(build(og.Checkpoint(tmp_path)))
    with pytest.raises(ValueError, match="begins at step 10"):
        fit(build(og.Checkpoint(tmp_path)), resume=tmp_path / names[0])
    assert [p.name for p in checkpoints(tmp_path)] == names


def test_two_callbacks_in_one_folder_are_refused(tmp_path):
    one = og.Checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match="as another callback does"):
        build(one, og.Checkpoint(tmp_path / "b" / ".." / "a"))
    fit(build(one, og.Checkpoint(tmp_path / "b", every_steps=4)), epochs=1)
    assert len(checkpoints(tmp_path / "b")) == 2


def test_a_finished_training_that_is_resumed_stays_as_it_is(whole, tmp_path):
    fit(build(og.Checkpoint(tmp_path)))
    equal(fit(build(og.Checkpoint(tmp_path)), resume=tmp_path), whole)
    equal(fit(build(og.Checkpoint(tmp_path)), resume=tmp_path, epochs=1), whole)


# -- threads --------------------------------------------------------------------------------------


def test_one_training_at_a_time_and_in_any_thread(whole):
    trainer, entered, go = build(), threading.Event(), threading.Event()

    def wait():
        entered.set()
        go.wait(PATIENCE)

    breaking = Breaking("on_epoch_end", 0, wait)
    trainer.callbacks.callbacks.append(breaking)
    thread = threading.Thread(target=fit, args=(trainer,))
    thread.start()
    assert entered.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="fit is running"):
        fit(trainer)
    go.set()
    thread.join(PATIENCE)
    equal(trainer, whole)


# -- a long training ------------------------------------------------------------------------------


@pytest.mark.sweep
def test_memory_and_sessions_stay_the_same_in_a_long_training(tmp_path, monkeypatch):
    million = script("million_steps")
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
