"""Training time of a regression
=============================

How long scikit-learn and onnxgrad take to train the same networks for 30 epochs, and the losses
they end with. Each time is the median of three.
"""

import time
import warnings
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import LearningRateSGDNesterov, OrtGradientForwardBackwardOptimizer

REPEAT, EPOCHS = 3, 30
X, y = (a.astype(np.float32) for a in make_regression(1000, 100, bias=2, random_state=0))
y /= y.std()
warnings.simplefilter("ignore", ConvergenceWarning)


def seconds(estimator):
    begin = time.perf_counter()
    estimator.fit(X, y)
    return time.perf_counter() - begin


# %%
# Both use Nesterov's momentum and batches of 15 rows. The first call, which builds the graphs, is
# not counted.

rate = LearningRateSGDNesterov(1e-3, learning_rate="constant", momentum=0.9, nesterov=True)
table = Table("hidden layers", "trained by", "seconds", "half the squared error")
bars = {}
for layers in ((), (50,), (50, 10)):
    mlp = MLPRegressor(
        hidden_layer_sizes=layers, solver="sgd", alpha=0, batch_size=15, learning_rate_init=1e-3,
        max_iter=EPOCHS, n_iter_no_change=EPOCHS, random_state=0,
    ).fit(X, y)  # fmt: skip
    trainer = OrtGradientForwardBackwardOptimizer(
        to_onnx(mlp, X[:1], target_opset=15), learning_rate=rate, batch_size=15, max_iter=EPOCHS,
        weight_init="glorot", random_state=0,
    ).fit(X, y)  # fmt: skip
    times = [(seconds(mlp), seconds(trainer)) for _ in range(REPEAT)]
    bars[str(layers)] = theirs, ours = [median(column) for column in zip(*times)]
    losses = (mlp.loss_curve_[-1], trainer.train_losses_[-1])
    table.add_row(str(layers), "scikit-learn", f"{theirs:.3f}", f"{losses[0]:.2g}")
    table.add_row("", "onnxgrad", f"{ours:.3f}", f"{losses[1]:.2g}")
    assert losses[1] < max(3 * losses[0], 1e-6)
Console().print(table)

# %%
# Small networks spend most of a step on calls, not on numbers; here, all steps of an epoch are one
# call of onnxruntime.

for shift, name, column in zip((-0.2, 0.2), ("scikit-learn", "onnxgrad"), zip(*bars.values())):
    plt.bar(np.arange(len(bars)) + shift, column, 0.4, label=name)
plt.xticks(range(len(bars)), bars)
plt.xlabel("hidden layers")
plt.ylabel("seconds")
plt.legend()
plt.show()
