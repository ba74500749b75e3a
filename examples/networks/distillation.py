"""Distillation: a linear model learns from a CNN
==============================================

A small model, the student, learns from the labels and from the probabilities that a larger model,
the teacher, predicts. The teacher is a second ONNX file. The loss is compared with PyTorch's.
"""

import io
import warnings

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, kl_div

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = X.reshape(-1, 1, 8, 8).astype(np.float32) / 16
X, X_test, y, y_test = X[:1000], X[1000:], y[:1000], y[1000:]

# %%
# The teacher is a CNN, which PyTorch exports and ``Trainer`` trains.

torch.manual_seed(0)
layers = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256, 10))
file = io.BytesIO()
warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*legacy.*")
names = {"input_names": ["image"], "output_names": ["logits"], "dynamic_axes": {"image": {0: "N"}}}
torch.onnx.export(net, (torch.tensor(X[:2]),), file, **names, dynamo=False)
cnn = og.Trainer(file.getvalue(), "cross_entropy", learning_rate=0.005, metrics=["accuracy"])
cnn.fit(X, y, epochs=5)

# %%
# The student is a linear model. The loss of the student is the sum of two terms: ``alpha`` times
# the divergence from the probabilities of the teacher, scaled by the squared temperature, and ``1 -
# alpha`` times the cross entropy of the labels. The temperature brings the probabilities of the
# teacher closer to each other.

student = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,1,8,8] image) => (float[N,10] logits)
    { flat = Flatten(image)  logits = Gemm(flat, weight, bias) }
""")
for name, shape in (("weight", (64, 10)), ("bias", (10,))):
    student.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, "f4"), name))
T, alpha = 3.0, 0.7
loss = og.losses.distillation(cnn.model, temperature=T, alpha=alpha)
trainer = og.Trainer(student, loss, learning_rate=0.02, metrics=["accuracy"])
before = trainer.evaluate(X_test, y_test)
trainer.fit(X, y, epochs=20)
after = trainer.evaluate(X_test, y_test)
assert after["loss"] < before["loss"] / 2
assert after["accuracy"] > 0.85

table = Table("test images", "loss of distillation", "accuracy")
table.add_row("teacher", "", f"{cnn.evaluate(X_test, y_test)['accuracy']:.3f}")
for name, results in (("student, untrained", before), ("student, trained", after)):
    table.add_row(name, f"{results['loss']:.4f}", f"{results['accuracy']:.3f}")
Console().print(table)

# %%
# PyTorch computes the same loss from the logits of the student and the teacher.

logits, targets = (torch.tensor(m.predict(X_test)) for m in (trainer, cnn))
soft = kl_div(
    (logits / T).log_softmax(1), (targets / T).log_softmax(1), log_target=True,
    reduction="batchmean",
)  # fmt: skip
expected = alpha * T**2 * soft + (1 - alpha) * cross_entropy(logits, torch.tensor(y_test))
np.testing.assert_allclose(after["loss"], expected.item(), rtol=1e-4)

# %%
# The weights of the student for each digit, as a picture: red pixels raise the logit of this digit,
# and blue pixels lower it.

weight = trainer.state.weights["weight"]
figure, axes = plt.subplots(2, 5, figsize=(8, 3.6), layout="constrained")
for digit, ax in enumerate(axes.flat):
    picture, limit = weight[:, digit].reshape(8, 8), np.abs(weight).max()
    ax.imshow(picture, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.set_title(digit)
    ax.axis("off")
plt.show()
