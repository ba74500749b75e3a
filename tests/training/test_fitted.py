"""Attributes of trainers after `fit`, what they build when asked, and that none of it is stale."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad import add_loss_output
from onnxgrad.compat import (
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    SquareLearningLoss,
)
from tests.support.errors import naming
from tests.support.models import add_initializers, operator_names, parse_model
from tests.support.running import run_named

CONSTANT = LearningRateSGD(0.05, learning_rate="constant")
START = {"w": np.float32([[0.1], [0.2]]), "b": np.float32([0.3])}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 2)).astype(np.float32)
Y = (2 * X[:, :1] - X[:, 1:] + 3).astype(np.float32)
WEIGHT = RNG.random(40).astype(np.float32)


def shifted_model(shift: float = 0.0) -> onnx.ModelProto:
    text = f"""g (float[N,2] x) => (float[N,1] y) {{ h = MatMul(x, w)  i = Add(h, b)
        c = Constant<value_float = {float(shift)}>()  y = Add(i, c) }}"""
    return parse_model(text, **START)


DEFAULTS = {"learning_rate": CONSTANT, "random_state": 0, "max_iter": 3}


def loss_in_model(**options) -> OrtGradientOptimizer:
    model = options.pop("model", add_loss_output(shifted_model(), weight_name="weight"))
    return OrtGradientOptimizer(model, None, **DEFAULTS | options)


def loss_beside_model(**options) -> OrtGradientForwardBackwardOptimizer:
    model = options.pop("model", shifted_model())
    return OrtGradientForwardBackwardOptimizer(model, **DEFAULTS | options)


BOTH = pytest.mark.parametrize("make", [loss_in_model, loss_beside_model])
ATTRIBUTES = (
    "train_losses_ validation_losses_ trained_coef_ n_iter_ n_steps_ learning_rate_ stop_reason_ "
    "train_session_ train_function_ input_names_ output_names_ cls_type_".split()
)
GRAPHS = "loss_grad_onnx_ loss_score_onnx_ axpy_onnx_ zero_onnx_ epoch_onnx_".split()


def residuals() -> np.ndarray:
    return (X @ START["w"] + START["b"] - Y).astype(float)


def numpy_arrays(state) -> dict[str, np.ndarray]:
    return {n: np.array(v if isinstance(v, np.ndarray) else v.numpy()) for n, v in state.items()}


# -- before and after fit ------------------------------------------------------------------------


@BOTH
def test_attributes_are_there_after_fit_only(make):
    made = make()
    names = ATTRIBUTES + (GRAPHS if make is loss_beside_model else [])
    for name in [*names, "feature_names_in_", "penalty_onnx_", "axpyw_onnx_"]:
        assert not hasattr(made, name)
    for name in names:
        with pytest.raises(AttributeError, match="fit"):
            getattr(made, name)
    made.fit(X, Y)
    for one in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        for name in names:
            assert getattr(one, name) is not None
        for name in ("feature_names_in_", "penalty_onnx_", "axpyw_onnx_"):
            assert not hasattr(one, name)
    with pytest.raises(AttributeError, match="n_iter_"):
        made.n_iter_ = 3


@BOTH
def test_as_scikit_learn_asks(make):
    base = pytest.importorskip("sklearn.base")
    validation = pytest.importorskip("sklearn.utils.validation")
    exceptions = pytest.importorskip("sklearn.exceptions")
    made = make()
    with pytest.raises(exceptions.NotFittedError):
        validation.check_is_fitted(made)
    with pytest.raises(exceptions.NotFittedError):
        _ = made.train_session_
    made.fit(X, Y)
    validation.check_is_fitted(made)
    validation.check_is_fitted(made, ["trained_coef_", "n_iter_"])
    new = base.clone(made)
    assert not any(hasattr(new, name) for name in ATTRIBUTES)
    with pytest.raises(exceptions.NotFittedError):
        validation.check_is_fitted(new)
    before = set(vars(made))
    if make is loss_beside_model:
        made.predict(X)
        made.score(X, Y)
    _ = made.train_function_
    assert set(vars(made)) == before
    assert set(made.get_params(deep=False)) == set(make().get_params(deep=False))


@BOTH
def test_a_state_that_was_set_has_no_passes(make):
    made = make().set_state(START)
    assert (made.n_iter_, made.train_losses_, made.stop_reason_) == (0, [], None)
    with pytest.raises(AttributeError, match="fit"):
        _ = made.train_session_


# -- sessions and passes -------------------------------------------------------------------------


def test_the_session_of_the_gradient_of_a_loss_inside():
    made = loss_in_model().fit(X, Y, WEIGHT)
    assert made.input_names_ == ["x", "label", "weight", "w", "b"]
    assert made.output_names_ == ["loss", "w_grad", "b_grad"]
    assert made.train_session_ is made.train_session_
    feed = {"x": X, "label": Y, "weight": WEIGHT, **START}
    loss, w_grad, b_grad = made.train_session_.run(None, feed)
    d = residuals()
    np.testing.assert_allclose(loss, [[(WEIGHT[:, None] * d * d).sum()]], rtol=1e-5)
    np.testing.assert_allclose(w_grad, 2 * X.T @ (WEIGHT[:, None] * d), rtol=1e-4)
    np.testing.assert_allclose(b_grad, 2 * (WEIGHT[:, None] * d).sum(0), rtol=1e-4)


def test_the_passes_of_a_loss_inside():
    made = loss_in_model().fit(X, Y)
    ones = np.ones(40, np.float32)
    loss, y = made.train_function_.forward([X, Y, ones, *START.values()], training=True)
    gradients = made.train_function_.backward([np.ones_like(loss), np.zeros_like(y)])
    d = residuals()
    np.testing.assert_allclose(loss, [[(d * d).sum()]], rtol=1e-5)
    np.testing.assert_allclose(gradients[3], 2 * X.T @ d, rtol=1e-4)
    np.testing.assert_allclose(gradients[4], 2 * d.sum(0), rtol=1e-4)
    assert made.cls_type_ is type(made.train_function_)


def test_the_passes_of_a_loss_outside():
    made = loss_beside_model().fit(X, Y)
    assert isinstance(made.train_session_, OrtGradientForwardBackward)
    assert made.input_names_ == ["x", "w", "b"]
    assert made.output_names_ == ["x_grad", "w_grad", "b_grad"]
    assert made.cls_type_ is made.train_session_.cls_type_
    for one in (made, pickle.loads(pickle.dumps(made))):
        weights = numpy_arrays(one.trained_coef_)
        [y] = one.train_function_.forward([X, *weights.values()], training=True)
        np.testing.assert_allclose(y, one.predict(X), rtol=1e-5, atol=1e-6)
        g = RNG.standard_normal(y.shape).astype(np.float32)
        x_grad, w_grad, b_grad = one.train_function_.backward([g])
        np.testing.assert_allclose(x_grad, g @ weights["w"].T, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(w_grad, X.T @ g, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(b_grad, g.sum(0), rtol=1e-4, atol=1e-5)


def test_passes_with_an_input_that_has_no_gradient_and_some_weights():
    model = parse_model(
        """g (int64[N] k, float[N,2] x) => (float[N,1] y) {
            e = Gather(t, k)  h = MatMul(x, w)  y = Add(h, e) }""",
        w=START["w"],
        t=np.zeros((3, 1), np.float32),
    )
    made = loss_beside_model(model=model, weights_to_train=["t"]).fit(
        {"x": X, "k": np.arange(40) % 3}, Y
    )
    assert made.input_names_ == ["k", "x", "t"]
    assert made.output_names_ == [None, "x_grad", "t_grad"]


# -- graphs --------------------------------------------------------------------------------------


def test_graphs_are_those_that_are_saved():
    rate = LearningRateSGDNesterov(1e-3)
    made = loss_beside_model(learning_rate=rate, learning_penalty="elastic", weight_name="w8").fit(
        X, Y
    )
    saved = made.save_onnx_graph(bytes)
    flat = saved | saved["learning_rate"] | saved["learning_loss"] | saved["learning_penalty"]
    names = [*GRAPHS, "axpyw_onnx_", "penalty_onnx_", "penalty_grad_onnx_"]
    for name in set(names) - {"axpy_onnx_"}:
        assert getattr(made, name).SerializeToString() == flat[name]
    assert not hasattr(made, "axpy_onnx_")
    feed = {"X1": Y, "X2": np.zeros_like(Y), "w8": WEIGHT}
    found = run_named(made.loss_grad_onnx_, **feed)
    np.testing.assert_allclose(found["Y"], (WEIGHT[:, None] * Y * Y).sum() / 2, rtol=1e-5)
    np.testing.assert_allclose(found["Y_grad"], -WEIGHT[:, None] * Y, rtol=1e-5)
    assert made.loss_grad_onnx_ is made.loss_grad_onnx_
    changed = made.set_params(learning_loss="absolute_error").loss_grad_onnx_
    np.testing.assert_allclose(run_named(changed, **feed)["Y_grad"], -WEIGHT[:, None] * np.sign(Y))


@pytest.mark.parametrize("kind", [str, Path])
def test_the_gradient_and_the_training_model_are_saved(tmp_path, kind):
    path = tmp_path / "gradient.onnx"
    model = add_loss_output(shifted_model(), weight_name="weight", reduction="mean")
    made = loss_in_model(model=model, saved_gradient=kind(path)).fit(X, Y)
    assert sorted(os.listdir(tmp_path)) == ["gradient.onnx", "gradient.onnx.training.onnx"]
    gradient, training = onnx.load(path), onnx.load(f"{path}.training.onnx")
    assert [x.name for x in gradient.graph.input] == ["x", "label", "weight", "w", "b"]
    assert [y.name for y in gradient.graph.output] == ["loss", "w_grad", "b_grad"]
    assert {d.domain for d in (*gradient.opset_import, *training.opset_import)} == {""}
    assert operator_names(training).count("Scan") == 1
    found = run_named(str(path), **{"x": X, "label": Y, "weight": WEIGHT, **START})
    torch = pytest.importorskip("torch")
    w, b = (torch.tensor(a.astype(float), requires_grad=True) for a in START.values())
    x, y, weight = (torch.tensor(a.astype(float)) for a in (X, Y, WEIGHT))
    loss = (weight[:, None] * (x @ w + b - y) ** 2).sum() / 40
    loss.backward()
    np.testing.assert_allclose(found["loss"].ravel(), loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad"], w.grad, rtol=1e-4)
    np.testing.assert_allclose(found["b_grad"], b.grad, rtol=1e-4)
    assert made.stop_reason_ == "max_iter"


def test_a_gradient_that_cannot_be_saved_changes_nothing(tmp_path):
    made = loss_in_model().fit(X, Y)
    state = made.get_state()
    made.set_params(saved_gradient=tmp_path / "no folder" / "g.onnx")
    with pytest.raises(OSError, match="no folder"):
        made.fit(X, Y)
    np.testing.assert_array_equal(made.get_state()["w"], state["w"])
    assert made.n_iter_ == 3


# -- what is kept between calls, and when it is built anew ---------------------------------------


@pytest.fixture
def sessions(monkeypatch):
    """Count the sessions that predictions and losses build."""
    from onnxgrad.training import evaluator

    built, session = [], evaluator.session
    monkeypatch.setattr(evaluator, "session", lambda *args: built.append(1) or session(*args))
    return built


def test_a_session_is_built_once(sessions):
    made = loss_beside_model().fit(X, Y)
    size = len(pickle.dumps(made))
    for _ in range(3):
        made.predict(X)
        made.losses(X, Y)
        made.score(X, Y)
    assert len(sessions) == 2
    for _ in range(2):
        made.score(X, Y, WEIGHT)
    assert len(sessions) == 3
    assert len(pickle.dumps(made)) == size  # no session
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.predict(X), made.predict(X))
    assert len(sessions) == 4
    by_path = loss_beside_model(random_state=np.random.default_rng(0)).fit(X, Y)
    by_path.predict(X)
    by_path.predict(X)
    assert len(sessions) == 5


def check_not_stale(made, shift=0.0):
    """Compare with the weights as they are."""
    w, b = (numpy_arrays(made.get_state())[n].astype(float) for n in ("w", "b"))
    y = X @ w + b + shift
    np.testing.assert_allclose(made.predict(X), y, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(made.losses(X, Y), ((y - Y) ** 2)[:, 0] / 2, rtol=1e-3, atol=1e-5)


def test_nothing_is_stale_after_the_state_changed():
    made = loss_beside_model().fit(X, Y)
    check_not_stale(made)
    check_not_stale(made.set_state({"w": [[7.0], [8.0]]}))
    check_not_stale(made.set_state({"b": [9.0]}))
    check_not_stale(made.fit(X, Y))
    check_not_stale(made.set_params(warm_start=True).fit(X, Y))
    check_not_stale(made.set_state(made.get_state(), zero=True))
    for one in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        check_not_stale(one)
        check_not_stale(one.set_state({"w": [[5.0], [6.0]]}))
    check_not_stale(made)
    assert not numpy_arrays(made.get_state())["w"].any()


def test_nothing_is_stale_after_a_parameter_changed():
    made = loss_beside_model().fit(X, Y)
    check_not_stale(made)
    check_not_stale(made.set_params(model_onnx=shifted_model(5.0)), 5.0)
    made.model_onnx = shifted_model(6.0)
    check_not_stale(made, 6.0)
    made.model_onnx.graph.node[2].attribute[0].f = 7.0  # in place
    check_not_stale(made, 7.0)
    made.set_params(learning_loss="absolute_error")
    f = made.predict(X)
    np.testing.assert_allclose(made.losses(X, Y), abs(f - Y)[:, 0], rtol=1e-5)
    made.set_params(learning_loss=lambda op, f, y: 3.0 * (f - y) * (f - y))
    np.testing.assert_allclose(made.losses(X, Y), 3 * ((f - Y) ** 2)[:, 0], rtol=1e-4)
    made.set_params(learning_loss="elastic")
    made.losses(X, Y)
    made.set_params(learning_loss__l1_weight=0.0, learning_loss__l2_weight=2.0)  # in place
    np.testing.assert_allclose(made.losses(X, Y), 2 * ((f - Y) ** 2)[:, 0], rtol=1e-4)


class ScaledSquares(SquareLearningLoss):
    """A loss with a parameter that no `__init__` names, and that may change in place."""

    scales = (1.0,)

    def loss(self, op, prediction, label):
        return self.scales[0] * (prediction - label) * (prediction - label)


class Opaque:
    """Something that cannot be compared."""

    def __init__(self, scale):
        self.scale = scale

    def __getitem__(self, index):
        return self.scale


def test_nothing_is_stale_after_a_loss_of_ones_own_changed():
    loss = ScaledSquares()
    made = loss_beside_model(learning_loss=loss).fit(X, Y)
    d = (made.predict(X) - Y)[:, 0]
    np.testing.assert_allclose(made.losses(X, Y), d * d, rtol=1e-4)
    made.learning_loss.scales = [2.0]
    np.testing.assert_allclose(made.losses(X, Y), 2 * d * d, rtol=1e-4)
    made.learning_loss.scales[0] = 3.0
    np.testing.assert_allclose(made.losses(X, Y), 3 * d * d, rtol=1e-4)
    made.learning_loss.scales = Opaque(4.0)
    np.testing.assert_allclose(made.losses(X, Y), 4 * d * d, rtol=1e-4)
    made.learning_loss.scales.scale = 5.0
    np.testing.assert_allclose(made.losses(X, Y), 5 * d * d, rtol=1e-4)


@pytest.mark.parametrize("external", [False, True])
def test_nothing_is_stale_after_a_file_changed(tmp_path, external, sessions):
    path = tmp_path / "model.onnx"

    def write(shift):
        model = shifted_model()
        add_initializers(model, {"s": np.float32([[shift]])})
        model.graph.node[-1].input[1] = "s"
        onnx.save(
            model, path, save_as_external_data=external, location="tensors.bin", size_threshold=0
        )

    write(5.0)
    made = loss_beside_model(model=str(path), weights_to_train=["w", "b"]).fit(X, Y)
    check_not_stale(made, 5.0)
    check_not_stale(made, 5.0)
    assert len(sessions) == 2
    main = path.read_bytes()
    (tmp_path / "tensors.bin").unlink(missing_ok=True)
    write(6.0)
    if external:
        assert path.read_bytes() == main
        os.utime(path, ns=(1, 1))
    check_not_stale(made, 6.0)
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match=naming("model.onnx")):
        made.predict(X)
    path.unlink()
    with pytest.raises(ValueError, match=naming("model.onnx")):
        made.predict(X)


# -- set_state ----------------------------------------------------------------------------------


@BOTH
def test_names_that_were_not_trained_are_refused_if_asked(make):
    made = make().set_params(weights_to_train=["w"])
    with pytest.raises(AttributeError, match="fit"):
        made.set_state(START, check_trained=True)
    made.set_state(START)
    with pytest.raises(AttributeError, match="fit"):
        made.set_state(START, check_trained=True)
    made.fit(X, Y)
    with pytest.raises(ValueError, match=naming("'b'", "'w'")):
        made.set_state(START, check_trained=True)
    made.set_state({"w": START["w"]}, check_trained=True)
    np.testing.assert_array_equal(numpy_arrays(made.get_state())["w"], START["w"])
    assert set(made.set_state(START).get_state()) == {"w", "b"}
    if make is loss_beside_model:
        with pytest.raises(ValueError, match="'b'"):
            made.set_state({"b": {}}, "grad", check_trained=True)
