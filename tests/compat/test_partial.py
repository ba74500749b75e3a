"""Training a model with its loss outside of it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad.compat import (
    BaseLearningLoss,
    BaseLearningRate,
    ConvergenceError,
    ConvergenceWarning,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    NoLearningPenalty,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    ProviderError,
    SquareLearningLoss,
    add_loss_output,
    onnx_derivative,
)
from tests.support.errors import naming
from tests.support.line_models import (
    DTYPES_OF_KINDS,
    LINE_START,
    kind_model,
    line_model,
    line_rows,
)
from tests.support.models import add_initializers, initializer_arrays
from tests.support.running import in_sweep, run, run_named

RATE = 0.05
CONSTANT = LearningRateSGD(RATE, learning_rate="constant")


def linear_classifier(classes: int) -> onnx.ModelProto:
    w = np.arange(2.0 * classes).reshape(2, classes) / 10
    return kind_model(f"g (float[N,2] x) => (float[N,{classes}] y) {{ y = MatMul(x, w) }}", w=w)


X, Y = line_rows()
WEIGHT = np.random.default_rng(1).random(47) + 0.5
CLASS = (X[:, 0] > 0).astype(np.int64)


def outer_line_trainer(model=None, **options) -> OrtGradientForwardBackwardOptimizer:
    defaults = {"max_iter": 5, "learning_rate": CONSTANT, "random_state": 0}
    return OrtGradientForwardBackwardOptimizer(model or line_model(), **defaults | options)


def arrays_of_ortvalues(state: dict) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in state.items()}


def one_step(model=None, x=X, y=Y, weight=None, **options) -> dict[str, np.ndarray]:
    """Return the gradients, mean over the rows, that one step on all rows has moved along."""
    made = outer_line_trainer(model, max_iter=1, batch_size=len(x), **options)
    before = initializer_arrays(made.model_onnx)
    after = arrays_of_ortvalues(made.fit(x, y, weight).trained_coef_)
    return {n: (before[n].astype(float) - w) / RATE for n, w in after.items()}


def logistic_function(f):
    return 1 / (1 + np.exp(-f))


# -- what is computed ----------------------------------------------------------------------------


ELASTIC = {"w": {"l1": 0.3, "l2": 0.7}}


def half_squares_by_hand(batch, epochs, weight, l1=0.0, l2=0.0):
    """Return w, b, the losses per epoch, of half the square, in float64 numpy."""
    rng, w, b = np.random.default_rng(0), np.array(LINE_START["w"]), np.array(LINE_START["b"])
    weight, losses = weight.reshape(-1, 1), []
    for _ in range(epochs):
        order, total = rng.permutation(len(X)), 0.0
        for i in range(0, len(X), batch):
            part = order[i : i + batch]
            d = X[part] @ w + b - Y[part]
            total += (weight[part] * d * d).sum() / 2 + l1 * abs(w).sum() + l2 * (w * w).sum()
            g = weight[part] * d
            gw, n = X[part].T @ g + l1 * np.sign(w) + 2 * l2 * w, len(part)
            w, b = w - RATE * gw / n, b - RATE * g.sum(0) / n
        losses.append(total / len(X))
    return w, b, losses


@pytest.mark.parametrize(
    ("shape", "penalty"),
    [
        (None, None),
        ((47,), ELASTIC),
        ((47, 1), None),
        *map(in_sweep, [None, (47,), (47, 1)], [ELASTIC, None, ELASTIC]),
    ],
)
def test_every_step_of_a_fit(shape, penalty):
    weight = None if shape is None else WEIGHT.reshape(shape)
    made = outer_line_trainer(batch_size=10, learning_penalty=penalty).fit(X, Y, weight)
    ones = np.ones(47) if shape is None else WEIGHT
    w, b, losses = half_squares_by_hand(10, 5, ones, **(penalty or {}).get("w", {}))
    state = arrays_of_ortvalues(made.trained_coef_)
    np.testing.assert_allclose(state["w"], w, rtol=1e-5)
    np.testing.assert_allclose(state["b"], b, rtol=1e-5)
    np.testing.assert_allclose(made.train_losses_, losses, rtol=1e-5)
    assert made.n_iter_ == 5


@pytest.mark.parametrize(
    "optimizer", ["Nesterov rate", "momentum", in_sweep("nesterov"), in_sweep("SGDOptimizer")]
)
def test_half_the_square_is_the_square_at_half_the_rate(optimizer):
    def rate(eta0):
        if optimizer == "Nesterov rate":
            return LearningRateSGDNesterov(eta0)
        return LearningRateSGD(eta0)

    name = "SGDOptimizer" if optimizer == "Nesterov rate" else optimizer
    outside = outer_line_trainer(learning_rate=rate(0.02), training_optimizer_name=name).fit(X, Y)
    inside = OrtGradientOptimizer(
        add_loss_output(line_model()), None, max_iter=5, random_state=0,
        learning_rate=rate(0.01), training_optimizer_name=name,
    ).fit(X, Y)  # fmt: skip
    for name, w in inside.trained_coef_.items():
        np.testing.assert_allclose(outside.trained_coef_[name].numpy(), w, rtol=1e-6)
    np.testing.assert_allclose(outside.train_losses_, np.array(inside.train_losses_) / 2, rtol=1e-6)


@pytest.mark.parametrize("name", [in_sweep("adam"), "adamw"])
def test_optimizers_that_take_the_mean_gradient(name):
    """They do not care for the scale: the same steps as with the loss inside."""
    outside = outer_line_trainer(training_optimizer_name=name).fit(X, Y, WEIGHT)
    model = add_loss_output(
        line_model(), lambda op, f, y: 0.5 * (f - y) * (f - y), weight_name="weight"
    )
    inside = OrtGradientOptimizer(
        model, None, max_iter=5, random_state=0, learning_rate=CONSTANT,
        training_optimizer_name=name,
    ).fit(X, Y, WEIGHT)  # fmt: skip
    for name, w in inside.trained_coef_.items():
        np.testing.assert_allclose(outside.trained_coef_[name].numpy(), w, rtol=1e-5)


D = (X @ np.array(LINE_START["w"]) + 0.3 - Y).astype(float)
F = D + Y
SIGNS = np.where(CLASS, 1.0, 0.0)[:, None]
LOSSES = {  # loss -> labels, gradient by the prediction, loss of a row
    "square_error": (Y, D, D * D / 2),
    "absolute_error": (Y, np.sign(D), abs(D)),
    "elastic": (Y, 0.5 * np.sign(D) + D, 0.5 * abs(D) + 0.5 * D * D),
    "log": (
        CLASS,
        logistic_function(F) - SIGNS,
        -np.log(np.where(SIGNS, logistic_function(F), 1 - logistic_function(F))),
    ),
    "huber": (Y, np.clip(D, -1, 1), np.where(abs(D) < 1, D * D / 2, abs(D) - 0.5)),
    "poisson": (abs(Y), np.exp(F) - abs(Y), np.exp(F) - abs(Y) * F),
}


def test_class_indices_where_the_number_of_classes_is_symbolic():
    """Those below 0 are refused; those beyond the last class, by the runtime."""
    model = kind_model("g (float[N,C] x) => (float[N,C] y) { y = Mul(x, w) }", w=[2.0])
    loss = NegLogLearningLoss(probability_function="softmax")
    made = OrtGradientForwardBackwardOptimizer(model, ["w"], learning_loss=loss, max_iter=2)
    x, y = np.eye(10, 3, dtype=np.float32), np.arange(10) % 3
    assert np.isfinite(made.fit(x, y).train_losses_).all()
    with pytest.raises(ValueError, match=naming("'label'", "below 0", "1 of 10", ": 0")):
        made.fit(x, y - (np.arange(10) == 0))


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, weight):
    y, gradient, loss = LOSSES[name]
    w = np.ones((47, 1)) if weight is None else weight[:, None]
    moved = one_step(y=y, weight=weight, learning_loss=name)
    np.testing.assert_allclose(moved["w"], X.T @ (w * gradient) / 47, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moved["b"], (w * gradient).mean(0), rtol=1e-4, atol=1e-5)
    nothing = outer_line_trainer(learning_loss=name).set_state({})
    np.testing.assert_allclose(nothing.losses(X, y, weight), (w * loss)[:, 0], rtol=1e-4, atol=1e-5)


def test_softmax_of_several_classes():
    label = np.arange(47) % 3
    loss = NegLogLearningLoss(probability_function="softmax")
    moved = one_step(linear_classifier(3), y=label, learning_loss=loss, weight=WEIGHT)
    p = np.exp(X @ (np.arange(6).reshape(2, 3) / 10))
    g = WEIGHT[:, None] * (p / p.sum(1, keepdims=True) - np.eye(3)[label])
    np.testing.assert_allclose(moved["w"], X.T @ g / 47, rtol=1e-4, atol=1e-6)


class TripledGradient(BaseLearningLoss):
    """A loss whose gradient is not that of what it reports."""

    def loss(self, op, prediction, label):
        return op.Floor(op.Abs(prediction - label))

    def gradient(self, op, prediction, label):
        return 3.0 * (prediction - label)


def test_the_gradient_starts_from_the_one_that_the_loss_writes():
    moved = one_step(learning_loss=TripledGradient())
    np.testing.assert_allclose(moved["w"], 3 * X.T @ D / 47, rtol=1e-5)
    made = outer_line_trainer(learning_loss=TripledGradient()).set_state({})
    np.testing.assert_array_equal(made.losses(X, Y), np.floor(abs(D[:, 0])))


def test_the_gradient_of_the_steps_is_that_of_the_derivative():
    """One step, and `onnx_derivative` fed with the gradient of the loss."""
    gradient = onnx_derivative(line_model(), inputs=[])
    fed = {"x": X, "y_grad": np.float32(WEIGHT[:, None] * D)}
    fed |= {name: np.float32(value) for name, value in LINE_START.items()}
    values = run_named(gradient, fed)
    for name, moved in one_step(weight=WEIGHT).items():
        np.testing.assert_allclose(moved, values[f"{name}_grad"] / 47, rtol=1e-4)


def test_penalties_of_all_weights_and_of_one():
    plain = one_step()
    size = {name: np.array(value) for name, value in LINE_START.items()}
    added = {n: (0.5 * np.sign(w) + 2 * 0.25 * w) / 47 for n, w in size.items()}
    every = one_step(learning_penalty=ElasticLearningPenalty(l1=0.5, l2=0.25))
    one = one_step(learning_penalty={"b": ElasticLearningPenalty(l1=0.5, l2=0.25)})
    for name, extra in added.items():
        np.testing.assert_allclose(every[name], plain[name] + extra, rtol=1e-4)
    np.testing.assert_allclose(one["b"], plain["b"] + added["b"], rtol=1e-4)
    np.testing.assert_array_equal(one["w"], plain["w"])


def test_a_penalty_of_coefficients_that_sit_in_attributes():
    model = kind_model("""g (float[N,2] x) => (float[N,1] y) {
        y = ai.onnx.ml.LinearRegressor<coefficients=[0.1, 0.2], intercepts=[0.3]>(x) }""")
    model.graph.node[0].name = "lr"
    made = outer_line_trainer(model, learning_penalty={"lr.coefficients": {"l2": 0.7}}).fit(X, Y)
    w, b, _ = half_squares_by_hand(10, 5, np.ones(47), l2=0.7)
    kept = {a.name: list(a.floats) for a in made.get_trained_onnx().graph.node[0].attribute}
    np.testing.assert_allclose(kept["coefficients"], w.ravel(), rtol=1e-5)
    np.testing.assert_allclose(kept["intercepts"], b, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("float", "square_error"),
        ("double", "absolute_error"),
        ("float16", "elastic"),
        *map(in_sweep, ["float", "float", "double"], ["absolute_error", "elastic", "square_error"]),
        *map(
            in_sweep,
            ["double", "float16", "float16"],
            ["elastic", "square_error", "absolute_error"],
        ),
    ],
)
def test_precisions_and_targets_of_several_columns(kind, loss):
    text = f"g ({kind}[N,2] x) => ({kind}[N,3] y) {{ y = MatMul(x, w) }}"
    model = kind_model(text, kind, w=np.zeros((2, 3)))
    target = X @ [[1.0, 2.0, -1.0], [0.5, -2.0, 1.0]]
    made = outer_line_trainer(model, learning_loss=loss, max_iter=60).fit(X, target, WEIGHT)
    w = made.trained_coef_["w"].numpy()
    assert w.dtype == DTYPES_OF_KINDS[kind]
    np.testing.assert_allclose(w, [[1.0, 2.0, -1.0], [0.5, -2.0, 1.0]], atol=0.1)
    assert made.losses(X, target).shape == (47,)


@pytest.mark.parametrize("kind", DTYPES_OF_KINDS)
def test_classes_in_all_precisions(kind):
    made = outer_line_trainer(line_model(kind), learning_loss="log", max_iter=20).fit(
        X, CLASS, WEIGHT
    )
    assert made.train_losses_[-1] < made.train_losses_[0]
    assert ((made.predict(X) > 0) == CLASS).mean() > 0.9


def test_integer_inputs_and_weights_in_constant_nodes():
    text = """g (float[N,2] x, int64[N] k) => (float[N,1] y) {
        w = Constant<value = float[2,1] {0.0, 0.0}>()
        e = Gather(t, k)  h = MatMul(x, w)  y = Add(h, e) }"""
    model = kind_model(text, t=[[0.0], [0.0], [0.0]])
    data = {"x": X, "k": np.arange(47) % 2}
    made = outer_line_trainer(model, max_iter=120).fit(data, Y)
    state = arrays_of_ortvalues(made.trained_coef_)
    np.testing.assert_allclose(state["w"], [[2], [-1]], atol=0.01)
    np.testing.assert_allclose(state["t"].ravel(), [3, 3, 0], atol=0.01)
    trained = made.get_trained_onnx()
    assert [n.op_type for n in trained.graph.node] == ["Constant", "Gather", "MatMul", "Add"]
    np.testing.assert_allclose(made.predict(data), Y, atol=0.05)
    np.testing.assert_array_equal(made.predict(data), run(trained, **data)[0])
    assert list(made.get_full_state()) == ["x", "k", *made.trained_coef_]
    with pytest.raises(ValueError, match=naming("input 'label'", "'x', 'k'")):
        made.predict(data | {"label": Y})


def test_an_iterable_of_batches_with_row_weights():
    batches = [(X[i : i + 10], Y[i : i + 10], WEIGHT[i : i + 10]) for i in range(0, 47, 10)]
    w, b = np.array(LINE_START["w"]), np.array(LINE_START["b"])
    for x, y, weight in batches:
        g = weight[:, None] * (x @ w + b - y) / len(x)
        w, b = w - RATE * x.T @ g, b - RATE * g.sum(0)
    made = outer_line_trainer(max_iter=1).fit(batches)
    np.testing.assert_allclose(made.trained_coef_["w"].numpy(), w, rtol=1e-5)
    np.testing.assert_allclose(made.losses(batches), made.losses(X, Y, WEIGHT), rtol=1e-6)


ONE_AXIS = """g (float[4,2] x) => (float[4] y)
    { h = Mul(x, w)  a = Constant<value_ints=[1]>()  y = ReduceSum<keepdims=0>(h, a) }"""


@pytest.mark.parametrize("optimizer", [in_sweep("sgd"), "adam"])
def test_a_fixed_batch_and_a_prediction_of_one_axis(optimizer):
    options = {"batch_size": 4, "training_optimizer_name": optimizer}
    made = outer_line_trainer(kind_model(ONE_AXIS, w=[[0.1, 0.2]]), **options).fit(
        X[:40], Y[:40, 0], WEIGHT[:40]
    )
    text = "g (float[N,2] x) => (float[N,1] y) { y = MatMul(x, w) }"
    same = outer_line_trainer(kind_model(text, w=LINE_START["w"]), **options).fit(
        X[:40], Y[:40], WEIGHT[:40]
    )
    w = made.trained_coef_["w"].numpy()
    np.testing.assert_allclose(w.T, same.trained_coef_["w"].numpy(), rtol=1e-5)
    np.testing.assert_allclose(made.losses(X[:8], Y[:8]), same.losses(X[:8], Y[:8]), rtol=1e-5)
    assert made.predict(X[:8]).shape == (8,)
    graph = onnx.load_from_string(made.save_onnx_graph(bytes)["learning_loss"]["loss_grad_onnx_"])
    found = run(graph, **{"X1": Y[:, 0], "X2": Y[:, 0] + 1})[1]
    np.testing.assert_allclose(found, np.ones(47), rtol=1e-6)
    np.testing.assert_allclose(made.predict(X[:7]), made.predict(X[:8])[:7], rtol=1e-6)


# -- an estimator --------------------------------------------------------------------------------


def test_arguments_and_defaults():
    made = OrtGradientForwardBackwardOptimizer(line_model())
    assert sorted(made.get_params(deep=False)) == sorted(
        "model_onnx weights_to_train loss_output_name max_iter training_optimizer_name batch_size "
        "learning_rate device warm_start verbose validation_every learning_loss enable_logging "
        "weight_name learning_penalty exc random_state weight_init".split()
    )
    assert isinstance(made.learning_rate, LearningRateSGD)
    assert isinstance(made.learning_loss, SquareLearningLoss)
    assert isinstance(made.learning_penalty, NoLearningPenalty)
    assert made.set_params(learning_rate__eta0=0.5).learning_rate.eta0 == 0.5
    made.set_params(learning_rate=0.25, learning_loss=NegLogLearningLoss(), learning_penalty=2)
    assert made.get_params()["learning_rate__eta0"] == 0.25
    assert made.get_params()["learning_penalty__l2"] == 2
    again = OrtGradientForwardBackwardOptimizer(**made.get_params(deep=False))
    for name, value in made.get_params(deep=False).items():
        assert getattr(again, name) is value


def test_predictions_have_the_axes_of_the_labels():
    made = outer_line_trainer(max_iter=1).fit(X, Y)
    assert made.predict(X).shape == (len(X), 1)
    flat = made.fit(X, Y[:, 0])
    np.testing.assert_array_equal(
        flat.predict(X), run(flat.get_trained_onnx(), **{"x": X})[0][:, 0]
    )


def test_score_and_losses_are_in_the_order_of_the_rows():
    x, y = line_rows(2500)
    made = outer_line_trainer(max_iter=1, learning_penalty="elastic").fit(x, y)
    state = arrays_of_ortvalues(made.trained_coef_)
    np.testing.assert_array_equal(made.predict(x), run(made.get_trained_onnx(), **{"x": x})[0])
    each = (x @ state["w"] + state["b"] - y)[:, 0] ** 2 / 2
    np.testing.assert_allclose(made.losses(x, y[:, 0]), each, rtol=1e-3, atol=1e-6)
    assert made.losses(x, y).shape == (2500,)
    assert made.score(x, y) == pytest.approx(-each.mean(), rel=1e-5)
    weight = np.random.default_rng(0).random(2500)
    np.testing.assert_allclose(made.losses(x, y, weight), weight * each, rtol=1e-3, atol=1e-6)
    assert made.score(x, y, weight) == pytest.approx(-(weight * each).mean(), rel=1e-5)
    assert type(made.score(x, y)) is float


def test_validation():
    made = outer_line_trainer(validation_every=2).fit(X, Y, WEIGHT, X[:7], Y[:7])
    assert len(made.validation_losses_) == 2
    made = outer_line_trainer(validation_every=1).fit(X, Y, WEIGHT, X[:7], Y[:7])
    assert made.validation_losses_[-1] == pytest.approx(-made.score(X[:7], Y[:7]), rel=1e-5)


@pytest.mark.parametrize("optimizer", [in_sweep("sgd"), "nesterov", "adam"])
def test_pickling_brings_back_everything(optimizer):
    options = {"training_optimizer_name": optimizer, "warm_start": True, "random_state": None}
    made = pickle.loads(pickle.dumps(outer_line_trainer(**options))).fit(X, Y)
    again = pickle.loads(pickle.dumps(made))
    assert again.train_losses_ == made.train_losses_
    again.fit(X, Y)  # draws the rows in the same order, from the same slots
    made.fit(X, Y)
    assert again.train_losses_ == made.train_losses_
    assert again.n_iter_ == 10
    for name, w in made.trained_coef_.items():
        np.testing.assert_array_equal(again.trained_coef_[name].numpy(), w.numpy())


def test_a_warm_start_goes_on_and_a_cold_one_begins_anew():
    whole = outer_line_trainer(max_iter=10, training_optimizer_name="momentum").fit(X, Y)
    half = (
        outer_line_trainer(warm_start=True, training_optimizer_name="momentum").fit(X, Y).fit(X, Y)
    )
    assert half.train_losses_ == whole.train_losses_
    cold = outer_line_trainer(training_optimizer_name="momentum").fit(X, Y).fit(X, Y)
    assert cold.train_losses_ == whole.train_losses_[:5]


# -- state ---------------------------------------------------------------------------------------


def test_the_weights_are_set_and_read():
    made = outer_line_trainer(warm_start=True, max_iter=1)
    exact = {"w": np.array([[2.0], [-1.0]]), "b": ort.OrtValue.ortvalue_from_numpy(np.float32([3]))}
    assert made.set_state(exact).fit(X, Y).train_losses_[0] < 1e-9
    state = made.get_state()
    assert all(isinstance(v, ort.OrtValue) for v in state.values())
    assert list(made.get_full_state()) == ["x", "w", "b"]
    assert made.get_full_state()["x"] is None
    other = outer_line_trainer(warm_start=True).set_state(made.get_full_state())
    np.testing.assert_array_equal(other.predict(X), made.predict(X))
    other.fit(X, Y + 1)  # a copy: the state that was read stays
    np.testing.assert_array_equal(state["w"].numpy(), made.get_state()["w"].numpy())
    zeros = made.set_state(made.get_state(), zero=True).get_state()
    assert not zeros["w"].numpy().any()
    assert not zeros["b"].numpy().any()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_slots_are_set_and_read(optimizer):
    options = {"training_optimizer_name": optimizer, "warm_start": True}
    made = outer_line_trainer(**options).fit([(X, Y)])
    both = made.get_state(["weight", "grad"])
    assert list(both[1]) == ["w", "b"]
    assert set(both[1]["w"]) == {"momentum": {"velocity"}, "adam": {"m", "v"}}[optimizer]
    full = made.get_full_state(["weight", "grad"])
    assert full[1]["x"] is None
    if optimizer == "momentum":  # Adam counts its steps as well
        other = outer_line_trainer(**options).set_state(full, kind=["weight", "grad"])
        other.fit([(X, Y)])
        same = pickle.loads(pickle.dumps(made)).fit([(X, Y)])
        for name, w in arrays_of_ortvalues(same.trained_coef_).items():
            np.testing.assert_array_equal(other.trained_coef_[name].numpy(), w)
    forgot = made.set_state(both[1], kind="grad", zero=True)
    fresh = outer_line_trainer(**options).set_state(both[0])
    for name, w in arrays_of_ortvalues(fresh.fit([(X, Y)]).trained_coef_).items():
        np.testing.assert_array_equal(forgot.fit([(X, Y)]).trained_coef_[name].numpy(), w)
        forgot.set_state(both[0]).set_state(both[0], "grad", zero=True)  # values do not matter


def test_one_slot_is_set_and_the_others_start_at_zero():
    velocity = {"b": {"velocity": np.float32([0.5])}}
    options = {"training_optimizer_name": "momentum", "warm_start": True, "max_iter": 1}
    made = outer_line_trainer(**options).set_state(velocity, kind="grad").fit([(X, Y)])
    plain = outer_line_trainer(**options).fit([(X, Y)])
    shift = made.trained_coef_["b"].numpy() - plain.trained_coef_["b"].numpy()
    np.testing.assert_allclose(shift, -RATE * 0.9 * 0.5, rtol=1e-5)
    np.testing.assert_array_equal(made.trained_coef_["w"].numpy(), plain.trained_coef_["w"].numpy())


@pytest.mark.parametrize(
    ("state", "options", "parts"),
    [
        ({"W": [[1.0], [1.0]]}, {}, "weight 'W'|'w'"),
        ({"w": [[9.0], [9.0]], "b": [1.0, 1.0]}, {}, "'b'|(1,)|(2,)"),
        ({"w": {"speed": [[1.0], [1.0]]}}, {"kind": "grad"}, "slot of 'w' 'speed'"),
        ({"w": {"velocity": [1.0]}}, {"kind": "grad"}, "'w'|(2, 1)"),
        ({"q": {"velocity": [1.0]}}, {"kind": "grad"}, "weight 'q'"),
        ({"q": None, "w": [1.0]}, {}, "'w'|(2, 1)"),
        ({}, {"kind": "gradient"}, "'gradient'"),
        ([{"w": [[9.0], [9.0]]}, {"q": {}}], {"kind": ["weight", "grad"]}, "weight 'q'"),
    ],
)
def test_a_wrong_state_changes_nothing(state, options, parts):
    made = outer_line_trainer(training_optimizer_name="momentum").fit(X, Y)
    weights, slots = made.get_state(["weight", "grad"])
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        made.set_state(state, **options)
    np.testing.assert_array_equal(made.get_state()["w"].numpy(), weights["w"].numpy())
    now = made.get_state("grad")["w"]["velocity"].numpy()
    np.testing.assert_array_equal(now, slots["w"]["velocity"].numpy())


@pytest.mark.parametrize("error", [ValueError, AttributeError])
def test_nothing_was_trained(error):
    made = outer_line_trainer()
    assert not hasattr(made, "trained_coef_")
    for ask in (
        made.get_state,
        made.get_full_state,
        made.get_trained_onnx,
        lambda: made.predict(X),
        lambda: made.score(X, Y),
    ):
        with pytest.raises(error, match="fit first"):
            ask()


# -- graphs --------------------------------------------------------------------------------------


def nested_names(made: dict) -> dict:
    return {k: nested_names(v) if isinstance(v, dict) else "" for k, v in made.items()}


@pytest.mark.parametrize("fitted", [in_sweep(False), True])
def test_the_graphs_are_saved(tmp_path, fitted):
    rate = LearningRateSGDNesterov(1e-3)
    made = outer_line_trainer(learning_rate=rate, weight_name="weight", learning_penalty="elastic")
    if fitted:
        made.fit(X, Y, WEIGHT)
    folder = tmp_path / "new" / "folder"
    paths = made.save_onnx_graph(folder)
    serialized = made.save_onnx_graph(bytes)
    assert nested_names(paths) == nested_names(serialized)
    assert nested_names(paths) == {
        "model_onnx": "",
        "learning_rate": {"axpyw_onnx_": ""},
        "learning_loss": {"loss_grad_onnx_": "", "loss_score_onnx_": ""},
        "learning_penalty": {"penalty_grad_onnx_": "", "penalty_onnx_": ""},
        "zero_onnx_": "",
        "train_function_": {
            "_trained_onnx": "",
            "_optimized_pre_grad_model": "",
            "_forward_onnx": "",
            "_backward_onnx": "",
        },
        "epoch_onnx_": "",
    }
    files = sorted(folder.iterdir())
    assert len(files) == 12
    assert Path(paths["learning_loss"]["loss_grad_onnx_"]) in files
    for path in files:
        model = onnx.load(path)
        joint = "_trained_onnx" in path.name
        assert any(n.op_type == "YieldOp" for n in model.graph.node) == joint
        domains = {d.domain for d in model.opset_import} - {"ai.onnx.ml"}
        assert domains == ({"", "com.microsoft"} if joint else {""})
        if not joint:
            ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    state = (
        arrays_of_ortvalues(made.trained_coef_)
        if fitted
        else {n: np.float32(v) for n, v in LINE_START.items()}
    )
    expected = X @ state["w"] + state["b"]
    model = onnx.load_from_string(serialized["model_onnx"])
    np.testing.assert_allclose(run(model, **{"x": X})[0], expected, rtol=1e-5, atol=1e-6)
    forward = onnx.load(paths["train_function_"]["_optimized_pre_grad_model"])
    assert [x.name for x in forward.graph.input] == ["x", "w", "b"]
    np.testing.assert_allclose(run(forward, **{"x": X} | state)[0], expected, rtol=1e-5, atol=1e-6)


class Halved(BaseLearningRate):
    """A learning rate of one's own."""

    def init_learning_rate(self):
        self.value = RATE
        return self

    def update_learning_rate(self, t, loss=None):
        self.value /= 2
        return self


