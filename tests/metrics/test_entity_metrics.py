"""F1 of entities, against seqeval and a counter of spans."""

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.metrics import EntityF1
from tests.support.entity_spans import entity_spans
from tests.support.errors import naming

pytest.importorskip("seqeval")
NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_f1_in_batches_is_that_of_all_at_once():
    """Against seqeval in one call, and a counter of spans."""
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    rng, compared = np.random.default_rng(3), 0
    for case in range(8):
        axis = 1 + case % 2
        f1, strict = EntityF1(NAMES), EntityF1(NAMES, "IOB2")
        for metric in (f1, strict):
            metric.begin(og.metrics.PredictionInfo(classes=5, axis=axis, ignore_index=-100))
        true, found = [], []
        for _ in range(4):
            n, t = rng.integers(1, 5), rng.integers(2, 12)
            labels = rng.integers(0, 5, (n, t))
            scores = rng.standard_normal((n, t, 5)) + 2 * np.eye(5)[labels]
            labels[rng.random((n, t)) < 0.3] = -100
            labels[:, 0] = 3
            for metric in (f1, strict):
                metric.update(np.moveaxis(scores, 2, axis), labels)
            for row, score in zip(labels, scores, strict=True):
                true.append([NAMES[k] for k in row if k >= 0])
                found.append([NAMES[s.argmax()] for k, s in zip(row, score, strict=True) if k >= 0])
        assert f1.compute() == f1_score(true, found)
        assert strict.compute() == f1_score(true, found, mode="strict", scheme=IOB2)
        sets = [(entity_spans(a), entity_spans(b)) for a, b in zip(true, found, strict=True)]
        hits = sum(len(a & b) for a, b in sets)
        total = sum(len(a) + len(b) for a, b in sets)
        assert f1.compute() == pytest.approx(2 * hits / total)
        compared += 1
    assert compared == 8


def test_metric_without_words_or_with_weights():
    f1 = EntityF1(NAMES)
    f1.begin(og.metrics.PredictionInfo(classes=5, axis=2, ignore_index=-100))
    with pytest.raises(ValueError, match=naming("sample weights")):
        f1.update(np.zeros((1, 2, 5)), np.zeros((1, 2)), np.ones(1))
    f1.update(np.zeros((1, 2, 5)), np.full((1, 2), -100))
    with pytest.raises(ValueError, match=naming("no word", "labels")):
        f1.compute()
