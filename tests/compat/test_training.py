"""Training a model with its loss in the graph."""

from __future__ import annotations

import logging
import pickle
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import NoGradientRule
from onnxgrad.compat import (
    ConvergenceError,
    DerivativeOptions,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtGradientOptimizer,
    ProviderError,
    add_loss_output,
    onnx_derivative,
)
from onnxgrad.optimizers import adam
from tests.support.errors import naming
from tests.support.line_models import (
    DTYPES_OF_KINDS,
    LINE_START,
    kind_model,
    line_model,
    line_rows,
)
from tests.support.models import add_initializers, initializer_arrays, parse_model
from tests.support.running import in_sweep, run, run_named

CONSTANT = LearningRateSGD(0.05, learning_rate="constant")
HEAVY_BALL = LearningRateSGDNesterov(0.01, learning_rate="constant")


def inner_line_trainer(model=None, weights=None, **options) -> OrtGradientOptimizer:
    defaults = {"max_iter": 5, "learning_rate": CONSTANT, "random_state": 0}
    defaults["weights_to_train"] = weights
    return OrtGradientOptimizer(model or add_loss_output(line_model()), **defaults | options)


def predict(model: onnx.ModelProto, feed: dict, name: str | None = None) -> np.ndarray:
    return run_named(model, feed)[name] if name else run(model, feed)[0]


def squares_by_hand(x, y, batch, epochs, rate, seed, weight=None):
    """Return w, b and the losses after the same epochs in numpy, in float64."""
    rng, w, b = np.random.default_rng(seed), np.array([[0.1], [0.2]]), np.array([0.3])
    weight = np.ones((len(x), 1)) if weight is None else weight.reshape(-1, 1)
    losses = []
    for _ in range(epochs):
        order, total = rng.permutation(len(x)), 0.0
        for i in range(0, len(x), batch):
            part = order[i : i + batch]
            d = x[part] @ w + b - y[part]
            total += (weight[part] * d * d).sum()
            g = 2 * weight[part] * d / len(part)
            w, b = w - rate * x[part].T @ g, b - rate * g.sum(0)
        losses.append(total / len(x))
    return w, b, losses


def test_every_row_is_drawn_and_the_last_batch_is_shorter():
    x, y = line_rows(47)
    made = inner_line_trainer(batch_size=10).fit(x, y)
    w, b, losses = squares_by_hand(x, y, 10, 5, 0.05, 0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)
    np.testing.assert_allclose(made.trained_coef_["b"], b, rtol=1e-5)
    np.testing.assert_allclose(made.train_losses_, losses, rtol=1e-5)
    assert made.n_iter_ == 5


def test_mean_loss_is_not_divided_again():
    x, y = line_rows()
    made = inner_line_trainer(add_loss_output(line_model(), reduction="mean"), batch_size=10).fit(
        x, y
    )
    w, _, losses = squares_by_hand(x, y, 10, 5, 0.05, 0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)
    np.testing.assert_allclose(made.train_losses_, losses, rtol=1e-5)


def test_a_step_moves_weights_of_every_shape_along_their_gradient():
    """Small weights are one vector in the step: split, shared, broadcast and scalar ones."""
    text = """g (float[N,3] x) => (float[N,3] y) { a = MatMul(x, m)  b = Add(a, row)
        c = Sub(last, b)  d = Mul(scalar, c)  e = Mul(row, d)  f = MatMul(e, m)  h = Div(f, one)
        i = Unsqueeze(h, axis)  j = PRelu(i, slope)  k = Mul(j, column)
        l = ReduceMean<keepdims=0>(k, axis)  n = Mul(l, cube)  o = Transpose<perm=[1, 0, 2]>(n)
        p = Squeeze(o, axis)  q = Mul(row, row)  r = Gemm(q, m)  y = Add(p, r) }"""
    rng = np.random.default_rng(0)
    shapes = {"m": (3, 3), "row": (1, 3), "last": (3,)}
    shapes |= {"scalar": (), "one": (1, 1), "slope": (1, 3), "column": (3, 1), "cube": (1, 1, 3)}
    made = {n: np.asarray(1 + rng.random(s), np.float32) for n, s in shapes.items()}
    model = add_loss_output(parse_model(text, **made, axis=np.array([1])), reduction="mean")
    x, y = np.float32(rng.standard_normal((2, 7, 3)))
    gradient = onnx_derivative(
        model, [*shapes], [], DerivativeOptions.Loss, loss="loss", label="label"
    )
    values = run_named(gradient, {"x": x, "label": y} | made)
    moved = inner_line_trainer(model, [*shapes], batch_size=7, max_iter=1).fit(x, y).trained_coef_
    for name, start in made.items():
        np.testing.assert_allclose(
            moved[name], start - 0.05 * values[f"{name}_grad"], rtol=2e-5, atol=1e-5
        )


def test_a_loss_without_axes():
    text = """g (float[N,2] x, float[N,1] target) => (float total) { h = MatMul(x, w)  y = Add(h, b)
        d = Sub(y, target)  s = Mul(d, d)  total = ReduceSum<keepdims=0>(s) }"""
    x, y = line_rows()
    options = {"training_optimizer_name": "adam", "max_iter": 2}
    made = inner_line_trainer(
        kind_model(text, **LINE_START), loss_output_name="total", **options
    ).fit(x, y)
    other = inner_line_trainer(**options).fit(x, y)
    np.testing.assert_array_equal(made.trained_coef_["w"], other.trained_coef_["w"])
    assert made.train_losses_ == other.train_losses_


