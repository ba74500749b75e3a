"""Texts of any language in tensors and attributes, in the main graph, a subgraph and a function."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_ir, to_proto
from tests.support.running import run_named

WORDS = "rosé", "猫", "Ωμέγα", "naïve", "дом", "🙂"
TEXT = """<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 3, "f": 1]>
    g (string[N,6] k, float[N,6] x) => (float[N,6] y, string[M] s)
    <float[6] w = {1, 2, 3, 4, 5, 6}, string[1] stored = {"W0"}> {
        one = Constant<value_string = "W1">()
        most = ReduceMax<keepdims = 0>(x)
        always = GreaterOrEqual(most, most)
        inner = If(always) <
            then_branch = t () => (string[1] u) { u = Constant<value_strings = ["W2"]>() },
            else_branch = e () => (string[1] v) { v = Constant<value = string[1] {"no"}>() }>
        coded = ai.onnx.ml.LabelEncoder<keys_strings = ["W5"], values_floats = [2.0]>(k)
        called = f.same<word = ["W3"]>(k)
        a = Equal(k, stored)  b = Equal(k, one)  c = Equal(k, inner)
        ab = Or(a, b)  abc = Or(ab, c)  found = Or(abc, called)
        number = Cast<to = 1>(found)  both = Add(number, coded)  shifted = Add(both, x)
        y = Mul(shifted, w)  s = Identity(stored) }
    <domain: "f", opset_import: ["": 20]> same<word>(k) => (z) {
        q = Constant<value_strings: strings = @word>()
        p = Constant<value_strings = ["W4"]>()
        first = Equal(k, q)  second = Equal(k, p)  z = Or(first, second) }"""


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Return a model that compares its input with texts, each held in another way."""
    serialized = onnx.parser.parse_model(TEXT)
    for holder in _text_holders(serialized):
        for i, word in enumerate(holder):
            holder[i] = WORDS[int(word[1:])].encode() if word.startswith(b"W") else word
    for node in serialized.graph.node:
        for attribute in node.attribute:
            if attribute.name == "value_string":
                attribute.s = WORDS[1].encode()
    return serialized


def _text_holders(model):
    """Yield each list of texts in the main graph, the branches and the function."""
    pending = [*model.graph.node, *model.functions[0].node]
    yield from (tensor.string_data for tensor in model.graph.initializer)
    for node in pending:
        for attribute in node.attribute:
            pending.extend(attribute.g.node)
            yield from (attribute.strings, attribute.t.string_data)


@pytest.mark.parametrize(
    "rewritten", [lambda m: to_proto(to_ir(m)), lambda m: to_proto(prepare(m))]
)
def test_texts_of_any_language_are_kept(model, rewritten):
    """`onnx_ir` reads the texts of a Constant as ASCII."""
    feed = {"k": np.array([WORDS], object), "x": np.zeros((1, 6), np.float32)}
    expected = run_named(model, feed)
    np.testing.assert_array_equal(expected["y"], [[1, 2, 3, 4, 5, 12]])
    result = run_named(rewritten(model), feed)
    np.testing.assert_array_equal(result["y"], expected["y"])
    assert result["s"].tolist() == [WORDS[0]]
