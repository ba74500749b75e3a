"""Signals at any moment: exit codes, and what is on disk."""

import os
import signal
from pathlib import Path
from pkgutil import resolve_name

import onnx
import pytest

from onnxgrad.cli.train import Watch
from tests.support.commands import as_json, assert_names, run_command, succeed, weights_of_file
from tests.support.running import in_sweep

LINE = ("linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error", "--no-curves")
PRECIOUS = b"what was there before"


@pytest.fixture
def send_in(monkeypatch):
    """Return a function that lets a function send a signal when it is called."""

    def send(target, number=signal.SIGINT, call=1, begins=True):
        owner, _, name = target.rpartition(".")
        original, calls = resolve_name(target), []

        def wrapped(*arguments, **more):
            calls.append(name)
            if begins and len(calls) == call:
                os.kill(os.getpid(), number)
            result = original(*arguments, **more)
            if not begins and len(calls) == call:
                os.kill(os.getpid(), number)
            return result

        monkeypatch.setattr(resolve_name(owner), name, wrapped)

    return send


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "moment",
    [
        "onnxgrad.cli.train.read_model",
        in_sweep("onnxgrad.cli.train.prepare_job"),
        in_sweep("onnxgrad.cli.job.open_task"),
        in_sweep("onnxgrad.training.loop.Loop.run"),
        "onnxgrad.training.run.runner.Runner.run",
    ],
)
def test_before_the_first_step_has_ended(here, send_in, moment, number):
    send_in(moment, number)
    before = sorted(os.listdir())
    made = run_command("train", *LINE)
    assert made.exit_code == 128 + number
    assert_names(made.stderr, "nothing ... no file")
    assert "Traceback" not in made.output
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_first_epoch(here, send_in, monkeypatch, number):
    monkeypatch.setattr(Watch, "every_steps", 1)
    send_in("onnxgrad.cli.train.Watch.on_step_end", number, call=2)
    made = run_command("train", *LINE, "--batch-size", 4, "--lr", 0.1, "--epochs", 3)
    assert made.exit_code == 128 + number
    assert_names(made.stderr, "trained.onnx ... of epoch 1 ")
    assert (weights_of_file("trained.onnx")["W"] != 1).all()
    assert "validation" not in made.stdout


def test_while_validation_data_are_evaluated(here, send_in):
    send_in("onnxgrad.training.evaluator.Evaluator.evaluate", call=2)
    made = run_command("train", *LINE, "--lr", 0.1, "--epochs", 30, "--history", "h.json")
    assert made.exit_code == 130
    assert (weights_of_file("trained.onnx")["W"] != 1).all()


@pytest.mark.parametrize("begins", [True, False])
def test_while_the_model_is_written(here, send_in, begins):
    Path("trained.onnx").write_bytes(PRECIOUS)
    send_in("onnxgrad.cli.model_files.save", begins=begins)
    made = run_command("train", *LINE, "--overwrite")
    assert made.exit_code == 130
    assert_names(made.stderr, "trained.onnx ... of epoch 10")
    onnx.checker.check_model(onnx.load("trained.onnx"))
    assert not [f for f in sorted(os.listdir()) if "onnxgrad" in f]


def test_while_predictions_are_written(here, send_in):
    Path("out.csv").write_bytes(PRECIOUS)
    before = sorted(os.listdir())
    send_in("pyarrow.table", call=3)
    line = ("predict", "linear.onnx", "rows.csv", "--ignore", "y", "--batch-size", 4)
    made = run_command(*line, "-o", "out.csv", "--overwrite")
    assert made.exit_code == 130
    assert_names(made.stderr, "SIGINT ... no file")
    assert (sorted(os.listdir()), Path("out.csv").read_bytes()) == (before, PRECIOUS)


@pytest.mark.parametrize("command", ["grad", "check", "trainable", "show", "eval"])
def test_in_other_commands(here, send_in, command):
    module = {"grad": "transform", "eval": "predict"}.get(command, "inspect")
    send_in(f"onnxgrad.cli.{module}.read_model")
    before = sorted(os.listdir())
    more = {"grad": ("-o", "g.onnx"), "eval": LINE[1:-1]}.get(command, ())
    made = run_command(command, "linear.onnx", *more)
    assert made.exit_code == 130
    assert_names(made.stderr, "SIGINT ... no file")
    assert sorted(os.listdir()) == before


def test_a_dry_run_writes_nothing(here, send_in):
    send_in("onnxgrad.cli.dry_run.Probe.on_step_end", call=2)
    before = sorted(os.listdir())
    made = run_command("train", *LINE, "--dry-run")
    assert made.exit_code == 130
    assert sorted(os.listdir()) == before


def test_a_dry_run_measures_all_parts(here):
    result = as_json("train", *LINE, "--dry-run", "--batch-size", 8, "--epochs", 2)
    assert (result["batch_size"], result["rows"], result["validation_rows"]) == (8, 32, 8)
    assert (result["steps"], result["parameters"]) == (8, 3)
    assert result["weights_bytes"] == 12
    assert result["slots_bytes"] >= 24  # two moments of adam
    assert result["seconds_per_evaluation"] > 0
    result = as_json("train", *LINE, "--dry-run", "--validation", 0, "--head", 1)
    assert set(result["trained"]) >= {"head.weight", "head.bias"}
    assert result["seconds_per_evaluation"] == 0
    assert result["batch_size"] == 32
    shown = succeed("train", *LINE, "--dry-run").stdout
    assert "3 numbers in 2 tensors" in shown
    assert "nothing was" in shown
    assert "trained.onnx" not in sorted(os.listdir())
