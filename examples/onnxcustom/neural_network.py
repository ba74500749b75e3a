"""A neural network: the loss in the model, and outside of it
==========================================================

The same network of scikit-learn is trained by ``OrtGradientOptimizer``, whose model computes its
loss, and by ``OrtGradientForwardBackwardOptimizer``, which has the loss outside of the model.
``weight_init="glorot"`` begins with new random weights, as scikit-learn does.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import (
    LearningRateSGD,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    get_train_initializer,
)

X, y = (a.astype(np.float32) for a in make_regression(1000, 10, bias=2, random_state=0))
y /= y.std()
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(
    hidden_layer_sizes=(10, 10), solver="sgd", alpha=0, momentum=0, batch_size=10,
    learning_rate_init=0.05, max_iter=100, n_iter_no_change=1000, random_state=0,
).fit(X_train, y_train)  # fmt: skip
onx = to_onnx(mlp, X_train[:1], target_opset=15)
weights = list(get_train_initializer(onx))
print("weights:", weights)

# %%
# The loss in the model is the squared error, and the one outside of it half of that. The gradient
# of the first is twice as large, so it gets half the learning rate.

options = {"max_iter": 100, "batch_size": 10, "weight_init": "glorot", "random_state": 0}
rates = {rate: LearningRateSGD(rate, learning_rate="constant") for rate in (0.025, 0.05)}
inside = OrtGradientOptimizer(add_loss_output(onx), weights, learning_rate=rates[0.025], **options)
inside.fit(X_train, y_train)
outside = OrtGradientForwardBackwardOptimizer(onx, weights, learning_rate=rates[0.05], **options)
outside.fit(X_train, y_train)
half = np.divide(inside.train_losses_, 2)
np.testing.assert_allclose(half, outside.train_losses_, rtol=0.01)

plt.semilogy(np.column_stack([mlp.loss_curve_, half]), label=["scikit-learn", "onnxgrad"])
plt.xlabel("epoch")
plt.ylabel("half the squared error")
plt.legend()
plt.show()

# %%
# The errors of rows that none of them has seen. The variance of the labels is 1.

session = InferenceSession(inside.get_trained_onnx(onx).SerializeToString())
predicted = {"scikit-learn": mlp.predict(X_test), "loss outside": outside.predict(X_test)}
predicted["loss in the model"] = session.run(None, {"X": X_test})[0]
table = Table("", "mean squared error")
for name, values in predicted.items():
    table.add_row(name, f"{mean_squared_error(y_test, values):.5f}")
    assert mean_squared_error(y_test, values) < 0.01
Console().print(table)
