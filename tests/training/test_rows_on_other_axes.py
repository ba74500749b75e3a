"""Rows on another axis than the first, against the same model with its rows first."""

from __future__ import annotations

import json

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.model import weights as model_weights
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.trainings import assert_close_arrays

ROWS, STEPS = 22, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, STEPS, 2)).astype("f")
Y = RNG.normal(size=(ROWS, STEPS, 3)).astype("f")
CLASSES = RNG.integers(0, 3, (ROWS, STEPS))
OF_ROWS = RNG.uniform(1, 2, ROWS).astype("f")
OF_TERMS = RNG.uniform(1, 2, Y.shape).astype("f")
WEIGHTS = {"w": RNG.normal(size=(2, 3)).astype("f")}

FIRST = parse_model("f (float[N,T,2] x) => (float[N,T,3] y) { y = MatMul(x, w) }", **WEIGHTS)
SECOND = parse_model(
    """f (float[T,N,2] x) => (float[T,N,3] y) {
        a = Transpose <perm = [1, 0, 2]> (x)  b = MatMul(a, w)
        y = Transpose <perm = [1, 0, 2]> (b) }""",
    **WEIGHTS,
)
# classes on the first axis, and rows behind them
BEHIND = parse_model(
    """f (float[T,N,2] x) => (float[3,T,N] y) {
        a = MatMul(x, w)  y = Transpose <perm = [2, 0, 1]> (a) }""",
    **WEIGHTS,
)
AXES = {"x": 1, "label": 1}


def steps_first(array):
    """Return an array of rows and steps with the steps first."""
    return array if array.ndim == 1 else array.swapaxes(0, 1)


def in_batches(*arrays):
    return [tuple(a[i : i + 8] for a in arrays) for i in range(0, ROWS, 8)]


def in_dicts(*arrays):
    return [dict(zip(("x", "label"), batch, strict=True)) for batch in in_batches(*arrays)]


def train(model, x, y=None, validation=None, stack=False, sample_weight=None, **options):
    """Return a trainer, or a stack, after two epochs."""
    kind, rate = (og.TrainerStack, [0.1, 0.3]) if stack else (og.Trainer, 0.1)
    options = {"loss": "mse", "optimizer": "adam", "metrics": ["mae"]} | options
    trainer = kind(model, learning_rate=rate, **options)
    fit = {"sample_weight": sample_weight, "validation": validation}
    return trainer.fit(x, y, epochs=2, batch_size=5, **fit)


