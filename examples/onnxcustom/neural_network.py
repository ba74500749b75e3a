"""The training classes of onnxcustom
==================================

Programs for ``onnxcustom.training`` train a network of scikit-learn in three ways.
``OrtGradientOptimizer`` trains a model that computes its loss.
``OrtGradientForwardBackwardOptimizer`` computes the loss outside of the model.
``OrtGradientForwardBackward`` only runs the forward and the backward pass, for a loop of your own.
The three networks are about as good as the network that scikit-learn trains.
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
    OrtDataLoader,
    OrtGradientForwardBackward,
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
names = list(get_train_initializer(onx))
print("weights:", names)

# %%
# The loss that ``add_loss_output`` adds is the squared error, and the loss outside of the model is
# half the squared error. The gradient of the squared error is twice as large, so the training with
# this loss has half the learning rate. ``weight_init="glorot"`` replaces the trained weights by
# random weights, as scikit-learn draws them.

options = {"max_iter": 100, "batch_size": 10, "weight_init": "glorot", "random_state": 0}
rates = {rate: LearningRateSGD(rate, learning_rate="constant") for rate in (0.025, 0.05)}
inside = OrtGradientOptimizer(add_loss_output(onx), names, learning_rate=rates[0.025], **options)
inside.fit(X_train, y_train)
outside = OrtGradientForwardBackwardOptimizer(onx, names, learning_rate=rates[0.05], **options)
outside.fit(X_train, y_train)
half = np.divide(inside.train_losses_, 2)
np.testing.assert_allclose(half, outside.train_losses_, rtol=0.01)

plt.semilogy(np.column_stack([mlp.loss_curve_, half]), label=["scikit-learn", "onnxgrad"])
plt.xlabel("epoch")
plt.ylabel("half the squared error")
plt.legend()
plt.show()

# %%
# A loop of your own: the forward pass, the gradient of half the squared error w.r.t. the
# predictions, the backward pass, and a step of gradient descent. The loop begins with other random
# weights.

passes = OrtGradientForwardBackward(onx, names).new_instance()
rng = np.random.default_rng(0)
shapes = [array.shape for array, _ in get_train_initializer(onx).values()]
weights = [rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in shapes]
loader = OrtDataLoader(X_train, y_train, batch_size=10, random_state=0)
for _ in range(100):
    for rows, labels in loader.iter_numpy():
        [predicted] = passes.forward([rows, *weights], training=True)
        _, *gradients = passes.backward([(predicted - labels) / len(rows)])
        for weight, gradient in zip(weights, gradients):
            weight -= 0.05 * gradient

# %%
# The errors for rows that were in no training. ``get_trained_onnx`` returns the file with its
# trained weights and without the loss. The labels have a variance of 1.

trained = InferenceSession(inside.get_trained_onnx(onx).SerializeToString())
predictions = {
    "scikit-learn": mlp.predict(X_test),
    "loss in the model": trained.run(None, {"X": X_test})[0],
    "loss outside of the model": outside.predict(X_test),
    "loop of your own": passes.forward([X_test, *weights])[0],
}
table = Table("", "mean squared error")
for name, predicted in predictions.items():
    table.add_row(name, f"{mean_squared_error(y_test, predicted):.5f}")
    assert mean_squared_error(y_test, predicted) < 0.01
Console().print(table)