def test_names_of_the_model_that_the_step_uses_too():
    text = """g (float[N,2] packed) => (float[N,1] step)
        { batch = MatMul(packed, minus_learning_rate)  step = Add(batch, inverse_rows) }"""
    x, y = line_rows()
    model = kind_model(text, minus_learning_rate=LINE_START["w"], inverse_rows=LINE_START["b"])
    options = {"training_optimizer_name": "adam", "max_iter": 2}
    made = inner_line_trainer(add_loss_output(model), **options).fit(x, y)
    other = inner_line_trainer(**options).fit(x, y)
    assert made.train_losses_ == other.train_losses_


def test_the_cut_of_an_epoch_into_calls_changes_no_bit(monkeypatch):
    x, y = line_rows()
    text = "g (double[N,2] x) => (double[N,1] y) { y = MatMul(x, w) }"
    double = kind_model(text, "double", w=LINE_START["w"])
    states = []
    for seconds in (1e-9, 10.0):
        monkeypatch.setattr("onnxgrad.training.run.runner.SECONDS_PER_CALL", seconds)
        seen = []
        rate = LearningRateSGD(0.1, learning_rate="adaptive")
        made = inner_line_trainer(add_loss_output(double), batch_size=3, learning_rate=rate)
        made.fit(x, y, callback=seen.append)
        states.append((len(seen), made.trained_coef_["w"].tolist(), made.train_losses_))
    assert states[0][0] > states[1][0]
    assert states[0][1:] == states[1][1:]


@pytest.mark.parametrize("shape", [(47,), (47, 1)])
def test_row_weights(shape):
    x, y = line_rows()
    weight = np.random.default_rng(3).random(shape)
    made = inner_line_trainer(add_loss_output(line_model(), weight_name="weight")).fit(x, y, weight)
    w, _, _ = squares_by_hand(x, y, 10, 5, 0.05, 0, weight)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)


def test_row_weights_are_ones_when_not_given():
    x, y = line_rows()
    made = inner_line_trainer(add_loss_output(line_model(), weight_name="weight")).fit(x, y)
    np.testing.assert_allclose(
        made.trained_coef_["w"], squares_by_hand(x, y, 10, 5, 0.05, 0)[0], rtol=1e-5
    )


def test_a_penalty_is_part_of_the_gradient():
    x, y = line_rows(40)
    model = add_loss_output(line_model(), penalty={"w": {"l1": 0.5, "l2": 2}})
    made = inner_line_trainer(model, batch_size=40, max_iter=1).fit(x, y)
    w = np.array([[0.1], [0.2]])
    g = 2 * x.T @ (x @ w + 0.3 - y) + 0.5 * np.sign(w) + 2 * 2 * w
    np.testing.assert_allclose(made.trained_coef_["w"], w - 0.05 * g / 40, rtol=1e-5)


def test_a_model_as_bytes_or_path_and_of_the_first_opsets(tmp_path):
    """Weights are inputs too, as was asked for until IR version 4."""
    x, y = line_rows()
    model = line_model(opset=9)
    model.ir_version = 3
    for t in model.graph.initializer:
        kind = onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        model.graph.input.append(kind)
    with_loss = add_loss_output(model)
    data = with_loss.SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data)
    states = [
        inner_line_trainer(given).fit(x, y).get_trained_onnx().SerializeToString()
        for given in (with_loss, data, tmp_path / "m.onnx", str(tmp_path / "m.onnx"))
    ]
    assert states[0] != data == with_loss.SerializeToString()
    assert len(set(states)) == 1
    made = inner_line_trainer(with_loss).fit(x, y)
    w, b, _ = squares_by_hand(x, y, 10, 5, 0.05, 0)
    trained = made.get_trained_onnx(model)
    assert trained.ir_version == 3
    np.testing.assert_allclose(predict(trained, {"x": x}), x @ w + b, atol=1e-5)


@pytest.mark.parametrize("opset", [11, in_sweep(13), in_sweep(18), 21])
def test_the_trained_model_computes_what_the_state_does(opset):
    x, y = line_rows()
    model = line_model(opset=opset)
    model.producer_name, model.doc_string = "somebody", "a model"
    model.metadata_props.add(key="kind", value="linear")
    model.graph.node[0].name = "product"
    made = inner_line_trainer(add_loss_output(model), training_optimizer_name="nesterov").fit(x, y)
    trained = made.get_trained_onnx(model)
    state = made.get_state()
    np.testing.assert_allclose(predict(trained, {"x": x}), x @ state["w"] + state["b"], atol=1e-6)
    with_loss = made.get_trained_onnx()
    np.testing.assert_allclose(
        predict(with_loss, {"x": x, "label": y}, "y"), predict(trained, {"x": x})
    )
    assert trained.opset_import[0].version == opset
    for tensor, old in zip(trained.graph.initializer, model.graph.initializer, strict=True):
        assert (numpy_helper.to_array(tensor) != numpy_helper.to_array(old)).all()
        tensor.CopyFrom(old)
    assert trained.SerializeToString() == model.SerializeToString()


