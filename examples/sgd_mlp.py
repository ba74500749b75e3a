"""A neural network of scikit-learn, trained again from its ONNX file: SGD and Nesterov's momentum.

All begin with the same weights. The loss, half the squared error, is beside the model.
"""

import warnings
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor

from onnxgrad import (
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    onnx_rename_weights,
    onnx_simple_text_plot,
)

X, y = (a.astype(np.float32) for a in make_regression(1000, 100, bias=2, random_state=0))
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# One epoch of scikit-learn makes the weights to begin with.
warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(
    hidden_layer_sizes=(50, 10), solver="sgd", alpha=0, batch_size=15, learning_rate_init=5e-5,
    max_iter=1, warm_start=True, n_iter_no_change=1000, random_state=0,
).fit(X_train, y_train)  # fmt: skip
onx = onnx_rename_weights(to_onnx(mlp, X_train[:1], target_opset=15))
print(onnx_simple_text_plot(onx))

# A hundred epochs follow: of scikit-learn, with Nesterov's momentum, of SGD, of the same momentum.
rate = LearningRateSGDNesterov(5e-5, learning_rate="constant", momentum=0.9, nesterov=True)
options = {"max_iter": 100, "batch_size": 15, "random_state": 0}
trainers = {
    "scikit-learn": mlp.set_params(max_iter=100),
    "SGD": OrtGradientForwardBackwardOptimizer(onx, learning_rate=5e-5, **options),
    "Nesterov": OrtGradientForwardBackwardOptimizer(onx, learning_rate=rate, **options),
}
losses = {}
for name, trainer in trainers.items():
    begin = perf_counter()
    trainer.fit(X_train, y_train)
    seconds = perf_counter() - begin
    losses[name] = mlp.loss_curve_[1:] if trainer is mlp else trainer.train_losses_
    plt.semilogy(losses[name], label=name)
    print(f"{name:12} loss {losses[name][0]:8.2f} -> {losses[name][-1]:8.4f} in {seconds:.2f} s")
plt.legend()
plt.savefig("sgd_mlp.png")

scores = {name: r2_score(y_test, trainer.predict(X_test)) for name, trainer in trainers.items()}
print("R² of the test rows:", {name: round(score, 3) for name, score in scores.items()})
assert losses["Nesterov"][-1] < min(losses["SGD"][-1], 5 * losses["scikit-learn"][-1])
assert scores["Nesterov"] > scores["scikit-learn"] - 0.05
