"""Transforms of waveforms, for arrays and as nodes that `preprocess` puts before a model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, log as ln
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import unknown
from onnxgrad.model.draft import Draft
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

_ZEROS, _ROLLOFF = 6, 0.99  # zero crossings and cutoff, the defaults of torchaudio
_HZ_PER_MEL = 200 / 3  # below 1000 Hz, on the scale of Slaney
_BREAK = 1000 / _HZ_PER_MEL  # mel at 1000 Hz, where the scale of Slaney becomes logarithmic
_LOG_STEP = np.log(6.4) / 27  # above 1000 Hz
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mel_scale": ("htk", "slaney"),
    "norm": ("slaney", None),
    "log": ("log", "log10", "db", None),
}


class WaveformTransform:
    """A transform of waveforms, float32 (N, samples): call it with an array, or use `preprocess`.

    Subclasses are frozen dataclasses with a method `write`.
    """

    def __call__(self, waveforms: Any) -> np.ndarray:
        """Return waveforms (N, samples), transformed by the nodes that `write` writes."""
        array = np.asarray(waveforms, np.float32)
        if array.ndim != 2:
            raise ValueError(f"waveforms must have the shape (N, samples), not {array.shape}")
        (result,) = _transform_session(self).run(None, {"waveforms": array})
        return result

    def write(self, op: Any, x: Any) -> Any:
        """Write the nodes that transform the waveforms `x`, and return their result."""
        raise NotImplementedError


@lru_cache(16)
def _transform_session(transform: WaveformTransform) -> ort.InferenceSession:
    """Return an onnxruntime session that runs the nodes of a transform of waveforms."""
    draft = Draft("audio")
    y = transform.write(draft.op, draft.input("waveforms", ["N", "samples"]))
    return session(draft.model({"result": y}), CPU, work=1e9)


@dataclass(frozen=True)
class Resample(WaveformTransform):
    """A transform of waveforms to another sample rate; `resample` returns it."""

    old: int
    new: int

    def write(self, op: Any, x: Any) -> Any:
        """Write the resampled waveforms: a Conv with a filter for each phase."""
        common = gcd(self.old, self.new)
        old, new = self.old // common, self.new // common
        if old == new:
            return x
        kernel, reach = sinc_kernel(old, new, _ZEROS, _ROLLOFF)
        kernels = np.asarray(kernel[:, None], np.float32)
        with op:
            padded = op.Pad(x, [reach, reach + old], None, [1], mode="constant")
            phases = op.Conv(op.Unsqueeze(padded, [1]), kernels, strides=[old])  # (N, new, blocks)
            joined = op.Reshape(op.Transpose(phases, perm=[0, 2, 1]), [0, -1])
            # samples * new / old, rounded up
            length = (op.Shape(x, start=1, end=2) * [new] + [old - 1]) / [old]
            return op.Slice(joined, [0], length, [1])


@dataclass(frozen=True)
class MelSpectrogram(WaveformTransform):
    """A transform of waveforms to mel spectrograms; `mel_spectrogram` returns it."""

    sample_rate: int
    n_fft: int
    hop_length: int
    n_mels: int
    win_length: int
    f_min: float
    f_max: float
    power: float
    mel_scale: str
    norm: str | None
    log: str | None
    floor: float
    center: bool
    frames_first: bool

    def __post_init__(self) -> None:
        """Raise `ValueError` for wrong arguments; warn of mel bands that contain no frequency of
        the Fourier transform.
        """
        for kind, choices in _CHOICES.items():
            if (value := getattr(self, kind)) not in choices:
                raise unknown(kind, value, [str(choice) for choice in choices])
        if self.power not in (1, 2):
            raise ValueError(f"power={self.power} must be 1.0 (magnitude) or 2.0")
        if not 0 < self.win_length <= self.n_fft or min(self.hop_length, self.n_mels) < 1:
            raise ValueError(
                f"n_fft={self.n_fft}, win_length={self.win_length}, hop_length={self.hop_length}, "
                f"n_mels={self.n_mels} must be positive, and win_length at most n_fft"
            )
        if not 0 <= self.f_min < self.f_max <= self.sample_rate / 2:
            raise ValueError(
                f"f_min={self.f_min} and f_max={self.f_max} must be in order, from 0 to "
                f"{self.sample_rate / 2} Hz, half of the sample rate"
            )
        if self.log is not None and not self.floor > 0:
            raise ValueError(f"floor={self.floor} must be above 0, to have a logarithm")
        if empty := int(np.sum(~self.filters().any(axis=1))):
            warnings.warn(
                f"{empty} of {self.n_mels} mel bands contain no frequency of the Fourier transform "
                "and are constant: use fewer bands or a larger n_fft",
                stacklevel=4,
            )

    def filters(self) -> np.ndarray:
        """Return the triangular filters of the mel bands, (n_mels, n_fft // 2 + 1)."""
        edges = (self.f_min, self.f_max)
        return mel_filters(
            self.sample_rate, self.n_fft, self.n_mels, edges, self.mel_scale, self.norm
        )

    def write(self, op: Any, x: Any) -> Any:
        """Write the spectrogram: a Conv with windowed sines and cosines, and a matrix product."""
        if self.center:
            x = op.Pad(x, [self.n_fft // 2] * 2, None, [1], mode="reflect")
        waves = self._write_fourier_filters(op)
        spectrum = op.Conv(op.Unsqueeze(x, [1]), waves, strides=[self.hop_length])
        bins = self.n_fft // 2 + 1
        with op:
            real = op.Slice(spectrum, [0], [bins], [1])
            imaginary = op.Slice(spectrum, [bins], [2 * bins], [1])
            magnitude = real * real + imaginary * imaginary
            if self.power == 1:
                magnitude = op.Sqrt(magnitude)
            mel = op.MatMul(np.asarray(self.filters(), np.float32), magnitude)
            if self.log is not None:
                mel = op.Log(op.Max(mel, self.floor))
            if self.log in ("log10", "db"):
                mel = mel * ((10 if self.log == "db" else 1) / ln(10))
            return op.Transpose(mel, perm=[0, 2, 1]) if self.frames_first else mel

    def _write_fourier_filters(self, op: Any) -> Any:
        """Write the windowed cosines and sines of the Fourier transform, (2 bins, 1, n_fft).

        They are gathered from one period, so that the file stays small: onnxruntime computes them
        once, when it loads the model.
        """
        n = self.n_fft
        angles = 2 * np.pi * np.arange(n) / n
        frequencies = np.arange(n // 2 + 1, dtype=np.int64)[:, None, None]
        with op:
            turns = op.Mod(op.const(frequencies) * np.arange(n, dtype=np.int64), np.array(n))
            cosines, sines = (
                op.Gather(np.asarray(wave, np.float32), turns)
                for wave in (np.cos(angles), -np.sin(angles))
            )
            window = np.asarray(hann_window(n, self.win_length), np.float32)
            return op.Concat(cosines, sines, axis=0) * window


def resample(old: int, new: int) -> Resample:
    """Return a transform of waveforms from one sample rate to another.

    Frequencies above the lower of both Nyquist frequencies are removed, by a sinc under a Hann
    window over six zero crossings on each side, with its cutoff at 0.99 of that frequency: the
    default of torchaudio.

    Args:
        old: sample rate of the waveforms in Hz.
        new: sample rate of the result in Hz. The ratio of both in lowest terms, old / new, should
            have small numbers: the filters have `old * new` numbers, times 12 at least.

    Returns:
        A transform of float32 (N, samples) to (N, ceil(samples * new / old)): call it with an
        array, or pass it to `preprocess`.

    Raises:
        ValueError: a sample rate below 1, or a ratio that needs filters of more than 10^7 numbers.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> second = np.sin(2 * np.pi * 440 * np.arange(44100) / 44100)
        >>> og.data.resample(44100, 16000)(second[None]).shape
        (1, 16000)
    """
    if min(old, new) < 1:
        raise ValueError(f"sample rates {old} and {new}: they must be at least 1 Hz")
    common = gcd(old, new)
    a, b = old // common, new // common
    taps = a + 2 * ceil(_ZEROS * a / (min(a, b) * _ROLLOFF))
    if b * taps > 10_000_000:
        raise ValueError(
            f"resampling from {old} to {new} Hz needs {b} filters of {taps} numbers: choose rates "
            "with a larger common divisor"
        )
    return Resample(old, new)


def mel_spectrogram(
    sample_rate: int,
    n_fft: int = 400,
    hop_length: int = 160,
    n_mels: int = 80,
    *,
    win_length: int | None = None,
    f_min: float = 0.0,
    f_max: float | None = None,
    power: float = 2.0,
    mel_scale: str = "htk",
    norm: str | None = None,
    log: str | None = "log",
    floor: float = 1e-10,
    center: bool = True,
    frames_first: bool = False,
) -> MelSpectrogram:
    """Return a transform of waveforms to mel spectrograms, as in torchaudio.

    For librosa's, use `mel_scale="slaney", norm="slaney"`; it pads with zeros.

    Args:
        sample_rate: sample rate of the waveforms in Hz.
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
        n_mels: number of bands.
        win_length: samples of the Hann window, in the middle of a frame; None: `n_fft`.
        f_min: lower end of the bands in Hz.
        f_max: upper end of the bands in Hz; None: half of the sample rate.
        power: 2.0, or 1.0 for the magnitude.
        mel_scale: "htk" or "slaney".
        norm: "slaney" for bands of equal area, None for equal height.
        log: "log", "log10", "db" (10 log10) or None, of values that are at least `floor`.
        center: frame t is around sample `t * hop_length`, with the waveform reflected at its ends;
            otherwise it begins there.
        frames_first: the result is (N, frames, n_mels) instead of (N, n_mels, frames).

    Returns:
        A transform of float32 (N, samples): call it with an array, or pass it to `preprocess`.

    Raises:
        ValueError: an unknown option, or lengths and frequencies that do not fit.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> second = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
        >>> og.data.mel_spectrogram(16000)(second[None]).shape
        (1, 80, 101)
    """
    return MelSpectrogram(
        sample_rate, n_fft, hop_length, n_mels, n_fft if win_length is None else win_length,
        f_min, sample_rate / 2 if f_max is None else f_max, power, mel_scale, norm, log, floor,
        center, frames_first,
    )  # fmt: skip


# -- filters, computed by numpy in float64 ---------------------------------------------------------


def sinc_kernel(old: int, new: int, zeros: int, rolloff: float) -> tuple[np.ndarray, int]:
    """Return (filters (new, taps) that resample by new / old, number of samples that a filter reads
    before the current sample).

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
    """Return a periodic Hann window of `length` samples, padded with zeros to `n_fft` samples."""
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
