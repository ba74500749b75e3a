"""A published detector of speech learns that a whistle counts as speech, and that hum does not.

PyTorch trains the same weights. The new file is the original but for these, at the same speed."""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F  # noqa: N812

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from published import fetched, time_ratio

original = onnx.load(path := fetched("silero-vad-v6"))
rng, start = np.random.default_rng(0), dict.fromkeys("hc", np.zeros((1, 1, 128), np.float32))


def recording(frames):
    """Return frames of 32 ms, each behind 4 ms of the one before, and whether one whistles."""
    label, seconds = np.repeat(rng.integers(0, 2, frames // 8), 8), np.arange(frames * 512) / 16000
    whistle = np.sin(2 * np.pi * (1500 + 300 * np.sin(6 * seconds)) * seconds)
    sound = 0.1 * whistle * np.repeat(label, 512) + 0.05 * np.sin(2 * np.pi * 100 * seconds)
    sound = np.pad(sound + rng.normal(0, 0.005, sound.shape), (64, 0)).astype(np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(sound, 576)[::512].copy()
    return {"input": frames, **start, "label": label.astype(np.float32)}


batches = [recording(40) for _ in range(16)]
trainer = og.Trainer(original, {"speech_probs": "bce"}, optimizer="adam", learning_rate=1e-3)
trainer.fit(batches, epochs=3, shuffle=False).save("whistle.onnx")
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
label = (test := recording(400)).pop("label")
runs = [onnxruntime.InferenceSession(str(file)).run for file in (path, "whistle.onnx")]
before, after = (np.mean((run(None, test)[0] > 0.5) == label) for run in runs)
ratio = time_ratio("whistle.onnx", path, test)
print(f"accuracy {before:.2f} before, {after:.2f} after, {ratio:.2f} x the time of the original")
assert before < 0.6 < 0.9 < after
assert og.replace_initializers_into_onnx("whistle.onnx", {n: arrays[n] for n in w}) == original
