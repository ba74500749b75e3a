"""Linear regression with the loss outside of the model
====================================================

``OrtGradientForwardBackwardOptimizer`` is a trainer that computes the loss beside the model, and an
estimator: scikit-learn searches for its learning rate. ``OrtGradientForwardBackward`` has the
forward and the backward pass only, for a training loop of your own. Both end at the coefficients
of least squares.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import (
    OrtDataLoader,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    get_train_initializer,
    onnx_simple_text_plot,
)

# %%
# A network without hidden layers is a linear regression. This one has seen the data once.

X, y = make_regression(200, n_features=2, bias=2, noise=5, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32)
warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(hidden_layer_sizes=(), max_iter=1, random_state=0).fit(X, y)
onx = to_onnx(mlp, X[:1], target_opset=15)
print(onnx_simple_text_plot(onx))
weights = {name: array for name, (array, _) in get_train_initializer(onx).items()}

# %%
# The trainer has the methods of an estimator, so ``GridSearchCV`` tries three learning rates.

trainer = OrtGradientForwardBackwardOptimizer(onx, list(weights), max_iter=100, random_state=0)
search = GridSearchCV(trainer, {"learning_rate": [1e-3, 1e-2, 5e-2]}, cv=3).fit(X, y)
trainer = search.best_estimator_
trained = np.concatenate([value.numpy().ravel() for value in trainer.get_state().values()])
print("learning rate:", trainer.learning_rate)

# %%
# A loop of your own: the forward pass, the gradient of half the squared error with respect to the
# predictions, the backward pass, and a step of gradient descent.

passes = OrtGradientForwardBackward(onx, list(weights)).new_instance()
loader = OrtDataLoader(X, y, batch_size=10, random_state=0)
losses = []
for _ in range(50):
    for rows, labels in loader.iter_numpy():
        [predicted] = passes.forward([rows, *weights.values()], training=True)
        losses.append(0.5 * np.mean((predicted - labels) ** 2))
        _, *gradients = passes.backward([(predicted - labels) / len(rows)])
        for array, gradient in zip(weights.values(), gradients):
            array -= 0.01 * gradient
own = np.concatenate([array.ravel() for array in weights.values()])
plt.semilogy(losses)
plt.xlabel("batch")
plt.ylabel("half the mean squared error")
plt.show()

# %%
# All three agree.

least = LinearRegression().fit(X, y)
expected = [*least.coef_, least.intercept_]
table = Table("", "coefficient 0", "coefficient 1", "intercept")
for name, numbers in (("least squares", expected), ("trainer", trained), ("own loop", own)):
    table.add_row(name, *(f"{number:.3f}" for number in numbers))
    np.testing.assert_allclose(numbers, expected, atol=0.3)
Console().print(table)
