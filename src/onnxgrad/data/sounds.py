"""Sounds in files: their waveforms, lists of clips with labels, and a reader of clips."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.audio import resample
from onnxgrad.data.class_folders import assign_class_indices
from onnxgrad.data.image_files import is_path
from onnxgrad.data.readers import FileReader, describe_arrays, describe_files, keep_arguments
from onnxgrad.errors import not_installed

SUFFIXES = frozenset(".wav .flac .ogg .mp3 .aiff .aif .opus".split())
_ENDS = ("start", "end")


@keep_arguments(data="path noise")
def sound_folder(
    path: str | os.PathLike,
    rate: int = 16000,
    seconds: float = 1.0,
    front: Callable[[np.ndarray], Any] | None = None,
    shift: float = 0.0,
    gain: float = 0.0,
    noise: str | os.PathLike | None = None,
    snr: tuple[float, float] = (0.0, 20.0),
) -> SoundFolder:
    """Return clips of sounds with their classes as data that `fit` reads while it trains.

    A row is the middle of a clip, cut or padded with zeros to one length. Random changes of a row
    follow from the seed of the epoch and the number of the row; evaluations have none.

    Args:
        path: a folder of folders, one a class, with files that `read_wave` reads; or a list, CSV or
            JSON lines, with the columns `file` (relative to the list) and `label`, and perhaps
            `start` and `end` in seconds.
        rate: sample rate in Hz; files of other rates are resampled.
        seconds: length of a row.
        front: function from waveforms, float32 (N, samples), to the input of the model, an array or
            a dict by input, such as `mel_spectrogram(...)`; None: the model takes waveforms.
        shift: most seconds by which clips are moved at random in training.
        gain: most dB by which clips become louder or softer at random in training.
        noise: folder of sounds, of which one is added to each clip in training.
        snr: lowest and highest ratio of the powers of clip and noise, in dB.

    Returns:
        A reader, which `fit(reader)` takes as X; see `SoundFolder` for its attributes.

    Raises:
        ValueError: no clip, a file that does not exist, or a row that cannot be read.
        ImportError: a format that needs `soundfile`.

    Examples:
        >>> import pathlib, tempfile, wave, onnxgrad as og
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> (root / "beep").mkdir()
        >>> with wave.open(str(root / "beep" / "1.wav"), "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     file.writeframes(bytes([0, 64] * 4000))
        >>> reader = og.data.sound_folder(root, rate=8000, seconds=0.25)
        >>> X, labels = next(reader.batches(1, None, 0))
        >>> X.shape, labels.tolist(), reader.classes
        ((1, 2000), [0], ['beep'])
    """
    noises = [] if noise is None else [read_wave(f, rate) for f in sound_files(Path(noise))]
    if noise is not None and not noises:
        raise ValueError(f"noise={str(noise)!r} has no sounds: pass a folder of sound files")
    augment = Augment(rate, shift, gain, noises, snr)
    return SoundFolder(list_clips(path), round(seconds * rate), augment, front)


class Clip(NamedTuple):
    """A labeled span of a sound file, in seconds; `end` None is the end of the file."""

    file: Path
    label: str
    start: float = 0.0
    end: float | None = None


def read_wave(
    path: str | os.PathLike, rate: int, start: float = 0.0, end: float | None = None
) -> np.ndarray:
    """Return the waveform of a file at `rate` Hz, mean of its channels, from -1 to 1.

    Args:
        path: WAV of 16 or 32 bits; other files are read by `soundfile`, if it is installed.
        rate: sample rate of the result; files of other rates are resampled by `resample`.
        start: second of the file at which the waveform begins.
        end: second of the file at which it ends; None: the end of the file.

    Returns:
        float32 (samples,).

    Raises:
        ValueError: the file cannot be read, or has no sample in that part.
        ImportError: a format that needs `soundfile`.

    Examples:
        >>> import pathlib, tempfile, wave, onnxgrad as og
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "short.wav"
        >>> with wave.open(str(path), "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     file.writeframes(bytes([0, 64] * 4))
        >>> og.data.read_wave(path, 8000).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    data, file_rate = _read_samples_and_rate(Path(path), start, end)
    if not len(data):
        raise ValueError(
            f"{str(path)!r} has no samples from {start} s to {end or 'its end'}: correct start "
            "and end"
        )
    x = np.asarray(data.mean(axis=1), np.float32)
    return x if file_rate == rate else resample(file_rate, rate)(x[None])[0]


def _read_samples_and_rate(path: Path, start: float, end: float | None) -> tuple[np.ndarray, int]:
    """Return samples (frames, channels) of a span of a file, and the file's sample rate."""
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
        pass  # no PCM: soundfile reads the file, or says why not
    try:
        import soundfile
    except ImportError as e:
        what = f"{str(path)!r}, which is no WAV of 16 or 32 bits,"
        raise not_installed(what, "soundfile", "sound") from e
    try:
        data, rate = soundfile.read(path, always_2d=True, dtype="float32")
    except (soundfile.SoundFileError, TypeError) as e:
        raise ValueError(f"cannot read the sound {str(path)!r}: {e}") from e
    last = len(data) if end is None else round(end * rate)
    return data[round(start * rate) : last], rate


def count_samples(path: Path, rate: int) -> int:
    """Return the number of samples of a sound file at a sample rate; for WAV files, only the header
    is read.
    """
    try:
        with wave.open(str(path), "rb") as file:
            if file.getsampwidth() in (2, 4):
                return -(-file.getnframes() * rate // file.getframerate())
    except (wave.Error, EOFError):
        pass
    return len(read_wave(path, rate))


def list_clips(path: str | os.PathLike) -> list[Clip]:
    """Return the clips of a folder with one folder for each class, or of a list in a CSV or JSON
    lines file.

    Raises:
        ValueError: no clip, a file that does not exist, or a row that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        clips = [Clip(f, f.relative_to(path).parts[0]) for f in sound_files(path)]
        if loose := [clip.file for clip in clips if clip.file.parent == path]:
            raise ValueError(f"{str(loose[0])!r} must be in a folder that names its class")
    elif path.suffix in (".csv", ".jsonl"):
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file)
            clips = [_parse_clip(path, number, line) for number, line in enumerate(lines, 1)]
    else:
        raise ValueError(f"{str(path)!r} must be a folder of folders, a .csv or a .jsonl file")
    if not clips:
        raise ValueError(f"{str(path)!r} names no sound ({' '.join(sorted(SUFFIXES))}): add one")
    return clips


def _parse_clip(path: Path, number: int, line: dict[str, Any]) -> Clip:
    """Return the `Clip` of a row in a list of clips; raise `ValueError` if the row is wrong."""
    try:
        start, end = (float(v) if (v := line.get(k)) not in (None, "") else None for k in _ENDS)
        clip = Clip(path.parent / line["file"], line["label"] or "", start or 0.0, end)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{str(path)!r}, row {number}: {e!r}; a row needs file and label, and may have start "
            "and end in seconds"
        ) from e
    if not clip.file.is_file():
        raise ValueError(f"{str(path)!r}, row {number}: there is no file {str(clip.file)!r}")
    if clip.end is not None and clip.end <= clip.start:
        raise ValueError(f"{str(path)!r}, row {number}: end={clip.end} must be after {clip.start}")
    return clip


def sound_files(folder: Path) -> list[Path]:
    """Return all sound files in a folder and the folders below it, sorted by path."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return sorted(p for p in found if not p.name.startswith("."))


@dataclass
class Augment:
    """Random changes of waveforms in training: noise, gain and shift, see `sound_folder`."""

    rate: int
    shift: float = 0.0
    gain: float = 0.0
    noise: Sequence[np.ndarray] = ()
    snr: tuple[float, float] = (0.0, 20.0)

    def draw_shift(self, rng: np.random.Generator | None) -> int:
        """Return the count of samples by which a clip is moved; 0 in evaluations."""
        most = round(self.shift * self.rate)
        return 0 if rng is None or not most else int(rng.integers(-most, most + 1))

    def __call__(self, x: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        """Return a waveform with noise and gain that `rng` draws; unchanged without `rng`."""
        if rng is None:
            return x
        if self.noise:
            noise = self.noise[int(rng.integers(len(self.noise)))]
            noise = np.resize(np.roll(noise, int(rng.integers(len(noise)))), len(x))
            powers = np.mean(np.square(x)), np.mean(np.square(noise)) + 1e-12
            x = x + noise * np.sqrt(powers[0] / powers[1] / 10 ** (rng.uniform(*self.snr) / 10))
        return np.asarray(x * 10 ** (rng.uniform(-self.gain, self.gain) / 20), np.float32)


def crop_or_pad(x: np.ndarray, samples: int, shift: int = 0) -> np.ndarray:
    """Return the `samples` samples in the middle of a waveform, moved by `shift`, padded with
    zeros.
    """
    start = (len(x) - samples) // 2 - shift
    result = np.zeros(samples, np.float32)
    part = x[max(0, start) : max(0, start + samples)]
    result[max(0, -start) :][: len(part)] = part
    return result


def list_sounds(inputs: Any) -> list[tuple[str, Any]]:
    """Return the sounds in a folder and the folders below it, in a file, or in a list.

    Args:
        inputs: a folder, a file, or a list of files and waveforms.

    Returns:
        A name and a `Path` or waveform for each; waveforms are named by their number.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> [name for name, sound in og.data.list_sounds(["a.wav", np.zeros(8)])]
        ['a.wav', '1']
    """
    if is_path(inputs):
        inputs = sound_files(Path(inputs)) if Path(inputs).is_dir() else [inputs]
    return [(str(x), Path(x)) if is_path(x) else (str(i), x) for i, x in enumerate(inputs)]


@dataclass(eq=False)
class SoundFolder(FileReader):
    """Clips of sounds, each of which is a row: the reader that `sound_folder` returns.

    Attributes:
        clips: the parts of files: `file`, `label`, `start` and `end` in seconds.
        samples: length of a row.
        augment: function `(waveform, generator or None) -> waveform` that adds noise and gain.
        front: see `sound_folder`.
        classes: labels of the clips, sorted; whole numbers are the numbers of classes.
        labels: number of the class of each clip, int64; may be set to other labels of the clips.
    """

    per_row = ("clips", "labels")
    clips: list[Clip]
    samples: int
    augment: Augment
    front: Callable[[np.ndarray], Any] | None = None

    def __post_init__(self) -> None:
        self.rows = len(self.clips)
        labels = sorted({clip.label for clip in self.clips})
        class_numbers, self.classes = assign_class_indices("labels", labels)
        numbers = dict(zip(labels, class_numbers, strict=True))
        self.labels = np.array([numbers[clip.label] for clip in self.clips], np.int64)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[Any, np.ndarray]:
        """Return the waveforms of a batch, or what `front` computes from them, and the labels."""
        x, labels = super().take(indices, seed)
        return x if self.front is None else self.front(x), labels

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.int64]:
        """Return the waveform and the label of a clip."""
        clip = self.clips[row]
        x = read_wave(clip.file, self.augment.rate, clip.start, clip.end)
        x = crop_or_pad(x, self.samples, self.augment.draw_shift(rng))
        return self.augment(x, rng), self.labels[row]

    def count_file_samples(self, file: Path) -> int:
        """Return the number of samples of a file at the sample rate of the rows."""
        return count_samples(file, self.augment.rate)

    def describe(self) -> dict[str, Any]:
        """Return the count of rows and a digest of clips, labels, sizes and times of files."""
        facts = repr(([(c.file.name, *c[1:]) for c in self.clips], self.labels.tolist(),
                      self.samples, self.augment.rate))  # fmt: skip
        digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        files = describe_files([clip.file for clip in self.clips])
        noise = describe_arrays("noise", {str(i): x for i, x in enumerate(self.augment.noise)})
        return {"kind": "sounds", "rows": self.rows, "digest": digest + files + noise["digest"]}
