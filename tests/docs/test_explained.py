"""`docs/tutorials/explained.py`, the explanation of reverse mode: its gradients are right."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.pages import TUTORIALS, load_script

SCRIPT = TUTORIALS / "explained.py"


@pytest.fixture(scope="module")
def explained():
    return load_script(SCRIPT)


def checked_gradients(
    explained, graph, loss: str, feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the gradients of `loss` with respect to all inputs, and check them with onnxgrad's."""
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    model = onnx_derivative(graph.model(loss), inputs=list(feeds), options=options)
    expected = explained.run(model, feeds)
    found = explained.run(graph.model(*explained.add_gradients(graph, loss, feeds)), feeds)
    for x, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[x], rtol=1e-9, atol=1e-12)
    return found


def test_loss_falls(explained):
    assert explained.losses[0] > 0.1
    assert explained.losses[-1] < 0.001
    predicted = explained.run(
        explained.network().model("prediction"), explained.data | explained.weights
    )
    x = explained.data["x"]
    assert np.abs(predicted["prediction"][:, 0] - x[:, 0] * x[:, 1]).max() < 0.2


def test_step_is_gradient_descent(explained):
    feeds = explained.data | explained.first_weights
    step = explained.run(explained.step_model, feeds | {"rate": np.array(0.25)})
    found = explained.run(explained.gradient_model, feeds)
    for w, start in explained.first_weights.items():
        np.testing.assert_allclose(step[f"{w}_new"], start - 0.25 * found[f"{w}_grad"])


def test_gradients_of_the_network(explained):
    feeds = explained.data | explained.first_weights
    found = explained.run(explained.gradient_model, feeds)
    model = explained.network().model("loss")
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    expected = explained.run(
        onnx_derivative(model, inputs=list(explained.WEIGHTS), options=options), feeds
    )
    for w in explained.WEIGHTS:
        gradient = found[f"{w}_grad"]
        np.testing.assert_allclose(gradient, expected[f"{w}_grad"], rtol=1e-6, atol=1e-9)
        differences = explained.central_differences(model, feeds, w)
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((2, 1), (1, 3)),
        ((1, 3), (4, 2, 1)),
        ((2, 3), ()),
        ((), ()),
    ],
)
@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul"])
def test_broadcasting(explained, op_type, a, b):
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal(a), "b": rng.standard_normal(b)}
    feeds = {x: np.asarray(array) for x, array in feeds.items()}
    graph = explained.Graph({"a": a, "b": b})
    y = graph.add("Tanh", graph.add(op_type, "a", "b"))
    loss = graph.add("ReduceSum", y, keepdims=0)
    for x, gradient in checked_gradients(explained, graph, loss, feeds).items():
        assert gradient.shape == feeds[x.removesuffix("_grad")].shape


def test_values_used_several_times(explained):
    feeds = {"x": np.array([[0.5, -1.0], [2.0, 0.25]])}
    graph = explained.Graph({"x": (2, 2)})
    square = graph.add("Mul", "x", "x")
    product = graph.add("MatMul", square, graph.add("Relu", graph.add("Sub", "x", square)))
    loss = graph.add("ReduceSum", graph.add("Add", product, square), keepdims=0)
    checked_gradients(explained, graph, loss, feeds)


def test_reduction_that_the_rule_does_not_cover(explained):
    graph = explained.Graph({"x": (3, 3)})
    rows = graph.add("ReduceSum", "x", graph.constant([1]), keepdims=0)
    loss = graph.add("ReduceSum", rows, keepdims=0)
    with pytest.raises(NotImplementedError, match=f"{rows}: ReduceSum"):
        explained.add_gradients(graph, loss, ["x"])


def test_operator_without_a_rule(explained):
    graph = explained.Graph({"x": ()})
    with pytest.raises(KeyError, match="Sin"):
        explained.add_gradients(graph, graph.add("Sin", "x"), ["x"])


def test_models_are_ordinary(explained):
    for model in (explained.gradient_model, explained.step_model):
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} == {""}
