"""Quantized models are refused, with the operator and a way out; what is beside them is not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.quantized_models import dynamic_model, static_model

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((1, 3, 8, 8)).astype(np.float32), np.ones((1, 5), np.float32)


@pytest.fixture(scope="module", params=["QDQ", "QOperator", "dynamic"])
def quantized(request, tmp_path_factory) -> tuple[str, onnx.ModelProto]:
    """A small network as onnxruntime quantizes it, and the first operators that round."""
    text = """g (float[1, 3, 8, 8] x) => (float[1, 5] y) { c = Conv<kernel_shape=[3, 3]>(x, w, b)
        r = Relu(c)  f = Flatten(r)  h = MatMul(f, v)  y = Add(h, u) }"""
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "v": (144, 5), "u": (5,)}
    arrays = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    model, folder = parse_model(text, opset=17, **arrays), tmp_path_factory.mktemp("quantized")
    if request.param == "dynamic":
        return "(Conv|MatMul)Integer", dynamic_model(model, folder)
    options = {"activation_type": "QInt8", "quant_format": request.param}
    operator = {"QDQ": "QuantizeLinear", "QOperator": "QLinear"}[request.param]
    return operator, static_model(model, folder, [{"x": X}], **options)


def refusal_pattern(operator: str) -> str:
    """Return the pattern of messages: the node, and the remedies."""
    remedy = ".*straight_through" if operator == "QuantizeLinear" else ""
    return rf"{operator}.* \(node '.*', output '.+'\): .*float model{remedy}"


@pytest.mark.parametrize("weights", [None, []])
def test_gradient(quantized, weights):
    operator, model = quantized
    with pytest.raises(og.NoGradientRule, match=refusal_pattern(operator)):
        og.onnx_derivative(model, weights)


def test_training(quantized):
    operator, model = quantized
    trainer = og.compat.OrtGradientForwardBackwardOptimizer(model, max_iter=1, batch_size=1)
    with pytest.raises(og.NoGradientRule, match=refusal_pattern(operator)):
        trainer.fit(X, Y)
    with_loss = og.add_loss_output(model)
    inside = og.compat.OrtGradientOptimizer(
        with_loss, list(og.graph.get_train_initializer(with_loss)), batch_size=1
    )
    with pytest.raises(og.NoGradientRule, match=refusal_pattern(operator)):
        inside.fit(X, Y)


BEHIND = """s = Constant<value_float=0.1>()  q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)
    h = MatMul(d, w)  y = Tanh(h)"""


def tanh_behind_rounding() -> onnx.ModelProto:
    text = f"g (float[2, 3] x) => (float[2, 4] y) {{ {BEHIND} }}"
    return parse_model(text, opset=20, w=RNG.standard_normal((3, 4)).astype(np.float32))


def test_remedies_of_the_message():
    made = tanh_behind_rounding()
    with pytest.raises(og.NoGradientRule, match=r"QuantizeLinear .*output 'q'"):
        og.onnx_derivative(made)
    through = og.onnx_derivative(made, straight_through=["d"])
    assert {y.name for y in through.graph.output} >= {"x_grad", "w_grad"}
    behind = og.onnx_derivative(made, weights=["w"], inputs=[])
    assert [y.name for y in behind.graph.output] == ["w_grad"]
    stopped = og.onnx_derivative(made, stop_gradient=["d"])
    assert [y.name for y in stopped.graph.output] == ["w_grad"]


def test_a_way_past_what_is_rounded():
    """Its gradient is the right one: that of rounding is zero."""
    made = parse_model(
        """g (float[3] x) => (float[3] y) { s = Constant<value_float=0.1>()
        q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)  y = Add(x, d) }""",
        opset=20,
    )
    assert [y.name for y in og.onnx_derivative(made).graph.output] == ["x_grad"]


def test_weights_that_are_kept_in_integers():
    """Their scales are trained: nothing is rounded when the model runs."""
    made = parse_model(
        """g (float[2, 3] x, int8[3, 4] q, float[4] s) => (float[2, 4] y) {
        w = DequantizeLinear<axis=1>(q, s)  y = MatMul(x, w) }""",
        opset=20,
    )
    assert [y.name for y in og.onnx_derivative(made).graph.output] == ["x_grad", "s_grad"]


IN_GRAPHS = {
    "beside": "q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Mul(d, w)",
    "branch": """c = Constant<value = bool {1}>()  y = If(c) <
        then_branch = t () => (p) {
            q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  p = Mul(d, w) },
        else_branch = e () => (r) { r = Mul(x, w) }>""",
    "loop": """n = Constant<value = int64 {2}>()
        y = Loop<body = b (int64 i, bool k, a) => (l, p) { l = Identity(k)
            q = QuantizeLinear(a, s, z)  d = DequantizeLinear(q, s, z)  p = Mul(d, w) }>(n, , x)""",
}


@pytest.mark.parametrize(
    "function", [og.onnx_derivative, og.vjp, og.jvp, og.hvp, og.jacobian, og.partition]
)
@pytest.mark.parametrize("where", IN_GRAPHS)
def test_refused_everywhere(where, function):
    """Never a zero for what was rounded: not in graphs of nodes, nor by another door."""
    model = parse_model(
        f"""g (float[2,3] x, float[3] w) => (float[2,3] y) {{
        s = Constant<value = float {{0.1}}>()  z = Constant<value = int8 {{0}}>()
        {IN_GRAPHS[where]} }}""",
        opset=20,
    )
    with pytest.raises(og.NoGradientRule, match=naming("QuantizeLinear", "quantized")):
        function(model)
