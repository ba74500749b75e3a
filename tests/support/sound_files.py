"""Files of sounds for tests: noise, and tones in noise."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

RATE = 4000  # samples a second


def write_wave(path: Path, x: np.ndarray, rate: int = RATE, width: int = 2) -> Path:
    """Write samples (frames,) or (frames, channels) from -1 to 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.atleast_2d(x.T).T
    with wave.open(str(path), "wb") as file:
        file.setnchannels(x.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.round(x * (2.0 ** (8 * width - 1) - 1)).astype(f"<i{width}").tobytes())
    return path


def random_sound(*shape: int, seed: int = 0, scale: float = 0.1) -> np.ndarray:
    """Return samples of white noise from -1 to 1."""
    return np.random.default_rng(seed).normal(scale=scale, size=shape).clip(-1, 1)


def folder_of_tones(root: Path, count: int = 6, seconds: float = 0.5) -> Path:
    """Return a folder of three classes: noise, and tones of two frequencies in noise."""
    t = np.arange(round(seconds * RATE)) / RATE
    for k, (name, hertz) in enumerate({"background": 0, "high": 900, "low": 300}.items()):
        for i in range(count):
            x = random_sound(len(t), seed=10 * i + k, scale=0.05) + 0.3 * np.sin(
                2 * np.pi * hertz * t
            )
            write_wave(root / name / f"{i}.wav", x)
    return root
