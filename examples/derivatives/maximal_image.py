"""Which image is most a three
===========================

The gradient of a classifier with respect to its input says how to change an image so that a class
becomes more probable. Begun with gray and repeated, this draws what the model takes for the ideal
digit. A penalty keeps the images small.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from scipy.special import softmax
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = X / 16
warnings.simplefilter("ignore", ConvergenceWarning)
network = MLPClassifier((64,), activation="tanh", alpha=0.1, max_iter=300, random_state=0)
network.fit(X, y)
model = to_onnx(network, X[:1], options={"zipmap": False})
model = og.graph.select_model_inputs_outputs(model, ["probabilities"])

# %%
# The gradient of log p with respect to the image: ``probabilities_grad`` is 1 / p for the class,
# and 0 for the others.

gradient = og.onnx_derivative(
    model, weights=[], inputs=["X"], options=og.DerivativeOptions.KeepOutputs
)
session = onnxruntime.InferenceSession(gradient.SerializeToString())
predict = onnxruntime.InferenceSession(model.SerializeToString())


def slope(images, classes):
    """Return log p of a class for each image, and its gradient."""
    p = predict.run(["probabilities"], {"X": images})[0]
    chosen = p[range(len(p)), classes]
    factors = np.eye(10)[classes] / chosen[:, None]
    [found] = session.run(["X_grad"], {"X": images, "probabilities_grad": factors})
    return np.log(chosen), found


# %%
# By hand: with W and V the weights of both layers and h the hidden values, the gradient is
# W (1 - h²) V (e - p).

log_p, found = slope(X[:50], y[:50])
h = np.tanh(X[:50] @ network.coefs_[0] + network.intercepts_[0])
p = softmax(h @ network.coefs_[1] + network.intercepts_[1], axis=1)
expected = ((np.eye(10)[y[:50]] - p) @ network.coefs_[1].T * (1 - h**2)) @ network.coefs_[0].T
np.testing.assert_allclose(found, expected, atol=1e-5)
print(f"largest difference to the gradient by hand: {np.abs(found - expected).max():.1e}")

# %%
# Gradient ascent for all ten classes at once, with pixels between 0 and 1.

images, classes = np.full((10, 64), 0.5), np.arange(10)
history = []
for _ in range(150):
    log_p, direction = slope(images, classes)
    history.append(log_p)
    images = np.clip(images + 0.1 * (direction - 0.05 * images), 0, 1)
plt.plot(np.exp(history), label=list(map(str, classes)))
plt.xscale("symlog")
plt.xlabel("step")
plt.ylabel("probability of the class")
plt.legend()
plt.show()
assert np.all(np.exp(history[-1]) > 0.95)

# %%
# What maximizes each class, above the mean of the real images of the class.

figure, axes = plt.subplots(2, 10, figsize=(11, 2.6), layout="constrained")
for digit, column in enumerate(axes.T):
    for ax, image in zip(column, (images[digit], X[y == digit].mean(axis=0))):
        ax.imshow(image.reshape(8, 8), cmap="gray_r")
        ax.axis("off")
    column[0].set_title(digit)
plt.show()
# sphinx_gallery_thumbnail_number = 2
