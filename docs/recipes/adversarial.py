"""
Adversarial images
==================

The fast gradient sign method (`Goodfellow et al. 2015 <https://arxiv.org/abs/1412.6572>`_) moves
every pixel by a small amount in the direction that raises the loss. A change that hardly shows
misleads the classifier; a random change of the same size does not. ``og.explain.fgsm`` and ``pgd``
are the same attacks as functions.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession
from pyarrow import parquet

import onnxgrad as og

DATA = Path(__file__).parents[2] / "data"
table = parquet.read_table(DATA / "digits.parquet")
X = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1).reshape(-1, 1, 8, 8)
y = table["label"].to_numpy()
X_test, y_test = X[1200:], y[1200:]
trainer = og.Trainer(DATA / "digits_cnn.onnx", "cross_entropy", learning_rate=0.005)
trainer.fit(X[:1200], y[:1200], epochs=10)

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
plt.xlabel("change of each pixel, which is between 0 and 1")
plt.ylabel("accuracy")
plt.legend()
plt.show()
