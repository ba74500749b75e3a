"""Mean average precision, against its definition."""

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.tasks.detection import Head
from onnxgrad.tasks.detection_heads import Decoder
from tests.support.errors import naming
from tests.support.running import in_sweep

CLASSES = 3


def average_precision(found, true, iou):
    """That of COCO for one class: matches by score, precision at 101 recalls."""
    count = sum(len(t) for t in true)
    if not count:
        return None
    rows = sorted(
        ((s, i, box) for i, boxes in enumerate(found) for s, *box in boxes),
        key=lambda row: -row[0],
    )
    taken, hits = [set() for _ in true], []
    for _, i, box in rows:
        best, at = min(iou, 1 - 1e-10), None
        for g, other in enumerate(true[i]):
            x = max(0, min(box[2], other[2]) - max(box[0], other[0]))
            y = max(0, min(box[3], other[3]) - max(box[1], other[1]))
            areas = sum((b[2] - b[0]) * (b[3] - b[1]) for b in (box, other))
            overlap = x * y / (areas - x * y)
            if g not in taken[i] and overlap >= best:
                best, at = overlap, g
        taken[i].add(at)
        hits.append(at is not None)
    tp = np.cumsum(hits)
    recall, precision = tp / count, tp / np.arange(1, len(hits) + 1)
    grid = np.linspace(0, 1, 101)
    return np.mean([max(precision[recall >= r], default=0.0) for r in grid])


@pytest.mark.parametrize("seeds", [range(6), in_sweep(range(6, 50))], ids=str)
def test_map_is_that_of_its_definition(seeds):
    pytest.importorskip("pycocotools")
    head = Head("rtdetr", CLASSES, (100, 100), probabilities=True)  # keeps all boxes
    for seed in seeds:
        rng = np.random.default_rng(seed)
        label = np.full((4, 5, 5), -1, np.float32)
        prediction = np.zeros((4, 12, 4 + CLASSES), np.float32)
        for row, boxes_of in zip(label, prediction, strict=True):
            count = rng.integers(1, 6)
            near = rng.uniform(10, 60, (count, 2))
            row[:count] = np.c_[
                rng.integers(0, CLASSES, count), near, near + rng.uniform(20, 35, 2)
            ]
            at = rng.integers(0, count, 12)
            corners = row[at, 1:] + rng.normal(scale=2.5, size=(12, 4))
            boxes_of[:, :2] = (corners[:, :2] + corners[:, 2:]) / 200
            boxes_of[:, 2:4] = (corners[:, 2:] - corners[:, :2]) / 100
            number = np.where(rng.random(12) < 0.8, row[at, 0], rng.integers(0, CLASSES, 12))
            boxes_of[np.arange(12), 4 + number.astype(int)] = rng.permutation(12) / 20 + 0.1
            boxes_of[np.arange(12), 4 + number.astype(int)] += rng.random(12) / 100
        for iou, ious in [((0.5, [0.5]), (None, np.arange(50, 100, 5) / 100))[seed % 2]]:
            decoder = Decoder(head)
            metric = og.metrics.MeanAveragePrecision(decoder.box_lists, iou)
            metric.begin(og.metrics.PredictionInfo())
            for half in (slice(0, 2), slice(2, 4)):
                metric.update(prediction[half], label[half])
            values = []
            for c in range(CLASSES):
                found = [d[d[:, 0] == c][:, 1:] for d in decoder(prediction, 0.001, 0.65)]
                true = [t[t[:, 0] == c][:, 1:] for t in label]
                values += [average_precision(found, true, t) for t in ious]
            expected = np.mean([v for v in values if v is not None])
            assert np.isclose(metric.compute(), expected, atol=1e-6), seed
            own = og.metrics.MeanAveragePrecision(decoder.box_lists, iou, per_class=CLASSES)
            own.begin(og.metrics.PredictionInfo())
            own.update(prediction, label)
            by_class = [values[i : i + len(ious)] for i in range(0, len(values), len(ious))]
            means = [np.nan if None in each else np.mean(each) for each in by_class]
            np.testing.assert_allclose(own.compute(), means, atol=1e-6)


def test_confusions_of_boxes():
    true = np.array([[0, 0, 0, 10, 10], [1, 20, 20, 30, 30], [1, 50, 50, 60, 60.0]])
    found = np.array(
        [
            [0, 0.9, 1, 0, 10, 10],  # right
            [1, 0.8, 0, 0, 10, 9],  # the same box again
            [0, 0.7, 20, 20, 30, 31],  # of another class
            [1, 0.2, 50, 50, 60, 60],  # a low score: missed
        ]
    )
    metric = og.metrics.BoxConfusion(lambda p, y: (p, y), classes=2)
    metric.begin(og.metrics.PredictionInfo())
    for batch in ((found, true), (np.zeros((0, 6)), np.zeros((0, 5)))):
        metric.update([batch[0]], [batch[1]])
    assert metric.compute().tolist() == [[1, 0, 0], [1, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match=naming("confusion_matrix", "sample weights")):
        metric.update([found], [true], weight=np.ones(1))
