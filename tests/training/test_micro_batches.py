"""Micro-batches and fixed batches: their result is that of the whole batch, or it is said."""

import warnings

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 32)
REDUCED = {  # how a model may compute its loss from elements q of each row
    "mean": "loss = ReduceMean<keepdims = 0>(q)",
    "sum": "loss = ReduceSum<keepdims = 0>(q)",
    "half sum and penalty": """
        s = ReduceSum<keepdims = 0>(q)  t = Mul(s, half)  loss = Cast<to = 1>(t)""",
    "mean and penalty": """
        s = ReduceMean<keepdims = 0>(q)  p = ReduceSum<keepdims = 0>(w)  loss = Add(s, p)""",
    "sum over size": """
        s = ReduceSum<keepdims = 0>(q)  n = Size(q)  c = Cast<to = 1>(n)  loss = Div(s, c)""",
    "mean of rows": """
        r = ReduceSum<keepdims = 0>(q, one)  loss = ReduceMean<keepdims = 0>(r)""",
}
MIXED = {  # and what no sum of micro-batches gives
    "root of the mean": "m = ReduceMean<keepdims = 0>(q)  loss = Sqrt(m)",
    "largest": "loss = ReduceMax<keepdims = 0>(q)",
    "softmax over rows": """
        p = Softmax<axis = 0>(q)  r = Mul(p, q)  loss = ReduceSum<keepdims = 0>(r)""",
    "norm": "loss = ReduceL2<keepdims = 0>(q)",
}


def model_with_loss(reduced, rows="N"):
    return parse_model(
        f"f (float[{rows},4] x) => (float loss) {{ h = MatMul(x, w)  q = Mul(h, h)  {reduced} }}",
        opset=18,
        w=np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2),
        half=np.float32(0.5),
        one=np.int64([1]),
    )


def trained_by(model, accumulate, loss=None, data=(X,), batch_size=16, make=og.Trainer, **options):
    options = {"optimizer": "sgd", "learning_rate": 0.05} | options
    trainer = make(model, loss, accumulate=accumulate, **options)
    trainer.fit(*data, batch_size=batch_size, shuffle=False, epochs=2)
    return trainer.history, trainer.state.weights["w"]


def assert_equal_to_whole(*arguments, parts=4, **options):
    (whole, weights), (history, own) = (trained_by(*arguments, k, **options) for k in (1, parts))
    np.testing.assert_allclose(own, weights, rtol=1e-5, atol=1e-6)
    for one, other in zip(whole, history, strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("reduced", REDUCED)
def test_a_loss_of_the_model_is_that_of_the_whole_batch(reduced):
    assert_equal_to_whole(model_with_loss(REDUCED[reduced]))


@pytest.mark.usefixtures("no_warning")
def test_members_and_loss_models():
    model = model_with_loss(REDUCED["sum"])
    options = {"make": og.TrainerStack, "learning_rate": [0.05, 0.01]}
    assert_equal_to_whole(model, **options)
    prediction = parse_model(
        "f (float[N,4] x) => (float[N,2] y) { y = MatMul(x, w) }", w=np.ones((4, 2), np.float32)
    )
    loss = parse_model(
        "l (float[N,2] y, float[N,2] t) => (float loss) { d = Sub(y, t)  q = Mul(d, d)  "
        "loss = ReduceSum<keepdims = 0>(q) }",
        opset=18,
    )
    data = X, X[:, :2]
    assert_equal_to_whole(prediction, loss=og.losses.LossModel(loss), data=data, learning_rate=1e-3)
    assert_equal_to_whole(prediction, loss="squared_error", data=data)


@pytest.mark.parametrize("reduced", MIXED)
def test_a_loss_that_mixes_rows_is_named(reduced):
    with pytest.warns(UserWarning, match=naming("accumulate", "output")):
        trained_by(model_with_loss(MIXED[reduced]), 4)


@pytest.mark.parametrize(
    ("loss", "body", "data"),
    [
        ("squared_error", "m = ReduceMean(h, zero)  y = Sub(h, m)", X[:, :2]),
        ("cross_entropy", "y = Softmax<axis = 0>(h)", LABELS % 2),
        ("triplet", "y = Identity(h)", LABELS),
        ("multiple_negatives", "y = Identity(h)", LABELS),
    ],
)
def test_a_model_or_loss_that_compares_rows_is_named(loss, body, data):
    model = parse_model(
        f"f (float[N,4] x) => (float[N,2] y) {{ h = MatMul(x, w)  {body} }}",
        opset=18,
        w=np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2),
        zero=np.int64([0]),
    )
    batches = [(X[:16], data[:16]), (X[16:], data[16:])]
    for form in ((X, data), (batches,)):
        with pytest.warns(UserWarning, match="accumulate"):
            trained_by(model, 2, loss=loss, data=form)


