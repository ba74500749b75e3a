"""A training that is resumed: its progress, its length, and warm-ups that are longer than it."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.cli.command import StopRequests
from onnxgrad.cli.train import Watch
from tests.support.commands import refusal, run_command, succeed, write_all
from tests.support.errors import naming
from tests.support.models import initializer_arrays
from tests.support.running import in_sweep
from tests.support.trainings import linear_model

LINE = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error")
FAST = ("--optimizer", "sgd", "--lr", 0.05, "--batch-size", 4, "--no-curves", "--overwrite")
X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.float32([[2], [-1]])


def trainer_of_zeros(*callbacks, make=og.Trainer, **options):
    return make(linear_model(np.zeros((2, 1))), "squared_error", callbacks=callbacks, **options)


@pytest.fixture
def folder_of_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


# -- progress ---------------------------------------------------------------------------------


def test_progress_counts_on(folder_of_rows):
    line = (*LINE, *FAST, "--checkpoint", "state", "--resume")
    first, second = succeed(*line, "--epochs", 3), succeed(*line, "--epochs", 5)
    assert re.findall(r"epoch (\d+/\d+):", first.stderr) == ["1/3", "2/3", "3/3"]
    assert re.findall(r"epoch (\d+/\d+):", second.stderr) == ["4/5", "5/5"]
    again = succeed(*line, "--epochs", 5)  # nothing is left to train
    assert not re.findall(r"epoch (\d+/\d+):", again.stderr)
    assert "epoch 5" in again.stdout


def test_an_error_names_the_epoch_of_the_whole_training(tmp_path):
    class Hot(og.callbacks.Callback):
        def on_epoch_end(self, trainer, state, control):
            if state.epoch == 4:
                state.weights = {"w": np.full((2, 1), 3e38, np.float32)}

    def fit(epochs, *more):
        trainer = trainer_of_zeros(og.Checkpoint(tmp_path / "state"), *more, optimizer="sgd")
        return trainer.fit(X, Y, epochs=epochs, resume=tmp_path / "state")

    assert fit(3).progress.epochs == 3
    with pytest.raises(og.ConvergenceError, match="epoch 5 "):
        fit(6, Hot())


def test_epochs_that_partial_fit_adds_count_for_themselves():
    trainer = trainer_of_zeros().fit(X, Y, epochs=3)
    trainer.partial_fit(X, Y)
    assert (trainer.progress.epoch, trainer.progress.epochs) == (0, 1)
    assert trainer.state.epoch == 4


def test_rows_behind_a_resumed_training_are_not_counted():
    """The rows of an epoch may be unknown until one has ended."""
    watch, progress = Watch(StopRequests()), SimpleNamespace(epoch=2, rows=8, total_rows=None)
    trainer = SimpleNamespace(progress=progress)
    watch.on_train_begin(trainer, None, None)
    progress.rows = 20
    watch.on_step_end(trainer, None, None)
    assert watch.rows == 12
    progress.epoch, progress.rows, progress.total_rows = 3, 10, 40
    watch.on_step_end(trainer, None, None)
    assert watch.rows == 42


# -- another number of epochs -----------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        ("--schedule", "cosine"),
        ("--schedule", "inverse_sqrt", "--warmup", 0.1),
        in_sweep(("--schedule", "linear")),
        in_sweep(("--schedule", "one_cycle")),
        in_sweep(("--schedule", "polynomial", "--schedule-option", "power=2")),
        in_sweep(("--warmup", 0.2)),
    ],
)
def test_another_length_is_refused_where_the_rates_depend_on_it(folder_of_rows, schedule):
    line = (*LINE, *FAST, *schedule, "--checkpoint", "state", "-o", "out.onnx")
    succeed(*line, "--epochs", 3)
    before = (folder_of_rows / "out.onnx").read_bytes()
    message = refusal(*line, "--resume", "--epochs", 5)
    for part in ("3 epochs (24 steps)", "--epochs 5", "40 steps", "--epochs 3", "folder"):
        assert part in message
    assert (folder_of_rows / "out.onnx").read_bytes() == before
    succeed(*line, "--resume", "--epochs", 3)
    assert (folder_of_rows / "out.onnx").read_bytes() == before


@pytest.mark.parametrize(
    "schedule",
    [
        ("--schedule", "step_decay", "--schedule-option", "every=10"),
        ("--schedule", "cosine", "--schedule-option", "steps=30"),
        in_sweep(()),
        in_sweep(("--warmup", 6)),
    ],
)
def test_another_length_goes_on_where_the_rates_do_not(folder_of_rows, schedule):
    line = (*LINE, *FAST, *schedule)
    parts = (*line, "--checkpoint", "state", "-o", "parts.onnx")
    succeed(*parts, "--epochs", 3)
    succeed(*parts, "--epochs", 5, "--resume")
    succeed(*line, "--epochs", 5, "-o", "whole.onnx")
    whole, parts = (initializer_arrays(onnx.load(f"{n}.onnx")) for n in ("whole", "parts"))
    np.testing.assert_equal(parts, whole)


def test_another_length_of_a_stack_is_refused(tmp_path):
    def fit(epochs):
        options = {"make": og.TrainerStack, "learning_rate": [og.schedules.cosine(0.1), 0.1]}
        stack = trainer_of_zeros(og.Checkpoint(tmp_path / "state"), **options)
        return stack.fit(X, Y, epochs=epochs, resume=tmp_path / "state")

    fit(2)
    with pytest.raises(ValueError, match=naming("2 epochs (4 steps)", "epochs=3", "6 steps")):
        fit(3)


# -- warm-ups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", ["cosine", *map(in_sweep, ("constant", "linear", "inverse_sqrt"))]
)
def test_a_warm_up_that_does_not_end(folder_of_rows, schedule):
    line = (*LINE, *FAST, "--schedule", schedule, "--epochs", 2)
    made = run_command(*line, "--warmup", 500)
    assert made.exit_code == 0, made.output
    [warning] = [text for text in made.stderr.splitlines() if text.startswith("Warning: ")]
    numbers = ("500 steps", "16 steps (2 epochs of 8 batches)", f"{0.05 * 15 / 500:.3g}")
    for part in (*numbers, "--warmup 0.1"):
        assert part in warning
    assert "Warning" not in run_command(*line, "--warmup", 0.1).stderr
    assert "Warning" not in run_command(*line, "--warmup", 15).stderr


def test_the_warning_is_at_the_line_of_the_call():
    trainer = trainer_of_zeros(learning_rate=og.schedules.warmup(0.1, 500))
    with pytest.warns(UserWarning, match="500 steps") as caught:
        trainer.fit(X, Y, epochs=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.partial_fit(X, Y)