def test_a_learning_rate_of_ones_own():
    made = outer_line_trainer(learning_rate=Halved(), max_iter=3).fit(X, Y)
    assert made.learning_rate_ == RATE / 4
    assert list(made.save_onnx_graph(bytes)["learning_rate"]) == ["axpy_onnx_"]


def test_the_graph_of_the_loss_and_the_one_that_is_run():
    made = outer_line_trainer(weight_name="w8").save_onnx_graph(bytes)
    assert list(made["learning_rate"]) == ["axpy_onnx_"]
    assert made["learning_penalty"] == {}
    graph = onnx.load_from_string(made["learning_loss"]["loss_grad_onnx_"])
    loss, gradient = run(graph, **{"X1": Y, "X2": np.float32(F), "w8": np.float32(WEIGHT)})
    np.testing.assert_allclose(loss.sum(), (WEIGHT[:, None] * D * D / 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, WEIGHT[:, None] * D, rtol=1e-3, atol=1e-5)
    epoch = onnx.load_from_string(made["epoch_onnx_"]).graph
    assert "Scan" in [node.op_type for node in epoch.node]
    assert "w8/all" in [x.name for x in epoch.input]
    assert "loss/last" in [y.name for y in epoch.output]


def test_the_graphs_of_a_classifier_in_float64():
    text = """g (double[N,2] x) => (int64[N] class, double[N,3] y) {
        y = MatMul(x, w)  class = ArgMax<axis=1, keepdims=0>(y) }"""
    loss = NegLogLearningLoss(probability_function="softmax")
    model = kind_model(text, "double", w=np.arange(6.0).reshape(2, 3))
    made = outer_line_trainer(model, learning_loss=loss, learning_penalty=0.5, weight_name="weight")
    made = made.save_onnx_graph(bytes)
    graph = onnx.load_from_string(made["learning_loss"]["loss_score_onnx_"])
    feed = {"X1": np.arange(3), "X2": np.eye(3), "weight": np.ones(3)}
    np.testing.assert_allclose(run(graph, **feed)[0].ravel(), np.log(np.e + 2) - 1)
    graph = onnx.load_from_string(made["learning_penalty"]["penalty_grad_onnx_"])
    np.testing.assert_allclose(run(graph, **{"w": np.eye(2)})[0], np.eye(2))
    joint = onnx.load_from_string(made["train_function_"]["_trained_onnx"]).graph
    [node] = [node for node in joint.node if node.op_type == "YieldOp"]
    assert list(node.input) == ["y"]


def test_the_trained_model_is_the_users_with_new_values():
    model = line_model()
    model.producer_name, model.doc_string = "somebody", "a model"
    made = outer_line_trainer(model).fit(X, Y)
    trained, state = made.get_trained_onnx(), arrays_of_ortvalues(made.trained_coef_)
    for tensor, old in zip(trained.graph.initializer, model.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), state[tensor.name])
        tensor.CopyFrom(old)
    assert trained.SerializeToString() == model.SerializeToString()
    other = made.get_trained_onnx(add_loss_output(model))
    assert [y.name for y in other.graph.output] == ["loss", "y"]


