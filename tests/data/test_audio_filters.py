"""Filters of sounds: centers by the closed forms of each scale, tones, and spectrograms."""

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.data.audio import mel_filters
from tests.support.errors import naming


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


@pytest.mark.parametrize("rates", [(12000, 8000), (8000, 12000), (8000, 8000)])
def test_a_resampled_tone_is_the_tone_at_the_new_rate(rates):
    old, new = rates
    tone = [np.sin(2 * np.pi * 440 * np.arange(n // 4) / n)[None] for n in rates]
    found = og.data.resample(old, new)(np.float32(tone[0]))
    assert found.shape == tone[1].shape
    inside = slice(100, -100)  # silence is heard around the tone
    np.testing.assert_allclose(found[:, inside], tone[1][:, inside], atol=2e-3)
    assert (
        og.data.resample(old, new)
        == og.data.resample(old, new)
        != og.data.resample(old, new + 1000)
    )


@pytest.mark.parametrize(
    ("options", "logarithm"),
    [
        ({"log": None}, lambda power: power),
        ({"log": "db", "power": 1.0, "win_length": 200}, lambda power: 10 * np.log10(power)),
        ({"log": "log10", "center": False, "frames_first": True}, np.log10),
    ],
)
def test_spectrogram_of_frames(options, logarithm):
    transform = og.data.mel_spectrogram(8000, 256, 100, 10, **options)
    x = np.random.default_rng(0).normal(size=(2, 1200))
    length = options.get("win_length", 256)
    window = np.pad(np.hanning(length + 1)[:-1], (256 - length) // 2)
    padded = np.pad(x, [(0, 0), (128, 128)], "reflect") if options.get("center", True) else x
    starts = np.arange(0, padded.shape[1] - 255, 100)
    frames = padded[:, starts[:, None] + np.arange(256)] * window
    energy = np.abs(np.fft.rfft(frames)) ** options.get("power", 2.0)
    bank = mel_filters(8000, 256, 10, (0, 4000), "htk", None)
    np.testing.assert_allclose(transform.filters(), bank, rtol=1e-6, atol=1e-7)
    expected = logarithm(energy @ bank.T)
    found = transform(np.float32(x))
    found = found if options.get("frames_first") else found.swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_names_of_spectrograms_that_do_not_exist():
    for wrong in ({"mel_scale": "mel"}, {"log": "ln"}, {"power": 3}, {"norm": "area"}):
        [(name, value)] = wrong.items()
        with pytest.raises(ValueError, match=naming(name, str(value))):
            og.data.mel_spectrogram(8000, **wrong)
