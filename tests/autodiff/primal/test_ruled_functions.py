"""Models with a local function that has a rule, in all that trains them.

The function rounds, so that its own gradient is zero; the rule says one. Each training makes a step
of gradient descent, which is compared with numpy.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

RATE = 0.1
X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
Y, START = np.ones((8, 1), np.float32), np.float32([[0.5], [-0.25]])
OPTIONS = {"optimizer": "sgd", "learning_rate": RATE}


def model_with_ruled_function(opset=18, tail="Y = Mul(r, r)") -> onnx.ModelProto:
    body = "eight = Constant<value_float = 8.0>() m = Mul(x, eight) n = Round(m) y = Div(n, eight)"
    text = f"""g (float[N,2] X) => (float[N,1] Y) <float[2,1] W = {{0.5, -0.25}}>
        {{ m = MatMul(X, W) r = my.Round8(m) {tail} }}
        <domain: "my", opset_import: ["": {opset}]> Round8 (x) => (y) {{ {body} }}"""
    return parse_model(text, domains={"my": 1})


def rounded_products(W: np.ndarray) -> np.ndarray:
    return np.round(8 * (X @ W)) / 8


def weights_after_step(rate=RATE) -> np.ndarray:
    """Return W after a step on the loss (r^2 - 1)^2, r the rounded product, dr/d(X W) = 1."""
    r = rounded_products(START)
    return START - rate * np.mean(4 * r * (r * r - Y) * X, axis=0)[:, None]


@pytest.fixture(autouse=True)
def rule_of_rounding():
    @og.rule("Round8", domain="my")
    def straight(op, node, g):
        """y = round(8 x) / 8:  dx = g."""
        return (g,)


@pytest.mark.parametrize(
    ("opset", "arguments"),
    [
        (17, {}),
        (19, {"accumulate": 2}),
        in_sweep(18, {"accumulate": 2}),
        (18, {"recompute": "all"}),
        in_sweep(19, {"recompute": "all"}),
        (18, {"clip_norm": 1e9}),
    ],
    ids=str,
)
def test_trainer(arguments, opset, tmp_path):
    recorder = og.callbacks.Recorder(tmp_path)
    trainer = og.Trainer(
        model_with_ruled_function(opset),
        "squared_error",
        callbacks=[recorder],
        **OPTIONS,
        **arguments,
    )
    trainer.fit(X, Y, batch_size=8)
    W = trainer.state.weights["W"]
    np.testing.assert_allclose(W, weights_after_step(), rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(X), rounded_products(W) ** 2, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.evaluate(X, Y)["loss"], np.mean((rounded_products(W) ** 2 - 1) ** 2), rtol=1e-5
    )
    trained = trainer.model
    assert [f.name for f in trained.functions] == ["Round8"]
    np.testing.assert_allclose(
        run_named(trained, {"X": X})["Y"], rounded_products(W) ** 2, rtol=1e-5
    )


def test_the_output_of_a_function_is_a_prediction():
    made = model_with_ruled_function(tail="Y = my.Round8(r)")
    trainer = og.Trainer(made, "squared_error", **OPTIONS).fit(X, Y, batch_size=8)
    gradient = np.mean(2 * (rounded_products(START) - Y) * X, axis=0)[:, None]
    np.testing.assert_allclose(trainer.state.weights["W"], START - RATE * gradient, rtol=1e-5)


def test_stack():
    rates = [RATE, 2 * RATE]
    stack = og.TrainerStack(
        model_with_ruled_function(), "squared_error", optimizer="sgd", learning_rate=rates
    )
    stack.fit(X, Y, batch_size=8)
    for rate, W in zip(rates, stack.state.weights["W"], strict=True):
        np.testing.assert_allclose(W, weights_after_step(rate), rtol=1e-5)


def test_loss_in_the_model_and_outside():
    with_loss = og.add_loss_output(model_with_ruled_function(), "squared_error")
    arguments = {"learning_rate": RATE, "max_iter": 1, "batch_size": 8}
    inside = og.compat.OrtGradientOptimizer(with_loss, ["W"], **arguments).fit(X, Y)
    outside = og.compat.OrtGradientForwardBackwardOptimizer(
        model_with_ruled_function(), ["W"], **arguments
    ).fit(X, Y)
    # `SquareLearningLoss` is half the square
    for trainer, rate in ((inside, RATE), (outside, RATE / 2)):
        (W,) = trainer.get_state().values()
        array = W if isinstance(W, np.ndarray) else W.numpy()
        np.testing.assert_allclose(array.reshape(2, 1), weights_after_step(rate), rtol=1e-4)


def test_layer_of_torch():
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    layer = OnnxModule(model_with_ruled_function())
    optimizer = torch.optim.SGD(layer.parameters(), RATE)
    torch.nn.functional.mse_loss(layer(torch.tensor(X)), torch.tensor(Y)).backward()
    optimizer.step()
    np.testing.assert_allclose(layer.W.detach(), weights_after_step(), rtol=1e-5)


def test_artifacts(tmp_path):
    og.artifacts.generate_artifacts(
        model_with_ruled_function(), loss="MSELoss", optimizer="SGD", artifact_directory=tmp_path
    )
    for name in ("step", "training_model", "eval_model"):
        file = onnx.load(tmp_path / f"{name}.onnx")
        assert {node.domain for node in file.graph.node} == {""}, name
        onnx.checker.check_model(file, full_check=True)
    fed = {"X": X, "label": Y, "W": START}
    loss = run_named(onnx.load(tmp_path / "eval_model.onnx"), fed)["loss"]
    np.testing.assert_allclose(loss, np.mean((rounded_products(START) ** 2 - 1) ** 2), rtol=1e-5)


def test_jacobians_of_rows():
    found = run_named(
        og.jacobian(model_with_ruled_function(), ["W"], [], batched=True), {"X": X, "W": START}
    )
    expected = (2 * rounded_products(START) * X)[:, None, :, None]
    np.testing.assert_allclose(found["Y_W_jacobian"], expected, rtol=1e-5)
