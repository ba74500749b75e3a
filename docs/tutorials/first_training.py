"""
Your first training
===================

In five minutes: take a model that exists only as an ``.onnx`` file, train it on handwritten digits,
and run the result with onnxruntime. You need Python and this package; neither PyTorch nor
scikit-learn.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from pyarrow import parquet

import onnxgrad as og

# %%
# The data
# --------
#
# 1,797 scanned digits of 8 x 8 pixels, in a Parquet file. Any array works just as well: a trainer
# takes numpy arrays, tables of pandas, polars or pyarrow, files, and iterables of batches.

DATA = Path(__file__).parents[2] / "data"
table = parquet.read_table(DATA / "digits.parquet")
X = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1).reshape(-1, 1, 8, 8)
y = table["label"].to_numpy()
X_train, X_test, y_train, y_test = X[:1400], X[1400:], y[:1400], y[1400:]
print(X_train.shape, X_train.dtype, y_train.shape, y_train.dtype)

figure, axes = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for ax, image, label in zip(axes.flat, X_train[:, 0], y_train, strict=False):
    ax.imshow(image, cmap="gray_r")
    ax.set_title(str(label), fontsize=9)
    ax.axis("off")

# %%
# The model
# ---------
#
# A small convolutional network with random weights, exported by PyTorch. `onnx_simple_text_plot`
# shows what the file computes: from images ``(N, 1, 8, 8)`` to ten scores, one for each digit.

MODEL = DATA / "digits_cnn.onnx"
print(og.onnx_simple_text_plot(MODEL))

# %%
# An ``.onnx`` file does not say which of its tensors were parameters. They are found by the role
# that they have in the graph, and `trainable` says why:

print(og.trainable(MODEL))

# %%
# The trainer
# -----------
#
# A trainer has a model, a loss, an optimizer and a learning rate. The model is never modified.
# Before training, it guesses: about one digit in ten is right.

trainer = og.Trainer(
    MODEL,
    loss="cross_entropy",
    optimizer="adam",
    learning_rate=0.005,
    metrics=["accuracy"],
)
before = trainer.evaluate(X_test, y_test)
print(before)

# %%
# ``fit`` trains, as in scikit-learn. ``validation=0.1`` holds out a tenth of the rows, on which the
# model is evaluated after every epoch.

trainer.fit(X_train, y_train, epochs=12, batch_size=32, validation=0.1)
after = trainer.evaluate(X_test, y_test)
print(after)
assert before["accuracy"] < 0.3
assert after["accuracy"] > 0.93

# %%
# ``history`` has one entry for every epoch.

epochs = [entry["epoch"] for entry in trainer.history]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(epochs, [entry["loss"] for entry in trainer.history], label="training")
left.plot(epochs, [entry["validation_loss"] for entry in trainer.history], label="validation")
left.set(xlabel="epoch", ylabel="cross entropy", yscale="log")
left.legend()
right.plot(epochs, [entry["validation_accuracy"] for entry in trainer.history], color="C1")
right.set(xlabel="epoch", ylabel="validation accuracy")

# %%
# The result
# ----------
#
# ``save`` writes the same file with new weights: the same nodes, names and opset. Whatever ran the
# old file runs the new one, such as the ordinary onnxruntime.

trainer.save("digits.onnx")
session = onnxruntime.InferenceSession("digits.onnx")
[scores] = session.run(None, {"image": X_test})
predicted = scores.argmax(axis=1)
np.testing.assert_allclose(np.mean(predicted == y_test), after["accuracy"])

# %%
# These are the first test images that it gets wrong, with the prediction and, in parentheses, the
# label.

wrong = np.flatnonzero(predicted != y_test)[:8]
figure, axes = plt.subplots(1, 8, figsize=(8, 1.4), layout="constrained")
for ax in axes:
    ax.axis("off")
for ax, i in zip(axes, wrong, strict=False):
    ax.imshow(X_test[i, 0], cmap="gray_r")
    ax.set_title(f"{predicted[i]} ({y_test[i]})", fontsize=9)
plt.show()

# %%
# What happened
# -------------
#
# ``fit`` wrote one ONNX model that holds the forward pass, the loss, its gradient, the optimizer
# and the loop over the batches. onnxruntime ran it; no batch passed through Python.
#
# Next: :doc:`fine-tune a model </auto_tutorials/finetune>` that already knows something, or read
# :doc:`the concepts </concepts>` on one page.
