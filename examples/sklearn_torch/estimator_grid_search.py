"""A classifier in a grid search of scikit-learn
=============================================

``OnnxClassifier`` trains an ONNX model and is an estimator, so it works in pipelines and grid
searches. Its accuracy has to be about that of ``MLPClassifier``, and the file that it returns has
to predict the same labels.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import RocCurveDisplay
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxgrad.sklearn import OnnxClassifier

data = load_breast_cancer()
y = data.target_names[data.target]  # "benign" and "malignant"
X_train, X_test, y_train, y_test = train_test_split(data.data, y, random_state=0)

# %%
# Without a model, ``OnnxClassifier`` builds a multilayer perceptron. Two learning rates times two
# class weights are four candidates, each trained on three folds. (A script that sets ``n_jobs``
# protects the search by ``if __name__ == "__main__":``, as processes import the script.)

classifier = OnnxClassifier(hidden_layer_sizes=(30,), max_iter=60, tol=None, random_state=0)
grid = {
    "onnxclassifier__learning_rate": [1e-4, 1e-2],
    "onnxclassifier__class_weight": [None, "balanced"],
}
search = GridSearchCV(make_pipeline(StandardScaler(), classifier), grid, cv=3)
search.fit(X_train, y_train)
table = Table("learning rate", "class weight", "accuracy", "±")
results = search.cv_results_
for params, mean, std in zip(
    results["params"], results["mean_test_score"], results["std_test_score"]
):
    table.add_row(*(str(params[name]) for name in grid), f"{mean:.3f}", f"{std:.3f}")
Console().print(table)

# %%
# Rows that none has seen: accuracy and ROC curves of the best candidate and of ``MLPClassifier``.

mlp = MLPClassifier(hidden_layer_sizes=(30,), learning_rate_init=1e-2, max_iter=500, random_state=0)
peer = make_pipeline(StandardScaler(), mlp).fit(X_train, y_train)
theirs, ours = (e.score(X_test, y_test) for e in (peer, search))
print(f"accuracy: MLPClassifier {theirs:.3f}, OnnxClassifier {ours:.3f}")
assert ours > theirs - 0.03
ax = plt.gca()
for name, estimator in (("MLPClassifier", peer), ("OnnxClassifier", search)):
    RocCurveDisplay.from_estimator(estimator, X_test, y_test, ax=ax, name=name)
plt.show()

# %%
# The file has the labels, and the same probabilities.

scaler, best = search.best_estimator_
file = best.to_onnx().SerializeToString()
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
labels, probabilities = session.run(None, {"X": scaler.transform(X_test)})
np.testing.assert_array_equal(labels, search.predict(X_test))
np.testing.assert_allclose(probabilities, search.predict_proba(X_test), atol=1e-9)
