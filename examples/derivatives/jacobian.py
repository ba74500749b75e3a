"""Which inputs change a prediction
================================

The class probabilities of a network of scikit-learn are differentiated with respect to the four
lengths of an iris flower, for all flowers in one run: a Jacobian for each flower. Central
differences have the same numbers.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession
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


def run(model, **inputs):
    session = InferenceSession(model.SerializeToString())
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, inputs)))


def differences(function, x, v, h=1e-5):
    """Return the derivative of a function along v."""
    return (function(x + h * v) - function(x - h * v)) / (2 * h)


# %%
# ``batched=True`` proves that rows do not mix, and computes the Jacobian of each row only: the
# result has the shape (150, 3, 4), a probability for each class and a slope for each length.

slopes = run(jacobian(model, outputs=["probabilities"], batched=True), X=X)
slopes = slopes["probabilities_X_jacobian"]
for i, unit in enumerate(np.eye(4)):
    np.testing.assert_allclose(
        slopes[:, :, i], differences(network.predict_proba, X, unit), rtol=1e-3, atol=1e-4
    )
means = np.abs(slopes).mean(axis=0)
plt.imshow(means, cmap="viridis")
plt.xticks(range(4), [name.removesuffix(" (cm)") for name in data.feature_names])
plt.yticks(range(3), data.target_names)
for (i, j), mean in np.ndenumerate(means):
    plt.text(j, i, f"{mean:.3f}", ha="center", va="center", color="white")
plt.title("mean |slope| of the probability")
plt.show()

# %%
# In one direction v there is no need for the matrix: ``jvp`` computes J v in about the time of two
# predictions.

v = np.random.default_rng(0).standard_normal(X.shape)
tangent = run(jvp(model, outputs=["probabilities"]), X=X, X_tangent=v)["probabilities_tangent"]
np.testing.assert_allclose(tangent, np.einsum("nij,nj->ni", slopes, v), rtol=1e-3, atol=1e-4)

# %%
# ``hvp`` computes H v, the curvature of the first class's probability along the same direction.

second = hvp(model, outputs=["probabilities"])
fed = {"probabilities_grad": np.eye(3)[np.zeros(150, int)], "X_vector": v}
curved = run(second, X=X, **fed)["X_hvp"]
bent = differences(lambda x: run(second, X=x, **fed)["X_grad"], X, v)
np.testing.assert_allclose(curved, bent, rtol=1e-3, atol=1e-3)
print(f"largest difference to central differences: {np.abs(curved - bent).max():.1e}")