IF = """g (float[N,2] x, bool c) => (float[N,1] y) {
    w = Constant<value = float[2,1] {0.1, 0.2}>()
    b = If (c) <
        then_branch = then () => (float[1] t) { t = Constant<value_floats=[1.0]>() },
        else_branch = else () => (float[1] e) { e = Constant<value_floats=[2.0]>() }>
    h = MatMul(x, w)  y = Add(h, b) }"""


def test_weights_return_into_constant_nodes():
    x, y = line_rows()
    model = parse_model(IF, c=np.array(True))
    model.graph.input.pop()
    made = inner_line_trainer(add_loss_output(model), ["w"]).fit(x, y)
    trained = made.get_trained_onnx(model)
    assert [n.op_type for n in trained.graph.node] == ["Constant", "If", "MatMul", "Add"]
    value = numpy_helper.to_array(trained.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(value, made.trained_coef_["w"])
    assert (value != [[0.1], [0.2]]).all()


def test_weights_return_into_constants_of_branches():
    model, c = kind_model(IF), {"c": np.array(True)}
    x, _ = line_rows()
    trained = (
        inner_line_trainer(model).set_state({"t": [5.0], "w": [[1.0], [1.0]]}).get_trained_onnx()
    )
    np.testing.assert_allclose(predict(trained, {"x": x, **c}), x.sum(1, keepdims=True) + 5)
    branches = {a.name: a.g for a in trained.graph.node[1].attribute}
    then, other = (branches[b].node[0].attribute[0] for b in ("then_branch", "else_branch"))
    assert (then.name, list(then.floats), list(other.floats)) == ("value_floats", [5], [2])


def test_weights_return_into_attributes():
    x, y = line_rows()
    model = kind_model("""g (float[N,2] x) => (float[N,1] y) {
        y = ai.onnx.ml.LinearRegressor<coefficients=[0.1, 0.2], intercepts=[0.3]>(x) }""")
    model.graph.node[0].name = "lr"
    made = inner_line_trainer(add_loss_output(model)).fit(x, y)
    trained = made.get_trained_onnx(model)
    w, b, _ = squares_by_hand(x, y, 10, 5, 0.05, 0)
    kept = {a.name: list(a.floats) for a in trained.graph.node[0].attribute}
    np.testing.assert_allclose(kept["coefficients"], w.ravel(), rtol=1e-5)
    np.testing.assert_allclose(kept["intercepts"], b, rtol=1e-5)
    assert set(made.trained_coef_) == {"lr.coefficients", "lr.intercepts"}
    np.testing.assert_allclose(predict(trained, {"x": x}), x @ w + b, atol=1e-5)


def test_only_the_asked_weights_move():
    x, y = line_rows()
    made = inner_line_trainer(weights_to_train=["b", "b"]).fit(x, y)
    assert list(made.trained_coef_) == ["b"]
    trained = initializer_arrays(made.get_trained_onnx())
    np.testing.assert_array_equal(trained["w"], np.float32([[0.1], [0.2]]))


def test_statistics_and_scalars_are_not_trained_by_default():
    text = """g (float[N,2] x) => (float[N,2] y)
        { s = Mul(x, half)  y = BatchNormalization(s, a, b, m, v) }"""
    model = kind_model(text, half=0.5, a=[1, 1], b=[0, 0], m=[0, 0], v=[1, 1])
    x, _ = line_rows()
    assert set(inner_line_trainer(add_loss_output(model)).fit(x, x).trained_coef_) == {"a", "b"}


FLOORED = "r = ReduceSum(s)  f = Floor(spare)  t = ReduceSum(f)  loss = Add(r, t)"


@pytest.mark.parametrize(
    ("outputs", "nodes"),
    [
        ("float[1,1] loss", "loss = ReduceSum(s)"),
        ("float[1,1] loss, float[N,1] z", "loss = ReduceSum(s)  z = MatMul(x, spare)"),
        in_sweep("float[1,1] loss", FLOORED),
    ],
)
def test_a_weight_without_influence_stays(outputs, nodes):
    """Nothing reads it, only another output does, or its gradient is zero everywhere."""
    text = f"""g (float[N,2] x, float[N,1] label) => ({outputs}) {{
        h = MatMul(x, w)  y = Add(h, b)  d = Sub(y, label)  s = Mul(d, d)  {nodes} }}"""
    spare = [[0.1], [0.2]]
    model, (x, y) = kind_model(text, **LINE_START, spare=spare), line_rows()
    with pytest.warns(UserWarning, match=r"\['spare'\]"):
        made = inner_line_trainer(model, weights_to_train=[*LINE_START, "spare"]).fit(
            x, y, X_val=x, y_val=y
        )
    plain = inner_line_trainer().fit(x, y, X_val=x, y_val=y)
    assert made.trained_coef_.keys() == {"w", "b"}
    np.testing.assert_array_equal(made.trained_coef_["w"], plain.trained_coef_["w"])
    assert made.validation_losses_ == plain.validation_losses_


# -- an estimator --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["nesterov", adam(b1=0.8)])
def test_pickling_before_and_after_fit(optimizer):
    x, y = line_rows()
    before = inner_line_trainer(warm_start=True, training_optimizer_name=optimizer)
    before = pickle.loads(pickle.dumps(before))
    made = before.fit(x, y)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.trained_coef_["w"], made.trained_coef_["w"])
    np.testing.assert_array_equal(
        again.fit(x, y).trained_coef_["w"], made.fit(x, y).trained_coef_["w"]
    )


