"""Binary classification with row weights: the log loss of raw scores, and that of probabilities.

One row in ten is of class 1; the weights make both classes count the same, as in scikit-learn.
"""

import warnings

import numpy as np
from onnxruntime import InferenceSession
from skl2onnx import to_onnx
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.neural_network import MLPClassifier

from onnxgrad import (
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
row_weights = np.where(y == 1, 0.5 / np.mean(y == 1), 0.5 / np.mean(y == 0)).astype(np.float32)
exact = LogisticRegression(C=np.inf).fit(X, y, row_weights)

# A network without hidden layers is a logistic regression, too.
warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPClassifier(hidden_layer_sizes=(), max_iter=1, random_state=0).fit(X, y)
onx = to_onnx(mlp, X[:1], target_opset=15, options={"zipmap": False})
options = {"learning_rate": 0.1, "batch_size": 50, "max_iter": 200, "random_state": 0}
scores = select_model_inputs_outputs(onx, outputs=["add_result"])  # before the sigmoid
partial = OrtGradientForwardBackwardOptimizer(
    scores, learning_loss=NegLogLearningLoss(), weight_name="weight", **options
).fit(X, y, row_weights)

onx_loss = add_loss_output(onx, "log", weight_name="weight", output_index="probabilities")
full = OrtGradientOptimizer(onx_loss, **options).fit(X, y, row_weights)

trained = InferenceSession(partial.get_trained_onnx(onx).SerializeToString())
labels = {
    "unweighted": LogisticRegression(C=np.inf).fit(X, y).predict(X),
    "scikit-learn": exact.predict(X),
    "onnxgrad": trained.run(["label"], {"X": X})[0],
}
for name, label in labels.items():
    print(f"{name:13} balanced accuracy {balanced_accuracy_score(y, label):.3f}")

coef = {name: value.numpy() for name, value in partial.get_state().items()}
for name, found in (("raw scores", coef), ("probabilities", full.get_state())):
    found = [*found["coefficient"].ravel(), *found["intercepts"].ravel()]
    print(f"{name:13}", np.round(found, 3))
    np.testing.assert_allclose(found, [*exact.coef_[0], *exact.intercept_], atol=0.1)
print("scikit-learn ", np.round([*exact.coef_[0], *exact.intercept_], 3))
