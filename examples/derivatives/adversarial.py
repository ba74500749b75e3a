"""Adversarial images
==================

The fast gradient sign method (`Goodfellow et al. 2015 <https://arxiv.org/abs/1412.6572>`_) moves
every pixel by a small amount in the direction that raises the loss. A change that hardly shows
misleads the classifier; a random change of the same size does not. ``og.explain.fgsm`` and ``pgd``
are the same attacks as functions.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from sklearn.datasets import load_digits

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
X_test, y_test = X[1200:], y[1200:]
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,64] image) => (float[N,10] logits)
    { a = MatMul(image, w1)  b = Relu(a)  logits = MatMul(b, w2) }""")
for name, shape in {"w1": (64, 64), "w2": (64, 10)}.items():
    weight = np.random.default_rng(0).normal(0, 0.1, shape).astype("f4")
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
trainer = og.Trainer(model, "cross_entropy", learning_rate=0.005).fit(X[:1200], y[:1200], epochs=10)

# %%
# The gradient model of the loss, with respect to the image only.

with_loss = og.add_loss_output(trainer.model, "cross_entropy")
options = og.DerivativeOptions.Loss | og.DerivativeOptions.FillGrad
gradient_model = og.onnx_derivative(
    with_loss, weights=[], inputs=["image"], options=options, loss="loss", label="label"
)
session = InferenceSession(gradient_model.SerializeToString())
[gradient] = session.run(["image_grad"], {"image": X_test, "label": y_test})
noise = np.random.default_rng(0).normal(size=gradient.shape)


def accuracy(images):
    """Return the share of images that the model gets right."""
    return np.mean(trainer.predict(images.astype(np.float32)).argmax(axis=1) == y_test)


sizes = np.linspace(0, 0.2, 9)
attacked = [accuracy(X_test + size * np.sign(gradient)) for size in sizes]
random = [accuracy(X_test + size * np.sign(noise)) for size in sizes]
print("attacked", np.round(attacked, 2), "random", np.round(random, 2))
assert attacked[4] < 0.5 < 0.85 < random[4]

# %%
plt.plot(sizes, attacked, label="along the sign of the gradient")
plt.plot(sizes, random, label="random signs")
plt.gca().set(xlabel="change of each pixel, which is between 0 and 1", ylabel="accuracy")
plt.legend()
plt.show()
