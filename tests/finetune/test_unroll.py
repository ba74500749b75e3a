"""Models unrolled over steps: values and truncated backpropagation through time, as PyTorch's."""

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.running import run_named

R = np.random.default_rng(0)
N, STEPS, BATCHES = 5, 4, 3
WEIGHTS = {
    name: R.standard_normal(shape).astype(np.float32) * 0.5
    for name, shape in {"u": (3, 4), "v": (4, 4), "bias": (4,), "w": (4, 2)}.items()
}
CELL = """g (float[N,3] x, float[N,4] h, float scale) => (float[N,2] y, float[N,4] new)
    { a = MatMul(x, u)  b = MatMul(h, v)  c = Add(a, b)  d = Add(c, bias)  s = Mul(d, scale)
      new = Tanh(s)  y = MatMul(new, w) }"""
X = R.standard_normal((BATCHES, N, STEPS, 3)).astype(np.float32)
Y = R.standard_normal((BATCHES, N, STEPS, 2)).astype(np.float32)
H = R.standard_normal((N, 4)).astype(np.float32)
SCALE = np.float32(0.9)


def cell():
    return parse_model(CELL, **WEIGHTS)


def lifted():
    """Return the cell with weights in Constant nodes, as exporters write them."""
    model = cell()
    for tensor in list(model.graph.initializer):
        node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        model.graph.node.insert(0, node)
    del model.graph.initializer[:]
    return model


@pytest.mark.parametrize("make", [cell, lifted])
def test_steps_are_those_of_the_model_one_by_one(make):
    model = og.graph.unroll(make(), {"h": "new"})
    onnx.checker.check_model(model, full_check=True)
    found = run_named(model, {"x": X[0], "h": H, "scale": SCALE})
    state = H
    for t in range(STEPS):
        one = run_named(make(), {"x": X[0][:, t], "h": state, "scale": SCALE})
        state = one["new"]
        np.testing.assert_allclose(found["y"][:, t], one["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["new"], state, rtol=1e-5, atol=1e-6)
    assert [v.name for v in model.graph.input] == ["x", "h", "scale"]
    assert {t.name for t in og.trainable(model) if t.trains} == {*WEIGHTS}


@pytest.mark.parametrize("make", [cell, lifted])
def test_truncated_backpropagation_through_time(make):
    """Two epochs of three batches, against PyTorch; the weights go back into the cell."""
    torch = pytest.importorskip("torch")
    model = og.graph.unroll(make(), {"h": "new"})
    trainer = og.Trainer(
        model, {"y": "squared_error"}, optimizer="sgd", learning_rate=0.1, carry={"h": "new"},
        batch_axes={"scale": None},
    )  # fmt: skip
    trainer.fit(
        [({"x": x, "h": H, "scale": SCALE}, y) for x, y in zip(X, Y, strict=True)], epochs=2
    )
    own = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}
    for _ in range(2):
        losses, state = [], torch.tensor(H)
        for x, y in zip(torch.tensor(X), torch.tensor(Y), strict=True):
            outputs, state = [], state.detach()
            for t in range(STEPS):
                inner = x[:, t] @ own["u"] + state @ own["v"] + own["bias"]
                state = torch.tanh(inner * SCALE)
                outputs.append(state @ own["w"])
            loss = ((torch.stack(outputs, 1) - y) ** 2).mean()
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(own.values()))
            with torch.no_grad():
                for w, g in zip(own.values(), gradients, strict=True):
                    w -= 0.1 * g
    assert trainer.history[-1]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    for name, w in own.items():
        np.testing.assert_allclose(
            trainer.state.weights[name], w.detach().numpy(), rtol=1e-5, atol=1e-6
        )
    back = og.graph.replace_initializers_into_onnx(make(), trainer.state.weights)
    assert [node.op_type for node in back.graph.node] == [n.op_type for n in make().graph.node]
    feed = {"x": X[0][:, 0], "h": H, "scale": SCALE}
    whole = run_named(trainer.model, {"x": X[0], "h": H, "scale": SCALE})
    np.testing.assert_allclose(run_named(back, feed)["y"], whole["y"][:, 0], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_unrolled():
    other = "g (float[N,3] x, float[N,4] h) => (float[N,4] y) { y = Identity(h) }"
    for model, carry, message in (
        (cell(), {}, r"pass \{input: output\} of each state"),
        (cell(), {"h": "new", "x": "new"}, r"pass \{input: output\} of each state"),
        (cell(), {"hh": "new"}, "Unknown input in carry 'hh'"),
        (cell(), {"h": "news"}, "Unknown output in carry 'news'"),
        (cell(), {"scale": "new"}, "the output 'new', FLOAT .* cannot be fed to the input 'scale'"),
        (parse_model(other), {"h": "y", "x": "y"}, r"pass \{input: output\} of each state"),
        (
            parse_model("g (float[N,4] h) => (float[N,4] y) { y = Tanh(h) }"),
            {"h": "y"},
            "all inputs are in carry=",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            og.graph.unroll(model, carry)
    same = og.graph.unroll(parse_model(other), {"h": "y"})  # a state that no step changes
    found = run_named(same, {"x": X[0], "h": H})
    np.testing.assert_array_equal(found["y"], H)