# -- reports and errors --------------------------------------------------------------------------


def test_divergence_raises_or_warns_and_keeps_the_state_before():
    made = outer_line_trainer(learning_rate=1e4, max_iter=50)
    with pytest.raises(ConvergenceError, match=r"epoch \d+ .*learning rate .*kept"):
        made.fit(X, Y)
    weak = outer_line_trainer(learning_rate=1e4, max_iter=50, exc=False)
    with pytest.warns(ConvergenceWarning, match=r"epoch \d+ .*learning rate .*kept") as seen:
        assert weak.fit(X, Y) is weak
    assert seen[0].filename == __file__
    for name, w in made.trained_coef_.items():
        assert np.isfinite(w.numpy()).all()
        np.testing.assert_array_equal(weak.trained_coef_[name].numpy(), w.numpy())
    assert weak.n_iter_ == made.n_iter_ == len(weak.train_losses_) < 50


def test_logging(caplog):
    with caplog.at_level(logging.DEBUG, "onnxgrad"):
        outer_line_trainer(enable_logging=True).fit(X, Y)
        assert sum("epoch" in m for m in caplog.messages) == 5
        assert sum("step" in m for m in caplog.messages) >= 5
        caplog.clear()
        outer_line_trainer().fit(X, Y)
    assert not [m for m in caplog.messages if "epoch" in m or "step" in m]


