"""
What a classifier looks at
==========================

The gradient of the score of a class with respect to the pixels says which pixels move it. Its size
is a saliency map (`Simonyan et al. 2013 <https://arxiv.org/abs/1312.6034>`_). This is what
``og.explain.saliency`` computes; :doc:`Explain a model </explain>` has more methods.
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
trainer = og.Trainer(DATA / "digits_cnn.onnx", "cross_entropy", learning_rate=0.005)
model = trainer.fit(X, y, epochs=10).model

# %%
# ``vjp`` returns a model that computes the outputs, and the gradient of their sum weighted by
# ``logits_grad``, with respect to the inputs. The weight is 1 for the score of the class.

session = InferenceSession(og.vjp(model).SerializeToString())
images, classes = X[:8], y[:8]
seed = np.eye(10, dtype=np.float32)[classes]
logits, gradient = session.run(["logits", "image_grad"], {"image": images, "logits_grad": seed})

# %%
# The check: a small step along the gradient raises each score by as much as the gradient says.

step = 1e-3 * gradient / np.abs(gradient).max()
[moved] = session.run(["logits"], {"image": images + step, "logits_grad": seed})
rise = np.sum((moved - logits) * seed, axis=1)
np.testing.assert_allclose(rise, np.sum(gradient * step, axis=(1, 2, 3)), rtol=0.1)
print(rise)

# %%
figure, axes = plt.subplots(2, 8, figsize=(9, 2.6), layout="constrained")
for image, slope, label, (top, bottom) in zip(images, gradient, classes, axes.T, strict=True):
    top.imshow(image[0], cmap="gray_r")
    top.set_title(str(label))
    bottom.imshow(np.abs(slope[0]), cmap="magma")
for ax in axes.flat:
    ax.axis("off")
plt.show()
