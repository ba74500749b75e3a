"""Training a model with its loss in the graph."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import (
    ConvergenceError,
    DerivativeOptions,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NoGradientRule,
    OrtGradientOptimizer,
    ProviderError,
    adam,
    add_loss_output,
    onnx_derivative,
)

CONSTANT = LearningRateSGD(0.05, learning_rate="constant")


def parse(text: str, opset: int = 18, **weights) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3]> {text}'
    )
    for name, array in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    return made


START = {"w": [[0.1], [0.2]], "b": [0.3]}


def linear(opset: int = 18) -> onnx.ModelProto:
    text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    return parse(text, opset, **START)


def rows(n: int = 47) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 2)).astype(np.float32)
    return x, (2 * x[:, :1] - x[:, 1:] + 3).astype(np.float32)


def trainer(model=None, weights=None, **options) -> OrtGradientOptimizer:
    defaults = {"max_iter": 5, "learning_rate": CONSTANT, "random_state": 0}
    defaults["weights_to_train"] = weights
    return OrtGradientOptimizer(model or add_loss_output(linear()), **defaults | options)


def run(model: onnx.ModelProto, feed: dict, names: list[str] | None = None) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, {x.name: feed[x.name] for x in session.get_inputs()})


def predict(model: onnx.ModelProto, feed: dict, name: str | None = None) -> np.ndarray:
    return run(model, feed, name and [name])[0]


def by_hand(x, y, batch, epochs, rate, seed, weight=None):
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
    x, y = rows(47)
    made = trainer(batch_size=10).fit(x, y)
    w, b, losses = by_hand(x, y, 10, 5, 0.05, 0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)
    np.testing.assert_allclose(made.trained_coef_["b"], b, rtol=1e-5)
    np.testing.assert_allclose(made.train_losses_, losses, rtol=1e-5)
    assert made.n_iter_ == 5


def test_mean_loss_is_not_divided_again():
    x, y = rows()
    made = trainer(add_loss_output(linear(), reduction="mean"), batch_size=10).fit(x, y)
    w, _, losses = by_hand(x, y, 10, 5, 0.05, 0)
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
    model = parse(text, **made)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    model = add_loss_output(model, reduction="mean")
    x, y = np.float32(rng.standard_normal((2, 7, 3)))
    gradient = onnx_derivative(
        model, [*shapes], [], DerivativeOptions.Loss, loss="loss", label="label"
    )
    names = [o.name for o in gradient.graph.output]
    values = dict(zip(names, run(gradient, {"x": x, "label": y} | made), strict=True))
    moved = trainer(model, [*shapes], batch_size=7, max_iter=1).fit(x, y).trained_coef_
    for name, start in made.items():
        np.testing.assert_allclose(
            moved[name], start - 0.05 * values[f"{name}_grad"], rtol=2e-5, atol=1e-5
        )


def test_a_loss_without_axes():
    text = """g (float[N,2] x, float[N,1] target) => (float total) { h = MatMul(x, w)  y = Add(h, b)
        d = Sub(y, target)  s = Mul(d, d)  total = ReduceSum<keepdims=0>(s) }"""
    x, y = rows()
    options = {"training_optimizer_name": "adam", "max_iter": 2}
    made = trainer(parse(text, **START), loss_output_name="total", **options).fit(x, y)
    other = trainer(**options).fit(x, y)
    np.testing.assert_array_equal(made.trained_coef_["w"], other.trained_coef_["w"])
    assert made.train_losses_ == other.train_losses_


def test_names_of_the_model_that_the_step_uses_too():
    text = """g (float[N,2] packed) => (float[N,1] step)
        { batch = MatMul(packed, minus_learning_rate)  step = Add(batch, inverse_rows) }"""
    x, y = rows()
    model = parse(text, minus_learning_rate=START["w"], inverse_rows=START["b"])
    options = {"training_optimizer_name": "adam", "max_iter": 2}
    made = trainer(add_loss_output(model), **options).fit(x, y)
    other = trainer(**options).fit(x, y)
    assert made.train_losses_ == other.train_losses_


def test_the_cut_of_an_epoch_into_calls_changes_no_bit(monkeypatch):
    x, y = rows()
    double = parse("g (double[N,2] x) => (double[N,1] y) { y = MatMul(x, w) }")
    double.graph.initializer.append(numpy_helper.from_array(np.array(START["w"]), "w"))
    states = []
    for seconds in (1e-9, 10.0):
        monkeypatch.setattr("onnxgrad.training.run.runner.SECONDS_PER_CALL", seconds)
        seen = []
        rate = LearningRateSGD(0.1, learning_rate="adaptive")
        made = trainer(add_loss_output(double), batch_size=3, learning_rate=rate)
        made.fit(x, y, callback=seen.append)
        states.append((len(seen), made.trained_coef_["w"].tolist(), made.train_losses_))
    assert states[0][0] > states[1][0]
    assert states[0][1:] == states[1][1:]


@pytest.mark.parametrize("shape", [(47,), (47, 1)])
def test_row_weights(shape):
    x, y = rows()
    weight = np.random.default_rng(3).random(shape)
    made = trainer(add_loss_output(linear(), weight_name="weight")).fit(x, y, weight)
    w, _, _ = by_hand(x, y, 10, 5, 0.05, 0, weight)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)


def test_row_weights_are_ones_when_not_given():
    x, y = rows()
    made = trainer(add_loss_output(linear(), weight_name="weight")).fit(x, y)
    np.testing.assert_allclose(made.trained_coef_["w"], by_hand(x, y, 10, 5, 0.05, 0)[0], rtol=1e-5)


def test_a_penalty_is_part_of_the_gradient():
    x, y = rows(40)
    model = add_loss_output(linear(), penalty={"w": {"l1": 0.5, "l2": 2}})
    made = trainer(model, batch_size=40, max_iter=1).fit(x, y)
    w = np.array([[0.1], [0.2]])
    g = 2 * x.T @ (x @ w + 0.3 - y) + 0.5 * np.sign(w) + 2 * 2 * w
    np.testing.assert_allclose(made.trained_coef_["w"], w - 0.05 * g / 40, rtol=1e-5)


def test_a_model_as_bytes_or_path_and_of_the_first_opsets(tmp_path):
    """Weights are inputs too, as was asked for until IR version 4."""
    x, y = rows()
    model = linear(9)
    model.ir_version = 3
    for t in model.graph.initializer:
        kind = onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        model.graph.input.append(kind)
    with_loss = add_loss_output(model)
    data = with_loss.SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data)
    states = [
        trainer(given).fit(x, y).get_trained_onnx().SerializeToString()
        for given in (with_loss, data, tmp_path / "m.onnx", str(tmp_path / "m.onnx"))
    ]
    assert states[0] != data == with_loss.SerializeToString()
    assert len(set(states)) == 1
    made = trainer(with_loss).fit(x, y)
    w, b, _ = by_hand(x, y, 10, 5, 0.05, 0)
    trained = made.get_trained_onnx(model)
    assert trained.ir_version == 3
    np.testing.assert_allclose(predict(trained, {"x": x}), x @ w + b, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_the_trained_model_computes_what_the_state_does(opset):
    x, y = rows()
    model = linear(opset)
    model.producer_name, model.doc_string = "somebody", "a model"
    model.metadata_props.add(key="kind", value="linear")
    model.graph.node[0].name = "product"
    made = trainer(add_loss_output(model), training_optimizer_name="nesterov").fit(x, y)
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
    x, y = rows()
    model = parse(IF)
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    made = trainer(add_loss_output(model), ["w"]).fit(x, y)
    trained = made.get_trained_onnx(model)
    assert [n.op_type for n in trained.graph.node] == ["Constant", "If", "MatMul", "Add"]
    value = numpy_helper.to_array(trained.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(value, made.trained_coef_["w"])
    assert (value != [[0.1], [0.2]]).all()


def test_weights_return_into_constants_of_branches():
    model, c = parse(IF), {"c": np.array(True)}
    x, _ = rows()
    trained = trainer(model).set_state({"t": [5.0], "w": [[1.0], [1.0]]}).get_trained_onnx()
    np.testing.assert_allclose(predict(trained, {"x": x, **c}), x.sum(1, keepdims=True) + 5)
    branches = {a.name: a.g for a in trained.graph.node[1].attribute}
    then, other = (branches[b].node[0].attribute[0] for b in ("then_branch", "else_branch"))
    assert (then.name, list(then.floats), list(other.floats)) == ("value_floats", [5], [2])


def test_weights_return_into_attributes():
    x, y = rows()
    model = parse("""g (float[N,2] x) => (float[N,1] y) {
        y = ai.onnx.ml.LinearRegressor<coefficients=[0.1, 0.2], intercepts=[0.3]>(x) }""")
    model.graph.node[0].name = "lr"
    made = trainer(add_loss_output(model)).fit(x, y)
    trained = made.get_trained_onnx(model)
    w, b, _ = by_hand(x, y, 10, 5, 0.05, 0)
    kept = {a.name: list(a.floats) for a in trained.graph.node[0].attribute}
    np.testing.assert_allclose(kept["coefficients"], w.ravel(), rtol=1e-5)
    np.testing.assert_allclose(kept["intercepts"], b, rtol=1e-5)
    assert set(made.trained_coef_) == {"lr.coefficients", "lr.intercepts"}
    np.testing.assert_allclose(predict(trained, {"x": x}), x @ w + b, atol=1e-5)


def test_only_the_asked_weights_move():
    x, y = rows()
    made = trainer(weights_to_train=["b", "b"]).fit(x, y)
    assert list(made.trained_coef_) == ["b"]
    trained = {t.name: numpy_helper.to_array(t) for t in made.get_trained_onnx().graph.initializer}
    np.testing.assert_array_equal(trained["w"], np.float32([[0.1], [0.2]]))


def test_statistics_and_scalars_are_not_trained_by_default():
    text = """g (float[N,2] x) => (float[N,2] y)
        { s = Mul(x, half)  y = BatchNormalization(s, a, b, m, v) }"""
    model = parse(text, half=0.5, a=[1, 1], b=[0, 0], m=[0, 0], v=[1, 1])
    x, _ = rows()
    assert set(trainer(add_loss_output(model)).fit(x, x).trained_coef_) == {"a", "b"}


@pytest.mark.parametrize(
    ("outputs", "nodes"),
    [
        ("float[1,1] loss", "loss = ReduceSum(s)"),
        ("float[1,1] loss, float[N,1] z", "loss = ReduceSum(s)  z = MatMul(x, spare)"),
        (
            "float[1,1] loss",
            "r = ReduceSum(s)  f = Floor(spare)  t = ReduceSum(f)  loss = Add(r, t)",
        ),
    ],
)
def test_a_weight_without_influence_stays(outputs, nodes):
    """Nothing reads it, only another output does, or its gradient is zero everywhere."""
    text = f"""g (float[N,2] x, float[N,1] label) => ({outputs}) {{
        h = MatMul(x, w)  y = Add(h, b)  d = Sub(y, label)  s = Mul(d, d)  {nodes} }}"""
    spare = [[0.1], [0.2]]
    model, (x, y) = parse(text, **START, spare=spare), rows()
    with pytest.warns(UserWarning, match=r"does not depend on \['spare'\]"):
        made = trainer(model, weights_to_train=[*START, "spare"]).fit(x, y, X_val=x, y_val=y)
    plain = trainer().fit(x, y, X_val=x, y_val=y)
    assert made.trained_coef_.keys() == {"w", "b"}
    np.testing.assert_array_equal(made.trained_coef_["w"], plain.trained_coef_["w"])
    assert made.validation_losses_ == plain.validation_losses_


# -- an estimator --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["nesterov", adam(b1=0.8)])
def test_pickling_before_and_after_fit(optimizer):
    x, y = rows()
    before = trainer(warm_start=True, training_optimizer_name=optimizer)
    before = pickle.loads(pickle.dumps(before))
    made = before.fit(x, y)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.trained_coef_["w"], made.trained_coef_["w"])
    np.testing.assert_array_equal(
        again.fit(x, y).trained_coef_["w"], made.fit(x, y).trained_coef_["w"]
    )


def test_clone_and_parameters():
    base = pytest.importorskip("sklearn.base")
    x, y = rows()
    made = trainer(batch_size=7).fit(x, y)
    copy = base.clone(made)
    assert not hasattr(copy, "trained_coef_")
    assert copy.get_params(deep=False).keys() == made.get_params(deep=False).keys()
    np.testing.assert_array_equal(copy.fit(x, y).trained_coef_["w"], made.trained_coef_["w"])
    assert made.set_params(batch_size=3, learning_rate__eta0=0.5).batch_size == 3
    assert made.learning_rate.eta0 == 0.5
    made.set_params(learning_rate__eta0=0.05)


def test_without_scikit_learn():
    code = """if True:
        import sys
        sys.modules["sklearn"] = sys.modules["sklearn.base"] = None
        import numpy as np, onnx
        from onnxgrad import OrtGradientOptimizer, LearningRateSGD, add_loss_output
        m = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
            g (float[N,1] x) => (float[N,1] y) <float[1,1] w = {1}> { y = MatMul(x, w) }''')
        OrtGradientOptimizer(add_loss_output(m)).fit(np.ones((10, 1)), np.ones(10))
        t = OrtGradientOptimizer("m.onnx", learning_rate=LearningRateSGD(0.5))
        assert t.get_params()["learning_rate__eta0"] == 0.5
        t.set_params(batch_size=3, learning_rate__eta0=0.1)
        assert t.learning_rate.eta0 == 0.1 and "batch_size=3" in repr(t)
        try:
            t.set_params(batchsize=3)
        except ValueError as e:
            assert "batchsize" in str(e)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_given_learning_rate_stays_as_it_is():
    x, y = rows()
    rate = LearningRateSGD(0.05, learning_rate="adaptive")
    made = trainer(learning_rate=rate, max_iter=60).fit(x, y)
    assert made.learning_rate_ < 0.05
    assert rate.value is None


def test_the_seed_gives_the_same_bits():
    x, y = rows()
    states = [
        trainer(random_state=seed, training_optimizer_name="adam").fit(x, y).get_state()
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(states[0]["w"], states[1]["w"])
    assert (states[0]["w"] != states[2]["w"]).any()


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
def test_a_warm_start_goes_on_where_the_last_fit_ended(optimizer):
    x, y = rows()
    options = {"training_optimizer_name": optimizer, "learning_rate": LearningRateSGD(0.05)}
    whole = trainer(max_iter=6, **options).fit(x, y)
    half = trainer(max_iter=3, warm_start=True, **options).fit(x, y).fit(x, y)
    np.testing.assert_array_equal(half.trained_coef_["w"], whole.trained_coef_["w"])
    assert half.train_losses_ == whole.train_losses_
    assert half.n_iter_ == 6
    cold = trainer(max_iter=3, **options).fit(x, y).fit(x, y)
    assert cold.n_iter_ == 3


def test_a_warm_start_may_train_other_weights():
    x, y = rows()
    made = trainer(weights_to_train=["b"], warm_start=True).fit(x, y)
    bias = made.get_state()["b"]
    made.set_params(weights_to_train=["w"], training_optimizer_name="adam").fit(x, y)
    np.testing.assert_array_equal(made.get_state()["b"], bias)
    trained = {t.name: numpy_helper.to_array(t) for t in made.get_trained_onnx().graph.initializer}
    np.testing.assert_array_equal(trained["b"], bias)
    assert (trained["w"] != [[0.1], [0.2]]).all()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # the velocity of one is a sum of gradients, that of the other a sum of steps
        (
            {"training_optimizer_name": "momentum"},
            {
                "training_optimizer_name": "sgd",
                "learning_rate": LearningRateSGDNesterov(0.01, learning_rate="constant"),
            },
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
    x, y = rows()
    warm = trainer(warm_start=True, **first).fit(x, y)
    fresh = trainer(warm_start=True, **first | then).set_state(warm.get_state())
    for made in (warm.set_params(**then), fresh):
        made.fit([(x, y)])
    np.testing.assert_array_equal(warm.trained_coef_["w"], fresh.trained_coef_["w"])
    np.testing.assert_array_equal(warm.trained_coef_["b"], fresh.trained_coef_["b"])


def test_a_warm_start_on_some_of_the_weights_keeps_their_slots():
    x, y = rows()
    options = {"training_optimizer_name": "momentum", "max_iter": 1, "warm_start": True}
    made = trainer(**options).fit([(x, y)])
    first = made.get_state()
    made.set_params(weights_to_train=["b"]).fit([(x, y)])
    g0, g1 = (2 * np.mean(x @ w + b - y) for w, b in (START.values(), first.values()))
    np.testing.assert_allclose(made.trained_coef_["b"], 0.3 - 0.05 * (1.9 * g0 + g1), rtol=1e-5)
    np.testing.assert_array_equal(made.trained_coef_["w"], first["w"])


def test_weights_start_from_the_model_or_are_drawn():
    model = linear()
    x, y = rows()
    nothing = LearningRateSGD(1e-30, learning_rate="constant")
    made = {
        init: trainer(add_loss_output(model), weight_init=init, learning_rate=nothing).fit(x, y)
        for init in ("model", "glorot", "normal")
    }
    start = numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_array_equal(made["model"].trained_coef_["w"], start)
    for init in ("glorot", "normal"):
        assert (made[init].trained_coef_["w"] != start).all()
        np.testing.assert_array_equal(made[init].trained_coef_["b"], np.float32([0.3]))
    assert (abs(made["glorot"].trained_coef_["w"]) <= np.sqrt(6 / 3)).all()


def test_setting_and_getting_the_state():
    x, y = rows()
    made = trainer(warm_start=True, max_iter=1)
    made.set_state({"w": [[2.0], [-1.0]], "b": [3.0]})
    assert made.fit(x, y).train_losses_[0] < 1e-9
    state = made.get_state()
    state["w"][:] = 7  # a copy
    assert (made.get_state()["w"] != 7).all()
    with pytest.raises(ValueError, match="Did you mean 'w'"):
        made.set_state({"W": [[1.0], [1.0]]})
    with pytest.raises(ValueError, match=r"'w' has shape \(2, 1\), its new value \(2,\)"):
        made.set_state({"w": [1.0, 1.0]})
    model = parse("g (float[N,2] x) => (float[N,2] y) { y = Reshape(x, n) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 2]), "n"))
    with pytest.raises(ValueError, match="Unknown weight 'n'"):
        trainer(model).set_state({"n": [0, 1]})
    for ask in (trainer().get_trained_onnx, trainer().get_state):
        with pytest.raises(ValueError, match="call fit first"):
            ask()


# -- progress, validation, interruption ----------------------------------------------------------


@pytest.mark.parametrize(("every", "count"), [(1, 5), (2, 2), (0.2, 5), (0.4, 2), (9, 0)])
def test_validation(every, count):
    x, y = rows()
    seen = []
    made = trainer(validation_every=every).fit(x, y, X_val=x[:7], y_val=y[:7], callback=seen.append)
    assert len(made.validation_losses_) == count
    if every == 1:
        state = made.get_state()
        loss = np.mean((x[:7] @ state["w"] + state["b"] - y[:7]) ** 2)
        assert made.validation_losses_[-1] == pytest.approx(loss, rel=1e-4)
        assert seen[-1].validation_loss == made.validation_losses_[-1]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_validation_on_many_rows_and_on_batches(reduction):
    x, y = rows(2500)
    batches = [(x[i : i + 1000], y[i : i + 1000]) for i in range(0, 2500, 1000)]
    for held in ({"X_val": x, "y_val": y}, {"X_val": batches}):
        made = trainer(add_loss_output(linear(), reduction=reduction), max_iter=1)
        made.fit(x[:40], y[:40], **held)
        state = made.get_state()
        loss = np.mean((x @ state["w"] + state["b"] - y) ** 2)
        assert made.validation_losses_ == pytest.approx([loss], rel=1e-5)
    with pytest.raises(ValueError, match="y_val is given without X_val"):
        made.fit(x, y, y_val=y)


def test_progress():
    x, y = rows()
    seen = []
    made = trainer(batch_size=10).fit(x, y, callback=seen.append)
    ends = [p for p in seen if p.rows == 47]
    assert [p.epoch for p in ends] == [0, 1, 2, 3, 4]
    assert [p.loss for p in ends] == made.train_losses_
    assert all(p.epochs == 5 and p.total_rows == 47 and p.rows_per_second > 0 for p in seen)
    assert all(p.validation_loss is None for p in seen)


def test_verbose_reports_every_epoch(caplog):
    x, y = rows()
    with caplog.at_level(logging.INFO, "onnxgrad"):
        trainer(verbose=1).fit(x, y)
    assert sum("epoch" in m for m in caplog.messages) == 5


def test_a_batch_size_of_numpy():
    x, y = rows()
    losses = trainer(batch_size=np.int64(7)).fit(x, y).train_losses_
    assert losses == trainer(batch_size=7).fit(x, y).train_losses_
    assert {type(v) for v in losses} == {float}


def test_an_interruption_keeps_what_was_trained():
    x, y = rows()

    def stop(progress):
        if progress.epoch == 2 and progress.rows == 47:
            raise KeyboardInterrupt

    made = trainer(max_iter=9)
    with pytest.raises(KeyboardInterrupt):
        made.fit(x, y, callback=stop)
    np.testing.assert_array_equal(
        made.trained_coef_["w"], trainer(max_iter=3).fit(x, y).trained_coef_["w"]
    )


def test_divergence_keeps_the_state_before():
    x, y = rows()
    made = trainer(learning_rate=1e4, max_iter=50)
    with pytest.raises(ConvergenceError, match=r"in epoch \d+ at learning rate .* kept"):
        made.fit(x, y)
    assert all(np.isfinite(w).all() for w in made.get_state().values())
    assert all(np.isfinite(made.train_losses_))
    predict(made.get_trained_onnx(), {"x": x, "label": y})
    made = trainer(learning_rate=1e38, max_iter=1, batch_size=47)  # the loss before is finite
    with pytest.raises(ConvergenceError, match=r"in epoch 1 .* before: none"):
        made.fit(x, y)
    np.testing.assert_array_equal(made.get_state()["w"], np.float32(START["w"]))


# -- data ----------------------------------------------------------------------------------------

TWO = """g (float[N,2] x, int64[N] k) => (float[N,1] y)
    { e = Gather(t, k)  h = MatMul(x, w)  y = Add(h, e) }"""


def test_several_inputs_as_a_dictionary():
    x, y = rows()
    model = add_loss_output(parse(TWO, w=[[0.0], [0.0]], t=[[0.0], [0.0], [0.0]]))
    made = trainer(model, max_iter=60).fit({"x": x, "k": np.arange(47) % 2}, y)
    np.testing.assert_allclose(made.trained_coef_["w"], [[2], [-1]], atol=0.01)
    np.testing.assert_allclose(made.trained_coef_["t"].ravel(), [3, 3, 0], atol=0.01)
    with pytest.raises(ValueError, match="several inputs: pass a dict"):
        trainer(model).fit(x, y)
    with pytest.raises(ValueError, match=r"no data for the inputs \['k'\]"):
        trainer(model).fit({"x": x}, y)
    with pytest.raises(ValueError, match=r"Unknown input 'X'\. Did you mean 'x'"):
        trainer(model).fit({"X": x, "k": np.arange(47)}, y)


def test_class_labels_and_images():
    text = """g (float[N,1,3,3] x) => (float[N,2] y)
        { c = Conv(x, k)  r = Relu(c)  f = Flatten(r)  y = MatMul(f, w) }"""
    rng = np.random.default_rng(0)
    model = parse(text, k=rng.standard_normal((4, 1, 2, 2)), w=rng.standard_normal((16, 2)))
    x = rng.standard_normal((60, 1, 3, 3))
    label = (x[:, 0, 1, 1] > 0).astype(np.int64)
    made = trainer(add_loss_output(model, "cross_entropy"), max_iter=40, learning_rate=0.1)
    made.fit(x, label)
    assert made.train_losses_[-1] < 0.5 * made.train_losses_[0]
    found = predict(made.get_trained_onnx(model), {"x": np.float32(x)}).argmax(1)
    assert (found == label).mean() > 0.9


def loader(x, y):
    data = pytest.importorskip("torch.utils.data")
    from_numpy = pytest.importorskip("torch").from_numpy
    return data.DataLoader(data.TensorDataset(from_numpy(x), from_numpy(y)), batch_size=15)


BATCHES = {
    "tuples": lambda x, y: [(x[s], y[s]) for s in CUT],
    "lists": lambda x, y: [[x[s], y[s]] for s in CUT],
    "dicts": lambda x, y: [{"x": x[s], "label": y[s]} for s in CUT],
    "columns": lambda x, y: [(np.asfortranarray(x[s]), y[s][::-1][::-1]) for s in CUT],
    "loader": loader,
    "list of a loader": lambda x, y: list(loader(x, y)),
}
CUT = [slice(i, i + 15) for i in range(0, 40, 15)]


def test_a_label_that_is_ignored():
    x, _ = rows()
    label = np.where(np.arange(47) < 40, x[:, 0] > 0, -100)
    model = parse("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, w) }", w=np.eye(2))
    moved = []
    for n in (40, 47):
        made = trainer(add_loss_output(model, "cross_entropy"), batch_size=n, max_iter=1)
        moved.append(n * (made.fit(x[:n], label[:n]).trained_coef_["w"] - np.eye(2)))
    np.testing.assert_allclose(*moved, rtol=1e-3)


@pytest.mark.parametrize("kind", BATCHES)
def test_an_iterable_of_batches(kind):
    x, y = rows(40)
    batches = BATCHES[kind](x, y)
    made = trainer(max_iter=2).fit(batches)
    w, b = np.array([[0.1], [0.2]]), np.array([0.3])
    for s in CUT * 2:
        g = 2 * (x[s] @ w + b - y[s]) / len(x[s])
        w, b = w - 0.05 * x[s].T @ g, b - 0.05 * g.sum(0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)


def test_a_generator_can_be_read_once_only():
    x, y = rows()
    with pytest.raises(ValueError, match="generator can be read only once"):
        trainer(max_iter=2).fit((x, y) for _ in range(3))


def test_wrong_batches():
    x, y = rows()
    model = add_loss_output(linear(), weight_name="weight")
    with pytest.raises(ValueError, match="not 4 arrays"):
        trainer().fit([(x, y, y, y)])
    with pytest.raises(ValueError, match="brings its sample weights"):
        trainer(model).fit([(x, y)], sample_weight=np.ones(47))
    with pytest.raises(ValueError, match="different numbers of rows"):
        trainer().fit([(x, y), (x, y[:3])])
    with pytest.raises(ValueError, match="the iterable gave no batch"):
        trainer().fit(x, y, X_val=iter([]))
    weight = abs(y[:, 0])
    weighted = trainer(model, batch_size=47).fit([(x, y, weight)])
    whole = trainer(model, batch_size=47).fit(x, y, weight)
    np.testing.assert_allclose(weighted.trained_coef_["w"], whole.trained_coef_["w"], rtol=1e-5)


def test_a_fixed_batch():
    model = parse("g (float[4,2] x) => (float[4,1] y) { y = MatMul(x, w) }", w=[[0.1], [0.2]])
    x, y = rows(40)
    made = trainer(add_loss_output(model), batch_size=4)
    made.fit(x, y, X_val=x[:8], y_val=y[:8])
    assert len(made.validation_losses_) == 5
    with pytest.raises(ValueError, match="fixed batch of 4 rows"):
        made.fit(x, y, X_val=x[:7], y_val=y[:7])
    with pytest.raises(ValueError, match="fixed batch of 4 rows"):
        made.fit(x[:38], y[:38])
    for wrong in ((x, y), ([(x[:8], y[:8])],)):
        with pytest.raises(ValueError, match="batch_size=4, not 8"):
            trainer(add_loss_output(model), batch_size=8).fit(*wrong)


@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_other_precisions(dtype):
    kind = {"double": np.float64, "float16": np.float16}[dtype]
    made = parse(f"g ({dtype}[N,2] x) => ({dtype}[N,1] y) {{ y = MatMul(x, w) }}")
    made.graph.initializer.append(numpy_helper.from_array(kind([[0.1], [0.2]]), "w"))
    x, y = rows()
    fitted = trainer(add_loss_output(made), max_iter=20).fit(x, y - 3)
    assert fitted.trained_coef_["w"].dtype == kind
    np.testing.assert_allclose(fitted.trained_coef_["w"], [[2], [-1]], atol=0.02)
    if dtype == "float16":
        with pytest.raises(ValueError, match="learning rate of 1e-08 is zero in float16"):
            fitted.set_params(learning_rate=1e-8).fit(x[:40], y[:40])


def test_two_precisions_in_one_model():
    text = """g (float[N,2] x) => (double[N,1] y)
        { h = MatMul(x, w)  c = Cast<to=11>(h)  y = Add(c, b) }"""
    model = parse(text, w=START["w"])
    model.graph.initializer.append(numpy_helper.from_array(np.array(START["b"]), "b"))
    x, y = rows()
    made = trainer(add_loss_output(model), batch_size=10).fit(x, y)
    w, b, _ = by_hand(x, y, 10, 5, 0.05, 0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)
    np.testing.assert_allclose(made.trained_coef_["b"], b, rtol=1e-6)
    assert {n: a.dtype for n, a in made.trained_coef_.items()} == {"w": "f4", "b": "f8"}


# -- bad input -----------------------------------------------------------------------------------

X, Y = rows()
NAN = np.where(np.arange(94).reshape(47, 2) // 2 == 30, np.nan, X)


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"weights_to_train": "w"}, (X, Y), "a list of names, not 'w'"),
        ({"weights_to_train": []}, (X, Y), "no differentiable path"),
        ({"weights_to_train": ["W"]}, (X, Y), "Unknown weight 'W'. Did you mean 'w'"),
        ({"loss_output_name": "los"}, (X, Y), "Unknown output 'los'. Did you mean 'loss'"),
        ({"loss_output_name": "y"}, (X, Y), "'y' must hold one number"),
        ({"training_optimizer_name": "adm"}, (X, Y), "Unknown optimizer 'adm'. Did you mean"),
        ({"learning_rate": "constant"}, (X, Y), "Unknown learning rate"),
        ({"weight_init": "he"}, (X, Y), "Unknown weight_init"),
        ({"batch_size": 0}, (X, Y), "batch_size must be a whole number above 0"),
        ({"max_iter": 1.5}, (X, Y), "max_iter must be a whole number"),
        ({"validation_every": 0}, (X, Y), "validation_every must be above 0"),
        ({"validation_every": None}, (X, Y), "validation_every must be above 0, not None"),
        ({"weights_to_train": 3}, (X, Y), "a list of names, not 3"),
        ({"learning_rate": [0.1]}, (X, Y), r"Unknown learning rate \[0.1\]"),
        ({"device": None}, (X, Y), "device None: the installed onnxruntime offers"),
        ({}, (X, Y, None, None, None, 3), "callback must be a function of a Progress, not 3"),
        ({}, (X, Y[:40]), "different numbers of rows.*'x': 47, 'label': 40"),
        ({}, (X[:0], Y[:0]), "'x' is empty"),
        ({}, (X[:, :1], Y), r"'x' must have shape \(rows, 2\), not \(47, 1\)"),
        ({}, (X, np.ones((47, 2))), r"'label' must have shape \(rows, 1\)"),
        ({}, (NAN, Y), "'x', as float32, holds NaN or infinity in 1 of 47 rows: 30"),
        ({}, (X.astype(float) * 1e300, Y), "'x', as float32, holds NaN or infinity"),
        ({}, (X, np.where(Y > 1e9, 0, np.inf)), "'label', as float32, holds NaN or infinity"),
        ({}, (X.astype(str), Y), "'x' must hold numbers, not <U32"),
        ({}, (X * 1j, Y), "'x' must hold numbers, not complex"),
        ({}, (X.astype("M8[s]"), Y), "'x' must hold numbers, not datetime64"),
        ({}, (np.ma.masked_less(X, 0), Y), "'x' has masked values"),
        ({}, ([[1, 2], [None, 3]], Y), "'x' must hold numbers, not None as in row 1"),
        ({}, (None, Y), "'x' must hold numbers, not NoneType"),
        ({}, (np.zeros(47, "f4, f4"), Y), r"'x' must hold numbers, not \[\('f0', '<f4'\)"),
        ({}, (X,), r"no data for the inputs \['label'\]"),
        ({}, (3.0, Y), "'x' must have one entry per row"),
        ({}, (X, Y, np.ones(47)), "takes no sample weights: build it with"),
        ({"training_optimizer_name": "adam", "learning_rate": "Nesterov"}, (X, Y), "own momentum"),
        ({"model_onnx": b"no model"}, (X, Y), "is no ONNX model"),
    ],
)
def test_bad_input_changes_nothing(options, data, message):
    made = trainer().fit(X, Y)
    state = made.get_state()
    made.set_params(**options)
    with pytest.raises(ValueError, match=message):
        made.fit(*data)
    assert made.n_iter_ == 5
    np.testing.assert_array_equal(made.get_state()["w"], state["w"])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((47, 2)), r"'weight' must have shape \(rows,\), not \(47, 2\)"),
        (np.ones(46), "different numbers of rows"),
    ],
)
def test_wrong_row_weights(weight, message):
    """Of batches of one row too: there two weights of a row would be added up."""
    model = add_loss_output(linear(), weight_name="weight")
    with pytest.raises(ValueError, match=message):
        trainer(model, batch_size=1).fit(X, Y, weight)


def test_numbers_that_the_input_cannot_hold():
    text = """g (float[N,2] x, uint8[N,1] k) => (float[N,1] y)
        { f = Cast<to=1>(k)  h = MatMul(x, w)  y = Add(h, f) }"""
    made = trainer(add_loss_output(parse(text, w=START["w"])))
    k = np.where(np.arange(47) == 5, 256, 255)
    with pytest.raises(ValueError, match="'k' must hold uint8; other values in 1 of 47 rows: 5"):
        made.fit({"x": X, "k": k}, Y)
    made.fit({"x": X / 100, "k": k - 1}, Y)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([0, 1, 3], "labels outside 0..2 in 1 of 3 rows: 2"),
        ([0, -1, 1], "labels outside 0..2 in 1 of 3 rows: 1"),
        ([0, 0.5, 1], "'label' must hold int64; other values in 1 of 3 rows: 1"),
        ([0, np.nan, 1], "'label' must hold int64; other values in 1 of 3 rows: 1"),
    ],
)
def test_class_labels_out_of_range(label, message):
    model = parse("g (float[N,2] x) => (float[N,3] y) { y = MatMul(x, w) }", w=np.eye(2, 3))
    made = trainer(add_loss_output(model, "cross_entropy"), batch_size=1)
    with pytest.raises(ValueError, match=message):
        made.fit(X[:3], np.array(label))


def test_an_integer_weight_an_unknown_operator_and_a_missing_device():
    model = add_loss_output(linear())
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3), "ids"))
    with pytest.raises(ValueError, match="'ids' holds INT64: only floats have a gradient"):
        trainer(model, weights_to_train=["ids"]).fit(X, Y)
    text = "g (float[2,2] x) => (float y) { h = MatMul(x, w)  y = acme.Foo(h) }"
    loss = parse(text, w=np.eye(2))
    loss.opset_import.add(domain="acme", version=1)
    with pytest.raises(NoGradientRule, match="Foo"):
        trainer(loss, loss_output_name="y").fit(X, None)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(ProviderError, match="device='cpu', or install"):
            trainer(device="cuda").fit(X, Y)


def test_no_warning_on_an_ordinary_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().fit(X, Y)


@pytest.mark.parametrize(
    ("loss", "label", "message"),
    [
        ("binary_cross_entropy", 7, "labels between 0 and 1; others in 1 of 47 rows: 5"),
        ("hinge", 2, "labels -1 and 1, or 0 and 1; others in 1 of 47 rows: 5"),
        ("poisson", -1, "labels of 0 or more; others in 1 of 47 rows: 5"),
    ],
)
def test_labels_that_the_loss_does_not_take(loss, label, message):
    y = np.where(np.arange(47) == 5, label, 1)
    with pytest.raises(ValueError, match=message):
        trainer(add_loss_output(linear(), loss)).fit(X, y)


def test_labels_of_a_prediction_of_unknown_rank():
    text = """g (float[N,2] x) => (float[N,1] y) {
        h = MatMul(x, w)  s = Shape(h)  k = Cast<to=1>(s)  z = Constant<value_float=0.0>()
        m = Greater(k, z)  c = Compress<axis=0>(s, m)  y = Reshape(h, c) }"""
    model = parse(text, w=[[0.1], [0.2]])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    flat, column = (
        trainer(add_loss_output(model), ["w"]).fit(X, y).trained_coef_["w"] for y in (Y[:, 0], Y)
    )
    np.testing.assert_array_equal(flat, column)