TWO = "g (float[N,2] x) => (float[N,1] y, float[N,1] h) { h = MatMul(x, w)  y = Add(h, b) }"
MAP = """g (float[N,2] x) => (int64[N] label, seq(map(int64, float)) output_probability) {
    s = MatMul(x, w)  p = Softmax(s)  label = ArgMax<axis=1, keepdims=0>(s)
    output_probability = ai.onnx.ml.ZipMap<classlabels_int64s=[0, 1]>(p) }"""


WRONG_DATA = [  # and what the message must name
    ((X, Y, WEIGHT[:40]), "rows|'weight': 40"),
    ((X, Y, np.ones((47, 2))), "'weight'|(rows,)|(47, 2)"),
    ((X, Y, np.where(np.arange(47) == 3, np.nan, 1)), "sample_weight|NaN|: 3"),
    ((X, Y, None, X, Y[:3]), "numbers of rows"),
    ((X, Y, None, None, Y), "y_val|X_val"),
]
WRONG_OPTIONS = [
    ({"learning_loss": "log"}, (X, CLASS + 1), "0..1|of 47"),
    ({"learning_loss": "log"}, (X, CLASS / 2), "'label'|int64"),
    ({"learning_loss": "poisson"}, (X, -abs(Y)), "0 or more|47 of 47"),
    ({"learning_loss": "sqare"}, (X, Y), "loss 'sqare'|'square'"),
    ({"learning_penalty": "elastik"}, (X, Y), "penalty 'elastik'"),
    ({"learning_penalty": {"W": 1}}, (X, Y), "penalty 'W'|'w'"),
    ({"learning_penalty": {"w": 0}}, (X, Y), "penalty of 'w'"),
    ({"learning_penalty": ElasticLearningPenalty(-1)}, (X, Y), "l1|number"),
    ({"learning_rate": "constant"}, (X, Y), "learning rate 'constant'"),
    ({"weights_to_train": ["W"]}, (X, Y), "weight 'W'|'w'"),
    ({"device": "gpu"}, (X, Y), "device 'gpu'|CPUExecutionProvider"),
    ({"max_iter": 0}, (X, Y), "max_iter|whole"),
    ({"model_onnx": lambda: kind_model(TWO, **LINE_START)}, (X, Y), "2 float outputs|'y'"),
    (
        {"model_onnx": lambda: kind_model(MAP, w=np.eye(2))},
        (X, Y),
        "0 float outputs|select_model_inputs_outputs|'p'",
    ),
    (
        {"learning_loss": lambda op, f, y: op.ReduceSum(f - y, keepdims=1)},
        (X, Y, WEIGHT),
        "element or row",
    ),
    (
        {"learning_loss": lambda op, f, y: op.Slice(op.ReduceSum(f - y), [0], [1])},
        (X, Y, WEIGHT),
        "element or row",
    ),
]


