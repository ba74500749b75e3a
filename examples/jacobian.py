"""What moves a prediction: the Jacobian of a network of scikit-learn, and a Hessian-vector product.

The class probabilities of a network trained on the iris data are differentiated by the four lengths
that it sees, for all flowers in one run; central differences give the same numbers.
"""

import numpy as np
from onnxruntime import InferenceSession
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from onnxgrad import hvp, jacobian, jvp

data = load_iris()
X = StandardScaler().fit_transform(data.data)
network = MLPClassifier((16,), activation="tanh", max_iter=2000, random_state=0)
network.fit(X, data.target)
model = to_onnx(network, X[:1], options={"zipmap": False})
features, classes = data.feature_names, data.target_names


def run(made, **inputs):
    session = InferenceSession(made.SerializeToString())
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, inputs)))


def differences(function, x, v, h=1e-5):
    """Return the derivative of a function along v."""
    return (function(x + h * v) - function(x - h * v)) / (2 * h)


# (150, 3, 4): how each probability of a flower changes with each of its lengths
slopes = run(jacobian(model, outputs=["probabilities"], batched=True), X=X)
slopes = slopes["probabilities_X_jacobian"]
for i, unit in enumerate(np.eye(4)):
    np.testing.assert_allclose(
        slopes[:, :, i], differences(network.predict_proba, X, unit), rtol=1e-3, atol=1e-4
    )

table = Table("mean |slope| of the probability of", *features)
for name, row in zip(classes, np.abs(slopes).mean(axis=0)):
    table.add_row(str(name), *(f"{s:.3f}" for s in row))
Console().print(table)

# in one direction there is no need for the matrix
v = np.random.default_rng(0).standard_normal(X.shape)
tangent = run(jvp(model, outputs=["probabilities"]), X=X, X_tangent=v)["probabilities_tangent"]
np.testing.assert_allclose(tangent, np.einsum("nij,nj->ni", slopes, v), rtol=1e-3, atol=1e-4)

# the curvature of the first class's probability, along the same direction
fed = {"probabilities_grad": np.eye(3)[np.zeros(150, int)], "X_vector": v}
curved = run(hvp(model, outputs=["probabilities"]), X=X, **fed)
bent = differences(lambda x: run(hvp(model, outputs=["probabilities"]), X=x, **fed)["X_grad"], X, v)
np.testing.assert_allclose(curved["X_hvp"], bent, rtol=1e-3, atol=1e-3)
print(f"v H v of the probability of {classes[0]}: {np.sum(v * curved['X_hvp']):.3f}")
