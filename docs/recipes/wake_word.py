"""
Train a wake word
=================

openWakeWord listens with an embedding of speech (Lin et al. 2020, arXiv:2002.01322), and a small
layer on it for each word. `Sound` trains both for sounds of your own: here, the word is a chirp
that rises and falls, and other chirps in noise are not. What counts is how often the detector is
wrong in an hour, for the share of the words that it misses.
"""

import wave
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from published import fetched

import onnxgrad as og
from onnxgrad.tasks.sound import Sound

RATE, root = 16000, Path(mkdtemp())
PATTERNS = {"word": (1, -1), "up": (1, 1), "down": (-1, -1), "other": (-1, 1)}


def chirp(rng, name):
    """Return two parts of 0.25 s, in each of which the pitch rises or falls."""
    low, high = 500 * rng.uniform(0.8, 1.2), 1500 * rng.uniform(0.8, 1.2)
    ends = [(low, high) if way > 0 else (high, low) for way in PATTERNS[name]]
    pitch = np.concatenate([np.geomspace(*pair, RATE // 4) for pair in ends])
    return 0.1 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * np.hanning(len(pitch))


def write(path, x):
    """Write a sound of 16 bits."""
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.int16(x.clip(-1, 1) * 32767).tobytes())


rng = np.random.default_rng(0)
for number in range(20):
    for name in PATTERNS:
        write(root / name / f"{number}.wav", chirp(rng, name))
    write(root / "silence" / f"{number}.wav", rng.normal(size=RATE) * 0.003)
    write(root.with_name("noise") / f"{number}.wav", rng.normal(size=2 * RATE) * 0.05)

# %%
# The file takes log-mel spectrograms of 0.78 s, (N, 76, 32, 1). `front` computes them as
# openWakeWord does, of samples in 16 bits: log10(power * 32768^2) + 2.

mel = og.mel_spectrogram(
    RATE, 512, 160, 32, win_length=400, f_min=60, f_max=3800, mel_scale="slaney", norm="slaney",
    log="log10", center=False,
)  # fmt: skip
model = og.add_head(fetched("openwakeword"), ["word"], activation="sigmoid")
of_16_bits = 2 * np.log10(32768) + 2
task = Sound(
    model, root, word="word", seconds=12512 / RATE, front=lambda x: mel(x) + of_16_bits,
    shift=0.15, gain=6, noise=root.with_name("noise"), snr=(-5, 10),
)  # fmt: skip

# %%
# The test is two minutes in which words and other chirps follow each other, in noise.

rng = np.random.default_rng(1)
stream, spans = rng.normal(size=120 * RATE) * 0.05, []
for second in range(1, 119):
    name = rng.choice(["word", "up", "down", "other"])
    start = int((second + rng.uniform(0, 0.4)) * RATE)
    stream[start : start + RATE // 2] += chirp(rng, name)
    spans += [(start / RATE, start / RATE + 0.5)] if name == "word" else []


def curve(model):
    """Return misses and false alarms; a window is one of the word if it has a part of it."""
    (heard,) = task.predict(model, [stream], hop=0.16)
    ends = heard.times + task.form.samples / RATE
    words = [(heard.times < end) & (ends > start) for start, end in spans]
    return og.false_alarms(heard.scores, np.any(words, axis=0), seconds=0.16, hold=1.0)


# %%
# Before, the new layer on the published embedding is trained alone; then all weights are.

head = task.trainer(optimizer="adam", learning_rate=0.01, train="head.*")
head.fit(task.data, epochs=4, batch_size=20)
trainer = task.trainer(optimizer="adam", learning_rate=1e-3)
trainer.fit(task.data, epochs=4, batch_size=20)
before, after = curve(head), curve(trainer)
for label, result in {"new layer alone": before, "all weights": after}.items():
    print(f"{label}: {result.at(missed=0.1)[1]:.0f} false alarms per hour, 10% missed")
    plt.step(result.per_hour, result.missed, label=label)
assert after.at(missed=0.1)[1] < before.at(missed=0.1)[1]
plt.xlabel("false alarms per hour")
plt.ylabel("share of the words missed")
plt.legend()
plt.show()
