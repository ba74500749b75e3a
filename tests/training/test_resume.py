"""A training that is resumed: its progress, its length, and warm-ups that are longer than it."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.cli.signals import StopRequests
from onnxgrad.cli.watch import Watch
from tests.support.commands import invoke, refused, succeed, weights, write_all

LINE = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error")
FAST = ("--optimizer", "sgd", "--lr", 0.05, "--batch-size", 4, "--no-curves", "--overwrite")
MODEL = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }""")
X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.float32([[2], [-1]])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


# -- progress ---------------------------------------------------------------------------------


def test_progress_counts_on(here):
    line = (*LINE, *FAST, "--checkpoint", "state", "--resume")
    first, second = succeed(*line, "--epochs", 3), succeed(*line, "--epochs", 5)
    assert re.findall(r"epoch (\d+/\d+):", first.stderr) == ["1/3", "2/3", "3/3"]
    assert re.findall(r"epoch (\d+/\d+):", second.stderr) == ["4/5", "5/5"]
    again = succeed(*line, "--epochs", 5)  # nothing is left to train
    assert not re.findall(r"epoch (\d+/\d+):", again.stderr)
    assert "the model has the weights of epoch 5" in again.stdout


def test_an_error_names_the_epoch_of_the_whole_training(tmp_path):
    class Hot(og.Callback):
        def on_epoch_end(self, trainer, state, control):
            if state.epoch == 4:
                state.weights = {"w": np.full((2, 1), 3e38, np.float32)}

    def fit(epochs, *more):
        callbacks = [og.Checkpoint(tmp_path / "state"), *more]
        trainer = og.Trainer(MODEL, "squared_error", optimizer="sgd", callbacks=callbacks)
        return trainer.fit(X, Y, epochs=epochs, resume=tmp_path / "state")

    assert fit(3).progress.epochs == 3
    with pytest.raises(og.ConvergenceError, match="infinite in epoch 5 "):
        fit(6, Hot())


def test_epochs_that_partial_fit_adds_count_for_themselves():
    trainer = og.Trainer(MODEL, "squared_error").fit(X, Y, epochs=3)
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
        ("--schedule", "linear"),
        ("--schedule", "cosine"),
        ("--schedule", "one_cycle"),
        ("--schedule", "polynomial", "--schedule-option", "power=2"),
        ("--schedule", "inverse_sqrt", "--warmup", 0.1),
        ("--warmup", 0.2),
    ],
)
def test_another_length_is_refused_where_the_rates_depend_on_it(here, schedule):
    line = (*LINE, *FAST, *schedule, "--checkpoint", "state", "-o", "out.onnx")
    succeed(*line, "--epochs", 3)
    before = (here / "out.onnx").read_bytes()
    message = refused(*line, "--resume", "--epochs", 5)
    assert "of 3 epochs (24 steps), and --epochs 5 makes 40 steps" in message
    assert "Pass --epochs 3; to train for longer, name another folder" in message
    assert (here / "out.onnx").read_bytes() == before
    succeed(*line, "--resume", "--epochs", 3)
    assert (here / "out.onnx").read_bytes() == before


@pytest.mark.parametrize(
    "schedule",
    [
        (),
        ("--schedule", "step_decay", "--schedule-option", "every=10"),
        ("--schedule", "cosine", "--schedule-option", "steps=30"),
        ("--warmup", 6),
    ],
)
def test_another_length_goes_on_where_the_rates_do_not(here, schedule):
    line = (*LINE, *FAST, *schedule)
    parts = (*line, "--checkpoint", "state", "-o", "parts.onnx")
    succeed(*parts, "--epochs", 3)
    succeed(*parts, "--epochs", 5, "--resume")
    succeed(*line, "--epochs", 5, "-o", "whole.onnx")
    for name, array in weights("whole.onnx").items():
        np.testing.assert_array_equal(weights("parts.onnx")[name], array)


def test_another_length_of_a_stack_is_refused(tmp_path):
    def fit(epochs):
        rates = [og.cosine(0.1), 0.1]
        callbacks = [og.Checkpoint(tmp_path / "state")]
        stack = og.TrainerStack(MODEL, "squared_error", learning_rate=rates, callbacks=callbacks)
        return stack.fit(X, Y, epochs=epochs, resume=tmp_path / "state")

    fit(2)
    with pytest.raises(ValueError, match=r"of 2 epochs \(4 steps\), and epochs=3 makes 6 steps"):
        fit(3)


# -- warm-ups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "inverse_sqrt"])
def test_a_warm_up_that_does_not_end(here, schedule):
    line = (*LINE, *FAST, "--schedule", schedule, "--epochs", 2)
    made = invoke(*line, "--warmup", 500)
    assert made.exit_code == 0, made.output
    [warning] = [text for text in made.stderr.splitlines() if text.startswith("Warning: ")]
    assert "warm-up of 500 steps" in warning
    assert "16 steps (2 epochs of 8 batches)" in warning
    assert f"rises to {0.05 * 15 / 500:.3g} only" in warning
    assert "--warmup 0.1" in warning
    assert "Warning" not in invoke(*line, "--warmup", 0.1).stderr
    assert "Warning" not in invoke(*line, "--warmup", 15).stderr


def test_the_warning_is_at_the_line_of_the_call():
    rate = og.warmup(0.1, 500)
    trainer = og.Trainer(MODEL, "squared_error", learning_rate=rate)
    with pytest.warns(UserWarning, match="warm-up of 500 steps") as caught:
        trainer.fit(X, Y, epochs=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.partial_fit(X, Y)