@pytest.fixture(scope="module")
def outer_fitted_line() -> bytes:
    return pickle.dumps(outer_line_trainer().fit(X, Y))


@pytest.mark.parametrize(
    ("options", "data", "parts"), [*(({}, *wrong) for wrong in WRONG_DATA), *WRONG_OPTIONS]
)
def test_bad_input_changes_nothing(outer_fitted_line, options, data, parts):
    made = pickle.loads(outer_fitted_line)
    state = arrays_of_ortvalues(made.get_state())
    options = {n: v() if n == "model_onnx" else v for n, v in options.items()}
    made.set_params(**options)
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        made.fit(*data)
    assert made.n_iter_ == 5
    for name, w in made._state.values.weights.items():
        np.testing.assert_array_equal(w, state[name])


def test_a_state_is_a_dictionary():
    inner = OrtGradientOptimizer(add_loss_output(line_model()))
    for made in (inner, OrtGradientForwardBackwardOptimizer(line_model())):
        for state in (None, [], [np.zeros((2, 1))]):
            with pytest.raises(ValueError, match=naming("the state", "a dict", "not")):
                made.set_state(state)


def test_a_missing_device():
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("there is one")
    with pytest.raises(ProviderError, match=r"offers \[.*'CPUExecutionProvider'"):
        outer_line_trainer(device="cuda").fit(X, Y)


