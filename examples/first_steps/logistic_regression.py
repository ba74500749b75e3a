"""Three classes and their borders
===============================

A linear model with a score for each class and the cross entropy of scores and labels is a logistic
regression. Without a penalty, it ends where that of scikit-learn ends.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression

import onnxgrad as og

X, y = make_blobs(300, centers=[[-2, 0], [2, 0], [0, 2.5]], cluster_std=1.2, random_state=0)
X = X.astype(np.float32)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> softmax (float[N,2] x) => (float[N,3] scores)
    { scores = Gemm(x, w, b) }
""")
for name, shape in (("w", (2, 3)), ("b", (3,))):
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, "f4"), name))

# %%
# The labels are numbers of classes. All rows are one batch, so that the loss falls to its minimum
# without noise. Metrics are computed with the validation data.

trainer = og.Trainer(
    model, "cross_entropy", learning_rate=og.schedules.cosine(0.3), metrics=["accuracy"]
)
trainer.fit(X, y, epochs=300, batch_size=300, validation=(X, y))
print({name: round(value, 4) for name, value in trainer.history[-1].items()})

# %%
# Adding the same number to all scores changes no probability, so the weights are compared after
# their mean is subtracted.

exact = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(X, y)
w = trainer.state.weights["w"]
np.testing.assert_allclose(
    (w - w.mean(axis=1, keepdims=True)).T, exact.coef_ - exact.coef_.mean(axis=0), atol=2e-2
)

# %%
# The probabilities on a grid: each class has its region, and the borders are straight lines. The
# dashed lines are those of scikit-learn.

grid = np.stack(np.meshgrid(*[np.linspace(-6, 6, 200, dtype="f4")] * 2), axis=-1)
scores = trainer.predict(grid.reshape(-1, 2))
probability = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
theirs = exact.predict_proba(grid.reshape(-1, 2))
np.testing.assert_allclose(probability, theirs, atol=0.01)
plt.imshow(probability.reshape(200, 200, 3), extent=(-6, 6, -6, 6), origin="lower", alpha=0.6)
classes = theirs.argmax(axis=1).reshape(200, 200)
plt.contour(*grid.transpose(2, 0, 1), classes, [0.5, 1.5], colors="black", linestyles="--")
plt.scatter(*X.T, c=np.eye(3)[y], edgecolors="white", s=20)
plt.show()
