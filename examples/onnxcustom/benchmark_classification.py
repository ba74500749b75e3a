"""Training time of a classifier
=============================

How long scikit-learn and onnxgrad take to train the same classifiers for 30 epochs, and the losses
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
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from onnxgrad.compat import (
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    OrtGradientForwardBackwardOptimizer,
    select_model_inputs_outputs,
)

REPEAT, EPOCHS = 3, 30
X, y = make_classification(1000, 100, random_state=0)
X = X.astype(np.float32)
warnings.simplefilter("ignore", ConvergenceWarning)


def seconds(estimator):
    begin = time.perf_counter()
    estimator.fit(X, y)
    return time.perf_counter() - begin


# %%
# The model is cut before its sigmoid: the log loss takes raw scores, and its gradient is p - y. The
# first call, which builds the graphs, is not counted.

rate = LearningRateSGDNesterov(1e-3, learning_rate="constant", momentum=0.9, nesterov=True)
table = Table("hidden layers", "trained by", "seconds", "log loss")
bars = {}
for layers in ((), (50,), (50, 10)):
    mlp = MLPClassifier(
        hidden_layer_sizes=layers, solver="sgd", alpha=0, batch_size=15, learning_rate_init=1e-3,
        max_iter=EPOCHS, n_iter_no_change=EPOCHS, random_state=0,
    ).fit(X, y)  # fmt: skip
    onx = to_onnx(mlp, X[:1], target_opset=15, options={"zipmap": False})
    scores = select_model_inputs_outputs(onx, [f"add_result{len(layers) or ''}"])
    trainer = OrtGradientForwardBackwardOptimizer(
        scores, learning_rate=rate, batch_size=15, max_iter=EPOCHS, weight_init="glorot",
        learning_loss=NegLogLearningLoss(), random_state=0,
    ).fit(X, y)  # fmt: skip
    times = [(seconds(mlp), seconds(trainer)) for _ in range(REPEAT)]
    bars[str(layers)] = theirs, ours = [median(column) for column in zip(*times)]
    losses = (mlp.loss_curve_[-1], trainer.train_losses_[-1])
    table.add_row(str(layers), "scikit-learn", f"{theirs:.3f}", f"{losses[0]:.4f}")
    table.add_row("", "onnxgrad", f"{ours:.3f}", f"{losses[1]:.4f}")
    assert losses[1] < 1.3 * losses[0]
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
