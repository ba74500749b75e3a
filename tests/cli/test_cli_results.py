"""What `onnxgrad train` says of a training: of which epoch the weights are, and why it ended."""

import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import onnxgrad as og
from onnxgrad.cli.train import Watch
from tests.support.commands import (
    as_json,
    assert_names,
    refusal,
    run_command,
    succeed,
    weights_of_file,
)
from tests.support.running import in_sweep, run_named

LINE = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error")


# -- curves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, in_sweep(0)])
def test_the_picture_is_that_of_plot_history(here, share):
    as_json(*LINE, "--epochs", 3, "--validation", share, "--history", "history.json")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = og.plot.plot_history(
        json.loads((here / "history.json").read_text()), figure.add_subplot()
    )
    assert len(axes.get_lines()) == (2 if share else 1)
    figure.savefig("own.png", dpi=120)
    np.testing.assert_array_equal(imread("trained.png"), imread("own.png"))


# -- the weights in the file, and why training ended -------------------------------------------

KINDS = ("train", "layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
FAR = ("--optimizer", "sgd", "--lr", 2.5, "--batch-size", 4, "--no-curves")  # it gets worse again


def held_out_rows(rows=40, share=0.2, seed=0):
    """Return the numbers of the rows that the command holds out."""
    return np.sort(np.random.default_rng(seed).permutation(rows)[: round(rows * share)])


def loss_and_accuracy(file):
    """Return the loss and the accuracy of a file for the rows that are held out."""
    table = np.loadtxt("kinds.csv", delimiter=",", skiprows=1)[held_out_rows()]
    [z] = run_named(file, x=np.float32(table[:, :2])).values()
    kind = table[:, 2].astype(int)
    z = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(z)), kind].mean(), (z.argmax(1) == kind).mean()


def columns_of_epochs(stdout):
    """Return the columns of the table of epochs, {number: (titles, {name: text})}."""
    lines = [line for line in stdout.splitlines() if line[:1] in "┃│"]
    rows = [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines
    ]
    numbers, titles, *numeric = rows
    return {
        int(number.removeprefix("epoch ")): (titles[i], {row[0]: row[i] for row in numeric})
        for i, number in enumerate(numbers)
        if number
    }


def test_the_weights_that_early_stopping_keeps(here):
    stopping = ("--epochs", 30, "--early-stopping", 3)
    options = (*FAR, *stopping, "--record", "record", "--card", "card.md")
    made = as_json(*KINDS, *options)
    history = made["history"]
    losses = [entry["validation_loss"] for entry in history]
    kept = int(np.argmin(losses))
    assert kept + 4 == len(history) < 30  # three epochs without improvement
    loss, accuracy = loss_and_accuracy("trained.onnx")
    assert made["validation"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert made["validation"]["accuracy"] == pytest.approx(accuracy)
    assert (made["epoch"], made["step"]) == (kept + 1, 8 * (kept + 1))
    assert made["loss"] == history[kept]["loss"]
    assert made["stopped"] == "early"
    assert_names(made["reason"], f"validation_loss ... 3 epochs ... epoch {kept + 1}")
    run = json.loads((here / "record" / "run.json").read_text())
    assert run["kept"] == {"epoch": kept + 1, "step": made["step"], "whole": True}
    assert run["reason"] == made["reason"]
    card = (here / "card.md").read_text()
    assert f"epoch | {kept + 1} |" in card


def test_columns_are_those_of_one_epoch_each(here):
    options = (*FAR, "--epochs", 30, "--early-stopping", 3, "--history", "history.json")
    stdout = succeed(*KINDS, *options).stdout
    history = json.loads((here / "history.json").read_text())
    shown = columns_of_epochs(stdout)
    kept = int(np.argmin([entry["validation_loss"] for entry in history])) + 1
    assert {n: titles for n, (titles, _) in shown.items()} == {
        1: "first",
        kept: "best, kept",
        len(history): "last",
    }
    for number, (_, numbers) in shown.items():
        entry = history[number - 1]
        assert numbers == {
            "training loss": f"{entry['loss']:.5g}",
            "validation loss": f"{entry['validation_loss']:.5g}",
            "validation accuracy": f"{entry['validation_accuracy']:.2%}",
        }
    assert_names(stdout, f"3 epochs ... epoch {kept}; ... of epoch {kept}\n")


def test_without_early_stopping_the_last_epoch_is_kept(here):
    line = (*KINDS, *FAR, "--epochs", 12, "--overwrite")
    made = as_json(*line)
    loss, accuracy = loss_and_accuracy("trained.onnx")
    assert made["epoch"] == 12
    assert made["loss"] == made["history"][-1]["loss"]
    assert made["validation"] == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-5)
    assert "all epochs" in made["reason"]
    stdout = succeed(*line).stdout
    losses = [entry["validation_loss"] for entry in made["history"]]
    best = int(np.argmin(losses)) + 1
    assert 1 < best < 12
    titles = {n: titles for n, (titles, _) in columns_of_epochs(stdout).items()}
    assert titles == {1: "first", best: "best", 12: "last, kept"}
    assert_names(stdout, "all epochs ... of epoch 12\n")


