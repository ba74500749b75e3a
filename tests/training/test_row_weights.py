"""Weights of rows and classes that make no sense are refused, and so are such learning rates."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.commands import refusal, run_command, write_all
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.trainings import linear_model

X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.float32([[2], [-1]])
WRONG = {
    "negative": (np.where(np.isin(np.arange(40), [3, 5]), -1, 1), "2 of 40.*: 3, 5"),
    "nan": (np.where(np.arange(40) == 4, np.nan, 1), "NaN.* 1 of 40 rows: 4"),
    "infinite": (np.where(np.arange(40) == 4, np.inf, 1), "NaN.* 1 of 40 rows: 4"),
    "zero": (np.zeros(40), "0 in all"),
}


def squared_error_trainer(**options):
    return og.Trainer(linear_model(np.zeros((2, 1))), "squared_error", **options)


@pytest.mark.parametrize("name", WRONG)
def test_weights_of_arrays(name):
    weight, message = WRONG[name]
    trainer = squared_error_trainer()
    for call in (
        lambda: trainer.fit(X, Y, sample_weight=weight),
        lambda: trainer.fit(X, Y, validation=(X, Y, weight)),
        lambda: trainer.partial_fit(X, Y, sample_weight=weight),
        lambda: trainer.evaluate(X, Y, sample_weight=weight),
    ):
        with pytest.raises(ValueError, match=f"^sample_weight.*{message}"):
            call()
    assert trainer.state.step == 0


def test_weights_of_batches():
    weight = np.ones(20, np.float32)
    trainer = squared_error_trainer()
    batches = [(X[:20], Y[:20], weight), (X[20:], Y[20:], -weight)]
    with pytest.raises(ValueError, match=naming("weight", "0")):
        trainer.fit(batches)
    batches[1] = X[20:], Y[20:], 0 * weight  # some rows do not count
    trainer.fit(batches)
    trainer.fit(X, Y, sample_weight=np.r_[weight, 0 * weight])


def test_the_target_is_no_weight():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y[:, 0], "w": 1.0})
    trainer = squared_error_trainer()
    with pytest.raises(ValueError, match=naming("'y'", "label", "weight")):
        trainer.fit(table, "y", sample_weight="y")
    trainer.fit(table, "y", sample_weight="w")


@pytest.mark.parametrize("rate", [np.inf, -np.inf, np.nan])
def test_rates_that_are_not_finite(rate):
    with pytest.raises(ValueError, match=naming("learning_rate", str(rate))):
        squared_error_trainer(learning_rate=rate)


# -- the command line -------------------------------------------------------------------------

LINE = ("train", "linear.onnx", "weighed.csv", "--target", "y", "--loss", "squared_error")


@pytest.fixture
def weighed_rows(tmp_path, monkeypatch):
    """Return a function that writes rows with these weights to a folder with models."""
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)

    def write_weights(weight):
        np.savetxt("weighed.csv", np.c_[X, Y, weight], delimiter=",", header="a,b,y,w", comments="")

    return write_weights


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("negative", ["--sample-weight w", "-1", "(rows 4, 6)"]),
        ("nan", ["NaN", "column 'w', row 5"]),
        ("infinite", ["infinite", "column 'w', row 5"]),
        ("zero", ["--sample-weight w", "0 in all"]),
    ],
)
def test_weights_of_a_column(weighed_rows, tmp_path, name, parts):
    """Rows have the numbers of the file, though some are held out."""
    weighed_rows(WRONG[name][0])
    message = refusal(*LINE, "--sample-weight", "w")
    assert all(part in message for part in parts), message
    assert not (tmp_path / "trained.onnx").exists()


def test_the_target_and_classes(weighed_rows):
    weighed_rows(np.ones(40))
    assert "--sample-weight y" in refusal(*LINE, "--sample-weight", "y")
    line = ("train", "layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
    assert "--class-weight" in refusal(*line, "--class-weight", "0=-1")
    zeros = [word for k in range(3) for word in ("--class-weight", f"{k}=0")]
    assert "--class-weight is 0" in refusal(*line, *zeros)


@pytest.mark.parametrize(
    ("rate", "schedule"), [("inf", "constant"), ("nan", "cosine"), in_sweep("inf", "cosine")]
)
def test_rates_of_the_command_line(weighed_rows, tmp_path, rate, schedule):
    weighed_rows(np.ones(40))
    line = (*LINE, "--schedule", schedule)
    made = run_command(*line, "--lr", rate)
    assert made.exit_code == 2
    assert "--learning-rate" in made.stderr
    assert "--schedule" not in made.stderr
    assert not (tmp_path / "trained.onnx").exists()
