"""Stochastic gradient descent on a simple function: with the loss in the model, and beside it.

z = -1 - 2x + 3y + x²/2 - y²/3 + noise is learned by a model of five coefficients. They have to be
those of scikit-learn's linear regression on x, y, x² and y².
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from sklearn.linear_model import LinearRegression

from onnxgrad import (
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

# With the loss in the model.
options = {"learning_rate": 0.05, "batch_size": 5, "max_iter": 100, "random_state": 0}
full = OrtGradientOptimizer(add_loss_output(f), ["a", "b", "c"], **options).fit(X, y)
print("Losses, mean squares:", full.train_losses_[-3:])

# With the loss beside the model; trained_coef_ then holds OrtValues.
partial = OrtGradientForwardBackwardOptimizer(f, ["a", "b", "c"], **options).fit(X, y)
print("Losses, half of them:", partial.train_losses_[-3:])
trained = partial.get_trained_onnx()
print("\n" + onnx_simple_text_plot(trained))
predicted = InferenceSession(trained.SerializeToString()).run(["y"], {"x": X[:5]})[0]
print("\nPredicted and expected:", np.hstack([predicted, y[:5]]), sep="\n")

least = LinearRegression().fit(np.hstack([X, X**2]), y)
found = {
    "scikit-learn": [*least.coef_[0], *least.intercept_],
    "loss in it": np.hstack([full.trained_coef_[k].ravel() for k in "abc"]),
    "loss beside": np.hstack([partial.trained_coef_[k].numpy().ravel() for k in "abc"]),
}
print("\nCoefficients of  x  y  x²  y²  1")
for name, coef in found.items():
    print(f"{name:12}", "  ".join(f"{v:8.5f}" for v in coef))
    np.testing.assert_allclose(coef, found["scikit-learn"], atol=0.01)

plt.semilogy(full.train_losses_, label="loss in the model")
plt.semilogy(partial.train_losses_, label="half of it, loss beside the model")
plt.legend()
plt.savefig("sgd_simple_training.png")
