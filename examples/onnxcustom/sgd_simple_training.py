"""Stochastic gradient descent on a simple function
================================================

z = -1 - 2x + 3y + x²/2 - y²/3 + noise is learned by a model of five coefficients, with the loss in
the model and with the loss outside of it. The coefficients have to be those of scikit-learn's
linear regression on x, y, x² and y².
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LinearRegression

from onnxgrad.compat import (
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    onnx_simple_text_plot,
)

f = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 14]>
    f (float[N, 2] x) => (float[N, 1] y)
        <float[1, 2] a = {0, 0}, float[1, 2] b = {0, 0}, float[1] c = {0}, int64[1] last = {1}>
    { square = Mul(x, x)  bx = Mul(square, b)  ax = Mul(x, a)  both = Add(ax, bx)
      total = ReduceSum(both, last)  y = Add(total, c) }""")
rng = np.random.default_rng(0)
X = rng.standard_normal((500, 2)).astype(np.float32)
y = -1 + X @ [-2, 3] + X**2 @ [1 / 2, -1 / 3] + rng.standard_normal(500) / 100
y = y.astype(np.float32).reshape(-1, 1)

# %%
# With the loss in the model, and with the loss outside of it. In the second case, ``trained_coef_``
# has OrtValues, which may be on a device.

options = {"learning_rate": 0.05, "batch_size": 5, "max_iter": 100, "random_state": 0}
inside = OrtGradientOptimizer(add_loss_output(f), ["a", "b", "c"], **options).fit(X, y)
outside = OrtGradientForwardBackwardOptimizer(f, ["a", "b", "c"], **options).fit(X, y)
plt.figure(layout="constrained")
plt.semilogy(inside.train_losses_, label="loss in the model: squared error")
plt.semilogy(outside.train_losses_, label="loss outside: half of it")
plt.xlabel("epoch")
plt.legend()
plt.show()

# %%
# The trained model is the original with other weights.

trained = outside.get_trained_onnx()
print(onnx_simple_text_plot(trained))
predicted = InferenceSession(trained.SerializeToString()).run(["y"], {"x": X})[0]
plt.figure(layout="constrained")
plt.scatter(y, predicted, s=5)
plt.axline((0, 0), slope=1, color="gray")
plt.xlabel("z")
plt.ylabel("predicted")
plt.show()

# %%
# The coefficients are those of least squares.

least = LinearRegression().fit(np.hstack([X, X**2]), y)
found = {
    "scikit-learn": [*least.coef_[0], *least.intercept_],
    "loss in the model": np.hstack([inside.trained_coef_[k].ravel() for k in "abc"]),
    "loss outside": np.hstack([outside.trained_coef_[k].numpy().ravel() for k in "abc"]),
}
table = Table("coefficient of", "x", "y", "x²", "y²", "1")
for name, coef in found.items():
    table.add_row(name, *(f"{number:.4f}" for number in coef))
    np.testing.assert_allclose(coef, found["scikit-learn"], atol=0.01)
Console().print(table)