def test_statistics_of_batches_are_named_and_dropout_is_not(no_warning):
    text = "f (float[N,4] x) => (float[N,2] y) { h = MatMul(x, w)  "
    numbers = {name: np.ones(2, np.float32) for name in "sbmv"}
    weight = {"w": np.ones((4, 2), np.float32)}
    normalized = text + "y = BatchNormalization(h, s, b, m, v) }"
    model = parse_model(normalized, opset=18, **weight, **numbers)
    data = X, X[:, :2]
    trained_by(model, 2, loss="squared_error", data=data)
    with pytest.warns(UserWarning, match=naming("accumulate", "BatchNormalization")):
        trained_by(model, 2, loss="squared_error", data=data, batch_norm="train")
    model = parse_model(text + "y = Dropout(h) }", opset=18, **weight)
    trained_by(model, 2, loss="squared_error", data=data, dropout={"y": 0.5})


# -- files with a fixed batch ---------------------------------------------------------------------


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("reduced", ["mean", "sum", "half sum and penalty"])
def test_a_fixed_batch_adds_up_or_averages_as_the_loss_does(reduced, caplog):
    fixed, free = (model_with_loss(REDUCED[reduced], rows) for rows in (8, "N"))
    (history, own), (whole, weights) = trained_by(fixed, 1), trained_by(free, 1)
    np.testing.assert_allclose(own, weights, rtol=1e-5)
    assert history[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-5)
    assert ("sum" if "sum" in reduced else "mean") in caplog.text


def fixed_classifier(rows):
    """Return a model whose rows are centered, so that they are not proven to be independent."""
    return parse_model(
        f"""f (float[{rows},4] x) => (float[{rows},3] y) {{
            m = ReduceMean<keepdims = 1>(x, zero)  c = Sub(x, m)  d = Add(c, m)
            y = MatMul(d, w) }}""",
        opset=18,
        w=RNG.normal(size=(4, 3)).astype(np.float32),
        zero=np.int64([0]),
    )


@pytest.mark.parametrize("shown", [8, in_sweep(None)])
def test_a_fixed_batch_in_every_call(shown):
    """Of all combinations of calls, some that are drawn; each evaluates as the whole does."""
    forms = {"arrays": (X, LABELS), "batches": ([(X[:16], LABELS[:16]), (X[16:], LABELS[16:])],)}
    cases = [
        (rows, form, size, accumulate, validation)
        for rows in (1, 8)
        for form in forms
        for size in (None, 8, 16, 32)
        for accumulate in (1, 2)
        for validation in (None, 0.3, "data")
        if not (form == "batches" and validation == 0.3)
    ]
    draw = np.random.default_rng(3)
    for number in draw.permutation(len(cases))[:shown]:
        rows, form, size, accumulate, validation = cases[number]
        held = (X[:8], LABELS[:8]) if validation == "data" else validation
        trainer = og.Trainer(fixed_classifier(rows), "cross_entropy", accumulate=accumulate)
        trainer.fit(*forms[form], batch_size=size, validation=held)
        assert np.isfinite(trainer.history[0]["loss"])
        assert ("validation_loss" in trainer.history[0]) == (validation is not None)
        whole = og.Trainer(trainer.model, "cross_entropy").evaluate(X, LABELS)["loss"]
        assert trainer.evaluate(*forms[form])["loss"] == pytest.approx(whole, rel=1e-5)
        assert trainer.predict(X).shape == (32, 3)


def test_a_held_out_share_is_a_multiple_of_the_fixed_batch():
    trainer = og.Trainer(fixed_classifier(8), "cross_entropy")
    trainer.fit(X, LABELS, validation=0.2)
    assert trainer.state.step == 3
    with pytest.raises(ValueError, match=naming("validation", "0.05", "8")):
        trainer.fit(X, LABELS, validation=0.05)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_fixed_batch_of_independent_rows_takes_any_number(rows, caplog):
    """Also where shapes state the batch, and a token is joined to each row."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(24, 3)).astype(np.float32)}

    def model(count):
        sizes = {"flat": [count * 24], "split": [count, 2, 12], "whole": [count, 24]}
        return parse_model(
            f"""f (float[{count},5,4] x) => (float[{count},3] y) {{
                j = Concat<axis = 1>(x, token)  f = Reshape(j, flat)  s = Reshape(f, split)
                t = Tanh(s)  g = Reshape(t, whole)  y = MatMul(g, w) }}""",
            opset=18,
            token=np.full((count, 1, 4), 0.5, np.float32),
            **{name: np.int64(size) for name, size in sizes.items()},
            **weights,
        )

    x, labels = draw.normal(size=(13, 5, 4)).astype(np.float32), draw.integers(0, 3, 13)
    options = {"optimizer": "sgd", "learning_rate": 0.1, "train": ["w"]}
    fixed, one = (og.Trainer(model(n), "cross_entropy", **options) for n in (rows, 1))
    for trainer in (fixed, one):
        trainer.fit(x, labels, batch_size=4, validation=0.3, epochs=2)
    np.testing.assert_allclose(fixed.predict(x), one.predict(x), rtol=1e-5)
    for own, other in zip(fixed.history, one.history, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    assert f"{rows} rows" in caplog.text
    with pytest.raises(ValueError, match=f"{rows} rows"):
        og.Trainer(fixed_classifier(rows), "cross_entropy").predict(x[:3, 0])
