"""Mel filters: where their centers are in Hz, by the closed forms of each scale."""

import numpy as np
import pytest

from onnxgrad.data.audio_filters import mel_filters


@pytest.mark.parametrize(
    ("scale", "edges", "spaced"),
    [
        ("slaney", (100, 800), np.linspace),  # linear below 1000 Hz, and logarithmic above
        ("slaney", (2000, 6400), np.geomspace),
        ("htk", (2000, 6400), lambda low, high, n: np.geomspace(low + 700, high + 700, n) - 700),
    ],
)
def test_centers_have_equal_distances_on_their_scale(scale, edges, spaced):
    filters = mel_filters(16000, 16000, 6, edges, scale, norm=None)  # a frequency for each Hz
    assert filters.shape == (6, 8001)
    np.testing.assert_allclose(filters.argmax(axis=1), spaced(*edges, 8)[1:-1], atol=1)
    inside = np.flatnonzero((filters > 1e-9).any(axis=0))
    np.testing.assert_allclose(inside[[0, -1]], edges, atol=1)


def test_filters_of_equal_areas():
    heights = mel_filters(16000, 16000, 6, (100, 800), "slaney", norm="slaney")
    np.testing.assert_allclose(heights.sum(axis=1), 1, rtol=1e-6)
