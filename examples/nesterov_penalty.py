"""Nesterov's momentum, without and with a penalty on the weights, against scikit-learn.

scikit-learn adds alpha / 2 times the squared coefficients to the summed loss of a batch, and leaves
the intercepts alone: a penalty of alpha / 2 for some weights by their names does the same.
"""

import warnings

import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from onnxgrad import (
    ElasticLearningPenalty,
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    get_train_initializer,
)

X, y = (a.astype(np.float32) for a in make_regression(1000, 10, bias=2, random_state=0))
y /= y.std()
warnings.simplefilter("ignore", ConvergenceWarning)
rate = LearningRateSGDNesterov(0.002, learning_rate="constant", momentum=0.9, nesterov=True)


def size(weights):
    """Return the sum of the squares."""
    return sum(float(np.square(w).sum()) for w in weights)


table = Table("alpha", "trained by", "loss, penalty included", "squared coefficients")
for alpha in (0, 0.2):
    mlp = MLPRegressor(
        hidden_layer_sizes=(10, 10), solver="sgd", alpha=alpha, batch_size=10, max_iter=1,
        learning_rate_init=0.002, warm_start=True, n_iter_no_change=1000, random_state=0,
    ).fit(X, y)  # fmt: skip
    onx = to_onnx(mlp, X[:1], target_opset=15)  # the weights that both begin with
    coefficients = [name for name in get_train_initializer(onx) if name.startswith("coefficient")]
    penalty = dict.fromkeys(coefficients, ElasticLearningPenalty(l1=0, l2=alpha / 2))
    trainer = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=rate, learning_penalty=penalty, random_state=0
    ).fit(X, y)
    mlp.set_params(max_iter=100).fit(X, y)

    sizes = [size(mlp.coefs_), size(trainer.trained_coef_[n].numpy() for n in coefficients)]
    losses = [mlp.loss_curve_[-1], trainer.train_losses_[-1]]
    for name, loss, squares in zip(("scikit-learn", "onnxgrad"), losses, sizes):
        table.add_row(str(alpha), name, f"{loss:.5f}", f"{squares:.3f}")
    np.testing.assert_allclose(sizes[0], sizes[1], rtol=0.05)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.2)
Console().print(table)