def test_clone_and_parameters():
    base = pytest.importorskip("sklearn.base")
    x, y = line_rows()
    made = inner_line_trainer(batch_size=7).fit(x, y)
    copy = base.clone(made)
    assert not hasattr(copy, "trained_coef_")
    assert copy.get_params(deep=False).keys() == made.get_params(deep=False).keys()
    np.testing.assert_array_equal(copy.fit(x, y).trained_coef_["w"], made.trained_coef_["w"])
    assert made.set_params(batch_size=3, learning_rate__eta0=0.5).batch_size == 3
    assert made.learning_rate.eta0 == 0.5
    made.set_params(learning_rate__eta0=0.05)


def test_a_learning_rate_has_the_value_of_the_last_epoch():
    x, y = line_rows()
    rate = LearningRateSGD(0.05, learning_rate="adaptive")
    made = inner_line_trainer(learning_rate=rate, max_iter=60).fit(x, y)
    assert made.learning_rate_ < 0.05
    assert rate.value == made.learning_rate_
    assert made.fit(x, y).learning_rate_ == rate.value  # each call begins with the first epoch


def test_the_seed_gives_the_same_bits():
    x, y = line_rows()
    states = [
        inner_line_trainer(random_state=seed, training_optimizer_name="adam").fit(x, y).get_state()
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(states[0]["w"], states[1]["w"])
    assert (states[0]["w"] != states[2]["w"]).any()


@pytest.mark.parametrize("optimizer", [in_sweep("sgd"), "nesterov", "adamw"])
def test_a_warm_start_goes_on_where_the_last_fit_ended(optimizer):
    x, y = line_rows()
    options = {"training_optimizer_name": optimizer, "learning_rate": LearningRateSGD(0.05)}
    whole = inner_line_trainer(max_iter=6, **options).fit(x, y)
    half = inner_line_trainer(max_iter=3, warm_start=True, **options).fit(x, y).fit(x, y)
    np.testing.assert_array_equal(half.trained_coef_["w"], whole.trained_coef_["w"])
    assert half.train_losses_ == whole.train_losses_
    assert half.n_iter_ == 6
    cold = inner_line_trainer(max_iter=3, **options).fit(x, y).fit(x, y)
    assert cold.n_iter_ == 3


def test_a_warm_start_may_train_other_weights():
    x, y = line_rows()
    made = inner_line_trainer(weights_to_train=["b"], warm_start=True).fit(x, y)
    bias = made.get_state()["b"]
    made.set_params(weights_to_train=["w"], training_optimizer_name="adam").fit(x, y)
    np.testing.assert_array_equal(made.get_state()["b"], bias)
    trained = initializer_arrays(made.get_trained_onnx())
    np.testing.assert_array_equal(trained["b"], bias)
    assert (trained["w"] != [[0.1], [0.2]]).all()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # the velocity of one is a sum of gradients, that of the other a sum of steps
        (
            {"training_optimizer_name": "momentum"},
            {"training_optimizer_name": "sgd", "learning_rate": HEAVY_BALL},
        ),
        # the step number of Adam counts from the first gradient that a slot has seen
        ({"training_optimizer_name": "adam"}, {"training_optimizer_name": adam(eps=1e-4)}),
        (
            {"training_optimizer_name": "adam", "weights_to_train": ["b"]},
            {"weights_to_train": ["b", "w"]},
        ),
    ],
)
def test_a_warm_start_without_slots_of_its_own_begins_with_none(first, then):
    x, y = line_rows()
    warm = inner_line_trainer(warm_start=True, **first).fit(x, y)
    fresh = inner_line_trainer(warm_start=True, **first | then).set_state(warm.get_state())
    for made in (warm.set_params(**then), fresh):
        made.fit([(x, y)])
    np.testing.assert_array_equal(warm.trained_coef_["w"], fresh.trained_coef_["w"])
    np.testing.assert_array_equal(warm.trained_coef_["b"], fresh.trained_coef_["b"])


def test_a_warm_start_on_some_of_the_weights_keeps_their_slots():
    x, y = line_rows()
    options = {"training_optimizer_name": "momentum", "max_iter": 1, "warm_start": True}
    made = inner_line_trainer(**options).fit([(x, y)])
    first = made.get_state()
    made.set_params(weights_to_train=["b"]).fit([(x, y)])
    g0, g1 = (2 * np.mean(x @ w + b - y) for w, b in (LINE_START.values(), first.values()))
    np.testing.assert_allclose(made.trained_coef_["b"], 0.3 - 0.05 * (1.9 * g0 + g1), rtol=1e-5)
    np.testing.assert_array_equal(made.trained_coef_["w"], first["w"])


