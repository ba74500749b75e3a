"""Filters and windows of audio transforms, computed by numpy in float64."""

from __future__ import annotations

from math import ceil

import numpy as np

_HZ_PER_MEL = 200 / 3  # below 1000 Hz, on the scale of Slaney
_BREAK = 1000 / _HZ_PER_MEL  # mel at 1000 Hz, where the scale of Slaney becomes logarithmic
_LOG_STEP = np.log(6.4) / 27  # above 1000 Hz


def sinc_kernel(old: int, new: int, zeros: int, rolloff: float) -> tuple[np.ndarray, int]:
    """Return polyphase filters (new, taps) that resample by new / old, and their reach in samples.

    Filter i computes the samples i, i + new, i + 2 new, ... of the result. It is a sinc with its
    cutoff at `rolloff` times the lower Nyquist frequency, under a Hann window over `zeros` zero
    crossings on each side (J. O. Smith, Digital Audio Resampling). `reach` is the number of samples
    before the first one.
    """
    cutoff = min(old, new) * rolloff
    reach = ceil(zeros * old / cutoff)
    samples = np.arange(-reach, reach + old) / old
    t = (samples - np.arange(new)[:, None] / new) * cutoff
    window = np.cos(np.clip(t, -zeros, zeros) * np.pi / zeros / 2) ** 2
    return np.sinc(t) * window * cutoff / old, reach


def hann_window(n_fft: int, length: int) -> np.ndarray:
    """Return a periodic Hann window of `length` samples in the middle of `n_fft`."""
    window = np.zeros(n_fft)
    start = (n_fft - length) // 2
    window[start : start + length] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    return window


def mel_filters(
    sample_rate: int,
    n_fft: int,
    n_mels: int,
    edges: tuple[float, float],
    scale: str,
    norm: str | None,
) -> np.ndarray:
    """Return triangular filters, (n_mels, n_fft // 2 + 1), between two frequencies in Hz.

    Their centers have equal distances on the mel scale. `norm` "slaney" gives them equal areas,
    None equal heights.
    """
    to_mel, to_hz = _SCALES[scale]
    first, last = to_mel(np.array(edges, np.float64))
    points = to_hz(np.linspace(first, last, n_mels + 2))
    frequencies = np.arange(n_fft // 2 + 1) * sample_rate / n_fft
    low, middle, high = (points[i : n_mels + i, None] for i in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    filters = np.maximum(0, np.minimum(rising, falling))
    return filters * (2 / (high - low)) if norm == "slaney" else filters


def _htk_to_mel(hz: np.ndarray) -> np.ndarray:
    return 2595 * np.log10(1 + hz / 700)


def _htk_to_hz(mel: np.ndarray) -> np.ndarray:
    return 700 * (10 ** (mel / 2595) - 1)


def _slaney_to_mel(hz: np.ndarray) -> np.ndarray:
    above = _BREAK + np.log(np.maximum(hz, 1000) / 1000) / _LOG_STEP
    return np.where(hz < 1000, hz / _HZ_PER_MEL, above)


def _slaney_to_hz(mel: np.ndarray) -> np.ndarray:
    above = 1000 * np.exp(_LOG_STEP * (np.maximum(mel, _BREAK) - _BREAK))
    return np.where(mel < _BREAK, mel * _HZ_PER_MEL, above)


_SCALES = {"htk": (_htk_to_mel, _htk_to_hz), "slaney": (_slaney_to_mel, _slaney_to_hz)}
