"""Weights of rows, which may be negative in plain means; refusals of weights and learning rates."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.commands import refusal, run_command, write_all
from tests.support.errors import naming
from tests.support.models import parse_model
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


# -- negative weights, as of advantages --------------------------------------------------------

SIGNED = np.random.default_rng(1).normal(size=40).astype(np.float32)
SIGNED[:10] -= SIGNED[:10].mean()  # of the first batch, the sum is 0 up to rounding
SIGNED[10:20] -= SIGNED[10:20].mean() + 0.5  # and of the second below 0
PLAIN = {"loss_options": {"weighted_mean": False}}


def weight_and_loss_of_torch(epochs):
    """Return the weight after steps of 10 rows, and the mean loss of the last epoch's steps."""
    torch = pytest.importorskip("torch")
    w, losses = torch.zeros(2, 1, requires_grad=True), []
    for step in range(4 * epochs):
        x, y, a = (torch.tensor(v[10 * (step % 4) :][:10]) for v in (X, Y, SIGNED))
        loss = (a * torch.nn.functional.mse_loss(x @ w, y, reduction="none")[:, 0]).mean()
        (gradient,) = torch.autograd.grad(loss, w)
        w.data -= 0.1 * gradient
        losses.append(loss.item())
    return w.detach().numpy(), np.mean(losses[-4:])


@pytest.mark.parametrize("form", ["arrays", "batches", "micro-batches", "loss in the model"])
def test_negative_weights_of_a_plain_mean(form):
    """The steps are those of PyTorch, also in batches whose weights add up to 0 or less."""
    options = {"optimizer": "sgd", "learning_rate": 0.1}
    if form == "loss in the model":
        model = og.add_loss_output(linear_model(np.zeros((2, 1))), weight_name="weight")
        trainer = og.Trainer(model, **options)
    else:
        trainer = squared_error_trainer(
            **options, **PLAIN, accumulate=3 if form == "micro-batches" else 1
        )
    if form == "batches":
        data = [(X[i : i + 10], Y[i : i + 10], SIGNED[i : i + 10]) for i in range(0, 40, 10)]
        trainer.fit(data, epochs=2, shuffle=False)
    else:
        trainer.fit(X, Y, sample_weight=SIGNED, batch_size=10, epochs=2, shuffle=False)
    expected, loss = weight_and_loss_of_torch(2)
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.history[-1]["loss"], loss, rtol=1e-5)
    squares = (X @ trainer.state.weights["w"] - Y) ** 2
    found = trainer.evaluate(X, Y, sample_weight=SIGNED, batch_size=7)["loss"]
    np.testing.assert_allclose(found, np.mean(SIGNED[:, None] * squares), rtol=1e-5)


def test_negative_weights_where_their_sum_may_be_the_divisor():
    """A loss of another model, a loss without its options, and metrics refuse them by name."""
    text = """f (float[N,1] y, float[N,1] label) => (float[N,1] loss) {
        d = Sub(y, label)  loss = Mul(d, d) }"""
    by_model = og.Trainer(linear_model(np.zeros((2, 1))), parse_model(text))
    of_user = parse_model("""f (float[N,2] x, float[N,1] label, float[N,1] weight) => (float loss)
        <float[2,1] w = {0.0, 0.0}> {
        y = MatMul(x, w)  d = Sub(y, label)  s = Mul(d, d)  p = Mul(s, weight)
        a = ReduceSum<keepdims = 0>(p)  b = ReduceSum<keepdims = 0>(weight)  loss = Div(a, b) }""")
    two = {"y": "squared_error", "z": "squared_error"}
    model = parse_model("""f (float[N,2] x) => (float[N,1] y, float[N,1] z)
        <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w)  z = Neg(y) }""")
    one_of_two = og.Trainer(model, two, loss_options={"y": {"weighted_mean": False}})
    for trainer, y in (
        (by_model, Y),
        (og.Trainer(of_user, train=["w"]), Y),
        (one_of_two, {"y": Y, "z": Y}),
    ):
        with pytest.raises(ValueError, match=naming("sample_weight", "40 rows", "weighted_mean")):
            trainer.fit(X, y, sample_weight=SIGNED)
        trainer.fit(X, y, sample_weight=abs(SIGNED))


def test_metrics_refuse_negative_weights():
    trainer = squared_error_trainer(**PLAIN, metrics=["mae"])
    rest = {"sample_weight": np.r_[np.ones(39), -1]}
    last = [(X[:20], Y[:20], np.ones(20)), (X[20:], Y[20:], -np.ones(20))]
    for call in (
        lambda: trainer.fit(X, Y, validation=(X, Y, SIGNED)),
        lambda: trainer.fit(X, Y, validation=last),
        lambda: trainer.fit(X, Y, **rest, validation=0.9),
        lambda: trainer.evaluate(X, Y, **rest),
        lambda: trainer.evaluate(last),
    ):
        with pytest.raises(ValueError, match=naming("sample_weight", "'mae'", "metrics")):
            call()
        assert trainer.state.step == 0
    trainer.fit(X, Y, sample_weight=SIGNED, validation=(X, Y))
    assert trainer.history[0]["validation_mae"] > 0


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
