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
    LearningRateSGD,
    NoGradientRule,
    OrtGradientOptimizer,
    ProviderError,
    add_loss_output,
)

CONSTANT = LearningRateSGD(0.05, learning_rate="constant")


def parse(text: str, opset: int = 18, **weights) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3]> {text}'
    )
    for name, array in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    return made


def linear(opset: int = 18) -> onnx.ModelProto:
    text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    return parse(text, opset, w=[[0.1], [0.2]], b=[0.3])


def rows(n: int = 47) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 2)).astype(np.float32)
    return x, (2 * x[:, :1] - x[:, 1:] + 3).astype(np.float32)


def trainer(model=None, weights=None, **options) -> OrtGradientOptimizer:
    defaults = {"max_iter": 5, "learning_rate": CONSTANT, "random_state": 0}
    defaults["weights_to_train"] = weights
    return OrtGradientOptimizer(model or add_loss_output(linear()), **defaults | options)


def predict(model: onnx.ModelProto, feed: dict, name: str | None = None) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    taken = {x.name for x in session.get_inputs()}
    return session.run(name and [name], {k: v for k, v in feed.items() if k in taken})[0]


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
    data = {"x": x, "c": np.ones(len(x), bool)}
    del data["c"]
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    made = trainer(add_loss_output(model), ["w"]).fit(data, y)
    trained = made.get_trained_onnx(model)
    assert [n.op_type for n in trained.graph.node] == ["Constant", "If", "MatMul", "Add"]
    value = numpy_helper.to_array(trained.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(value, made.trained_coef_["w"])
    assert (value != [[0.1], [0.2]]).all()


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
    made = trainer(weights_to_train=["b"]).fit(x, y)
    assert list(made.trained_coef_) == ["b"]
    trained = {t.name: numpy_helper.to_array(t) for t in made.get_trained_onnx().graph.initializer}
    np.testing.assert_array_equal(trained["w"], np.float32([[0.1], [0.2]]))


def test_statistics_and_scalars_are_not_trained_by_default():
    text = """g (float[N,2] x) => (float[N,2] y)
        { s = Mul(x, half)  y = BatchNormalization(s, a, b, m, v) }"""
    model = parse(text, half=0.5, a=[1, 1], b=[0, 0], m=[0, 0], v=[1, 1])
    x, _ = rows()
    assert set(trainer(add_loss_output(model)).fit(x, x).trained_coef_) == {"a", "b"}


def test_a_weight_without_influence_stays():
    model = add_loss_output(linear())
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "spare"))
    x, y = rows()
    with pytest.warns(UserWarning, match="does not depend on .'spare'"):
        made = trainer(model).fit(x, y)
    assert "spare" not in made.trained_coef_


# -- an estimator --------------------------------------------------------------------------------


def test_pickling_before_and_after_fit():
    x, y = rows()
    before = pickle.loads(pickle.dumps(trainer(warm_start=True)))
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
        from onnxgrad import OrtGradientOptimizer, LearningRateSGD
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


def test_weights_start_from_the_model_or_are_drawn():
    text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    model = parse(text, w=[[0.1], [0.2]], b=[0.3])
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
    with pytest.raises(ValueError, match=r"'w' has shape \(2, 1\), the given one \(2,\)"):
        made.set_state({"w": [1.0, 1.0]})
    with pytest.raises(ValueError, match="call fit first"):
        trainer().get_trained_onnx()


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


@pytest.mark.parametrize("kind", ["tuples", "dicts", "loader"])
def test_an_iterable_of_batches(kind):
    x, y = rows(40)
    cut = [slice(i, i + 15) for i in range(0, 40, 15)]
    batches = {
        "tuples": [(x[s], y[s]) for s in cut],
        "dicts": [{"x": x[s], "label": y[s]} for s in cut],
        "loader": None,
    }[kind]
    if kind == "loader":
        torch = pytest.importorskip("torch")
        data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        batches = torch.utils.data.DataLoader(data, batch_size=15)
    made = trainer(max_iter=2).fit(batches)
    w, b = np.array([[0.1], [0.2]]), np.array([0.3])
    for s in cut * 2:
        g = 2 * (x[s] @ w + b - y[s]) / len(x[s])
        w, b = w - 0.05 * x[s].T @ g, b - 0.05 * g.sum(0)
    np.testing.assert_allclose(made.trained_coef_["w"], w, rtol=1e-5)


