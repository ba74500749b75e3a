"""Differential privacy
====================

DP-SGD (`Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>`_) limits what a model can tell about
one row of its data: the gradient of each row is clipped to the norm C, and normal noise of standard
deviation sigma C is added to their sum. This is the mechanism only: the privacy budget that it
spends is computed by an accountant, such as those of Opacus or dp-accounting.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession

import onnxgrad as og

rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 4)).astype(np.float32)
score = x @ np.float32([[2], [-1], [1], [0]])
y = (score + rng.logistic(size=score.shape) > 0).astype(np.float32)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,4] x) => (float[N,1] s) <float[4,1] w = {0.0, 0.0, 0.0, 0.0}> { s = MatMul(x, w) }
""")

# %%
# The gradient of the loss of each row, as in :doc:`/auto_examples/derivatives/gradients_of_rows`.

loss = og.add_loss_output(model, "binary_cross_entropy", from_logits=True)
rows = og.losses.unreduced_onnx_loss(loss, "loss")
gradient_model = og.jacobian(rows, weights=["w"], inputs=[], batched=True)
session = InferenceSession(gradient_model.SerializeToString())


def trained(clip, sigma, steps=150, rate=0.5, share=0.05):
    """Return the weights after steps of DP-SGD; each row is in a batch with probability `share`."""
    w, drawn = np.zeros((4, 1), np.float32), np.random.default_rng(1)
    for _ in range(steps):
        batch = drawn.random(len(x)) < share
        feed = {"x": x[batch], "label": y[batch], "w": w}
        gradients = session.run(None, feed)[1].reshape(-1, 4)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        clipped = gradients * np.minimum(1, clip / np.maximum(norms, 1e-12))
        noisy = clipped.sum(axis=0) + sigma * clip * drawn.normal(size=4)
        w -= (rate * noisy / (share * len(x))).astype(np.float32)[:, None]
    return w


# %%
# The accuracy falls as the noise grows.

sigmas = [0, 1, 4, 16, 64, 256]
accuracy = [np.mean((x @ trained(1.0, sigma) > 0) == y) for sigma in sigmas]
print(dict(zip(sigmas, accuracy, strict=True)))
assert accuracy[1] > 0.7  # the noise of common budgets costs little
plt.plot(sigmas, accuracy, "o-")
plt.xlabel("noise, sigma")
plt.ylabel("accuracy")
plt.show()
