"""
Train a wake word
=================

openWakeWord listens with an embedding of speech (Lin et al. 2020, arXiv:2002.01322), and a small
layer on it for each word. Both train here for a sound of your own: a chirp that rises and falls.
What counts is how often the detector is wrong in an hour, for the words that it misses.
"""

import wave
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from published import fetched  # published.py: on the page Recipes

import onnxgrad as og

RATE, root, rng = 16000, Path(mkdtemp()), np.random.default_rng(0)
WAYS = {"word": (1, -1), "up": (1, 1), "down": (-1, -1), "other": (-1, 1)}


def chirp(name):
    """Return two parts of 0.25 s, in each of which the pitch rises or falls."""
    ends = [rng.uniform([400, 1200], [600, 1800])[::way] for way in WAYS[name]]
    pitch = np.concatenate([np.geomspace(*pair, RATE // 4) for pair in ends])
    return 0.1 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * np.hanning(len(pitch))


for name, number in [(name, number) for name in (*WAYS, "silence") for number in range(20)]:
    (root / name).mkdir(exist_ok=True)
    with wave.open(str(root / name / f"{number}.wav"), "wb") as file:
        x = chirp(name) if name in WAYS else np.zeros(RATE)
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.int16((x + rng.normal(size=len(x)) * 0.03) * 32767).tobytes())
stream, start = rng.normal(size=120 * RATE) * 0.05, RATE * np.arange(1, 119)
said = rng.choice([*WAYS], 118)
for name, first in zip(said, start, strict=True):  # two minutes of the word and other chirps
    stream[first : first + RATE // 2] += chirp(name)
# %%
# The file takes log-mel spectrograms of 0.78 s, of samples in 16 bits: log10(power * 32768^2) + 2.

options = {"win_length": 400, "f_min": 60, "f_max": 3800, "mel_scale": "slaney", "norm": "slaney"}
mel = og.data.mel_spectrogram(RATE, 512, 160, 32, log="log10", center=False, **options)
model = og.add_head(fetched("openwakeword"), ["word"], activation="sigmoid")
front = {"seconds": 12512 / RATE, "front": lambda x: mel(x) + 2 * np.log10(32768) + 2}
task = og.tasks.sound.Sound(model, root, word="word", shift=0.15, gain=6, **front)
per_hour = []
for label, train, rate in (("new layer", "head.*", 0.01), ("all weights", None, 0.001)):
    trainer = task.trainer(optimizer="adam", learning_rate=rate, train=train)
    [heard] = task.predict(trainer.fit(task.data, epochs=4, batch_size=20), [stream], hop=0.16)
    word = [abs(heard.times - at / RATE + 0.14) < 0.6 for at in start[said == "word"]]
    alarms = og.metrics.false_alarms(heard.scores, np.any(word, 0), seconds=0.16, hold=1.0)
    per_hour.append(alarms.at(missed=0.1)[1])
    print(f"{label}: {per_hour[-1]:.0f} false alarms per hour, 10% missed")
    plt.step(alarms.per_hour, alarms.missed, label=label)
plt.legend()
assert per_hour[1] < per_hour[0]
