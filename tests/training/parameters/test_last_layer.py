"""`train="last"`: the weights of the last layer, by the graph."""

import re

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
V, W = RNG.normal(size=(4, 4)).astype(np.float32), RNG.normal(size=(4, 3)).astype(np.float32)
B = RNG.normal(size=3).astype(np.float32)
TENSORS = {
    "v": V, "w": W, "b": B, "scale": np.abs(B) + 1, "table": RNG.normal(size=(3, 4)),
    "c": RNG.normal(size=4), "k": RNG.normal(size=(3, 4, 1, 1)), "planes": B.reshape(1, 3, 1, 1),
    "bytes": np.int8(W * 10), "step": np.float32(0.1), "ramp": np.arange(3),
}  # fmt: skip
MATRIX = "f (float[N,4] x) => (float[N,3] y)"
BODY = "a = MatMul(x, v) e = Add(a, c) r = Relu(e)"
CASES = {
    "gemm": (f"{MATRIX} {{ {BODY} y = Gemm(r, w, b) }}", "w b"),
    "matmul, add, cast, softmax": (
        f"{MATRIX} {{ {BODY} h = MatMul(r, w) s = Add(h, b) f = Cast<to=11>(s) p = Softmax(f)"
        " y = Cast<to=1>(p) }", "w b"),
    "normalized": (
        f"{MATRIX} {{ {BODY} h = MatMul(r, w) y = LayerNormalization(h, scale, b) }}",
        "w scale b"),
    "classes only": (
        "f (float[N,4] x) => (int64[N] y) { a = MatMul(x, v) r = Relu(a) h = Gemm(r, w, b)"
        " y = ArgMax<axis=1, keepdims=0>(h) }", "w b"),
    "maps": (
        "f (float[N,4,H,W] x) => (float[N,3] y) { h = Conv(x, k) p = Add(h, planes)"
        " g = GlobalAveragePool(p) y = Flatten(g) }", "k planes"),
    "two outputs": (
        "f (float[N,4] x) => (float[N,4] z, float[N,3] y) {"
        f" {BODY} z = MatMul(r, v) y = MatMul(r, w) }}", "v w"),
    "features are an output, too": (
        f"f (float[N,4] x) => (float[N,4] r, float[N,3] y) {{ {BODY} y = MatMul(r, w) }}", "w"),
    "tied": (
        "f (int64[N] i) => (float[N,3] y) { x = Gather(table, i) a = MatMul(x, v) r = Relu(a)"
        " t = Transpose(table) y = MatMul(r, t) }", "table"),
    "numbers of classes behind probabilities": (
        f"f (float[N,4] x) => (float[N,1] y) <int64[1] one = {{1}}> {{ {BODY} h = Gemm(r, w, b)"
        " p = Softmax(h) q = Unsqueeze(p, one) m = MatMul(q, column) y = Squeeze(m, one) }",
        "w b"),
    "scikit-learn": (
        "f (float[N,4] x) => (int64[N] l, float[N,2] y) { a = MatMul(x, v) r = Relu(a)"
        " l, y = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1], coefficients=[1.0, 2.0,"
        " 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], intercepts=[1.0, 2.0]>(r) }",
        "l.coefficients l.intercepts"),
}  # fmt: skip


def last_layer_case(text, **more):
    arrays = {**TENSORS, "column": np.arange(3.0)[:, None], **more}
    read = set(re.findall(r"\w+", text))
    named = {n: a for n, a in arrays.items() if n in read}
    return parse_model(
        text,
        **{n: a if a.dtype.kind == "i" else np.float32(a) for n, a in named.items()},
    )


@pytest.mark.parametrize("name", CASES)
def test_weights_of_the_last_layer(name):
    text, expected = CASES[name]
    rows = og.trainable(last_layer_case(text), train="last")
    assert {t.name for t in rows.trained} == {*expected.split()}
    frozen = og.trainable(last_layer_case(text), freeze="last")
    assert {t.name for t in frozen.trained}.isdisjoint(expected.split())


def test_a_trainer_trains_the_last_layer_only():
    model = og.replace_head(last_layer_case(CASES["gemm"][0]), ["a", "b"])
    trainer = og.Trainer(model, "cross_entropy", train="last")
    assert trainer.trained == ["head.weight", "head.bias"]
    trainer.fit(X, np.arange(6) % 2)
    both = og.Trainer(model, "cross_entropy", train=["last", "v"])
    assert both.trained == ["v", "head.weight", "head.bias"]
    inside = og.add_loss_output(model, "cross_entropy")
    assert og.Trainer(inside).trained == ["v", "c", "head.weight", "head.bias"]
    assert og.Trainer(inside, train="last").trained == ["head.weight", "head.bias"]


def test_a_weight_with_this_name_wins():
    text = f"{MATRIX} {{ a = MatMul(x, last) r = Relu(a) y = MatMul(r, w) }}"
    rows = og.trainable(last_layer_case(text, last=V), train="last")
    assert [t.name for t in rows.trained] == ["last"]


def test_a_last_layer_without_floats():
    text = f"{MATRIX} {{ {BODY} d = DequantizeLinear(bytes, step) y = MatMul(r, d) }}"
    with pytest.raises(ValueError, match=naming("train=", "'last'", "floats")):
        og.trainable(last_layer_case(text), train="last")
