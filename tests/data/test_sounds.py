"""Files of sounds: waves, lists and folders of clips, and what augmentation does to them."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.data import sounds
from tests.support.errors import naming
from tests.support.sound_files import RATE, random_sound, write_wave


@pytest.mark.parametrize("width", [2, 4])
def test_waves_are_read(tmp_path, width):
    x = random_sound(1000, 2)
    path = write_wave(tmp_path / "a.wav", x, width=width)
    np.testing.assert_allclose(og.data.read_wave(path, RATE), x.mean(axis=1), atol=4e-5)
    part = og.data.read_wave(path, RATE, 0.1, 0.2)
    np.testing.assert_array_equal(part, og.data.read_wave(path, RATE)[400:800])
    slow = og.data.read_wave(path, RATE // 2)
    np.testing.assert_array_equal(
        slow, og.data.resample(RATE, RATE // 2)(og.data.read_wave(path, RATE)[None])[0]
    )
    assert sounds.count_samples(path, RATE // 2) == len(slow)


def test_files_that_are_no_waves(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF, but no more")
    try:
        import soundfile  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"a\.wav.*pip install 'onnxgrad\[sound\]'"):
            og.data.read_wave(tmp_path / "a.wav", RATE)
    else:
        with pytest.raises(ValueError, match=r"a\.wav"):
            og.data.read_wave(tmp_path / "a.wav", RATE)
    path = write_wave(tmp_path / "b.wav", random_sound(100))
    with pytest.raises(ValueError, match=r"b\.wav.* 3"):
        og.data.read_wave(path, RATE, 3)


def test_soundfile_reads_what_wave_does_not(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    x = random_sound(1000)
    soundfile.write(tmp_path / "a.flac", x, RATE)
    np.testing.assert_allclose(
        og.data.read_wave(tmp_path / "a.flac", RATE, 0.1), x[400:], atol=1e-4
    )


def test_lists(tmp_path):
    write_wave(tmp_path / "a.wav", random_sound(RATE))
    rows = [("a.wav", "beep", 0.25, 0.5), ("a.wav", "", "", "")]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "start", "end"), *rows])
    lines = [{"file": "a.wav", "label": "beep", "start": 0.25, "end": 0.5}]
    lines += [{"file": "a.wav", "label": ""}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    clips = sounds.list_clips(tmp_path / "list.csv")
    assert clips == sounds.list_clips(tmp_path / "list.jsonl")
    assert clips[0] == sounds.Clip(tmp_path / "a.wav", "beep", 0.25, 0.5)
    assert clips[1] == sounds.Clip(tmp_path / "a.wav", "", 0.0, None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b.wav,x,,", r"list\.csv', row 1: .*b\.wav"),
        ("a.wav,x,late,", r"row 1: .*late.*seconds"),
        ("a.wav,x,2,1", r"end=1\.0.* 2\.0"),
    ],
)
def test_lists_that_are_wrong(tmp_path, row, message):
    write_wave(tmp_path / "a.wav", random_sound(RATE))
    (tmp_path / "list.csv").write_text(f"file,label,start,end\n{row}\n")
    with pytest.raises(ValueError, match=message):
        sounds.list_clips(tmp_path / "list.csv")


def test_folders_that_are_wrong(tmp_path):
    with pytest.raises(ValueError, match=naming(str(tmp_path), "no sound", ".wav")):
        sounds.list_clips(tmp_path)
    write_wave(tmp_path / "a.wav", random_sound(100))
    with pytest.raises(ValueError, match=r"a\.wav.*folder"):
        sounds.list_clips(tmp_path)
    with pytest.raises(ValueError, match=r"c'.*folder"):
        sounds.list_clips(tmp_path / "c")


def test_augmentation_is_what_it_says(tmp_path):
    """The ratio of powers is within `snr`, the gain within `gain`, and the shift exact."""
    x, other = random_sound(4000, scale=0.2), np.float32(random_sound(700, seed=3))
    for seed in range(5):
        add = sounds.Augment(RATE, noise=[other], snr=(5, 10))
        added = add(x, np.random.default_rng(seed)) - x
        ratio = 10 * np.log10(np.mean(x**2) / np.mean(added**2))
        assert 4.7 < ratio < 10.3  # the noise is cut, which changes its power a little
        louder = sounds.Augment(RATE, gain=6)(x, np.random.default_rng(seed)) / x
        assert np.ptp(louder) < 1e-4
        assert abs(20 * np.log10(louder[0])) < 6
        moved = sounds.Augment(RATE, shift=0.01).draw_shift(np.random.default_rng(seed))
        assert abs(moved) <= 40
        np.testing.assert_array_equal(
            sounds.crop_or_pad(x, 2000, moved), np.float32(x[1000 - moved : 3000 - moved])
        )
    assert sounds.Augment(RATE, 1, 6, [other])(x, None) is x
