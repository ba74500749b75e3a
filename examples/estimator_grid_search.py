"""A pipeline with a classifier that trains an ONNX model, in a grid search of scikit-learn.

Its accuracy has to be about that of `MLPClassifier`; the file it returns has to predict the same
labels.
"""

import numpy as np
import onnxruntime
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxgrad.sklearn import OnnxClassifier

if __name__ == "__main__":  # where processes are spawned, they import this file
    data = load_breast_cancer()
    y = data.target_names[data.target]  # "benign" and "malignant"
    X_train, X_test, y_train, y_test = train_test_split(data.data, y, random_state=0)

    classifier = OnnxClassifier(hidden_layer_sizes=(30,), max_iter=60, tol=None, random_state=0)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), classifier),
        {
            "onnxclassifier__learning_rate": [1e-4, 1e-2],
            "onnxclassifier__class_weight": [None, "balanced"],
        },
        cv=3,
        n_jobs=2,
    ).fit(X_train, y_train)
    print("Best:", search.best_params_, f"accuracy {search.best_score_:.3f}")

    mlp = MLPClassifier(
        hidden_layer_sizes=(30,), learning_rate_init=1e-2, max_iter=500, random_state=0
    )
    theirs = make_pipeline(StandardScaler(), mlp).fit(X_train, y_train).score(X_test, y_test)
    ours = search.score(X_test, y_test)
    print(f"Accuracy of other rows: MLPClassifier {theirs:.3f}, OnnxClassifier {ours:.3f}")
    assert ours > theirs - 0.03

    scaler, best = search.best_estimator_
    file = best.to_onnx().SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    labels, probabilities = session.run(None, {"X": scaler.transform(X_test)})
    np.testing.assert_array_equal(labels, search.predict(X_test))
    np.testing.assert_allclose(probabilities, search.predict_proba(X_test), atol=1e-9)
