"""Models that reduce over all axes of their one row: they train as with a symbolic batch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.operators.shapes import dims
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, run

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 3, 6, 6)).astype(np.float32)
Y = rng.integers(0, 4, 20)


def fitting_array(*shape):
    return (rng.normal(size=shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)


WEIGHTS = {
    "kernel": fitting_array(8, 3, 3, 3), "scale": 1 + fitting_array(8), "bias": fitting_array(8),
    "mean": fitting_array(8), "variance": 1 + fitting_array(8) ** 2, "r": fitting_array(1, 24, 6),
    "k": fitting_array(1, 24, 8), "h": fitting_array(1, 1, 6), "s": 1 + fitting_array(6),
    "o": fitting_array(6), "head": fitting_array(4, 6), "c": fitting_array(4),
    "every": np.array([1, 2, 3]), "sequence": np.array([0, 8, 36]), "first": np.array(0),
    "one": np.array([1]),
}  # fmt: skip

# a convolution, an LSTM along the places, a normalization and a layer
NETWORK = """f (float[ROWS,3,6,6] x) => (float[ROWS,4] y) {
    MEAN
    t = Sub(x, m)  u = Conv<pads = [1, 1, 1, 1]>(t, kernel)
    v = BatchNormalization(u, scale, bias, mean, variance)  a = Relu(v)
    q = Reshape(a, sequence)  p = Transpose<perm = [2, 0, 1]>(q)
    START
    steps, e = LSTM<hidden_size = 6>(p, k, r, , , start)  b = Gather<axis = 0>(e, first)
    n = LayerNormalization<axis = -1>(b, s, o)  y = Gemm<transB = 1>(n, head, c) }"""
OF_ONE_ROW = {
    "ROWS": "1",
    "MEAN": "m = ReduceMean<keepdims = 0>(x)",
    "START": "start = Identity(h)",
}
OF_ANY = {
    "ROWS": "N", "MEAN": "m = ReduceMean(x, every)",
    "START": "d = Shape<start = 0, end = 1>(x)  z = Concat<axis = 0>(one, d, one) "
    "start = Expand(h, z)",
}  # fmt: skip


def both_models() -> list[onnx.ModelProto]:
    models = []
    for parts in (OF_ONE_ROW, OF_ANY):
        text = NETWORK
        for name, part in parts.items():
            text = text.replace(name, part)
        used = {n: w for n, w in WEIGHTS.items() if n in text}
        models.append(parse_model(text, **used))
    return models


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate": 4, "batch_norm": "train"},
        {"learning_rate": [0.05, 0.1]},
        {"dropout": {"a": 0.3}},
        in_sweep({"recompute": "all", "clip_norm": 0.1}),
        in_sweep({"optimizer": og.optimizers.ema(og.optimizers.sgd(0.9), 0.9)}),
    ],
    ids=str,
)
def test_it_trains_as_with_a_symbolic_batch(arguments):
    given = {"optimizer": "sgd", "learning_rate": 0.1} | arguments
    kind = og.TrainerStack if isinstance(given["learning_rate"], list) else og.Trainer
    models, weight = both_models(), np.linspace(0, 1, 20, dtype=np.float32)
    one, many = (
        kind(model, "cross_entropy", **given).fit(
            X, Y, epochs=2, batch_size=8, sample_weight=weight, validation=(X[:5], Y[:5])
        )
        for model in models
    )
    states = [{**t.state.weights, **t.state.buffers} for t in (one, many)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_allclose(array, states[1][name], rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(one.predict(X), many.predict(X), rtol=1e-3, atol=1e-5)
    losses = (t.history[-1]["validation_loss"] for t in (one, many))
    np.testing.assert_allclose(*losses, rtol=1e-4)
    if kind is og.Trainer:
        out = one.model
        assert out.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
        assert operator_names(out) == operator_names(models[0])
        np.testing.assert_allclose(run(out, x=X[3:4])[0], one.predict(X)[3:4], rtol=1e-4, atol=1e-5)


def test_states_keep_their_rows_on_the_stated_axis():
    """Each state has several axes of length 1, and goes to the output of the same shape."""
    text = """f (float[1,3] x, float[1,1,3] h) => (float[1,3] y, float[1,1,3] g) {
        m = ReduceMax<keepdims = 0>(x)  y = Sub(x, m)  g = Add(h, y) }"""
    for stated, expected in (({}, ("rows", 1, 3)), ({"h": 1}, (1, "rows", 3))):
        freed = free_rows(prepare(parse_model(text)), "rows", stated)
        assert freed is not None
        assert dims(freed.graph.inputs[1]) == dims(freed.graph.outputs[1]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "f (float[1,3] x) => (float[3] y) { m = ReduceMax<keepdims = 0>(x)  "
        "n = ReduceSum<keepdims = 0>(x, z)  y = Sub(n, m) }",
        "f (float[1,3] x) => (float[1,3] y) { y = Neg(w) }",
        # an input whose axis of length 1 may be no axis of rows
        "f (float[1,3] x, float[3,1] v) => (float[1,1] y) { y = MatMul(x, v) }",
    ],
)
def test_outputs_without_an_axis_of_rows(text):
    model = parse_model(text, z=np.array([0]), w=np.ones((1, 3), np.float32))
    assert free_rows(prepare(model), "rows", {}) is None