def test_weights_start_from_the_model_or_are_drawn():
    model = line_model()
    x, y = line_rows()
    nothing = LearningRateSGD(1e-30, learning_rate="constant")
    made = {
        init: inner_line_trainer(
            add_loss_output(model), weight_init=init, learning_rate=nothing
        ).fit(x, y)
        for init in ("model", "glorot", "normal")
    }
    start = numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_array_equal(made["model"].trained_coef_["w"], start)
    for init in ("glorot", "normal"):
        assert (made[init].trained_coef_["w"] != start).all()
        np.testing.assert_array_equal(made[init].trained_coef_["b"], np.float32([0.3]))
    assert (abs(made["glorot"].trained_coef_["w"]) <= np.sqrt(6 / 3)).all()


def test_setting_and_getting_the_state():
    x, y = line_rows()
    made = inner_line_trainer(warm_start=True, max_iter=1)
    made.set_state({"w": [[2.0], [-1.0]], "b": [3.0]})
    assert made.fit(x, y).train_losses_[0] < 1e-9
    state = made.get_state()
    state["w"][:] = 7  # a copy
    assert (made.get_state()["w"] != 7).all()
    with pytest.raises(ValueError, match=naming("'W'", "'w'")):
        made.set_state({"W": [[1.0], [1.0]]})
    with pytest.raises(ValueError, match=naming("'w'", "(2, 1)", "(2,)")):
        made.set_state({"w": [1.0, 1.0]})
    text = "g (float[N,2] x) => (float[N,2] y) { y = Reshape(x, n) }"
    model = parse_model(text, n=np.array([0, 2]))
    with pytest.raises(ValueError, match="weight 'n'"):
        inner_line_trainer(model).set_state({"n": [0, 1]})
    for ask in (inner_line_trainer().get_trained_onnx, inner_line_trainer().get_state):
        with pytest.raises(ValueError, match="fit first"):
            ask()


# -- progress, validation, interruption ----------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "count"), [(1, 5), (2, 2), (0.2, 5), (0.4, 2), (0.39, 5), (9, 0)]
)
def test_validation(every, count):
    x, y = line_rows()
    seen = []
    made = inner_line_trainer(validation_every=every).fit(
        x, y, X_val=x[:7], y_val=y[:7], callback=seen.append
    )
    assert len(made.validation_losses_) == count
    if every == 1:
        state = made.get_state()
        loss = np.mean((x[:7] @ state["w"] + state["b"] - y[:7]) ** 2)
        assert made.validation_losses_[-1] == pytest.approx(loss, rel=1e-4)
        assert seen[-1].validation_loss == made.validation_losses_[-1]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_validation_on_many_rows_and_on_batches(reduction):
    x, y = line_rows(2500)
    batches = [(x[i : i + 1000], y[i : i + 1000]) for i in range(0, 2500, 1000)]
    for held in ({"X_val": x, "y_val": y}, {"X_val": batches}):
        made = inner_line_trainer(add_loss_output(line_model(), reduction=reduction), max_iter=1)
        made.fit(x[:40], y[:40], **held)
        state = made.get_state()
        loss = np.mean((x @ state["w"] + state["b"] - y) ** 2)
        assert made.validation_losses_ == pytest.approx([loss], rel=1e-5)
    with pytest.raises(ValueError, match=naming("y_val", "X_val", "pass both")):
        made.fit(x, y, y_val=y)


def test_progress():
    x, y = line_rows()
    seen = []
    made = inner_line_trainer(batch_size=10).fit(x, y, callback=seen.append)
    ends = [p for p in seen if p.rows == 47]
    assert [p.epoch for p in ends] == [0, 1, 2, 3, 4]
    assert [p.loss for p in ends] == made.train_losses_
    assert all(p.epochs == 5 and p.total_rows == 47 and p.rows_per_second > 0 for p in seen)
    assert all(p.validation_loss is None for p in seen)


def test_verbose_reports_every_epoch(caplog):
    x, y = line_rows()
    with caplog.at_level(logging.INFO, "onnxgrad"):
        inner_line_trainer(verbose=1).fit(x, y)
    assert sum("epoch" in m for m in caplog.messages) == 5


def test_a_batch_size_of_numpy():
    x, y = line_rows()
    losses = inner_line_trainer(batch_size=np.int64(7)).fit(x, y).train_losses_
    assert losses == inner_line_trainer(batch_size=7).fit(x, y).train_losses_
    assert {type(v) for v in losses} == {float}


def test_an_interruption_keeps_what_was_trained():
    x, y = line_rows()

    def stop(progress):
        if progress.epoch == 2 and progress.rows == 47:
            raise KeyboardInterrupt

    made = inner_line_trainer(max_iter=9)
    with pytest.raises(KeyboardInterrupt):
        made.fit(x, y, callback=stop)
    np.testing.assert_array_equal(
        made.trained_coef_["w"], inner_line_trainer(max_iter=3).fit(x, y).trained_coef_["w"]
    )


