"""Gradients of matrices by which the iterations of a Loop multiply."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.models import parse_model
from tests.support.running import run_named


def derivative_with_outputs(text: str) -> onnx.ModelProto:
    return onnx_derivative(parse_model(text), options=DerivativeOptions.KeepOutputs)


def backward_body(model):
    loops = [n for n in model.graph.node if n.op_type == "Loop"]
    return next(a.g for a in loops[-1].attribute if a.name == "body").node


@pytest.mark.parametrize("product", ["MatMul(h, w)", "Gemm<transB=1, alpha=0.5>(h, w)"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_one_product_behind_the_loop(product, count):
    torch = pytest.importorskip("torch")
    text = f"""g (float[2,3] s, float[3,3] w, int64 n) => (float[2,3] y, float[T,2,3] hs) {{
        c = Constant<value = bool {{1}}>()
        y, hs = Loop<body = b (int64 i, bool before, float[2,3] h)
            => (bool after, float[2,3] next, float[2,3] stacked) {{
                after = Identity(before)  m = {product}  next = Tanh(m)  stacked = Mul(next, next)
            }}>(n, c, s) }}"""
    model = derivative_with_outputs(text)
    rng = np.random.default_rng(0)
    shapes = {"s": (2, 3), "w": (3, 3), "y_grad": (2, 3), "hs_grad": (count, 2, 3)}
    feed = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    ours = run_named(model, feed | {"n": np.array(count)})
    s, w = (torch.tensor(feed[k], requires_grad=True) for k in ("s", "w"))
    h, total = s, 0.0
    for i in range(count):
        h = torch.tanh(0.5 * h @ w.T if "Gemm" in product else h @ w)
        total = total + (h * h * torch.tensor(feed["hs_grad"][i])).sum()
    (total + (h * torch.tensor(feed["y_grad"])).sum()).backward()
    np.testing.assert_allclose(ours["s_grad"], s.grad, rtol=1e-4, atol=1e-5)
    expected = np.zeros((3, 3)) if w.grad is None else w.grad
    np.testing.assert_allclose(ours["w_grad"], expected, rtol=1e-4, atol=1e-5)
    gemms = [n for n in backward_body(model) if n.op_type in ("MatMul", "Gemm")]
    assert len(gemms) <= 2  # the product itself, and the gradient of h


def test_a_random_factor_is_that_of_the_forward_pass():
    model = derivative_with_outputs("""
        g (float[3,4] w, int64 n) => (float[T,2,4] m, float[T,2,3] r) {
        c = Constant<value = bool {1}>()
        m, r = Loop<body = b (int64 i, bool before)
            => (bool after, float[2,4] product, float[2,3] drawn) {
                after = Identity(before)  drawn = RandomNormal<shape=[2,3]>()
                product = MatMul(drawn, w)
            }>(n, c) }""")
    rng = np.random.default_rng(0)
    feed = {"w": rng.normal(size=(3, 4)).astype(np.float32), "n": np.array(5)}
    feed |= {k: np.ones((5, 2, n), np.float32) for k, n in (("m_grad", 4), ("r_grad", 3))}
    feed["m_grad"] = rng.normal(size=(5, 2, 4)).astype(np.float32)
    result = run_named(model, feed)
    expected = np.einsum("tbi,tbo->io", result["r"], feed["m_grad"])
    np.testing.assert_allclose(result["w_grad"], expected, rtol=1e-4, atol=1e-5)
