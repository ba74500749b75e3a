"""Weights of rows and classes that make no sense are refused, and so are such learning rates."""

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.commands import invoke, refused, write_all, write_csv

MODEL = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }""")
X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
Y = X @ np.float32([[2], [-1]])
WRONG = {
    "negative": (np.where(np.isin(np.arange(40), [3, 5]), -1, 1), "0 or more.* 2 of 40.*: 3, 5"),
    "nan": (np.where(np.arange(40) == 4, np.nan, 1), "NaN or infinity in 1 of 40 rows: 4"),
    "infinite": (np.where(np.arange(40) == 4, np.inf, 1), "NaN or infinity in 1 of 40 rows: 4"),
    "zero": (np.zeros(40), "is 0 in all rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_of_arrays(name):
    weight, message = WRONG[name]
    trainer = og.Trainer(MODEL, "squared_error")
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
    trainer = og.Trainer(MODEL, "squared_error")
    batches = [(X[:20], Y[:20], weight), (X[20:], Y[20:], -weight)]
    with pytest.raises(ValueError, match="0 or more"):
        trainer.fit(batches)
    batches[1] = X[20:], Y[20:], 0 * weight  # some rows do not count
    trainer.fit(batches)
    trainer.fit(X, Y, sample_weight=np.r_[weight, 0 * weight])


def test_the_target_is_no_weight():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y[:, 0], "w": 1.0})
    trainer = og.Trainer(MODEL, "squared_error")
    with pytest.raises(ValueError, match="'y' is both label and weight"):
        trainer.fit(table, "y", sample_weight="y")
    trainer.fit(table, "y", sample_weight="w")


@pytest.mark.parametrize("rate", [np.inf, -np.inf, np.nan])
def test_rates_that_are_not_finite(rate):
    with pytest.raises(ValueError, match="learning_rate must be a finite number"):
        og.Trainer(MODEL, "squared_error", learning_rate=rate)


# -- the command line -------------------------------------------------------------------------

LINE = ("train", "linear.onnx", "weighed.csv", "--target", "y", "--loss", "squared_error")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


def weigh(weight):
    write_csv("weighed.csv", a=X[:, 0], b=X[:, 1], y=Y[:, 0], w=weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", "--sample-weight w must hold numbers of 0 or more, not -1 (rows 4, 6)"),
        ("nan", "empty, NaN or infinite: column 'w', row 5"),
        ("infinite", "empty, NaN or infinite: column 'w', row 5"),
        ("zero", "--sample-weight w is 0 in all rows, so that none counts"),
    ],
)
def test_weights_of_a_column(here, name, message):
    """Rows have the numbers of the file, though some are held out."""
    weigh(WRONG[name][0])
    assert message in refused(*LINE, "--sample-weight", "w")
    assert not (here / "trained.onnx").exists()


def test_the_target_and_classes(here):
    weigh(np.ones(40))
    message = refused(*LINE, "--sample-weight", "y")
    assert "--sample-weight y is the target" in message
    line = ("train", "layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
    message = refused(*line, "--class-weight", "0=-1")
    assert "--class-weight must hold finite numbers of 0 or more" in message
    zeros = [word for k in range(3) for word in ("--class-weight", f"{k}=0")]
    assert "--class-weight is 0 for all classes" in refused(*line, *zeros)


@pytest.mark.parametrize("rate", ["inf", "nan"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_rates_of_the_command_line(here, rate, schedule):
    weigh(np.ones(40))
    line = (*LINE, "--schedule", schedule)
    made = invoke(*line, "--lr", rate)
    assert made.exit_code == 2
    assert "--learning-rate" in made.stderr
    assert "--schedule" not in made.stderr
    assert not (here / "trained.onnx").exists()
