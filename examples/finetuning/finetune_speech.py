"""A detector of speech learns a new sound
=======================================

Silero VAD, a published detector of speech, learns that a whistle counts as speech, and that hum
does not. PyTorch trains the same weights. The new file is the original but for these.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F  # noqa: N812

import onnxgrad as og

# %%
# The model is in a wheel on PyPI, of 1 MB. It is downloaded once, and only read.

wheel, name = "faster-whisper==1.2.1", "faster_whisper/assets/silero_vad_v6.onnx"
folder = Path.home() / ".cache" / "onnxgrad" / "models" / wheel.replace("==", "-")
if not (folder / name).exists():
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*pip, "--ignore-requires-python", "-d", folder, wheel]).returncode:
        raise ConnectionError(f"{wheel} cannot be downloaded from PyPI, and the example needs it")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extract(name, folder)
original = onnx.load(folder / name)

# %%
# Frames of 32 ms, each behind 4 ms of the one before, and whether one whistles.

rng, start = np.random.default_rng(0), dict.fromkeys("hc", np.zeros((1, 1, 128), np.float32))


def recording(frames):
    label, seconds = np.repeat(rng.integers(0, 2, frames // 8), 8), np.arange(frames * 512) / 16000
    whistle = np.sin(2 * np.pi * (1500 + 300 * np.sin(6 * seconds)) * seconds)
    sound = 0.1 * whistle * np.repeat(label, 512) + 0.05 * np.sin(2 * np.pi * 100 * seconds)
    sound = np.pad(sound + rng.normal(0, 0.005, sound.shape), (64, 0)).astype(np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(sound, 576)[::512].copy()
    return {"input": frames, **start, "label": label.astype(np.float32)}


batches = [recording(40) for _ in range(16)]
trainer = og.Trainer(original, {"speech_probs": "bce"}, optimizer="adam", learning_rate=1e-3)
trainer.fit(batches, epochs=3, shuffle=False)

# %%
# The same training, with the network written again in PyTorch: a Fourier transform as convolution,
# four convolutions, an LSTM and a linear layer.

arrays = {t.name: onnx.numpy_helper.to_array(t) for t in original.graph.initializer}
w = {n: torch.tensor(arrays[n], requires_grad=True) for n in trainer.state.weights}
adam, p, lstm = torch.optim.Adam(w.values(), 1e-3), list(w.values()), torch.nn.LSTM(128, 128)
for batch in batches * 3:
    x = F.pad(torch.tensor(batch["input"])[:, None], (128, 128), "reflect")
    x = F.conv1d(x, torch.tensor(next(iter(arrays.values()))), stride=128)[..., 1:]
    x = x.unflatten(1, (2, 129)).norm(dim=1)
    for i, stride in enumerate([1, 2, 2, 1]):
        x = F.conv1d(x, *p[2 * i : 2 * i + 2], stride, padding=1).relu()
    flat = [p[10][0], p[11][0], *p[12][0].chunk(2)]  # gates: i, o, f, c
    gates = [a.unflatten(0, (4, 128))[[0, 2, 3, 1]].flatten(0, 1) for a in flat]
    h, _ = torch.func.functional_call(lstm, dict(zip(lstm.state_dict(), gates)), (x.mT,))
    scores = h[:, 0].relu() @ p[8][0, :, 0] + p[9]
    F.binary_cross_entropy_with_logits(scores, torch.tensor(batch["label"])).backward()
    adam.step(), adam.zero_grad()
for name, weight in w.items():
    np.testing.assert_allclose(trainer.state.weights[name], weight.detach(), atol=5e-3)
restored = og.graph.replace_initializers_into_onnx(trainer.model, {n: arrays[n] for n in w})
assert restored.graph == original.graph

# %%
# A new recording, before and after.

label = (test := recording(400)).pop("label")
files = (original.SerializeToString(), trainer.model.SerializeToString())
before, after = (onnxruntime.InferenceSession(file).run(None, test)[0].ravel() for file in files)
accuracies = [np.mean((speech > 0.5) == label) for speech in (before, after)]
print("accuracy {:.2f} before, {:.2f} after".format(*accuracies))
assert accuracies[0] < 0.6 < 0.9 < accuracies[1]
seconds = np.arange(100) * 0.032
plt.figure(figsize=(9, 3), layout="constrained")
plt.fill_between(seconds, label[:100], step="post", alpha=0.2, label="whistle")
plt.step(seconds, before[:100], where="post", label="before")
plt.step(seconds, after[:100], where="post", label="after")
plt.xlabel("seconds")
plt.ylabel("probability of speech")
plt.legend()
plt.show()
