"""Inputs with a default, which can be fed in all models that are returned, of any length."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose

import onnxgrad as og
from onnxgrad import DerivativeOptions as Options
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run_named

X, R = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([2, 3, 4])
ONES = Options.FillGrad | Options.KeepOutputs
FEED = {"x": X, "w": np.float32([1, 2])} | dict.fromkeys(("y_grad", "label"), np.ones_like(X))
FEED |= dict.fromkeys(("x_tangent", "x_vector", "adj_y", "fwd_x", "fwd_adj_y"), np.ones_like(X))


def model_with_default(ir_version: int = 9) -> onnx.ModelProto:
    """Return y = x w r, where r is a one, in whose place a number for each row can be fed."""
    text = """f (float[N,2] x, float[N] r) => (float[N,2] y)
        { k = Reshape(r, s)  h = Mul(x, w)  y = Mul(h, k) }"""
    weights = {"r": np.ones(1, np.float32), "w": [1.0, 2.0], "s": np.int64([-1, 1])}
    return parse_model(text, ir_version=ir_version, **weights)


def stated_lengths(model: onnx.ModelProto, name: str) -> list[str | int]:
    [found] = [x for x in model.graph.input if x.name == name]
    return [d.dim_param or d.dim_value for d in found.type.tensor_type.shape.dim]


def stated(model: onnx.ModelProto, **more: np.ndarray) -> dict[str, np.ndarray]:
    inputs = {x.name for x in model.graph.input}
    return run_named(model, {k: v for k, v in (FEED | more).items() if k in inputs})


def with_loss() -> onnx.ModelProto:
    return og.add_loss_output(model_with_default())


MADE = {
    "derivative": lambda m: og.onnx_derivative(m, ["w"], ["x"]),
    "all": og.onnx_derivative,
    "ones": lambda m: og.onnx_derivative(m, [], ["x"], ONES),
    "loss": lambda m: og.onnx_derivative(with_loss(), [], ["x"], Options.Loss, "loss", "label"),
    "add_loss_output": og.add_loss_output,
    "unreduced": lambda m: og.losses.unreduced_onnx_loss(with_loss()),
    "selected": lambda m: og.graph.select_model_inputs_outputs(m, ["y"], ["x"]),
    "vjp": og.vjp,
    "jvp": lambda m: og.jvp(m, inputs=["x"]),
    "hvp": lambda m: og.hvp(m, inputs=["x"]),
    "jacobian": lambda m: og.jacobian(m, batched=True),
    "of rows": lambda m: og.jacobian(m, ["w"], ["x"], batched=True),
    "hessian": lambda m: og.hessian(with_loss(), inputs=["x"], output="loss"),
    "f": lambda m: og.graph.derivative_family(m, inputs=["x"])["f"],
    "adj_f": lambda m: og.graph.derivative_family(m, inputs=["x"])["adj_f"],
    "fwd_adj_f": lambda m: og.graph.derivative_family(m, inputs=["x"])["fwd_adj_f"],
}


@pytest.mark.parametrize("name", MADE)
def test_default_can_be_fed(name):
    """A one is broadcast to ones for all rows, and another number for each row changes results."""
    made = MADE[name](model_with_default())
    assert stated_lengths(made, "r") == ["N"]
    assert initializer_arrays(made)["r"].tolist() == [1]
    fed, default = stated(made, r=R), stated(made)
    same = stated(made, r=np.float32([1, 1, 1]))
    changed = 0
    for key, value in fed.items():
        if key != "r_grad":  # of the length that is fed
            assert_allclose(default[key], same[key], rtol=1e-6)
            changed += not np.array_equal(value, default[key])
    assert changed


def test_gradients_of_a_default():
    gradients = og.onnx_derivative(model_with_default(), ["w"], ["x", "r"], ONES)
    w = FEED["w"]
    fed = stated(gradients, r=R)
    assert_allclose(fed["x_grad"], R[:, None] * w)
    assert_allclose(fed["r_grad"], X @ w)
    assert_allclose(fed["w_grad"], R @ X)
    assert_allclose(stated(gradients)["r_grad"], [(X @ w).sum()])


def test_listed_weights():
    """A weight that a file lists among the inputs is a weight; before version 4, so are all."""
    made = model_with_default()
    made.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("w", 1, [2]))
    gradients = og.onnx_derivative(made)
    assert [y.name for y in gradients.graph.output] == ["x_grad", "r_grad", "w_grad"]
    assert [y.name for y in og.vjp(made).graph.output] == ["y", "x_grad", "r_grad"]
    assert stated_lengths(og.vjp(made), "w") == [2]
    assert list(og.graph.get_train_initializer(made)) == ["w"]
    with pytest.raises(ValueError, match=naming("'w'", "twice")):
        og.vjp(made, ["w"], ["w"])
    old = og.onnx_derivative(model_with_default(ir_version=3), [])
    assert [x.name for x in old.graph.input] == ["x", "y_grad"]


def test_trained_files(tmp_path):
    trainer = og.Trainer(model_with_default(), "mse")
    trainer.fit(X, X, epochs=1)
    trainer.save(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert stated_lengths(trained, "r") == ["N"]
    assert initializer_arrays(trained)["r"].tolist() == [1]
    assert initializer_arrays(trained)["w"].tolist() != [1, 2]


@pytest.mark.parametrize(
    ("body", "default", "fed"),
    [
        ("float t | y = Pow(a, t)", np.float32(2), np.float32(3)),
        ("int64[M] t | y = Gather<axis=1>(a, t)", np.int64([1]), np.int64([0, 1, 0])),
        in_sweep("float t | y = Clip(a, t)", np.float32(1.5), np.float32(2.5)),
        in_sweep("int64[1] t | y, i = TopK(a, t)", np.int64([1]), np.int64([2])),
        in_sweep('float[2] t | y = Resize<mode="linear">(a, , t)', [1.0, 2.0], [2.0, 3.0]),
        in_sweep("bool t | y = If (t) <then_branch = u () => (float[N,2] c) { c = Mul(a, a) },"
                 "else_branch = v () => (float[N,2] d) { d = Neg(a) }>", True, False),
    ],
)  # fmt: skip
def test_what_is_fed_is_what_rules_compute_with(body, default, fed):
    kind, nodes = body.split(" | ")
    text = f"f (float[N,2] x, {kind}) => (float[A,B] y) {{ a = Abs(x)  {nodes} }}"
    own, stored = map(np.asarray, (default, fed))
    own, stored = (a.astype(np.float32) if a.dtype == np.float64 else a for a in (own, stored))
    gradient = og.onnx_derivative(parse_model(text, t=own), [], ["x"], ONES)
    plain = parse_model(text, t=stored)
    del plain.graph.input[1]
    expected = stated(og.onnx_derivative(plain, [], ["x"], ONES))
    found = stated(gradient, t=stored)
    assert_allclose(found["x_grad"], expected["x_grad"], rtol=1e-6)
    assert not np.array_equal(found["x_grad"], stated(gradient)["x_grad"])


def test_axes_that_can_be_fed_leave_the_rank_known():
    """A Scan behind them needs it, and other axes give the gradient of other means."""
    text = """g (float[N,3] x{0}) => (float[N,3] y)
        <int64[1] d = {{{1}}}, float[3] w = {{1,2,3}}> {{
        h = ReduceMean<keepdims=1>(x, d)  c = Sub(x, h)  q = Mul(c, w)
        s, y = Scan<num_scan_inputs = 1, body = b (float[3] before, float[3] row)
            => (float[3] after, float[3] each) {{
                after = Add(before, row)  each = Mul(row, before) }}>(w, q) }}"""
    x, w = np.arange(6, dtype=np.float32).reshape(2, 3) ** 2, np.float32([1, 2, 3])
    options = {"weights": ["w"], "inputs": ["x"], "options": ONES}
    model = og.onnx_derivative(parse_model(text.format(", int64[1] d", 1), opset=20), **options)
    for axis in (0, 1):
        fixed = og.onnx_derivative(parse_model(text.format("", axis), opset=20), **options)
        expected = run_named(fixed, {"x": x, "w": w})
        found = run_named(model, {"x": x, "w": w, "d": np.int64([axis])})
        for name, array in expected.items():
            assert_allclose(found[name], array, rtol=1e-5)