def test_a_signal_keeps_the_weights_of_the_last_step(here, monkeypatch):
    """Not the best ones, which early stopping would keep: training can go on from the last step."""
    original = Watch.on_step_end

    def on_step_end(watch, trainer, state, control):
        if state.step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        original(watch, trainer, state, control)

    monkeypatch.setattr(Watch, "on_step_end", on_step_end)
    monkeypatch.setattr(Watch, "every_steps", 1)
    options = (*FAR, "--epochs", 30, "--early-stopping", 3)
    result = run_command(*KINDS, *options, "--json")
    assert result.exit_code == 130
    made = json.loads(result.stdout)
    assert (made["epochs"], made["steps"]) == (2, 20)
    assert (made["epoch"], made["step"]) == (3, 20)
    assert made["validation"] == {}
    assert made["loss"] not in [entry["loss"] for entry in made["history"]]
    assert made["stopped"] == made["reason"]
    assert "SIGINT" in made["reason"]
    assert_names(result.stderr, "trained.onnx ... epoch 3 ... 20 steps")


def test_a_divergence_after_the_best_epoch(here):
    """The loss overflows at the end of the warm-up; early stopping restores an epoch before."""
    options = ("--optimizer", "sgd", "--lr", 1e-20, "--schedule", "step_decay", "--batch-size", 4)
    options = (*options, "--schedule-option", "every=8", "--schedule-option", "factor=1e20")
    options = (*options, "--epochs", 9, "--early-stopping", 5, "--no-curves")
    result = run_command(*LINE, *options, "--json")
    assert result.exit_code == 1, result.output
    made = json.loads(result.stdout)
    losses = [e["validation_loss"] for e in made["history"] if "validation_loss" in e]
    kept = int(np.argmin(losses))
    assert made["epoch"] == kept + 1
    rows = np.float32(np.loadtxt("rows.csv", delimiter=",", skiprows=1)[held_out_rows()])
    [y] = run_named("trained.onnx", x=rows[:, :2]).values()
    assert made["validation"]["loss"] == pytest.approx(
        np.mean((y[:, 0] - rows[:, 2]) ** 2), rel=1e-5
    )
    assert_names(result.stderr, f"trained.onnx ... epoch {kept + 1}")
    assert_names(made["reason"], "NaN ... infinite ... best weights")
    shown = run_command(*LINE, *options, "--overwrite")
    assert "validation loss" in shown.stdout
    assert "None" not in shown.stdout  # for the epoch without validation


def test_a_divergence_in_the_first_step(here):
    """There is no epoch to show, and the weights are those of before."""
    before = weights_of_file("linear.onnx")
    options = ("--optimizer", "sgd", "--lr", 1e38, "--batch-size", 40, "--validation", 0)
    result = run_command(*LINE, *options, "--json")
    made = json.loads(result.stdout)
    assert (made["epoch"], made["step"], made["loss"]) == (0, 0, None)
    assert_names(result.stderr, "trained.onnx ... weights ... no step")
    shown = run_command(*LINE, *options, "--overwrite").stdout
    assert "epoch" not in shown
    for name, array in weights_of_file("trained.onnx").items():
        np.testing.assert_array_equal(array, before[name])


def test_rows_of_a_resumed_training_are_its_own():
    """What it has behind it does not count."""
    watch = Watch(SimpleNamespace(delay_signals=lambda: None, raise_if_signaled=lambda: None))
    progress = SimpleNamespace(epoch=3, rows=8, total_rows=40)
    trainer = SimpleNamespace(progress=progress)
    watch.on_train_begin(trainer, None, None)
    progress.epoch, progress.rows = 5, 20
    watch.on_step_end(trainer, None, None)
    assert watch.rows == 2 * 40 + 20 - 8


def test_the_record_has_options_that_are_false(here):
    options = ("--no-shuffle", "--weight-decay", 0, "--record", "run", "--no-curves")
    succeed("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "mse", *options)
    chosen = json.loads((here / "run" / "run.json").read_text())["about"]["options"]
    told = {name: chosen[name] for name in ("shuffle", "weight-decay", "seed", "curves")}
    assert told == {"shuffle": "False", "weight-decay": "0.0", "seed": "0", "curves": "False"}
    assert "json" not in chosen


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_train_without_validation(here, rows):
    """A fifth of them is none, unless it is asked for."""
    lines = (here / "rows.csv").read_text().splitlines()[: rows + 1]
    (here / "rows.csv").write_text("\n".join(lines))
    line = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "mse", "--epochs", 1)
    made = as_json(*line, "--no-curves")
    assert (made["rows"], made["validation_rows"]) == (rows, None)
    assert_names(refusal(*line, "--overwrite", "--validation", 0.2), "--validation")
