"""A callback of your own: weights that stay sparse
================================================

Proximal gradient descent takes a step of gradient descent and then moves every weight toward zero
by a threshold. Proximal gradient descent solves the lasso: a linear regression with a penalty on
the absolute values of the weights. In this example, the ``Trainer`` takes the step of gradient
descent, and a callback moves the weights toward zero. The trained weights are compared with
scikit-learn's ``Lasso``.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import Lasso

import onnxgrad as og

X, y = make_regression(200, 20, n_informative=5, noise=5.0, random_state=0)
X, y = X.astype(np.float32), (y / y.std()).astype(np.float32)[:, None]

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,20] x) => (float[N,1] y)
    { a = MatMul(x, w)  y = Add(a, b) }
""")
for name, shape in (("w", (20, 1)), ("b", (1,))):
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, "f4"), name))


# %%
# A callback is a class with a method for each event that it handles. ``every_steps = 1`` asks for
# the event ``on_step_end`` after every step. ``self.entry(state)`` is a dict for numbers of the
# callback that checkpoints shall store.


class SparseWeights(og.callbacks.Callback):
    """Moves a weight toward zero after every step, and stops when the weight no longer changes."""

    every_steps = 1

    def __init__(self, name, alpha, tolerance=1e-6):
        self.name, self.alpha, self.tolerance, self.path = name, alpha, tolerance, []

    def on_step_end(self, trainer, state, control):
        w = state.weights[self.name]
        threshold = state.learning_rate * self.alpha
        state.weights = {self.name: np.sign(w) * np.maximum(np.abs(w) - threshold, 0)}

    def on_epoch_end(self, trainer, state, control):
        w, entry = state.weights[self.name], self.entry(state)
        control.stop = np.abs(w - np.asarray(entry.get("last", 0.0))).max() < self.tolerance
        entry["last"] = w.tolist()
        self.path.append(w[:, 0].copy())


# %%
# The loss of the trainer is the mean squared error, and the loss of ``Lasso`` is half the mean
# squared error. So the trainer needs twice the penalty ``alpha`` of ``Lasso``.

alpha = 0.05
sparse = SparseWeights("w", 2 * alpha)
trainer = og.Trainer(model, "squared_error", optimizer="sgd", learning_rate=0.1, callbacks=[sparse])
trainer.fit(X, y, epochs=2000, batch_size=len(X))
print(len(trainer.history), "epochs:", trainer.state.stop_reason)
assert len(trainer.history) < 2000

lasso = Lasso(alpha, tol=1e-8).fit(X.astype(float), y[:, 0])
w = trainer.state.weights["w"][:, 0]
np.testing.assert_allclose(w, lasso.coef_, atol=1e-4)
np.testing.assert_array_equal(w == 0, lasso.coef_ == 0)
print(f"{np.sum(w == 0)} of 20 weights are zero, the same weights as in scikit-learn")

# %%
# Ten weights are zero after the first step, and 15 weights after the last step.

plt.plot(sparse.path[:60])
plt.plot(np.full(20, 60), lasso.coef_, "k<", label="scikit-learn")
plt.xlabel("step")
plt.ylabel("weight")
plt.legend()
plt.show()
