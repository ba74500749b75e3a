"""Metrics of a `Trainer`: of token losses, of batches without weights, and whose warning it is."""

import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og

pytestmark = pytest.mark.usefixtures("one_thread")


def bigram():
    """Return a model with the scores of the next token after each token."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> bigram (int64[N,T] ids) => (float[N,T,5] logits)
        { logits = Gather(table, ids) }""")
    table = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return model


def test_metrics_of_a_token_loss_compare_with_the_next_token():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))
    labels = np.where(ids == 4, -100, ids)
    trainer = og.Trainer(
        bigram(), "cross_entropy", loss_options={"shift": True}, metrics=["perplexity", "accuracy"]
    )
    results = trainer.evaluate(ids, labels)
    before, after = trainer.predict(ids)[:, :-1], labels[:, 1:]
    kept = after != -100
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]), rel=1e-5)
    assert results["accuracy"] == np.mean(before.argmax(axis=-1)[kept] == after[kept])


def test_batches_without_weights_have_metrics_that_take_none():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))
    labels = np.roll(ids, 1)

    def share(prediction, label):
        return float(np.mean(prediction.argmax(axis=-1) == label))

    trainer = og.Trainer(bigram(), "cross_entropy", loss_options={"axis": 2}, metrics=[share])
    batches = [(ids[i : i + 4], labels[i : i + 4]) for i in (0, 4)]
    assert trainer.evaluate(batches) == pytest.approx(trainer.evaluate(ids, labels))
    weighted = [(*batches[0], np.full(4, 2.0)), batches[1]]
    with pytest.raises(ValueError, match="'share' has no parameter sample_weight"):
        trainer.evaluate(weighted)


def test_weights_of_some_batches():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))

    def total(prediction, label, sample_weight=None):
        return float(sample_weight.sum())

    trainer = og.Trainer(bigram(), "cross_entropy", loss_options={"axis": 2}, metrics=[total])
    batches = [(ids[:4], ids[:4], np.full(4, 2.0)), (ids[4:], ids[4:])]
    assert trainer.evaluate(batches)["total"] == 12


def test_the_warning_of_a_weight_without_effect_is_shown_at_the_call():
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y, float[N,1] z)
        <float[2,1] a = {1.0, 2.0}, float[2,1] b = {1.0, 2.0}> { y = MatMul(x, a) z = MatMul(x, b) }
    """)
    X = np.ones((4, 2), np.float32)
    with pytest.warns(UserWarning, match=r"does not depend on \['b'\]") as caught:
        og.Trainer(model, {"y": "mse"}).fit(X, X[:, :1])
    assert caught[0].filename == __file__
