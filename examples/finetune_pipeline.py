"""A scikit-learn pipeline goes on training on new data, and stays one ONNX file.

A scaler, a PCA and a logistic regression are fitted to old data, and exported. New data of another
distribution come in batches: the regression follows them, the scaler and the PCA stay. On the same
data, the result is the optimum that scikit-learn finds behind the same transformers.
"""

import time

import numpy as np
import onnxruntime as ort
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X, names = X.astype(np.float32), np.array([f"digit {i}" for i in range(10)])
old, new, test = slice(0, 600), slice(600, 1400), slice(1400, None)
model = make_pipeline(StandardScaler(), PCA(30), LogisticRegression(C=0.1, max_iter=1000))
model.fit(X[old], names[y[old]])
X[600:] = X[600:] * 0.7 + 2  # the new scanner has less contrast
original = to_onnx(model, X[:1], options={"zipmap": False})
print(og.trainable(original))

more = og.OnnxClassifier(original, optimizer="adam", learning_rate=0.003, random_state=0)
for epoch in range(30):
    for rows in np.array_split(np.random.default_rng(epoch).permutation(800), 8):
        more.partial_fit(X[new][rows], names[y[new]][rows])
before, after = (e.score(X[test], names[y[test]]) for e in (model, more))
print(f"accuracy on new data: {before:.3f} before, {after:.3f} after")
assert after > before
# To the end, both without a penalty
whole = og.OnnxClassifier(original, learning_rate=0.01, max_iter=300, batch_size=800, tol=None)
whole.fit(X[new], names[y[new]])
peer = LogisticRegression(C=np.inf, max_iter=300).fit(model[:2].transform(X[new]), names[y[new]])
expected = peer.score(model[:2].transform(X[test]), names[y[test]])
print(
    f"trained to the end: {whole.score(X[test], names[y[test]]):.3f}, scikit-learn {expected:.3f}"
)
assert abs(whole.score(X[test], names[y[test]]) - expected) < 0.03

trained = more.to_onnx()
assert [n.op_type for n in trained.graph.node] == [n.op_type for n in original.graph.node]
seconds = {}
for file in [original, trained] * 2:
    session = ort.InferenceSession(file.SerializeToString())
    labels = session.run(None, {"X": X[test]})[0]
    began = time.perf_counter()
    for _ in range(200):
        session.run(None, {"X": X[test]})
    seconds.setdefault(id(file), []).append(time.perf_counter() - began)
np.testing.assert_array_equal(labels, more.predict(X[test]))
before, after = map(min, seconds.values())
print(f"{after / before:.2f} x the time of the original")