def test_no_warning_on_an_ordinary_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer_line_trainer(learning_penalty="elastic", weight_name="weight").fit(X, Y, WEIGHT)


def test_a_weight_without_influence_stays_and_is_not_penalized():
    model = line_model()
    add_initializers(model, {"spare": np.float32([7, 8])})
    named = {"weights_to_train": ["w", "b", "spare"]}
    with pytest.warns(UserWarning, match=r"\['spare'\]") as seen:
        made = outer_line_trainer(model, learning_penalty="elastic", **named).fit(
            X, Y, X_val=X, y_val=Y
        )
    assert seen[0].filename == __file__
    assert set(made.trained_coef_) == {"w", "b"}


def test_names_of_the_model_that_training_uses_too():
    text = """g (float[N,2] label) => (float[N,1] loss)
        { weight = MatMul(label, w)  loss = Add(weight, b) }"""
    made = outer_line_trainer(kind_model(text, **LINE_START)).fit(X, Y, WEIGHT)
    same = outer_line_trainer().fit(X, Y, WEIGHT)
    assert made.train_losses_ == same.train_losses_
    np.testing.assert_array_equal(made.predict(X), same.predict(X))


def test_without_scikit_learn():
    """A process whose scikit-learn cannot be imported."""
    code = """if True:
        import sys
        sys.modules["sklearn"] = sys.modules["sklearn.base"] = None
        import numpy as np, onnx
        from onnxgrad.compat import OrtGradientForwardBackwardOptimizer as Outer
        from onnxgrad.compat import LearningRateSGD, OrtGradientOptimizer as Inner, add_loss_output
        m = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
            g (float[N,1] x) => (float[N,1] y) <float[1,1] w = {1}> { y = MatMul(x, w) }''')
        x, y = np.ones((10, 1)), np.zeros(10)
        Inner(add_loss_output(m)).fit(x, np.ones(10))
        t = Inner("m.onnx", learning_rate=LearningRateSGD(0.5))
        assert t.get_params()["learning_rate__eta0"] == 0.5
        t.set_params(batch_size=3, learning_rate__eta0=0.1)
        assert t.learning_rate.eta0 == 0.1 and "batch_size=3" in repr(t)
        try:
            t.set_params(batchsize=3)
        except ValueError as e:
            assert "batchsize" in str(e)
        else:
            raise AssertionError
        t = Outer(m, learning_rate=0.5)
        assert t.get_params()["learning_rate__eta0"] == 0.5
        for error in (ValueError, AttributeError):
            try:
                t.get_state()
            except error as e:
                assert "call fit first" in str(e)
        assert t.fit(x, y).score(x, y) > -0.01
    """
    subprocess.run([sys.executable, "-c", code], check=True)