def test_divergence_keeps_the_state_before():
    x, y = line_rows()
    made = inner_line_trainer(learning_rate=1e4, max_iter=50)
    with pytest.raises(ConvergenceError, match=r"epoch \d+ .*learning rate .*kept"):
        made.fit(x, y)
    assert all(np.isfinite(w).all() for w in made.get_state().values())
    assert all(np.isfinite(made.train_losses_))
    predict(made.get_trained_onnx(), {"x": x, "label": y})
    made = inner_line_trainer(
        learning_rate=1e38, max_iter=1, batch_size=47
    )  # the loss before is finite
    with pytest.raises(ConvergenceError, match=r"epoch 1 .* none"):
        made.fit(x, y)
    np.testing.assert_array_equal(made.get_state()["w"], np.float32(LINE_START["w"]))


# -- data ----------------------------------------------------------------------------------------

TWO = """g (float[N,2] x, int64[N] k) => (float[N,1] y)
    { e = Gather(t, k)  h = MatMul(x, w)  y = Add(h, e) }"""


def test_several_inputs_as_a_dictionary():
    x, y = line_rows()
    model = add_loss_output(kind_model(TWO, w=[[0.0], [0.0]], t=[[0.0], [0.0], [0.0]]))
    made = inner_line_trainer(model, max_iter=60).fit({"x": x, "k": np.arange(47) % 2}, y)
    np.testing.assert_allclose(made.trained_coef_["w"], [[2], [-1]], atol=0.01)
    np.testing.assert_allclose(made.trained_coef_["t"].ravel(), [3, 3, 0], atol=0.01)
    with pytest.raises(ValueError, match=naming("inputs", "dict")):
        inner_line_trainer(model).fit(x, y)
    with pytest.raises(ValueError, match=r"\['k'\]"):
        inner_line_trainer(model).fit({"x": x}, y)
    with pytest.raises(ValueError, match=naming("input 'X'", "'x'")):
        inner_line_trainer(model).fit({"X": x, "k": np.arange(47)}, y)


def test_class_labels_and_images():
    text = """g (float[N,1,3,3] x) => (float[N,2] y)
        { c = Conv(x, k)  r = Relu(c)  f = Flatten(r)  y = MatMul(f, w) }"""
    rng = np.random.default_rng(0)
    model = kind_model(text, k=rng.standard_normal((4, 1, 2, 2)), w=rng.standard_normal((16, 2)))
    x = rng.standard_normal((60, 1, 3, 3))
    label = (x[:, 0, 1, 1] > 0).astype(np.int64)
    made = inner_line_trainer(
        add_loss_output(model, "cross_entropy"), max_iter=40, learning_rate=0.1
    )
    made.fit(x, label)
    assert made.train_losses_[-1] < 0.5 * made.train_losses_[0]
    found = predict(made.get_trained_onnx(model), {"x": np.float32(x)}).argmax(1)
    assert (found == label).mean() > 0.9


def loader_of_pairs(x, y):
    data = pytest.importorskip("torch.utils.data")
    from_numpy = pytest.importorskip("torch").from_numpy
    return data.DataLoader(data.TensorDataset(from_numpy(x), from_numpy(y)), batch_size=15)


BATCHES = {
    "tuples": lambda x, y: [(x[s], y[s]) for s in CUT],
    "lists": lambda x, y: [[x[s], y[s]] for s in CUT],
    "dicts": lambda x, y: [{"x": x[s], "label": y[s]} for s in CUT],
    "columns": lambda x, y: [(np.asfortranarray(x[s]), y[s][::-1][::-1]) for s in CUT],
    "loader": loader_of_pairs,
    "list of a loader": lambda x, y: list(loader_of_pairs(x, y)),
}
CUT = [slice(i, i + 15) for i in range(0, 40, 15)]


def test_a_label_that_is_ignored():
    x, _ = line_rows()
    label = np.where(np.arange(47) < 40, x[:, 0] > 0, -100)
    model = kind_model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, w) }", w=np.eye(2))
    moved = []
    for n in (40, 47):
        made = inner_line_trainer(add_loss_output(model, "cross_entropy"), batch_size=n, max_iter=1)
        moved.append(n * (made.fit(x[:n], label[:n]).trained_coef_["w"] - np.eye(2)))
    np.testing.assert_allclose(*moved, rtol=1e-3)


@pytest.mark.parametrize("kind", BATCHES)
def test_an_iterable_of_batches(kind):
    x, y = line_rows(40)
    batches = BATCHES[kind](x, y)
    made = inner_line_trainer(max_iter=2).fit(batches)
    w, b = np.array([[0.1], [0.2]]), np.array([0.3])
    for s in CUT * 2:
        g = 2 * (x[s] @ w + b - y[s]) / len(x[s])
        w, b = w - 0.05 * x[s].T @ g, b - 0.05 * g.sum(0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)


def test_a_generator_can_be_read_once_only():
    x, y = line_rows()
    with pytest.raises(ValueError, match=naming("generator", "once")):
        inner_line_trainer(max_iter=2).fit((x, y) for _ in range(3))


