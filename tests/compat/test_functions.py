"""The small models of a training loop, against numpy."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrad.compat import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
    function_onnx_graph,
    get_supported_functions,
)
from tests.support.running import in_sweep, run_named
from tests.support.values import each_dtype_and_opset

RNG = np.random.default_rng(0)
X1, X2, G = RNG.standard_normal((3, 10, 4))
ROWS = RNG.random(10) + 0.1
LABELS = RNG.integers(0, 2, (10, 4))
CLASSES = RNG.integers(0, 4, 10)
DTYPES = [np.float16, np.float32, np.float64]
RTOL = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}


def assert_outputs(found: dict, dtype, **expected) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == dtype
        assert found[name].shape == np.shape(value)
        np.testing.assert_allclose(found[name], value, rtol=RTOL[dtype], atol=RTOL[dtype])


def row_softmax(x):
    e = np.exp(x)
    return e / e.sum(axis=1, keepdims=True)


def elastic_penalty(x, a, b):
    return a * abs(x).sum() + b * (x * x).sum()


# name, options, loss of (expected, predicted) element by element, its gradient
SUMS = {
    "square": ({}, lambda y, f: (f - y) ** 2, lambda y, f: 2 * (f - y)),
    "half square": ({"multiply": 1}, lambda y, f: (f - y) ** 2 / 2, lambda y, f: f - y),
    "absolute": ({}, lambda y, f: abs(f - y), lambda y, f: np.sign(f - y)),
    "elastic": (
        {"l1_weight": 0.1, "l2_weight": 0.9},
        lambda y, f: 0.1 * abs(f - y) + 0.9 * (f - y) ** 2,
        lambda y, f: 0.1 * np.sign(f - y) + 1.8 * (f - y),
    ),
    "elastic of 0.01": (
        {},
        lambda y, f: 0.01 * (abs(f - y) + (f - y) ** 2),
        lambda y, f: 0.01 * (np.sign(f - y) + 2 * (f - y)),
    ),
}


@pytest.mark.parametrize("weight", [None, "weight"])
@each_dtype_and_opset((14, 18, 26))
@pytest.mark.parametrize("case", SUMS)
def test_errors_and_their_gradients(case, dtype, weight, opset):
    options, loss, slope = SUMS[case]
    kind = case.split()[-1] if case == "half square" else case.split()[0]
    y, f, w = (a.astype(dtype) for a in (X1, X2, ROWS))
    column = w.astype(float)[:, None] if weight else 1.0
    total = (loss(y.astype(float), f.astype(float)) * column).sum()
    gradient = slope(y.astype(float), f.astype(float)) * column
    feed = {"X1": y, "X2": f} | ({"weight": w} if weight else {})
    both = function_onnx_graph(f"grad_loss_{kind}_error", opset, dtype, weight, **options)
    assert_outputs(run_named(both, **feed), dtype, Y=total, Y_grad=gradient)
    value = function_onnx_graph(f"{kind}_error", opset, dtype, weight, **options)
    assert_outputs(run_named(value, **feed), dtype, Y=total)
    if kind == "square":
        alone = function_onnx_graph("grad_square_error", opset, dtype, weight, **options)
        assert_outputs(run_named(alone, **feed), dtype, Y_grad=gradient)
        if not options:
            mean = function_onnx_graph("reduce_mean_square", opset, dtype, weight)
            assert_outputs(run_named(mean, **feed), dtype, Y=total / f.size)
    for model in (both, value):
        onnx.checker.check_model(model, full_check=True)
        assert model.opset_import[0].version == opset


@pytest.mark.parametrize("name", ["absolute", "square", "elastic"])
def test_row_weights_that_are_not_fed_are_ones(name):
    y, f = X1.astype(np.float32), X2.astype(np.float32)
    made = [
        run_named(function_onnx_graph(f"grad_loss_{name}_error", weight_name=w), X1=y, X2=f)
        for w in ("weight", None)
    ]
    for key in ("Y", "Y_grad"):
        np.testing.assert_allclose(made[0][key], made[1][key], rtol=1e-6)


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_classes(dtype, weight):
    f, w = X2.astype(dtype), ROWS.astype(dtype)
    column = w.astype(float)[:, None] if weight else 1.0
    feed = {"X2": f} | ({"weight": w} if weight else {})
    p = 1 / (1 + np.exp(-f.astype(float)))
    clipped = np.clip(np.where(LABELS, p, 1 - p), 0.2, 0.8)
    model = function_onnx_graph(
        "grad_sigmoid_neg_log_loss_error", None, dtype, weight_name=weight, eps=0.2
    )
    total = (-np.log(clipped) * column).sum()
    assert_outputs(
        run_named(model, X1=LABELS, **feed), dtype, Y=total, Y_grad=(p - LABELS) * column
    )
    p, hit = row_softmax(f.astype(float)), np.eye(4)[CLASSES]
    model = function_onnx_graph("grad_softmax_neg_log_loss_error", None, dtype, weight, eps=0.0)
    total = (-np.log(p) * hit * column).sum()
    assert_outputs(run_named(model, X1=CLASSES, **feed), dtype, Y=total, Y_grad=(p - hit) * column)


@pytest.mark.parametrize("shape", [(), in_sweep((5,)), in_sweep((3, 2)), (2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [np.float64, in_sweep(np.float32), np.float16])
def test_updates_of_weights_of_any_shape(dtype, shape):
    x, w, g = (np.resize(a, shape).astype(dtype) for a in (X1, X2, G))
    a, b = np.array([-0.25], dtype), np.array([0.75], dtype)
    for declared in (None, shape):
        options = {"shape": declared}
        model = function_onnx_graph("axpy", None, dtype, **options)
        assert_outputs(run_named(model, X1=x, X2=w, alpha=a), dtype, Y=w - 0.25 * x)
        z = 0.75 * g - 0.25 * x
        model = function_onnx_graph("axpyw", None, dtype, **options)
        assert_outputs(run_named(model, X1=x, X2=w, G=g, alpha=a, beta=b), dtype, Y=w + z, Z=z)
        model = function_onnx_graph("axpyw2", None, dtype, **options)
        ahead = w + 0.75 * z - 0.25 * x
        assert_outputs(run_named(model, X1=x, X2=w, G=g, alpha=a, beta=b), dtype, Y=ahead, Z=z)
        assert [i.name for i in model.graph.input] == ["X1", "X2", "G", "alpha", "beta"]
        assert_outputs(
            run_named(function_onnx_graph("copy", None, dtype, **options), X=x), dtype, Y=x
        )
        nan = np.full_like(x, np.nan)
        assert_outputs(
            run_named(function_onnx_graph("zero", None, dtype, **options), X=nan), dtype, Y=0 * x
        )
        model = function_onnx_graph(
            "grad_penalty_elastic_error", None, dtype, l1_weight=0.5, l2_weight=0.25, **options
        )
        slope = 0.5 * np.sign(w) + 0.5 * w
        assert_outputs(
            run_named(model, X=w),
            dtype,
            Y=elastic_penalty(w.astype(float), 0.5, 0.25),
            Y_grad=slope,
        )
        model = function_onnx_graph("update_penalty_elastic_error", None, dtype, l1=0.1, **options)
        assert_outputs(run_named(model, X=w), dtype, Y=w - 0.1 * np.sign(w) - 2e-4 * w)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("loss", [np.array(3.0), np.array([3.0]), np.array([[3.0]])])
def test_a_loss_and_the_penalties_of_several_weights(loss):
    weights = {"W0": X1, "W1": X2[0], "W2": np.array(-2.0)}
    for options in ({}, {"weight_name": "weight"}, {"loss_shape": loss.shape}):
        model = function_onnx_graph(
            "n_penalty_elastic_error", 18, np.float64, n_tensors=3, l1_weight=0.1, l2_weight=0.9,
            **options,
        )  # fmt: skip
        found = run_named(model, loss=loss, **weights)
        assert_outputs(
            found, np.float64, Y=3 + sum(elastic_penalty(w, 0.1, 0.9) for w in weights.values())
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_regression(dtype):
    x, a, b = X1.astype(dtype), X2[:4].astype(dtype), G[:1].astype(dtype)
    model = function_onnx_graph("linear_regression", 20, dtype)
    assert_outputs(run_named(model, X=x, A=a, B=b), dtype, Y=x.astype(float) @ a.astype(float) + b)


def test_the_list_of_functions():
    listed = get_supported_functions()
    asked = """axpy axpyw axpyw2 copy zero linear_regression square_error absolute_error
        elastic_error reduce_mean_square grad_square_error grad_loss_square_error
        grad_loss_absolute_error grad_loss_elastic_error grad_sigmoid_neg_log_loss_error
        grad_penalty_elastic_error update_penalty_elastic_error n_penalty_elastic_error"""
    assert set(asked.split()) <= set(listed)
    for name, text in listed.items():
        assert re.match("(Y|Y_grad|Z) = ", text)
        assert function_onnx_graph(name, np.int64(15)).opset_import[0].version == 15


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("axpi", {}, "'axpi'.*'axpy'"),
        ("axpy", {"weight_name": "w"}, "'axpy' 'weight_name'.*'shape'"),
        ("square_error", {"l1": 1}, "'square_error' 'l1'"),
        ("copy", {"target_opset": 13}, "opset.*13.* 14 to"),
        ("copy", {"target_opset": 99}, "opset.*99.* 14 to"),
        ("copy", {"dtype": np.int32}, "dtype.*int32"),
        ("square_error", {"weight_name": "X1"}, "'X1'"),
        ("n_penalty_elastic_error", {"n_tensors": 0}, "n_tensors=0"),
        ("update_penalty_elastic_error", {"l1": 0, "l2": 0}, "penalty of 'X'"),
    ],
)
def test_what_cannot_be_written(name, options, text):
    with pytest.raises(ValueError, match=text):
        function_onnx_graph(name, **options)


@pytest.mark.parametrize("nesterov", [True, False])
def test_learning_rates_write_their_update(nesterov):
    """v <- m v - lr g; w <- w + (m v - lr g or v), by the models that they keep."""
    rate = LearningRateSGD(0.5).build_onnx_function(18, "cpu", 3, np.float64)
    a, m = np.array([-0.5]), np.array([0.9])
    np.testing.assert_allclose(run_named(rate.axpy_onnx_, X1=G, X2=X2, alpha=a)["Y"], X2 - 0.5 * G)
    assert not hasattr(rate, "axpyw_onnx_")
    rate = LearningRateSGDNesterov(0.5, nesterov=nesterov).build_onnx_function(dtype=np.float64)
    w, v = X2, 0 * X2
    for g in (G, X1):
        found = run_named(rate.axpyw_onnx_, X1=g, X2=w, G=v, alpha=a, beta=m)
        v = 0.9 * v - 0.5 * g
        w = w + (0.9 * v - 0.5 * g if nesterov else v)
        np.testing.assert_allclose(found["Y"], w)
        np.testing.assert_allclose(found["Z"], v)
        w, v = found["Y"], found["Z"]
    assert BaseLearningRate.select(rate) is rate


def test_learning_rates_have_their_update_unasked():
    """At once and in float32, as for a look at it after a training."""
    g, w, v = (x.astype(np.float32) for x in (G, X2, X1))
    a, m = np.array([-0.5], np.float32), np.array([0.9], np.float32)
    found = run_named(LearningRateSGD().axpy_onnx_, X1=g, X2=w, alpha=a)
    np.testing.assert_allclose(found["Y"], w - 0.5 * g, rtol=1e-5)
    rate = LearningRateSGDNesterov(nesterov=False)
    found = run_named(rate.axpyw_onnx_, X1=g, X2=w, G=v, alpha=a, beta=m)
    np.testing.assert_allclose(found["Y"], w + 0.9 * v - 0.5 * g, rtol=1e-4, atol=1e-6)
    rate.build_onnx_function(dtype=np.float64)
    assert rate.axpyw_onnx_.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
