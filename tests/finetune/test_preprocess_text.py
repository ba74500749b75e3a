"""Files that take texts: features by the operators of ONNX, and a linear part that trains."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.running import run

WORDS = ["bad", "film", "good"]
TEXTS = np.array([["good film", "good"], ["bad film", "bad"], ["film good", "x"]], object)


def word_classifier() -> onnx.ModelProto:
    """Return counts of words, scaled to length 1 by an operator without type inference."""
    pool = ", ".join(f'"{word}"' for word in WORDS)
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3, "com.microsoft": 1]>
        g (string[N,2] text) => (float[N,1] p)
        <float[3,1] w = {{0.5, -0.25, 1.0}}, float[1] b = {{0.125}}>
        {{ tokens = com.microsoft.Tokenizer<mark = 0, mincharnum = 1, pad_value = "#",
               separators = [" "]>(text)
           flat = Flatten(tokens)
           counts = TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1,
               max_skip_count = 0, ngram_counts = [0], ngram_indexes = [0, 1, 2],
               pool_strings = [{pool}]>(flat)
           unit = ai.onnx.ml.Normalizer<norm = "L2">(counts)
           product = MatMul(unit, w)
           score = Add(product, b)
           p = Sigmoid(score) }}""")
    return model


def scaled_counts() -> np.ndarray:
    rows = [[" ".join(row).split().count(word) for word in WORDS] for row in TEXTS]
    counts = np.array(rows, np.float64)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_the_linear_part_trains():
    """One step of gradient descent on the logistic loss, by numpy in float64."""
    model = word_classifier()
    (features,) = run(og.graph.select_model_inputs_outputs(model, ["unit"]), text=TEXTS)
    np.testing.assert_allclose(features, scaled_counts(), rtol=1e-6)
    linear = og.graph.select_model_inputs_outputs(model, ["score"], inputs=["unit"])
    assert [t.name for t in og.trainable(model) if t.trains] == ["w", "b"]
    y = np.array([1, 0, 1])
    trainer = og.Trainer(linear, "binary_cross_entropy", optimizer="sgd", learning_rate=0.5)
    trainer.fit(features, y, batch_size=3)
    w, b = np.array([0.5, -0.25, 1.0]), 0.125
    error = 1 / (1 + np.exp(-(scaled_counts() @ w + b))) - y
    w, b = w - 0.5 * error @ scaled_counts() / 3, b - 0.5 * error.mean()
    np.testing.assert_allclose(trainer.state.weights["w"][:, 0], w, rtol=1e-5)
    np.testing.assert_allclose(trainer.state.weights["b"], b, rtol=1e-5)
    adapted = og.graph.replace_initializers_into_onnx(model, trainer.state.weights)
    want = 1 / (1 + np.exp(-(scaled_counts() @ w + b)))
    np.testing.assert_allclose(run(adapted, text=TEXTS)[0][:, 0], want, rtol=1e-5)


def test_batches_of_strings_are_refused():
    with pytest.raises(ValueError, match=r"'text' holds strings.*select_model_inputs_outputs"):
        og.Trainer(word_classifier(), "binary_cross_entropy").fit(TEXTS, np.array([1, 0, 1]))
