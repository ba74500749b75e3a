"""Calibration: training a temperature
===================================

A network that has learned its training rows by heart predicts too high probabilities. Temperature
scaling divides the logits of the network by one number, the temperature, which is trained on
held-out rows (`Guo et al. 2017 <https://arxiv.org/abs/1706.04599>`_). The trained temperature is
compared with the minimum that SciPy finds.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.calibration import calibration_curve
from sklearn.datasets import make_classification

import onnxgrad as og

X, y = make_classification(
    3000, 20, n_informative=5, n_classes=3, flip_y=0.2, class_sep=0.8, random_state=0
)
X = X.astype(np.float32)
train, held_out, test = slice(0, 600), slice(600, 1600), slice(1600, None)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,20] x) => (float[N,3] logits)
    <float[1] inverse_temperature = {1.0}>
    { a = Gemm(x, w1, b1)  b = Relu(a)  c = Gemm(b, w2, b2)  logits = Mul(c, inverse_temperature) }
""")
rng = np.random.default_rng(0)
for name, shape in {"w1": (20, 64), "b1": 64, "w2": (64, 3), "b2": 3}.items():
    array = rng.normal(0, 0.2, shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

# %%
# In the first training, the weights of the network train, while the temperature stays at 1.

network = og.Trainer(model, "cross_entropy", freeze="inverse_temperature", learning_rate=0.01)
network.fit(X[train], y[train], epochs=100, batch_size=50)

# %%
# In the second training, the temperature alone trains, on rows that were not in the first training.
# The weight in the file is the inverse of the temperature.

scaled = og.Trainer(
    network.model,
    "cross_entropy",
    train="inverse_temperature",
    learning_rate=og.schedules.cosine(0.05),
)
scaled.fit(X[held_out], y[held_out], epochs=200, batch_size=1000)
inverse = scaled.state.weights["inverse_temperature"].item()
logits = network.predict(X[held_out]).astype(float)
best = minimize_scalar(
    lambda t: -log_softmax(t * logits, axis=1)[range(1000), y[held_out]].mean(),
    bounds=(0, 2), method="bounded",
)  # fmt: skip
print(f"temperature: {1 / inverse:.3f}, by SciPy {1 / best.x:.3f}")
np.testing.assert_allclose(inverse, best.x, rtol=0.02)

# %%
# For the test rows, the loss is lower with the trained temperature. The accuracy is the same, as
# the temperature does not change which logit of a row is the largest.

table = Table("test rows", "cross entropy", "accuracy")
losses = {}
for name, trainer in (("before", network), ("after", scaled)):
    losses[name] = trainer.evaluate(X[test], y[test])["loss"]
    accuracy = np.mean(trainer.predict(X[test]).argmax(axis=1) == y[test])
    table.add_row(name, f"{losses[name]:.3f}", f"{accuracy:.3f}")
Console().print(table)
assert losses["after"] < losses["before"]

# %%
# Among predictions of 80 %, how many are right? On the diagonal, the share of right predictions
# equals the predicted probability.

plt.figure(layout="constrained")
plt.plot([0, 1], [0, 1], color="gray")
for name, trainer in (("before", network), ("after", scaled)):
    p = softmax(trainer.predict(X[test]), axis=1)
    share, predicted = calibration_curve(np.eye(3)[y[test]].ravel(), p.ravel(), n_bins=10)
    plt.plot(predicted, share, "o-", label=name)
plt.xlabel("predicted probability")
plt.ylabel("share of right predictions")
plt.legend()
plt.show()
