"""A loss of your own
==================

A loss is a function that writes the loss of every element as nodes. Its gradient follows by itself.
Here, a prediction that is too low costs nine times as much as one that is too high. The result is
the expectile regression that numpy computes by reweighted least squares.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

rng = np.random.default_rng(0)
x = rng.uniform(0, 3, (400, 1)).astype(np.float32)
y = (1 + 2 * x + (0.2 + x) * rng.normal(size=x.shape)).astype(np.float32)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    line (float[N,1] x) => (float[N,1] y) <float[1,1] slope = {0.0}, float[1] intercept = {0.0}>
    { a = MatMul(x, slope)  y = Add(a, intercept) }
""")

# %%
# The function gets ``op``, which writes nodes (``op.Abs``, ``op.Where`` and so on; arithmetic works
# on the results), the prediction and the label.


def too_low_is_worse(op, prediction, label):
    """Write w (f - y)^2, with w = 0.9 where f < y and 0.1 elsewhere."""
    weight = op.Where(op.Less(prediction, label), 0.9, 0.1)
    return weight * (prediction - label) * (prediction - label)


def trained(loss):
    """Return the trained slope and intercept."""
    trainer = og.Trainer(model, loss, optimizer="sgd", learning_rate=0.1)
    state = trainer.fit(x, y, epochs=2000, batch_size=400).state
    return np.array([state.weights["slope"].item(), state.weights["intercept"].item()])


A, expected = np.hstack([x, np.ones_like(x)]).astype(float), np.zeros(2)
for _ in range(100):
    root = np.sqrt(np.where(A @ expected < y[:, 0], 0.9, 0.1))
    expected = np.linalg.lstsq(A * root[:, None], y[:, 0] * root, rcond=None)[0]
own, usual = trained(too_low_is_worse), trained("squared_error")
print("slope and intercept:", own, "numpy:", expected, "squared error:", usual)
np.testing.assert_allclose(own, expected, rtol=1e-3)

# %%
plt.plot(x[:, 0], y[:, 0], ".", alpha=0.3)
for name, line in (("own loss", own), ("squared error", usual)):
    plt.plot([0, 3], [line[1], 3 * line[0] + line[1]], label=name)
plt.legend()
plt.show()
