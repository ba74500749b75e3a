"""Callbacks that show training to people: the progress bar, and trackers of other programs."""

from __future__ import annotations

import io
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.callbacks.diagnostics import Norms
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.callbacks.trackers import MLflow, TensorBoard, WeightsAndBiases
from tests.support.fake_trainer import Trainer


def terminal_console(**options) -> tuple[io.StringIO, Console]:
    """Return what is written to a terminal, and the console that writes it."""
    out = io.StringIO()
    return out, Console(file=out, force_terminal=True, **options)


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor

# -- progress -------------------------------------------------------------------------------------


def test_lines_where_stderr_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    Trainer([0.5, 0.25]).fit(Progress(), epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", err)
    assert plain.splitlines() == [
        f"epoch {i}/2: loss 4, validation loss {v}, accuracy {a}, learning rate 0.1, 100,000 rows/s"
        for i, v, a in ((1, 0.5, 0.5), (2, 0.25, 0.75))
    ]


def test_lines_within_an_epoch(capsys):
    Trainer().fit(Progress(seconds=0), epochs=1)
    first, second, end = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 1/1, 50 %: loss 2,")
    assert re.match(r"epoch 1/1, 100 %, 0:00:00 left: loss 4,", second)
    assert end.startswith("epoch 1/1: loss 4,")


def test_an_evaluation_within_an_epoch_gets_a_line(capsys):
    class Evaluate(Callback):
        def on_step_end(self, trainer, state, control):
            if state.step == 2:
                state.history.append({"step": 2, "epoch": 0, "validation_loss": 0.75})
                progress.on_evaluate(trainer, state, control)

    progress = Progress()
    Trainer().fit(progress, Evaluate(), epochs=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 2: validation loss 0.75"
    assert lines[1].startswith("epoch 1/1: loss 4")
    assert "validation" not in lines[1]


@pytest.mark.parametrize("fail", [None, (2, KeyboardInterrupt()), (2, ValueError())])
def test_the_bar_ends_with_training_and_shows_the_cursor_again(fail):
    out, console = terminal_console(width=120)
    trainer = Trainer([0.5, 0.25])
    if fail:
        with pytest.raises(type(fail[1])):
            trainer.fit(Progress(console=console), epochs=2, fail=fail)
    else:
        trainer.fit(Progress(console=console), epochs=2)
    text = out.getvalue()
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index(SHOW)
    if not fail:
        last = text[text.rindex("epoch 2/2") :]
        assert "0:00:00" in last
        assert "loss 4, validation loss 0.25, accuracy 0.75, learning rate 0.1" in last


@pytest.mark.parametrize("width", [54, 80, 100, 120])
def test_the_bar_fits_a_narrow_terminal(width):
    out, console = terminal_console(width=width, color_system=None)
    Trainer([0.5, 0.25]).fit(Progress(console=console), epochs=2)
    text = out.getvalue()
    line = re.split(r"[\r\n]", text[text.rindex("epoch 2/2") :])[0]
    assert "0:00:00" in line
    assert "loss 4, validation loss 0.25" in line
    assert "\u2026" not in line  # no number is cut off
    assert ("accuracy 0.75" in line) == (width > 54)
    assert ("rows/s" in line) == (width > 80)
    assert ("learning rate" in line) == (width > 100)


def test_a_training_without_steps_shows_no_bar():
    out = io.StringIO()
    Trainer().fit(Progress(console=Console(file=out, force_terminal=True)), epochs=0)
    assert out.getvalue() == ""


def test_names_cannot_control_the_terminal(capsys):
    class Evil(Callback):
        def on_evaluate(self, trainer, state, control):
            state.history[-1]["validation_[red]\x1b[2J"] = 0.5

    Trainer([0.5]).fit(Evil(), Progress(), epochs=1)
    err = capsys.readouterr().err
    assert r"[red]\x1b[2J 0.5" in err
    assert "\x1b" not in err


def test_a_closed_pipe_does_not_end_training():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for terminal in (True, False):
        console = Console(file=Closed(), force_terminal=terminal)
        assert Trainer().fit(Progress(console=console)).state.epoch == 3


# -- trackers -------------------------------------------------------------------------------------


class LoggedNumbers:
    """What was logged: `(step, name): value`; each once."""

    def __init__(self):
        self.points, self.parameters, self.ends = {}, {}, []

    def add(self, values, step):
        for name, value in values.items():
            assert (step, name) not in self.points, "logged twice"
            self.points[step, name] = value

    def curve(self, name):
        return {step: value for (step, n), value in self.points.items() if n == name}


@pytest.fixture
def recorded_mlflow(monkeypatch):
    """A module like mlflow, that only records."""
    module, log = ModuleType("mlflow"), LoggedNumbers()
    module.log, module.active, module.started = log, None, []

    def start_run(run_id=None, run_name=None):
        module.started.append((run_id, run_name))
        module.active = SimpleNamespace(info=SimpleNamespace(run_id=run_id or "id-1"))
        return module.active

    def end_run(status):
        log.ends.append(status)
        module.active = None

    module.start_run, module.end_run = start_run, end_run
    module.active_run = lambda: module.active
    module.log_params = lambda values: log.parameters.update(values)
    module.log_metrics = lambda values, step: log.add(values, step)
    module.set_experiment = lambda name: module.started.append(name)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.fixture
def recorded_wandb(monkeypatch):
    """A module like wandb, that only records."""
    module, log = ModuleType("wandb"), LoggedNumbers()
    module.log, module.run, module.options = log, None, None

    def init(**options):
        module.options = options
        module.run = SimpleNamespace(
            id=options.get("id", "id-1"),
            config=SimpleNamespace(update=lambda v, allow_val_change: log.parameters.update(v)),
            define_metric=lambda name, step_metric: None,
            log=lambda values: log.add(values, values.pop("step")),
            finish=finish,
        )
        return module.run

    def finish(exit_code):
        log.ends.append(exit_code)
        module.run = None

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


TRACKERS = pytest.mark.parametrize(
    ("name", "tracker"), [("mlflow", MLflow), ("wandb", WeightsAndBiases)]
)


@TRACKERS
def test_numbers_are_logged_once_by_step(request, name, tracker):
    log = request.getfixturevalue(f"recorded_{name}").log
    Trainer([0.5, 0.25], alpha=2).fit(tracker(every_steps=2), Norms(every_steps=4), epochs=2)
    assert log.curve("validation_loss") == {4: 0.5, 8: 0.25}
    assert log.curve("loss") == {4: 1, 8: 0.5}
    assert log.curve("learning_rate") == dict.fromkeys((2, 4, 6, 8), 0.1)
    assert log.curve("gradient_norm") == {4: 1 / 4, 8: 1 / 8}
    assert log.curve("gradient_norm/w") == {4: 1 / 4, 8: 1 / 8}
    # the mean loss of 20 rows is 2, of 40 rows 4: that of the second 20 is 6
    assert log.curve("step_loss") == pytest.approx({2: 2, 4: 6, 6: 2, 8: 6})
    assert {k: str(v) for k, v in log.parameters.items()} == {
        "validation": "[0.5, 0.25]",
        "losses": "None",
        "alpha": "2",
        "optimizer": "sgd",
    }


@TRACKERS
def test_a_resumed_training_goes_on_in_its_run(request, name, tracker):
    module = request.getfixturevalue(f"recorded_{name}")
    trainer, losses = Trainer([0.5, 0.25, 0.1]), [0.5, 0.25, 0.1]
    with pytest.raises(ValueError):
        trainer.fit(tracker(), fail=(8, ValueError()))
    assert module.log.ends == [1 if name == "wandb" else "FAILED"]
    Trainer(losses).fit(tracker(), resume=trainer.state.through_a_file())
    assert module.log.curve("validation_loss") == {4: 0.5, 8: 0.25, 12: 0.1}
    assert module.log.ends[1] == (0 if name == "wandb" else "FINISHED")
    if name == "wandb":
        assert module.options == {"id": "id-1", "resume": "allow"}
    else:
        assert module.started == [(None, None), ("id-1", None)]


@TRACKERS
def test_a_tracker_added_later_logs_the_whole_history(request, name, tracker):
    log = request.getfixturevalue(f"recorded_{name}").log
    state = Trainer([0.5, 0.25]).fit(epochs=2).state.through_a_file()
    Trainer([0.5, 0.25, 0.1]).fit(tracker(), resume=state)
    assert log.curve("validation_loss") == {4: 0.5, 8: 0.25, 12: 0.1}


@TRACKERS
def test_an_active_run_is_used_and_stays_open(request, name, tracker):
    module = request.getfixturevalue(f"recorded_{name}")
    module.start_run() if name == "mlflow" else module.init()
    Trainer([0.5]).fit(tracker(), epochs=1)
    assert module.log.curve("loss") == {4: 1}
    assert module.log.ends == []


def test_names_that_mlflow_refuses(recorded_mlflow):
    class Odd(Callback):
        def on_step_end(self, trainer, state, control):
            self.publish(state, {"norm/a[0]:é": 1.0})

    Trainer().fit(Odd(), MLflow(), epochs=1)
    assert recorded_mlflow.log.curve("norm/a_0___") == {2: 1, 4: 1}


@pytest.mark.parametrize(
    ("make", "extra", "modules"),
    [
        (lambda: TensorBoard("a"), "tensorboard", ("tensorboardX", "torch.utils.tensorboard")),
        (MLflow, "mlflow", ("mlflow",)),
        (WeightsAndBiases, "wandb", ("wandb",)),
    ],
)
def test_what_to_install(make, extra, modules, monkeypatch):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{modules[0]}: pip install 'onnxgrad\[{extra}\]'"):
        make()


def test_tensorboard_writes_what_tensorboard_reads(tmp_path):
    pytest.importorskip("tensorboardX")
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    trainer = Trainer([0.5, 0.25, 0.1])
    with pytest.raises(ValueError):
        trainer.fit(TensorBoard(tmp_path, every_steps=2), fail=(10, ValueError()))
    state = Trainer([0.5, 0.25]).fit(epochs=2).state  # a checkpoint of step 8
    state.callbacks = {"TensorBoard": {"records": 2}}
    Trainer([0.5, 0.25, 0.2]).fit(TensorBoard(tmp_path, every_steps=2), resume=state)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    curve = {e.step: e.value for e in events.Scalars("validation_loss")}
    assert curve == pytest.approx({4: 0.5, 8: 0.25, 12: 0.2})
    steps = [e.step for e in events.Scalars("step_loss")]
    assert steps == [2, 4, 6, 8, 10, 12]
    assert b"optimizer" in events.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_itself(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    try:
        trainer = Trainer([0.5, 0.25]).fit(MLflow("e", tracking_uri=uri), epochs=2)
        run_id = trainer.state.callbacks["MLflow"]["run_id"]
        client = mlflow.MlflowClient(uri)
        history = client.get_metric_history(run_id, "validation_loss")
        assert [(m.step, m.value) for m in history] == [(4, 0.5), (8, 0.25)]
        run = client.get_run(run_id)
        assert (run.info.status, run.data.params["alpha"]) == ("FINISHED", "0.5")
    finally:
        mlflow.set_tracking_uri(None)


def test_wandb_itself(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        Trainer([0.5]).fit(WeightsAndBiases(), epochs=1)
        assert run.summary["validation_loss"] == 0.5
        assert run.config["alpha"] == 0.5
    tracker = WeightsAndBiases("p", mode="offline", dir=str(tmp_path))
    state = Trainer([0.5]).fit(tracker, epochs=1).state
    assert wandb.run is None
    run_id = state.callbacks["WeightsAndBiases"]["run_id"]
    assert list(tmp_path.rglob(f"run-{run_id}.wandb"))


# -- notebooks ------------------------------------------------------------------------------------


def test_a_notebook_shows_lines(monkeypatch):
    shown = []
    display = SimpleNamespace(display=lambda part: shown.append(part.text))
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    console = Console(file=io.StringIO(), force_jupyter=True)
    Trainer([0.5, 0.25]).fit(Progress(console=console), epochs=2)
    assert [text.partition(":")[0] for text in shown] == ["epoch 1/2", "epoch 2/2"]
