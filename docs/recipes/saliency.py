"""
What a classifier looks at
==========================

The gradient of the score of a class with respect to the pixels says which pixels move it. Its size
is a saliency map (`Simonyan et al. 2013 <https://arxiv.org/abs/1312.6034>`_). This is what
``og.explain.saliency`` computes; :doc:`Explain a model </explain>` has more methods.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from sklearn.datasets import load_digits

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32).reshape(-1, 1, 8, 8)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> cnn (float[N,1,8,8] image) => (float[N,10] logits) {
        a = Conv <pads = [1,1,1,1]> (image, w1)  b = Relu(a)  c = Conv <pads = [1,1,1,1]> (b, w2)
        d = Relu(c)  e = MaxPool <kernel_shape = [2,2], strides = [2,2]> (d)  f = Flatten(e)
        logits = MatMul(f, w3) }
""")
for name, *shape in (("w1", 16, 1, 3, 3), ("w2", 32, 16, 3, 3), ("w3", 512, 10)):
    weight = np.random.default_rng(0).normal(0, 0.1, shape).astype("f4")
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
trainer = og.Trainer(model, "cross_entropy", learning_rate=0.005)
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
