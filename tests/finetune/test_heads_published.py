"""Five classes for published models, when asked for: see test_real_models.py."""

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import initializer_arrays
from tests.support.published_models import judge_published
from tests.support.running import run_named

pytestmark = pytest.mark.real

REPLACED = {"magika", "opennsfw", "dnsmos", "aecmos", "paddleocr"}
NAMED = {"spindle": {"output": "detection"}, "silero-vad-v6": {"output": "speech_probs"}}


def learns_one_class(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> bool:
    """Return whether the new layer learns one class for all rows."""
    rows = next(iter(feed.values())).shape[0]
    trainer = og.Trainer(model, "cross_entropy", train=["head.*"], learning_rate=1e-2)
    trainer.fit(feed, np.full(rows, 3), epochs=5)
    return trainer.history[-1]["loss"] < trainer.history[0]["loss"]


@pytest.mark.parametrize("name", sorted(REPLACED | NAMED.keys()))
def test_five_classes(name):
    judged = judge_published(name)
    model = og.replace_head(judged.proto, 5, **NAMED.get(name, {}))
    onnx.checker.check_model(model, full_check=True)
    results = run_named(model, judged.feed)
    assert any(5 in y.shape for y in results.values())
    if name in ("magika", "opennsfw"):
        [y] = results.values()
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-5)
        assert learns_one_class(model, judged.feed)


DETECTORS = {"nudenet": (["model.22.cv3.*.2"], 1, 4), "ddddocr": (["427", "429", "431"], 2, 5)}


@pytest.mark.parametrize("name", DETECTORS)
def test_classes_of_a_detector(name):
    """Boxes, and whether there is an object, are the same; scores are of the new classes."""
    at, axis, kept = DETECTORS[name]
    judged = judge_published(name)
    with pytest.raises(ValueError, match=r"replaced together.*3 layers"):
        og.replace_head(judged.proto, 5)
    model = og.replace_head(judged.proto, 5, at)
    onnx.checker.check_model(model, full_check=True)
    [y], [before] = (list(run_named(m, judged.feed).values()) for m in (model, judged.proto))
    assert y.shape[axis] == kept + 5
    boxes = (slice(None),) * axis + (slice(kept),)
    np.testing.assert_allclose(y[boxes], before[boxes], rtol=1e-5)
    assert {f"head.{i}.weight" for i in range(3)} <= {t.name for t in og.trainable(model).trained}


def test_sentence_classifier():
    """An encoder that ends in a normalization gets a layer behind the mean of its tokens."""
    judged = judge_published("minilm")
    with pytest.raises(ValueError, match="add_head"):
        og.replace_head(judged.proto, 5)
    value, mask = "onnx::Shape_422", "attention_mask"
    body = og.graph.features(judged.proto, value)
    model = og.add_head(judged.proto, 5, value, pool="mean", mask=mask, activation="softmax")
    tokens = run_named(body, judged.feed)["onnx::Shape_422"]
    mask = judged.feed["attention_mask"][..., None]
    pooled = (tokens * mask).sum(1) / mask.sum(1)
    e = np.exp(pooled @ initializer_arrays(model)["head.weight"])
    [y] = run_named(model, judged.feed).values()
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-3)
    assert learns_one_class(model, judged.feed)