def test_wrong_batches():
    x, y = line_rows()
    model = add_loss_output(line_model(), weight_name="weight")
    with pytest.raises(ValueError, match="4 arrays"):
        inner_line_trainer().fit([(x, y, y, y)])
    with pytest.raises(ValueError, match="sample weights"):
        inner_line_trainer(model).fit([(x, y)], sample_weight=np.ones(47))
    with pytest.raises(ValueError, match="numbers of"):
        inner_line_trainer().fit([(x, y), (x, y[:3])])
    with pytest.raises(ValueError, match="no batch"):
        inner_line_trainer().fit(x, y, X_val=iter([]))
    weight = abs(y[:, 0])
    weighted = inner_line_trainer(model, batch_size=47).fit([(x, y, weight)])
    whole = inner_line_trainer(model, batch_size=47).fit(x, y, weight)
    np.testing.assert_allclose(weighted.trained_coef_["w"], whole.trained_coef_["w"], rtol=1e-5)


def test_a_fixed_batch():
    model = kind_model("g (float[4,2] x) => (float[4,1] y) { y = MatMul(x, w) }", w=[[0.1], [0.2]])
    x, y = line_rows(40)
    made = inner_line_trainer(add_loss_output(model), batch_size=4)
    made.fit(x, y, X_val=x[:8], y_val=y[:8])
    assert len(made.validation_losses_) == 5
    with pytest.raises(ValueError, match="4 rows"):
        made.fit(x, y, X_val=x[:7], y_val=y[:7])
    with pytest.raises(ValueError, match="4 rows"):
        made.fit(x[:38], y[:38])
    for wrong in ((x, y), ([(x[:8], y[:8])],)):
        with pytest.raises(ValueError, match=naming("batch_size=4", "8")):
            inner_line_trainer(add_loss_output(model), batch_size=8).fit(*wrong)


@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_other_precisions(dtype):
    kind = DTYPES_OF_KINDS[dtype]
    text = f"g ({dtype}[N,2] x) => ({dtype}[N,1] y) {{ y = MatMul(x, w) }}"
    made = kind_model(text, dtype, w=[[0.1], [0.2]])
    x, y = line_rows()
    fitted = inner_line_trainer(add_loss_output(made), max_iter=20).fit(x, y - 3)
    assert fitted.trained_coef_["w"].dtype == kind
    np.testing.assert_allclose(fitted.trained_coef_["w"], [[2], [-1]], atol=0.02)
    if dtype == "float16":
        with pytest.raises(ValueError, match=naming("1e-08", "float16")):
            fitted.set_params(learning_rate=1e-8).fit(x[:40], y[:40])


def test_two_precisions_in_one_model():
    text = """g (float[N,2] x) => (double[N,1] y)
        { h = MatMul(x, w)  c = Cast<to=11>(h)  y = Add(c, b) }"""
    model = parse_model(text, w=LINE_START["w"], b=np.array(LINE_START["b"]))
    x, y = line_rows()
    made = inner_line_trainer(add_loss_output(model), batch_size=10).fit(x, y)
    w, b, _ = squares_by_hand(x, y, 10, 5, 0.05, 0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)
    np.testing.assert_allclose(made.trained_coef_["b"], b, rtol=1e-6)
    assert {n: a.dtype for n, a in made.trained_coef_.items()} == {"w": "f4", "b": "f8"}


# -- bad input -----------------------------------------------------------------------------------

X, Y = line_rows()
NAN = np.where(np.arange(94).reshape(47, 2) // 2 == 30, np.nan, X)


WRONG_OPTIONS = [  # and what the message must name
    ({"weights_to_train": "w"}, "list|'w'"),
    ({"weights_to_train": []}, "differentiable"),
    ({"weights_to_train": ["W"]}, "weight 'W'|'w'"),
    ({"weights_to_train": 3}, "list|3"),
    ({"loss_output_name": "los"}, "output 'los'|'loss'"),
    ({"loss_output_name": "y"}, "'y'|one number"),
    ({"training_optimizer_name": "adm"}, "optimizer 'adm'"),
    ({"training_optimizer_name": "adam", "learning_rate": "Nesterov"}, "momentum"),
    ({"learning_rate": "constant"}, "learning rate"),
    ({"learning_rate": [0.1]}, "learning rate [0.1]"),
    ({"weight_init": "he"}, "weight_init"),
    ({"batch_size": 0}, "batch_size|1 or more"),
    ({"max_iter": 1.5}, "max_iter|whole"),
    ({"validation_every": 0}, "validation_every|above 0"),
    ({"validation_every": None}, "validation_every|None"),
    ({"device": None}, "device None"),
    ({"model_onnx": b"no model"}, "no ONNX"),
]
WRONG_DATA = [
    ((X, Y, None, None, None, 3), "callback|Progress|3"),
    ((X, Y[:40]), "rows|'x': 47, 'label': 40"),
    ((X[:0], Y[:0]), "'x'|no rows"),
    ((X[:, :1], Y), "'x'|(rows, 2)|(47, 1)"),
    ((X, np.ones((47, 2))), "'label'|(rows, 1)"),
    ((NAN, Y), "'x'|float32|NaN|1 of 47 rows: 30"),
    ((X.astype(float) * 1e300, Y), "'x'|float32|infinity"),
    ((X, np.where(Y > 1e9, 0, np.inf)), "'label'|float32|infinity"),
    ((X.astype(str), Y), "'x'|numbers|<U32"),
    ((X * 1j, Y), "'x'|numbers|complex"),
    ((X.astype("M8[s]"), Y), "'x'|numbers|datetime64"),
    ((np.ma.masked_less(X, 0), Y), "'x'|masked"),
    (([[1, 2], [None, 3]], Y), "'x'|numbers|None|row 1"),
    ((None, Y), "'x'|numbers|NoneType"),
    ((np.zeros(47, "f4, f4"), Y), "'x'|numbers|[('f0', '<f4')"),
    ((X,), "['label']"),
    ((3.0, Y), "'x'|a value per row"),
    ((X, Y, np.ones(47)), "sample weights"),
]
WRONG = [(options, (X, Y), parts) for options, parts in WRONG_OPTIONS]
WRONG += [({}, data, parts) for data, parts in WRONG_DATA]


@pytest.fixture(scope="module")
def inner_fitted_line() -> bytes:
    return pickle.dumps(inner_line_trainer().fit(X, Y))


@pytest.mark.parametrize(("options", "data", "parts"), WRONG)
def test_bad_input_changes_nothing(inner_fitted_line, options, data, parts):
    made = pickle.loads(inner_fitted_line)
    state = made.get_state()
    made.set_params(**options)
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        made.fit(*data)
    assert made.n_iter_ == 5
    np.testing.assert_array_equal(made.get_state()["w"], state["w"])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((47, 2)), r"'weight' .*\(rows,\).*\(47, 2\)"),
        (np.ones(46), "'weight': 46"),
    ],
)
def test_wrong_row_weights(weight, message):
    """Of batches of one row too: there two weights of a row would be added up."""
    model = add_loss_output(line_model(), weight_name="weight")
    with pytest.raises(ValueError, match=message):
        inner_line_trainer(model, batch_size=1).fit(X, Y, weight)