def test_a_generator_can_be_read_once_only():
    x, y = rows()
    with pytest.raises(ValueError, match="generator can be read once only"):
        trainer(max_iter=2).fit((x, y) for _ in range(3))


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
    with pytest.raises(ValueError, match="batch_size=4"):
        trainer(add_loss_output(model), batch_size=8).fit(x, y)


@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_other_precisions(dtype):
    kind = {"double": np.float64, "float16": np.float16}[dtype]
    made = parse(f"g ({dtype}[N,2] x) => ({dtype}[N,1] y) {{ y = MatMul(x, w) }}")
    made.graph.initializer.append(numpy_helper.from_array(kind([[0.1], [0.2]]), "w"))
    x, y = rows()
    fitted = trainer(add_loss_output(made), max_iter=20).fit(x, y - 3)
    assert fitted.trained_coef_["w"].dtype == kind
    np.testing.assert_allclose(fitted.trained_coef_["w"], [[2], [-1]], atol=0.02)


# -- bad input -----------------------------------------------------------------------------------

X, Y = rows()
NAN = np.where(np.arange(94).reshape(47, 2) // 2 == 30, np.nan, X)


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"weights_to_train": ["W"]}, (X, Y), "Unknown weight 'W'. Did you mean 'w'"),
        ({"loss_output_name": "los"}, (X, Y), "Unknown output 'los'. Did you mean 'loss'"),
        ({"loss_output_name": "y"}, (X, Y), "'y' must hold one number"),
        ({"training_optimizer_name": "adm"}, (X, Y), "Unknown optimizer 'adm'. Did you mean"),
        ({"learning_rate": "constant"}, (X, Y), "Unknown learning rate"),
        ({"weight_init": "he"}, (X, Y), "Unknown weight_init"),
        ({"batch_size": 0}, (X, Y), "batch_size must be a whole number above 0"),
        ({"batch_size": 48}, (X, Y), "batch_size=48 is more than the 47 rows"),
        ({"max_iter": 1.5}, (X, Y), "max_iter must be a whole number"),
        ({"validation_every": 0}, (X, Y), "validation_every must be above 0"),
        ({}, (X, Y[:40]), "different numbers of rows.*'x': 47, 'label': 40"),
        ({}, (X[:0], Y[:0]), "'x' is empty"),
        ({}, (X[:, :1], Y), r"'x' must have shape \(rows, 2\), not \(47, 1\)"),
        ({}, (X, np.ones((47, 2))), r"'label' must have shape \(rows, 1\)"),
        ({}, (NAN, Y), "'x' holds NaN or infinity in 1 of 47 rows: 30"),
        ({}, (X, np.where(Y > 1e9, 0, np.inf)), "'label' holds NaN or infinity"),
        ({}, (X.astype(str), Y), "'x' must hold numbers"),
        ({}, (X,), r"no data for the inputs \['label'\]"),
        ({}, (3.0, Y), "'x' must have one entry per row"),
        ({}, (X, Y, np.ones(47)), "takes no row weights: build it with"),
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
    ("label", "message"),
    [
        ([0, 1, 3], "labels outside 0..2 in 1 of 3 rows: 2"),
        ([0, -1, 1], "labels outside 0..2 in 1 of 3 rows: 1"),
        ([0, 0.5, 1], "'label' must hold integers; fractions in 1 of 3 rows: 1"),
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
    text = "g (float[2,2] x) => (float y) { h = MatMul(x, w)  y = Det(h) }"
    loss = parse(text, w=np.eye(2))
    with pytest.raises(NoGradientRule, match="Det"):
        trainer(loss, loss_output_name="y").fit(X, None)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(ProviderError, match="device='cpu', or install"):
            trainer(device="cuda").fit(X, Y)


def test_the_training_model_is_saved_when_asked(tmp_path):
    path = tmp_path / "epoch.onnx"
    trainer(saved_gradient=str(path)).fit(X, Y)
    saved = onnx.load(path)
    assert [node.op_type for node in saved.graph.node] == ["Scan"]
    assert {d.domain for d in saved.opset_import} <= {"", "ai.onnx.ml"}


def test_no_warning_on_an_ordinary_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().fit(X, Y)
