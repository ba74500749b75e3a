"""Spectrograms as a part of the file
==================================

A CNN classifies sounds by their log-mel spectrograms. For the training, a transform computes the
spectrograms once. Then the transform becomes a part of the file, as ONNX nodes, and the file takes
waveforms. The scores are compared with PyTorch, which computes the spectrograms by its own Fourier
transform.
"""

import io
import warnings

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch

import onnxgrad as og

RATE, SAMPLES = 8000, 6000
CLASSES = ["falling", "constant", "rising"]
rng = np.random.default_rng(0)


def draw_tones(labels):
    """Return waveforms of tones with noise, whose pitch falls, is constant, or rises."""
    seconds = np.arange(SAMPLES) / RATE
    slope = (labels[:, None] - 1) * rng.uniform(0.5, 1, (len(labels), 1))
    pitch = rng.uniform(500, 1000, (len(labels), 1)) * np.exp2(slope * (seconds - 0.4))
    tones = np.sin(2 * np.pi * np.cumsum(pitch, axis=1) / RATE)
    return (tones + rng.normal(0, 0.3, tones.shape)).astype(np.float32)


mel = og.data.mel_spectrogram(RATE, n_fft=256, hop_length=128, n_mels=32)
labels = rng.integers(0, 3, 300)
spectrograms = mel(draw_tones(labels))[:, None]  # (N, 1, bands, frames)

figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
for label, ax in enumerate(axes):
    ax.imshow(spectrograms[labels == label][0, 0], origin="lower", aspect="auto")
    ax.set(title=CLASSES[label], xlabel="frame", ylabel="mel band")
plt.show()

# %%
# A CNN, exported by PyTorch, trains on the spectrograms.

torch.manual_seed(0)
layers = [torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 5, stride=2)]
layers += [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))
file = io.BytesIO()
warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*legacy.*")
named = {"input_names": ["mel"], "dynamic_axes": {"mel": {0: "N"}}, "dynamo": False}
torch.onnx.export(net, (torch.tensor(spectrograms[:2]),), file, **named)
trainer = og.Trainer(file.getvalue(), "cross_entropy", learning_rate=0.01)
trainer.fit(spectrograms, labels, epochs=20)

# %%
# ``preprocess`` writes the transform into the file, in front of the CNN, and the file takes
# waveforms. The constants of the transform do not train: ``trainable`` lists the weights of the CNN
# only.

model = og.graph.preprocess(trainer.model, [mel])
assert [t.name for t in og.trainable(model) if t.trains] == list(trainer.state.weights)
new_labels = rng.integers(0, 3, 200)
waveforms = draw_tones(new_labels)
session = onnxruntime.InferenceSession(model.SerializeToString())
(scores,) = session.run(None, {"waveform": waveforms})
accuracy = np.mean(scores.argmax(axis=1) == new_labels)
print(f"accuracy for new waveforms: {accuracy:.3f}")
assert accuracy > 0.9

# %%
# PyTorch computes the same scores from the same waveforms.

net.load_state_dict({name: torch.tensor(w) for name, w in trainer.state.weights.items()})
window = torch.hann_window(256)
spectrum = torch.stft(torch.tensor(waveforms), 256, 128, window=window, return_complex=True)
bands = torch.tensor(mel.filters(), dtype=torch.float32) @ spectrum.abs().square()
expected = net(bands.clamp(min=1e-10).log()[:, None])
np.testing.assert_allclose(scores, expected.detach(), rtol=1e-3, atol=1e-3)
print(f"largest difference to PyTorch: {np.abs(scores - expected.detach().numpy()).max():.1e}")
