"""Which digits are mistaken for which
===================================

A small CNN reads digits. The metrics of the trainer, with the confusion matrix, equal those of
scikit-learn, and the images that are mistaken are shown.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from rich.console import Console
from rich.table import Table
from sklearn import metrics
from sklearn.datasets import load_digits

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = X.reshape(-1, 1, 8, 8).astype(np.float32) / 16
X, X_test, y, y_test = X[:900], X[900:], y[:900], y[900:]

# %%
# A convolution, a pooling and a linear layer, with random weights.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> cnn (float[N,1,8,8] image) => (float[N,10] logits)
    { a = Conv <pads = [1,1,1,1]> (image, kernel, shift)  b = Relu(a)
      c = MaxPool <kernel_shape = [2,2], strides = [2,2]> (b)
      d = Flatten(c)  logits = Gemm(d, weight, bias) }
""")
rng = np.random.default_rng(0)
for name, shape in (("kernel", (16, 1, 3, 3)), ("shift", 16), ("weight", (256, 10)), ("bias", 10)):
    array = rng.normal(0, 0.1, shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

names = ["accuracy", "balanced_accuracy", "f1_macro", "top_2_accuracy", "confusion_matrix"]
trainer = og.Trainer(model, "cross_entropy", learning_rate=og.schedules.cosine(0.01), metrics=names)
trainer.fit(X, y, epochs=10, batch_size=30)
results = trainer.evaluate(X_test, y_test)

# %%
# The same numbers, computed by scikit-learn from the predictions.

logits = trainer.predict(X_test)
guesses = logits.argmax(axis=1)
expected = {
    "accuracy": metrics.accuracy_score(y_test, guesses),
    "balanced_accuracy": metrics.balanced_accuracy_score(y_test, guesses),
    "f1_macro": metrics.f1_score(y_test, guesses, average="macro"),
    "top_2_accuracy": metrics.top_k_accuracy_score(y_test, logits, k=2),
}
table = Table("metric", "onnxgrad", "scikit-learn")
for name, value in expected.items():
    table.add_row(name, f"{results[name]:.4f}", f"{value:.4f}")
    np.testing.assert_allclose(results[name], value, atol=1e-6)
Console().print(table)
matrix = metrics.confusion_matrix(y_test, guesses)
np.testing.assert_array_equal(results["confusion_matrix"], matrix)
metrics.ConfusionMatrixDisplay(matrix).plot(cmap="Blues", colorbar=False)
plt.show()

# %%
# The first images that are mistaken: what they are, and what the model takes them for.

figure, axes = plt.subplots(1, 8, figsize=(10, 1.8), layout="constrained")
for ax, i in zip(axes, np.flatnonzero(guesses != y_test)):
    ax.imshow(X_test[i, 0], cmap="gray_r")
    ax.set_title(f"{y_test[i]}, not {guesses[i]}")
for ax in axes:
    ax.axis("off")
plt.show()
assert results["accuracy"] > 0.9
