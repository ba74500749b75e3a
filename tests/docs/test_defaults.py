"""The page of defaults, the code, and what a training does that is told nothing."""

import importlib
from dataclasses import fields
from inspect import signature

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS
from onnxgrad.training.job import USUAL_BATCH_SIZE
from tests.support.commands import as_json, weights_of_file
from tests.support.models import parse_model
from tests.support.paths import DOCS

PAGE = DOCS / "defaults.md"
MODEL = parse_model("""
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }""")
X = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)


def rows_of_page(number):
    """Return the rows of a table of the page, without its head."""
    tables = [part for part in PAGE.read_text().split("\n\n") if part.startswith("|")]
    lines = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def default_values(function):
    return {name: p.default for name, p in signature(function).parameters.items()}


def test_the_table_is_what_the_code_has():
    pytest.importorskip("sklearn")
    sklearn = importlib.import_module("onnxgrad.sklearn")
    shell = {f.name: f.default for f in fields(TrainOptions)}
    trainer, fit = default_values(og.Trainer), default_values(og.Trainer.fit)
    estimator = default_values(sklearn.OnnxClassifier)
    assert estimator.items() & default_values(sklearn.OnnxRegressor).items() >= {
        (name, estimator[name])
        for name in ("optimizer", "learning_rate", "max_iter", "batch_size", "tol", "shuffle")
    }
    rows = {name: cells for name, *cells in rows_of_page(0)}
    names = [f"`{d['optimizer']}`" for d in (shell, trainer, estimator)]
    assert rows["Optimizer"][:3] == names
    assert [d["learning_rate"] for d in (shell, trainer, estimator)] == [None] * 3
    assert rows["Learning rate"][:3] == ["of the optimizer"] * 3
    epochs = [str(shell["epochs"]), str(fit["epochs"]), f"{estimator['max_iter']}, at most"]
    assert rows["Epochs"][:3] == epochs
    assert (shell["batch_size"], fit["batch_size"], estimator["batch_size"]) == (None, None, "auto")
    assert rows["Rows of a batch"][:2] == [str(USUAL_BATCH_SIZE)] * 2
    shuffled = [d["shuffle"] for d in (shell, fit, estimator)]
    assert rows["Rows in another order each epoch"][:3] == ["yes" if s else "no" for s in shuffled]
    assert [shell["seed"], trainer["seed"], estimator["random_state"]] == [0, 0, None]
    assert rows["Seed"][:3] == ["0", "0", "none"]
    assert (shell["validation"], fit["validation"]) == (None, None)
    assert f"{estimator['validation_fraction']:.0%}".replace("%", " %") in " ".join(
        rows["Rows held out for validation"]
    )
    assert (shell["early_stopping"], trainer["callbacks"]) == (None, ())
    ends = f"{estimator['n_iter_no_change']} epochs without an improvement of {estimator['tol']:g}"
    assert ends in rows["Ends early"][2]
    assert f"EarlyStopping(patience={og.EarlyStopping().patience})" in PAGE.read_text()


def test_rates():
    """Every optimizer by its name, and as an object, has the rate of the table."""
    rates = {
        n.strip(" `"): float(rate) for names, rate in rows_of_page(1) for n in names.split(",")
    }
    known = OPTIMIZERS | WHOLE_TENSORS
    assert set(rates) == set(known)
    for name, rate in rates.items():
        for choice in (name, known[name]()):
            assert og.Trainer(
                MODEL, "mse", optimizer=choice
            )._job.learning_rate == og.schedules.constant(rate)
    wrapped = og.optimizers.ema(og.optimizers.sgd(momentum=0.9, weight_decay=0.1))
    assert og.Trainer(MODEL, "mse", optimizer=wrapped)._job.learning_rate == og.schedules.constant(
        0.01
    )


def test_a_rate_that_is_none_is_trained_with():
    one = og.Trainer(MODEL, "mse", optimizer="sgd").fit(X, X[:, :1])
    other = og.Trainer(MODEL, "mse", optimizer="sgd", learning_rate=0.01).fit(X, X[:, :1])
    np.testing.assert_array_equal(one.state.weights["w"], other.state.weights["w"])
    stack = og.TrainerStack(MODEL, "mse", optimizer=["sgd", "sgd"], learning_rate=[None, 0.1])
    assert stack.learning_rates == [og.schedules.constant(0.01), og.schedules.constant(0.1)]


def test_the_command_trains_as_a_trainer_does(working_folder):
    """Which gets the same rows and epochs; the share that is held out is that of the page."""
    line = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error")
    made = as_json(*line, "--no-curves")
    share = {name: cells for name, *cells in rows_of_page(0)}["Rows held out for validation"][0]
    assert made["validation_rows"] == 40 * int(share.removesuffix(" %")) / 100
    assert made["epochs"] == 10
    rows = np.loadtxt("rows.csv", delimiter=",", skiprows=1, dtype=np.float32)
    kept = np.sort(np.random.default_rng(0).permutation(40)[8:])
    trainer = og.Trainer("linear.onnx", "squared_error")
    trainer.fit(rows[kept, :2], rows[kept, 2:], epochs=10)
    for name, array in trainer.state.weights.items():
        np.testing.assert_array_equal(weights_of_file("trained.onnx")[name], array)
