"""SGD and Nesterov's momentum
===========================

A neural network of scikit-learn is trained again from its ONNX file, by plain gradient descent and
by Nesterov's momentum. All begin with the same weights. The loss, half the squared error, is
outside of the model.
"""

import warnings
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import (
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    onnx_rename_weights,
    onnx_simple_text_plot,
)

X, y = (a.astype(np.float32) for a in make_regression(1000, 100, bias=2, random_state=0))
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# %%
# One epoch of scikit-learn makes the initial weights.

warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(
    hidden_layer_sizes=(50, 10), solver="sgd", alpha=0, batch_size=15, learning_rate_init=5e-5,
    max_iter=1, warm_start=True, n_iter_no_change=1000, random_state=0,
).fit(X_train, y_train)  # fmt: skip
onx = onnx_rename_weights(to_onnx(mlp, X_train[:1], target_opset=15))
print(onnx_simple_text_plot(onx))

# %%
# A hundred epochs follow: by scikit-learn with Nesterov's momentum, by plain gradient descent, and
# by Nesterov's momentum in ONNX.

rate = LearningRateSGDNesterov(5e-5, learning_rate="constant", momentum=0.9, nesterov=True)
options = {"max_iter": 100, "batch_size": 15, "random_state": 0}
trainers = {
    "scikit-learn, Nesterov": mlp.set_params(max_iter=100),
    "onnxgrad, SGD": OrtGradientForwardBackwardOptimizer(onx, learning_rate=5e-5, **options),
    "onnxgrad, Nesterov": OrtGradientForwardBackwardOptimizer(onx, learning_rate=rate, **options),
}
table = Table("", "first loss", "last loss", "R² of test rows", "seconds")
last, scores = [], []
for name, trainer in trainers.items():
    begin = perf_counter()
    trainer.fit(X_train, y_train)
    seconds = perf_counter() - begin
    losses = mlp.loss_curve_[1:] if trainer is mlp else trainer.train_losses_
    last.append(losses[-1])
    scores.append(r2_score(y_test, trainer.predict(X_test)))
    plt.semilogy(losses, label=name)
    numbers = f"{losses[0]:.2f}", f"{losses[-1]:.4f}", f"{scores[-1]:.3f}", f"{seconds:.2f}"
    table.add_row(name, *numbers)
plt.xlabel("epoch")
plt.ylabel("half the squared error")
plt.legend()
plt.show()

# %%
# Momentum is far ahead of plain gradient descent with the same learning rate.

Console().print(table)
assert last[2] < min(last[1], 5 * last[0])
assert scores[2] > scores[0] - 0.05