PAIRS = {
    "arrays": {},
    "accumulated": {"accumulate": 2},
    "weights of rows": {"sample_weight": OF_ROWS},
    "weights of terms": {"sample_weight": OF_TERMS, "accumulate": 2},
    "a share": {"validation": 0.3},
    "a share of a stack": {"validation": 0.3, "stack": True},
    "an accumulating stack": {"accumulate": 2, "stack": True},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_arrays_train_as_with_rows_first(pair):
    options = {"validation": (X, Y)} | PAIRS[pair]
    first = train(FIRST, X, Y, **options)
    if options["validation"] != 0.3:
        options["validation"] = steps_first(X), steps_first(Y)
    if "sample_weight" in options:
        options["sample_weight"] = steps_first(options["sample_weight"])
    second = train(SECOND, steps_first(X), steps_first(Y), batch_axes=AXES, **options)
    assert_same_training(first, second)


@pytest.mark.parametrize("accumulate", [2, in_sweep(1)])
@pytest.mark.parametrize("cut", [in_batches, in_dicts])
def test_batches_train_as_with_rows_first(cut, accumulate):
    options = {"accumulate": accumulate, "loss": "mse"}
    first = train(FIRST, cut(X, Y), validation=cut(X, Y), **options)
    batches = [
        {n: steps_first(a) for n, a in batch.items()}
        if isinstance(batch, dict)
        else tuple(map(steps_first, batch))
        for batch in cut(X, Y)
    ]
    second = train(SECOND, batches, validation=batches, batch_axes=AXES, **options)
    assert_same_training(first, second)


def test_large_weights_train_as_with_rows_first(monkeypatch):
    monkeypatch.setattr(model_weights, "LARGE", 0)
    first = train(FIRST, X, Y)
    second = train(SECOND, steps_first(X), steps_first(Y), batch_axes=AXES)
    assert first._last_loop.runner.in_place
    assert second._last_loop.runner.in_place
    assert_same_training(first, second)


@pytest.mark.parametrize(("model", "axis"), [(SECOND, 2), (BEHIND, 0)])
def test_classes_beside_rows_on_other_axes(model, axis):
    options = {"loss": "cross_entropy", "metrics": ["accuracy", "f1_macro"], "validation": 0.3}
    options["class_weight"] = "balanced"
    first = train(FIRST, X, CLASSES, loss_options={"axis": 2}, **options)
    second = train(
        model, steps_first(X), steps_first(CLASSES),
        loss_options={"axis": axis}, batch_axes=AXES, **options,
    )  # fmt: skip
    prediction = second.predict(steps_first(X), batch_size=5)
    prediction = np.moveaxis(prediction, axis, 2)
    np.testing.assert_allclose(steps_first(prediction), first.predict(X), rtol=1e-4, atol=1e-6)
    assert_same_history(first, second)


@pytest.mark.parametrize("accumulate", [2, in_sweep(1)])
def test_sequences_without_alignment_beside_rows_behind_steps(accumulate):
    labels = np.random.default_rng(1).integers(1, 3, (ROWS, 2))
    options = {"loss": "ctc", "metrics": (), "accumulate": accumulate, "validation": 0.3}
    first = train(FIRST, X, labels, sample_weight=OF_ROWS, **options)
    options |= {"loss_options": {"time_major": True}, "batch_axes": {"x": 1, "label": 0}}
    second = train(SECOND, steps_first(X), labels, sample_weight=OF_ROWS, **options)
    assert_close_arrays(second.state.weights, first.state.weights, rtol=1e-4, atol=1e-6)
    assert_same_history(first, second)


def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path):
    def trained(*callbacks, epochs, **options):
        trainer = og.Trainer(SECOND, "mse", callbacks=callbacks, batch_axes=AXES)
        x, y = steps_first(X), steps_first(Y)
        return trainer.fit(x, y, epochs=epochs, batch_size=5, validation=0.3, **options)

    whole = trained(epochs=3)
    trained(og.Checkpoint(tmp_path), epochs=1)
    resumed = trained(og.Checkpoint(tmp_path), epochs=3, resume=tmp_path)
    np.testing.assert_array_equal(resumed.state.weights["w"], whole.state.weights["w"])


def test_a_step_that_fails_has_the_inputs_of_the_model():
    trainer = og.Trainer(SECOND, "mse", optimizer="sgd", learning_rate=1e30, batch_axes=AXES)
    with pytest.raises(og.ConvergenceError):
        trainer.fit(steps_first(X), steps_first(Y), batch_size=5, epochs=3)
    _, inputs = trainer.failed_step()
    assert inputs["x"].shape == (STEPS, 5, 2)
    assert inputs["label"].shape == (STEPS, 5, 3)


def test_the_rows_of_a_report(tmp_path):
    found = []
    for name, model, place, axes in (
        ("first", FIRST, np.asarray, None), ("second", SECOND, steps_first, AXES),
    ):  # fmt: skip
        folder = tmp_path / name
        options = {
            "loss": "cross_entropy",
            "metrics": (),
            "callbacks": [og.callbacks.Recorder(folder)],
        }
        options |= {"loss_options": {"axis": 2}, "batch_axes": axes}
        train(model, place(X), place(CLASSES), **options)
        found.append(json.loads((folder / "run.json").read_text())["examined"])
    first, second = found
    assert [w["row"] for w in first["worst"]] == [w["row"] for w in second["worst"]]
    assert [w["values"] for w in first["worst"]] == [w["values"] for w in second["worst"]]
    assert first["outputs"] == second["outputs"]
    assert first["rows"] == second["rows"] == ROWS


def assert_same_training(first, second):
    """Assert that weights, histories, losses and predictions are the same, but for the axes."""
    assert_close_arrays(second.state.weights, first.state.weights, rtol=1e-5, atol=1e-6)
    assert_same_history(first, second)
    x, y = steps_first(X), steps_first(Y)
    losses, expected = second.evaluate(x, y, batch_size=5), first.evaluate(X, Y)
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(losses[name], value, rtol=1e-5)
    predictions = first.predict(X).swapaxes(-2, -3)
    for size in (5, ROWS):
        np.testing.assert_allclose(second.predict(x, batch_size=size), predictions, rtol=1e-4)


def assert_same_history(first, second):
    """Assert that the entries of two histories are the same."""
    assert len(first.history) == len(second.history) == 2
    for own, expected in zip(second.history, first.history, strict=True):
        assert own.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-4, err_msg=name)
