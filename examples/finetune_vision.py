"""A published image classifier gets five new classes, without a line of its training code.

The network (ResNet-50-thin, exported from TensorFlow) rates images as safe or not. Its last layer
is replaced, and learns to tell five patterns apart; then the whole last block trains, too. The new
layer alone trains as PyTorch trains it on the features. The file has the nodes of the original and
its speed.
"""

import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from published import CACHE, fetch, models

original = fetch(next(m for m in models() if m.name == "opennsfw"), CACHE)
CLASSES = ["rows", "columns", "checks", "rings", "noise"]


def images(count, seed):
    """Return images (count, 224, 224, 3) of blue, green and red around 0, and their classes."""
    rng, t = np.random.default_rng(seed), np.linspace(-1, 1, 224)
    y = np.arange(count) % 5
    X = 20 * rng.standard_normal((count, 224, 224, 3))
    for i, (f, phase) in enumerate(rng.uniform([8, 0], [16, 6], (count, 2))):
        a, b = np.sin(f * t + phase)[:, None], np.sin(f * t)[None]
        waves = a + 0 * b, b + 0 * a, a * b, np.sin(f * np.hypot(t[:, None], t) + phase), 0 * a * b
        X[i] += 60 * waves[y[i]][:, :, None] * rng.uniform(0.5, 1.5, 3)
    return X.astype(np.float32), y


X, y = images(30, 0)
X_test, y_test = images(20, 1)
model = og.replace_head(original, units=CLASSES)
head = og.Trainer(model, "cross_entropy", train="head.*", learning_rate=0.05, optimizer="sgd")
head.fit(X, y, epochs=5, batch_size=30)

backbone = ort.InferenceSession(og.features(model).SerializeToString())
Z = torch.tensor(backbone.run(None, {"input:0": X})[0])
W = torch.tensor(og.get_train_initializer(model)["head.weight"][0], requires_grad=True)
b = torch.zeros(5, requires_grad=True)
sgd = torch.optim.SGD([W, b], 0.05)
for _ in range(5):
    sgd.zero_grad()
    torch.nn.functional.cross_entropy(Z @ W + b, torch.tensor(y)).backward()
    sgd.step()
np.testing.assert_allclose(head.state.weights["head.weight"], W.detach().numpy(), atol=1e-4)

trainer = og.Trainer(head.model, "cross_entropy", train=["head.*", "*stage3_block2*"])
trainer.fit(X, y, epochs=2, batch_size=10)
trainer.save("patterns.onnx")
trained = ort.InferenceSession("patterns.onnx")
accuracy = np.mean(trained.run(None, {"input:0": X_test})[0].argmax(axis=1) == y_test)
nodes = [node.op_type for node in onnx.load("patterns.onnx").graph.node]
assert nodes == [node.op_type for node in onnx.load(original).graph.node]
assert accuracy > 0.9
seconds = {}
for session in [ort.InferenceSession(original), trained] * 5:
    began = time.perf_counter()
    session.run(None, {"input:0": X_test[:2]})
    seconds.setdefault(session, []).append(time.perf_counter() - began)
before, after = map(np.median, seconds.values())
print(f"accuracy {accuracy:.2f} for {CLASSES}, {after / before:.2f} x the time of the original")
