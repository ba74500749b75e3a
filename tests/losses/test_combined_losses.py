"""Sums of losses of one prediction: those of a row are added to each of its elements."""

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.losses.objectives import training_loss
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.written_losses import WrittenLoss

RNG = np.random.default_rng(0)
MAPS = RNG.normal(size=(3, 4, 2, 5))
CLASSES = RNG.integers(0, 4, (3, 2, 5))
BITS = (RNG.random(MAPS.shape) > 0.5) * 1.0


def result_of(loss, labels):
    """Return the total and the gradient of a loss of maps."""
    shape = "double[N,4,2,5]"
    model = parse_model(f"g ({shape} x) => ({shape} y) {{ y = Identity(x) }}")
    options = {"options": {"axis": 1}} if labels is CLASSES else {}
    result = WrittenLoss(model, training_loss(loss, **options), {"x": MAPS, "label": labels})
    return result.total, result.gradient


@pytest.mark.parametrize(
    ("factors", "labels", "title"),
    [
        ({"cross_entropy": 1, "softmax_dice": 0.5}, CLASSES, "cross_entropy + 0.5 softmax_dice"),
        ({"softmax_dice": 3}, CLASSES, "3 softmax_dice"),
        ({"focal": 2, "dice": 1, "binary_cross_entropy": 0.25}, BITS, None),
    ],
)
def test_without_ignored_labels_it_is_the_sum_of_means(factors, labels, title):
    loss = og.losses.combined_loss(
        factors, {"binary_cross_entropy": {"label_smoothing": 0.1}} if title is None else None
    )
    assert title in (None, loss.name)
    parts = []
    for name, factor in factors.items():
        options = {"label_smoothing": 0.1} if name == "binary_cross_entropy" else {}
        logits = {"from_logits": True} if labels is BITS else {}
        spec = og.losses.LOSSES[name].with_options(options | logits)
        parts.append([factor * part for part in result_of(spec, labels)])
    for found, expected in zip(result_of(loss, labels), zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(found, sum(expected), rtol=1e-9, atol=1e-12)


def test_one_loss_stays():
    assert og.losses.combined_loss({"softmax_dice": 1}) == og.losses.LOSSES[
        "softmax_dice"
    ].with_options({})


@pytest.mark.parametrize(
    ("factors", "options", "parts"),
    [
        ({"cross_entropy": 1, "dice": 1}, None, ["'cross_entropy'", "'dice'", "classes"]),
        ({}, None, ["[]", "losses"]),
        ({"mse": 1.0}, None, ["loss", "'mse'"]),
        ({"ctc": 1.0}, None, ["loss", "'ctc'"]),
        ({"log": 1.0}, None, ["loss", "'log'"]),
        ({"dice": np.inf}, None, ["'dice'", "finite", "inf"]),
        ({"dice": 1}, {"focal": {}}, ["'focal'", "'dice'"]),
        ({"dice": 1}, {"dice": {"ignore_nan": True}}, ["'ignore_nan'", "loss_options"]),
    ],
)
def test_sums_that_are_refused(factors, options, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        og.losses.combined_loss(factors, options)
