"""Files of sounds: waveforms, lists of labels, and readers of clips and of streams."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import wave
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import onnxgrad as og

SUFFIXES = frozenset(".wav .flac .ogg .mp3 .aiff .aif .opus".split())


class Clip(NamedTuple):
    """A labelled part of a file, in seconds; `end` is None for the end of the file."""

    file: Path
    label: str
    start: float = 0.0
    end: float | None = None


def read_wave(
    path: str | os.PathLike, rate: int, start: float = 0.0, end: float | None = None
) -> np.ndarray:
    """Return a file as samples from -1 to 1: the mean of its channels, at `rate` Hz.

    Args:
        path: WAV of 16 or 32 bits; other files by `soundfile`, if that is installed.
        rate: sample rate of the result; others are resampled by `onnxgrad.resample`.
        start: second at which the part begins that is read.
        end: second at which it ends; None: the end of the file.

    Returns:
        float32 (samples,).

    Raises:
        ValueError: the file cannot be read, or has no sample in that part.
        ImportError: a format that needs `soundfile`.

    Examples:
        >>> import pathlib, tempfile, wave
        >>> from onnxgrad.tasks.sound import read_wave
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "short.wav"
        >>> with wave.open(str(path), "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     file.writeframes(bytes([0, 64] * 4))
        >>> read_wave(path, 8000).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    data, own = _channels(Path(path), start, end)
    if not len(data):
        raise ValueError(f"{str(path)!r} has no samples from {start} s to {end or 'its end'}")
    x = np.asarray(data.mean(axis=1), np.float32)
    return x if own == rate else og.resample(own, rate)(x[None])[0]


def _channels(path: Path, start: float, end: float | None) -> tuple[np.ndarray, int]:
    """Return samples (frames, channels) of a part of a file, and its sample rate."""
    try:
        with wave.open(str(path), "rb") as file:
            width, rate, count = file.getsampwidth(), file.getframerate(), file.getnframes()
            if width in (2, 4):
                first = min(count, round(start * rate))
                last = count if end is None else min(count, round(end * rate))
                file.setpos(first)
                raw = np.frombuffer(file.readframes(max(0, last - first)), f"<i{width}")
                return raw.reshape(-1, file.getnchannels()) / 2.0 ** (8 * width - 1), rate
    except (wave.Error, EOFError):
        pass  # no PCM: soundfile may know it, or says what is wrong
    try:
        import soundfile
    except ImportError as e:
        raise ImportError(
            f"{str(path)!r} is no WAV of 16 or 32 bits: pip install soundfile reads others"
        ) from e
    try:
        data, rate = soundfile.read(path, always_2d=True, dtype="float32")
    except (soundfile.SoundFileError, TypeError) as e:
        raise ValueError(f"cannot read the sound {str(path)!r}: {e}") from e
    last = len(data) if end is None else round(end * rate)
    return data[round(start * rate) : last], rate


def length_of(path: Path, rate: int) -> int:
    """Return how many samples a file has at a sample rate, without reading all of a WAV."""
    try:
        with wave.open(str(path), "rb") as file:
            if file.getsampwidth() in (2, 4):
                return -(-file.getnframes() * rate // file.getframerate())
    except (wave.Error, EOFError):
        pass
    return len(read_wave(path, rate))


def list_clips(path: str | os.PathLike) -> list[Clip]:
    """Return the clips of a folder of folders, one a class, or of a list in CSV or JSON lines.

    Raises:
        ValueError: no clip, a file that does not exist, or a row that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        clips = [Clip(f, f.relative_to(path).parts[0]) for f in sound_files(path)]
        if loose := [clip.file for clip in clips if clip.file.parent == path]:
            raise ValueError(f"{str(loose[0])!r} is in no folder of {str(path)!r}: one is a class")
    elif path.suffix in (".csv", ".jsonl"):
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file)
            clips = [_clip(path, number, line) for number, line in enumerate(lines, 1)]
    else:
        raise ValueError(f"{str(path)!r} is no folder of folders, .csv or .jsonl")
    if not clips:
        raise ValueError(f"{str(path)!r} has no sound ({' '.join(sorted(SUFFIXES))})")
    return clips


def _clip(path: Path, number: int, line: dict[str, Any]) -> Clip:
    try:
        start, end = (float(v) if (v := line.get(k)) not in (None, "") else None for k in _ENDS)
        clip = Clip(path.parent / line["file"], line["label"] or "", start or 0.0, end)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{str(path)!r}, row {number}: {e!r}; a row has file, label, and may have start and "
            "end in seconds"
        ) from e
    if not clip.file.is_file():
        raise ValueError(f"{str(path)!r}, row {number}: there is no file {str(clip.file)!r}")
    if clip.end is not None and clip.end <= clip.start:
        raise ValueError(f"{str(path)!r}, row {number}: end={clip.end} is before {clip.start}")
    return clip


_ENDS = ("start", "end")


def sound_files(folder: Path) -> list[Path]:
    """Return all files of sounds below a folder, in the order of their names."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return sorted(p for p in found if not p.name.startswith("."))


@dataclass
class Augment:
    """What is random about a waveform in training; see `Sound`."""

    rate: int
    shift: float = 0.0
    gain: float = 0.0
    noise: Sequence[np.ndarray] = ()
    snr: tuple[float, float] = (0.0, 20.0)

    def moved(self, rng: np.random.Generator | None) -> int:
        """Return by how many samples a clip is moved."""
        most = round(self.shift * self.rate)
        return 0 if rng is None or not most else int(rng.integers(-most, most + 1))

    def __call__(self, x: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        """Return a waveform with noise and gain; the ratio of powers is in dB."""
        if rng is None:
            return x
        if self.noise:
            noise = self.noise[int(rng.integers(len(self.noise)))]
            noise = np.resize(np.roll(noise, int(rng.integers(len(noise)))), len(x))
            powers = np.mean(np.square(x)), np.mean(np.square(noise)) + 1e-12
            x = x + noise * np.sqrt(powers[0] / powers[1] / 10 ** (rng.uniform(*self.snr) / 10))
        return np.asarray(x * 10 ** (rng.uniform(-self.gain, self.gain) / 20), np.float32)


def fitted(x: np.ndarray, samples: int, moved: int = 0) -> np.ndarray:
    """Return `samples` of the middle of a waveform, with zeros where it is shorter."""
    start = (len(x) - samples) // 2 - moved
    result = np.zeros(samples, np.float32)
    part = x[max(0, start) : max(0, start + samples)]
    result[max(0, -start) :][: len(part)] = part
    return result


@dataclass(eq=False)
class Clips(og.IndexedReader):
    """Clips, each of them a row: `inputs` makes those of the model from waveforms.

    Attributes:
        clips: the parts of files.
        labels: one for each, in the form of the loss.
        inputs: from float32 (N, samples) to the features.
    """

    clips: list[Clip]
    labels: np.ndarray
    samples: int
    augment: Augment
    inputs: Callable[[np.ndarray], dict[str, np.ndarray]]

    def __post_init__(self) -> None:
        self.rows = len(self.clips)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, np.ndarray]:
        """Return features and labels of a batch."""
        return self.inputs(np.stack([self._one(int(i), seed) for i in indices])), self.labels[
            indices
        ]

    def _one(self, row: int, seed: int | None) -> np.ndarray:
        clip, rng = self.clips[row], None if seed is None else np.random.default_rng([seed, row])
        x = read_wave(clip.file, self.augment.rate, clip.start, clip.end)
        return self.augment(fitted(x, self.samples, self.augment.moved(rng)), rng)

    def subset(self, numbers: np.ndarray) -> Clips:
        """Return some of the clips."""
        part = copy(self)
        part.clips, part.labels = [self.clips[i] for i in numbers], self.labels[numbers]
        part.rows = len(numbers)
        return part

    def describe(self) -> dict[str, Any]:
        """Return the number of rows and a digest of clips, labels, sizes and times of files."""
        return {"kind": "clips", "rows": self.rows, "digest": _digest(self.clips, self.labels)}


def _digest(clips: Sequence[Clip], labels: Any) -> str:
    stats = [(c.file.name, *c[1:], c.file.stat().st_size, c.file.stat().st_mtime_ns) for c in clips]
    return hashlib.blake2b(repr((stats, labels)).encode(), digest_size=16).hexdigest()


@dataclass(eq=False)
class Streams(og.Reader):
    """Files in consecutive windows, several side by side as the rows of a batch.

    Files of similar length share their batches; shorter ones end in windows of weight zero. A seed
    changes the order of such groups. A group begins with the states in its data.

    Attributes:
        files: the labelled parts of each file.
        windows: returns windows (count, samples) and labels (count, ...) of a file, for a generator
            or None.
        inputs: from windows (N, samples) to the features, with states if told so.
        counts: the number of windows of each file.
        width: files side by side, or if `along`, consecutive windows of one file.
        along: whether the rows of a batch are windows of one file.
    """

    files: list[list[Clip]]
    windows: Callable[[list[Clip], np.random.Generator | None], tuple[np.ndarray, np.ndarray]]
    inputs: Callable[[np.ndarray], dict[str, np.ndarray]]
    counts: list[int]
    width: int
    along: bool = False
    groups: list[list[int]] = field(init=False)
    sequences = True

    def __post_init__(self) -> None:
        order = sorted(range(len(self.files)), key=lambda i: self.counts[i])
        size = 1 if self.along else min(self.width, len(order))
        self.groups = [order[i : i + size] for i in range(0, len(order), size)]
        self.count = sum(self._steps(group) for group in self.groups)

    def _steps(self, group: list[int]) -> int:
        longest = max(self.counts[i] for i in group)
        return -(-longest // self.width) if self.along else longest

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass; `size` is not read."""
        order = np.arange(len(self.groups))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        for group in (self.groups[i] for i in order):
            if skip >= (steps := self._steps(group)):
                skip -= steps
                continue
            if not skip and group is not self.groups[order[0]]:
                yield None
            yield from self._group(group, seed, skip)
            skip = 0

    def _group(self, group: list[int], seed: int | None, skip: int) -> Iterator[Any]:
        read = []
        for i in group:
            rng = None if seed is None else np.random.default_rng([seed, i])
            read.append(self.windows(self.files[i], rng))
        if self.along:
            ((x, y),) = read
            for at in range(skip * self.width, len(x), self.width):
                rows = slice(at, at + self.width)
                yield self.inputs(x[rows]), y[rows], np.ones(len(y[rows]), np.float32)
            return
        sides = [read[i % len(read)] for i in range(len(self.groups[0]))]  # each batch has as many
        for t in range(skip, self._steps(group)):
            own = [min(t, len(y) - 1) for _, y in sides]
            weight = [i < len(read) and t < len(y) for i, (_, y) in enumerate(sides)]
            x, y = (
                np.stack([side[k][at] for side, at in zip(sides, own, strict=True)]) for k in (0, 1)
            )
            yield self.inputs(x), y, np.asarray(weight, np.float32)

    def describe(self) -> dict[str, Any]:
        """Return the number of batches and a digest of parts, sizes and times of files."""
        clips = [clip for file in self.files for clip in file]
        return {"kind": "streams", "count": self.count, "digest": _digest(clips, self.width)}
