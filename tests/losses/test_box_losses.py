"""Losses of boxes, against the formulas of torchvision and ultralytics in PyTorch."""

import numpy as np
import pytest

from onnxgrad.losses.image_losses import box_iou, distribution_focal, varifocal
from tests.support.detection_cases import (
    assert_same_values,
    random_boxes,
    torch_iou,
    torch_value_and_gradients,
    value_and_gradients,
)

torch = pytest.importorskip("torch")
F = torch.nn.functional
BINS = 8


@pytest.mark.parametrize("kind", ["iou", "giou", "ciou"])
def test_box_iou_is_that_of_torchvision(kind):
    rng = np.random.default_rng(0)
    pair = random_boxes(rng, 140), random_boxes(rng, 140)
    mine = value_and_gradients(lambda op, a, b: box_iou(op, a, b, kind), *pair, wrt=2)
    other = torch_value_and_gradients(lambda a, b: torch_iou(a, b, kind), *pair, wrt=2)
    assert_same_values(mine, other)


def test_varifocal_is_that_of_ultralytics():
    def witness(pred, score, alpha=0.75, gamma=2.0):
        weight = alpha * pred.sigmoid().pow(gamma) * (score <= 0) + score
        return F.binary_cross_entropy_with_logits(pred, score, reduction="none") * weight

    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(40, 5)).astype(np.float32)
    target = np.maximum(rng.uniform(-1, 1, (40, 5)), 0).astype(np.float32)
    assert_same_values(
        value_and_gradients(varifocal, logits, target),
        torch_value_and_gradients(witness, logits, target),
    )


def test_distribution_focal_is_that_of_ultralytics():
    def witness(logits, t):
        t = t.clamp(0, BINS - 1 - 0.01)
        low = t.long()
        flat, high = logits.view(-1, BINS), (low + 1).view(-1)
        left = F.cross_entropy(flat, low.view(-1), reduction="none").view(t.shape) * (low + 1 - t)
        return left + F.cross_entropy(flat, high, reduction="none").view(t.shape) * (t - low)

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4, BINS)).astype(np.float32)
    target = rng.uniform(-1, BINS + 1, (6, 4)).astype(np.float32)
    assert_same_values(
        value_and_gradients(distribution_focal, logits, target),
        torch_value_and_gradients(witness, logits, target),
    )
