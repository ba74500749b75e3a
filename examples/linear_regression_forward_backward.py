"""A linear regression whose loss is not in the model: by a trainer, and by a loop of one's own.

`OrtGradientForwardBackwardOptimizer` brings loss and loop along, `OrtGradientForwardBackward` the
two passes only. Both end at the coefficients of scikit-learn.
"""

import warnings

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor

from onnxgrad import (
    OrtDataLoader,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    get_train_initializer,
    onnx_simple_text_plot,
)

X, y = make_regression(200, n_features=2, bias=2, noise=5, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32)
least = LinearRegression().fit(X, y)
expected = [*least.coef_, least.intercept_]

# A network without hidden layers is a linear regression: this one has seen the data once.
warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(hidden_layer_sizes=(), max_iter=1, random_state=0).fit(X, y)
onx = to_onnx(mlp, X[:1], target_opset=15)
print(onnx_simple_text_plot(onx))
weights = {name: array for name, (array, _) in get_train_initializer(onx).items()}

# The trainer is an estimator: scikit-learn can look for its learning rate.
trainer = OrtGradientForwardBackwardOptimizer(onx, list(weights), max_iter=100, random_state=0)
search = GridSearchCV(trainer, {"learning_rate": [1e-3, 1e-2, 5e-2]}, cv=3).fit(X, y)
trainer = search.best_estimator_
print("\nBest of three:", trainer.learning_rate, "losses:", trainer.train_losses_[-3:])
trained = np.concatenate([value.numpy().ravel() for value in trainer.get_state().values()])

# The loop of one's own: forward, the gradient of half the square, backward, a step.
passes = OrtGradientForwardBackward(onx, list(weights)).new_instance()
loader = OrtDataLoader(X, y, batch_size=10, random_state=0)
for _ in range(50):
    for rows, labels in loader.iter_numpy():
        [predicted] = passes.forward([rows, *weights.values()], training=True)
        _, *gradients = passes.backward([(predicted - labels) / len(rows)])
        for array, gradient in zip(weights.values(), gradients):
            array -= 0.01 * gradient
own = np.concatenate([array.ravel() for array in weights.values()])

for name, coef in (("scikit-learn", expected), ("trainer", trained), ("own loop", own)):
    print(f"{name:13}", np.round(coef, 3))
    np.testing.assert_allclose(coef, expected, atol=0.3)
