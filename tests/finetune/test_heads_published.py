"""Five classes for published models, when asked for: see test_real_models.py."""

import numpy as np
import onnx
import pytest
from published import Published, models, run, session

from onnxgrad import Trainer, trainable
from onnxgrad.finetune.add_head import add_head
from onnxgrad.finetune.features import features
from onnxgrad.finetune.heads import replace_head
from tests.docs.test_real_models import judge

pytestmark = pytest.mark.real

REPLACED = {"magika", "opennsfw", "dnsmos", "aecmos", "paddleocr"}
NAMED = {"spindle": {"output": "detection"}, "silero-vad-v6": {"output": "speech_probs"}}


def named(name: str) -> Published:
    return next(m for m in models() if m.name == name)


def learns(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> bool:
    """Return whether the new layer learns one class for all rows."""
    rows = next(iter(feed.values())).shape[0]
    trainer = Trainer(model, "cross_entropy", train=["head.*"], learning_rate=1e-2)
    trainer.fit(feed, np.full(rows, 3), epochs=5)
    return trainer.history[-1]["loss"] < trainer.history[0]["loss"]


@pytest.mark.parametrize("name", sorted(REPLACED | NAMED.keys()))
def test_five_classes(name):
    judged = judge(named(name))
    model = replace_head(judged.proto, 5, **NAMED.get(name, {}))
    onnx.checker.check_model(model, full_check=True)
    results = run(session(model), judged.feed)
    assert any(5 in y.shape for y in results.values())
    if name in ("magika", "opennsfw"):
        [y] = results.values()
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-5)
        assert learns(model, judged.feed)


DETECTORS = {"nudenet": (["model.22.cv3.*.2"], 1, 4), "ddddocr": (["427", "429", "431"], 2, 5)}


@pytest.mark.parametrize("name", DETECTORS)
def test_classes_of_a_detector(name):
    """Boxes, and whether there is an object, are the same; scores are of the new classes."""
    at, axis, kept = DETECTORS[name]
    judged = judge(named(name))
    with pytest.raises(ValueError, match=r"replaced together.*3 layers"):
        replace_head(judged.proto, 5)
    model = replace_head(judged.proto, 5, at)
    onnx.checker.check_model(model, full_check=True)
    [y], [before] = (list(run(session(m), judged.feed).values()) for m in (model, judged.proto))
    assert y.shape[axis] == kept + 5
    boxes = (slice(None),) * axis + (slice(kept),)
    np.testing.assert_allclose(y[boxes], before[boxes], rtol=1e-5)
    assert {f"head.{i}.weight" for i in range(3)} <= {t.name for t in trainable(model).trained}


def test_sentence_classifier():
    """An encoder that ends in a normalization gets a layer behind the mean of its tokens."""
    judged = judge(named("minilm"))
    with pytest.raises(ValueError, match="add_head"):
        replace_head(judged.proto, 5)
    value, mask = "onnx::Shape_422", "attention_mask"
    body = features(judged.proto, value)
    model = add_head(judged.proto, 5, value, pool="mean", mask=mask, activation="softmax")
    tokens = run(session(body), judged.feed)["onnx::Shape_422"]
    mask = judged.feed["attention_mask"][..., None]
    pooled = (tokens * mask).sum(1) / mask.sum(1)
    w = next(t for t in model.graph.initializer if t.name == "head.weight")
    e = np.exp(pooled @ onnx.numpy_helper.to_array(w))
    [y] = run(session(model), judged.feed).values()
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-3)
    assert learns(model, judged.feed)
