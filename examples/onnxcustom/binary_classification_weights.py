"""Sample weights for classes of different size
============================================

One row in ten is of class 1. Sample weights make both classes count the same, as
``class_weight="balanced"`` does in scikit-learn. The log loss is computed once from raw scores and
once from probabilities.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, balanced_accuracy_score
from sklearn.neural_network import MLPClassifier

from onnxgrad.compat import (
    NegLogLearningLoss,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    select_model_inputs_outputs,
)

X, y = make_classification(
    1000, 4, n_informative=4, n_redundant=0, weights=[0.9], class_sep=1.5, random_state=0
)
X = X.astype(np.float32)
sample_weights = np.where(y == 1, 0.5 / np.mean(y == 1), 0.5 / np.mean(y == 0)).astype(np.float32)
exact = LogisticRegression(C=np.inf).fit(X, y, sample_weights)

# %%
# A network without hidden layers is a logistic regression. Cut before its sigmoid, it returns raw
# scores, from which the loss is computed with less rounding.

warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPClassifier(hidden_layer_sizes=(), max_iter=1, random_state=0).fit(X, y)
onx = to_onnx(mlp, X[:1], target_opset=15, options={"zipmap": False})
options = {"learning_rate": 0.1, "batch_size": 50, "max_iter": 200, "random_state": 0}
scores = select_model_inputs_outputs(onx, outputs=["add_result"])
outside = OrtGradientForwardBackwardOptimizer(
    scores, learning_loss=NegLogLearningLoss(), weight_name="weight", **options
).fit(X, y, sample_weights)

# %%
# The same loss in the model, computed from the probabilities.

onx_loss = add_loss_output(onx, "log", weight_name="weight", output_index="probabilities")
inside = OrtGradientOptimizer(onx_loss, **options).fit(X, y, sample_weights)

coefficients = {"scikit-learn": [*exact.coef_[0], *exact.intercept_]}
state = {name: value.numpy() for name, value in outside.get_state().items()}
for name, found in (("raw scores", state), ("probabilities", inside.get_state())):
    coefficients[name] = [*found["coefficient"].ravel(), *found["intercepts"].ravel()]
table = Table("loss of", "w0", "w1", "w2", "w3", "intercept")
for name, numbers in coefficients.items():
    table.add_row(name, *(f"{number:.3f}" for number in numbers))
    np.testing.assert_allclose(numbers, coefficients["scikit-learn"], atol=0.1)
Console().print(table)

# %%
# Without weights, three quarters of the rare class are missed.

trained = InferenceSession(outside.get_trained_onnx(onx).SerializeToString())
labels = {"without weights": LogisticRegression(C=np.inf).fit(X, y).predict(X)}
labels |= {"scikit-learn": exact.predict(X), "onnxgrad": trained.run(["label"], {"X": X})[0]}
figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for ax, (name, label) in zip(axes, labels.items()):
    ConfusionMatrixDisplay.from_predictions(y, label, normalize="true", ax=ax, colorbar=False)
    ax.set_title(f"{name}: {balanced_accuracy_score(y, label):.3f}")
figure.suptitle("balanced accuracy, and the share of rows of each class")
plt.show()
assert np.mean(labels["onnxgrad"] == labels["scikit-learn"]) > 0.98
