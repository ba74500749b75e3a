"""Nesterov's momentum with a penalty on some weights
==================================================

scikit-learn adds ``alpha / 2`` times the squared coefficients to the loss of a batch, and leaves
the intercepts alone. A penalty for some weights, given by their names, does the same here.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import (
    ElasticLearningPenalty,
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    get_train_initializer,
)

X, y = (a.astype(np.float32) for a in make_regression(1000, 10, bias=2, random_state=0))
y /= y.std()
warnings.simplefilter("ignore", ConvergenceWarning)
rate = LearningRateSGDNesterov(0.002, learning_rate="constant", momentum=0.9, nesterov=True)

# %%
# Both trainings begin with the same weights: those of scikit-learn after one epoch.

table = Table("alpha", "trained by", "loss with penalty", "sum of squared coefficients")
coefs = {}
for alpha in (0, 0.2):
    mlp = MLPRegressor(
        hidden_layer_sizes=(10, 10), solver="sgd", alpha=alpha, batch_size=10, max_iter=1,
        learning_rate_init=0.002, warm_start=True, n_iter_no_change=1000, random_state=0,
    ).fit(X, y)  # fmt: skip
    onx = to_onnx(mlp, X[:1], target_opset=15)
    names = [name for name in get_train_initializer(onx) if name.startswith("coefficient")]
    penalty = dict.fromkeys(names, ElasticLearningPenalty(l1=0, l2=alpha / 2))
    trainer = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=rate, learning_penalty=penalty, random_state=0
    ).fit(X, y)
    mlp.set_params(max_iter=100).fit(X, y)

    coefs[alpha] = mlp.coefs_, [trainer.trained_coef_[name].numpy() for name in names]
    sizes = [sum(np.square(w).sum() for w in arrays) for arrays in coefs[alpha]]
    losses = [mlp.loss_curve_[-1], trainer.train_losses_[-1]]
    for name, loss, size in zip(("scikit-learn", "onnxgrad"), losses, sizes):
        table.add_row(str(alpha), name, f"{loss:.5f}", f"{size:.3f}")
    np.testing.assert_allclose(sizes[0], sizes[1], rtol=0.05)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.2)
Console().print(table)

# %%
# The penalty makes coefficients small: the first layer, without it and with it.

figure, axes = plt.subplots(2, 2, sharex=True, sharey=True, layout="constrained")
for row, alpha in zip(axes, coefs):
    for ax, name, (first, *_) in zip(row, ("scikit-learn", "onnxgrad"), coefs[alpha]):
        image = ax.imshow(first, cmap="RdBu", vmin=-1, vmax=1)
        ax.set_title(f"{name}, alpha = {alpha}")
figure.colorbar(image, ax=axes)
plt.show()
