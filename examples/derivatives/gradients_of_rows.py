"""Gradients of single rows, and differential privacy
==================================================

A gradient model returns the sum of the gradients over the batch. The gradient of each single row is
a block of the Jacobian of the losses. The gradients of single rows show which row changes the
weights most, and are what DP-SGD needs (`Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>`_):
this optimizer clips the gradient of every row and adds noise, so that the weights tell little about
any one row.
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
x[17], y[17] = [4, -4, 4, 0], 0  # an outlier, with the wrong label
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    logistic (float[N,4] x) => (float[N,1] s) <float[4,1] w = {1.0, -1.0, 1.0, 0.0}>
    { s = MatMul(x, w) }
""")

# %%
# ``unreduced_onnx_loss`` returns the model of the loss of every row. Its Jacobian w.r.t. the weight
# w has one block for each row, of shape ``(N, 1, 4, 1)`` altogether. ``batched=True`` proves that
# no row has an influence on the loss of another row, and computes one block for each row only.

loss = og.add_loss_output(model, "binary_cross_entropy", from_logits=True)
row_losses = og.losses.unreduced_onnx_loss(loss, "loss")
gradient_model = og.jacobian(row_losses, weights=["w"], inputs=[], batched=True)
session = InferenceSession(gradient_model.SerializeToString())
print([(output.name, output.shape) for output in session.get_outputs()])


def row_gradients(x, y, w):
    """Return the gradient of each row's loss w.r.t. w, as an array (N, 4)."""
    return session.run(None, {"x": x, "label": y, "w": w})[1].reshape(-1, 4)


# %%
# The gradient of a row's cross entropy is (sigmoid(s) - y) x. The norm of the gradient of a row is
# largest for the outlier.

w = np.float32([[1], [-1], [1], [0]])
gradients = row_gradients(x, y, w)
np.testing.assert_allclose(gradients, (1 / (1 + np.exp(-x @ w)) - y) * x, rtol=1e-3, atol=1e-5)
norms = np.linalg.norm(gradients, axis=1)
print("row", norms.argmax(), "has the gradient with the largest norm")
assert norms.argmax() == 17
plt.hist(norms, 60)
plt.annotate("row 17", (norms[17], 1), (norms[17], 100), ha="center", arrowprops={"width": 1})
plt.xlabel("norm of the gradient of a row")
plt.ylabel("rows")
plt.show()


# %%
# DP-SGD clips the gradient of each row to the norm C, and adds normal noise of standard deviation
# sigma C to the sum of the gradients. A privacy accountant, such as the packages Opacus and
# dp-accounting, computes from sigma, the size of the batches and the number of steps how much the
# weights reveal about a row: the privacy budget.


def train_privately(clip, sigma, steps=150, rate=0.5, share=0.05):
    """Return the weights after steps of DP-SGD; each row is in a batch with probability `share`."""
    w, drawn = np.zeros((4, 1), np.float32), np.random.default_rng(1)
    for _ in range(steps):
        batch = drawn.random(len(x)) < share
        gradients = row_gradients(x[batch], y[batch], w)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        clipped = gradients * np.minimum(1, clip / np.maximum(norms, 1e-12))
        noisy = clipped.sum(axis=0) + sigma * clip * drawn.normal(size=4)
        w -= (rate * noisy / (share * len(x))).astype(np.float32)[:, None]
    return w


# %%
# The accuracy falls as the noise grows. The noise of common privacy budgets, sigma near 1, costs
# little.

sigmas = [0, 1, 4, 16, 64, 256]
accuracy = [np.mean((x @ train_privately(1.0, sigma) > 0) == y).item() for sigma in sigmas]
print(dict(zip(sigmas, accuracy)))
assert accuracy[1] > 0.7
plt.plot(sigmas, accuracy, "o-")
plt.xlabel("noise, sigma")
plt.ylabel("accuracy")
plt.show()
