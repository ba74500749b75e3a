"""A pipeline goes on training on new data
=======================================

A scaler, a PCA and a logistic regression are fitted to old data and exported as one file. New data
of another distribution come in batches: the regression follows them, the scaler and the PCA stay.
"""

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X, y = X.astype(np.float32), np.array([f"digit {i}" for i in range(10)])[y]
old, new, test = slice(0, 600), slice(600, 1400), slice(1400, None)
model = make_pipeline(StandardScaler(), PCA(30), LogisticRegression(C=0.1, max_iter=1000))
model.fit(X[old], y[old])
X[600:] = X[600:] * 0.7 + 2  # the new scanner has less contrast
original = to_onnx(model, X[:1], options={"zipmap": False})

# %%
# What trains by default: the coefficients and intercepts of the regression.

print(og.trainable(original))

# %%
# ``partial_fit`` takes one batch after the other. The accuracy of new images rises.

more = og.OnnxClassifier(original, optimizer="adam", learning_rate=0.003, random_state=0)
scores = [model.score(X[test], y[test])]
for epoch in range(30):
    for rows in np.array_split(np.random.default_rng(epoch).permutation(800), 8):
        more.partial_fit(X[new][rows], y[new][rows])
    scores.append(more.score(X[test], y[test]))
plt.plot(scores)
plt.xlabel("epoch on new data")
plt.ylabel("accuracy")
plt.show()
assert scores[-1] > scores[0]

# %%
# Trained to the end without a penalty, the result is the optimum that scikit-learn finds behind the
# same scaler and PCA.

whole = og.OnnxClassifier(original, learning_rate=0.01, max_iter=300, batch_size=800, tol=None)
whole.fit(X[new], y[new])
peer = LogisticRegression(C=np.inf, max_iter=300).fit(model[:2].transform(X[new]), y[new])
expected = peer.score(model[:2].transform(X[test]), y[test])
found = whole.score(X[test], y[test])
assert abs(found - expected) < 0.03
table = Table("", "accuracy for new images")
for name, score in (
    ("before", scores[0]),
    ("30 epochs of partial_fit", scores[-1]),
    ("trained to the end", found),
    ("scikit-learn, trained to the end", expected),
):
    table.add_row(name, f"{score:.3f}")
Console().print(table)

# %%
# The trained file has the nodes of the original.

assert [n.op_type for n in more.to_onnx().graph.node] == [n.op_type for n in original.graph.node]
