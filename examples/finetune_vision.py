"""A published image classifier gets five new classes, without a line of its training code.

A ResNet-50 from TensorFlow, which rates images as safe or not, gets a new last layer for five
patterns. Alone, it trains as in PyTorch on the features; then the last block trains, too. The file
has the nodes of the original and its speed.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from published import fetched, time_ratio

original = fetched("opennsfw")
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
model = og.replace_head(original, units=CLASSES)
head = og.Trainer(model, "cross_entropy", train="head.*", learning_rate=0.05, optimizer="sgd")
head.fit(X, y, epochs=5, batch_size=30)

backbone = ort.InferenceSession(og.features(model).SerializeToString())
Z = torch.tensor(backbone.run(None, {"input:0": X})[0])
W = torch.tensor(og.get_train_initializer(model)["head.weight"][0], requires_grad=True)
b = torch.zeros(5, requires_grad=True)
for _ in range(5):
    loss = torch.nn.functional.cross_entropy(Z @ W + b, torch.tensor(y))
    for tensor, gradient in zip((W, b), torch.autograd.grad(loss, (W, b))):
        tensor.data -= 0.05 * gradient
np.testing.assert_allclose(head.state.weights["head.weight"], W.detach().numpy(), atol=1e-4)
trainer = og.Trainer(head.model, "cross_entropy", train=["head.*", "*stage3_block2*"])
trainer.fit(X, y, epochs=4, batch_size=10)
trainer.save("patterns.onnx")
[scores] = ort.InferenceSession("patterns.onnx").run(None, {"input:0": X_test})
accuracy = np.mean(scores.argmax(axis=1) == y_test)
before, after = ([n.op_type for n in onnx.load(p).graph.node] for p in (original, "patterns.onnx"))
assert after == before and accuracy > 0.9  # noqa: PT018
ratio = time_ratio("patterns.onnx", original, {"input:0": X_test[:2]})
print(f"accuracy {accuracy:.2f} for {CLASSES}, {ratio:.2f} x the time of the original")