def test_numbers_that_the_input_cannot_hold():
    text = """g (float[N,2] x, uint8[N,1] k) => (float[N,1] y)
        { f = Cast<to=1>(k)  h = MatMul(x, w)  y = Add(h, f) }"""
    made = inner_line_trainer(add_loss_output(kind_model(text, w=LINE_START["w"])))
    k = np.where(np.arange(47) == 5, 256, 255)
    with pytest.raises(ValueError, match=naming("'k'", "uint8", "1 of 47", ": 5")):
        made.fit({"x": X, "k": k}, Y)
    made.fit({"x": X / 100, "k": k - 1}, Y)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([0, 1, 3], "0..2 .*1 of 3 rows: 2"),
        ([0, -1, 1], "0..2 .*1 of 3 rows: 1"),
        ([0, 0.5, 1], "'label' .*int64.* 1 of 3 rows: 1"),
        ([0, np.nan, 1], "'label' .*int64.* 1 of 3 rows: 1"),
    ],
)
def test_class_labels_out_of_range(label, message):
    model = kind_model("g (float[N,2] x) => (float[N,3] y) { y = MatMul(x, w) }", w=np.eye(2, 3))
    made = inner_line_trainer(add_loss_output(model, "cross_entropy"), batch_size=1)
    with pytest.raises(ValueError, match=message):
        made.fit(X[:3], np.array(label))


def test_an_integer_weight_an_unknown_operator_and_a_missing_device():
    model = add_loss_output(line_model())
    add_initializers(model, {"ids": np.arange(3)})
    with pytest.raises(ValueError, match=naming("'ids'", "INT64")):
        inner_line_trainer(model, weights_to_train=["ids"]).fit(X, Y)
    text = "g (float[2,2] x) => (float y) { h = MatMul(x, w)  y = acme.Foo(h) }"
    loss = kind_model(text, w=np.eye(2))
    loss.opset_import.add(domain="acme", version=1)
    with pytest.raises(NoGradientRule, match="Foo"):
        inner_line_trainer(loss, loss_output_name="y").fit(X, None)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(ProviderError, match=naming("device='cpu'", "install")):
            inner_line_trainer(device="cuda").fit(X, Y)


def test_no_warning_on_an_ordinary_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inner_line_trainer().fit(X, Y)


@pytest.mark.parametrize(
    ("loss", "label", "message"),
    [
        ("binary_cross_entropy", 7, "0 and 1.* 1 of 47 rows: 5"),
        ("hinge", 2, "-1 and 1.* 0 and 1.* 1 of 47 rows: 5"),
        ("poisson", -1, "0 or more.* 1 of 47 rows: 5"),
    ],
)
def test_labels_that_the_loss_does_not_take(loss, label, message):
    y = np.where(np.arange(47) == 5, label, 1)
    with pytest.raises(ValueError, match=message):
        inner_line_trainer(add_loss_output(line_model(), loss)).fit(X, y)


def test_labels_of_a_prediction_of_unknown_rank():
    text = """g (float[N,2] x) => (float[N,1] y) {
        h = MatMul(x, w)  s = Shape(h)  k = Cast<to=1>(s)  z = Constant<value_float=0.0>()
        m = Greater(k, z)  c = Compress<axis=0>(s, m)  y = Reshape(h, c) }"""
    model = kind_model(text, w=[[0.1], [0.2]])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    flat, column = (
        inner_line_trainer(add_loss_output(model), ["w"]).fit(X, y).trained_coef_["w"]
        for y in (Y[:, 0], Y)
    )
    np.testing.assert_array_equal(flat, column)
