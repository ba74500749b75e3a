"""Distillation: a linear model learns from a CNN, a second ONNX file, and from the labels.

The loss is compared with one that PyTorch computes from the logits of both models.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from pyarrow import parquet
from torch.nn.functional import cross_entropy, kl_div

import onnxgrad as og

DATA = Path(__file__).parent.parent / "data"
table = parquet.read_table(DATA / "digits.parquet")
X = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1).reshape(-1, 1, 8, 8)
y = table["label"].to_numpy()
X, X_test, y, y_test = X[:1000], X[1000:], y[:1000], y[1000:]

cnn = og.Trainer(DATA / "digits_cnn.onnx", "cross_entropy", learning_rate=0.005)
cnn.fit(X, y, epochs=5).save("teacher.onnx")

student = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,1,8,8] image) => (float[N,10] logits)
    { flat = Flatten(image)  logits = Gemm(flat, weight, bias) }
""")
for name, shape in (("weight", (64, 10)), ("bias", (10,))):
    student.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, "f4"), name))

T, alpha = 3.0, 0.7
loss = og.distillation("teacher.onnx", temperature=T, alpha=alpha)
trainer = og.Trainer(student, loss, learning_rate=0.02, metrics=["accuracy"])
before = trainer.evaluate(X_test, y_test)
trainer.fit(X, y, epochs=20)
after = trainer.evaluate(X_test, y_test)
print("before", before, "after", after)
assert after["loss"] < before["loss"] / 2
assert after["accuracy"] > 0.85

logits, teacher = (torch.tensor(m.predict(X_test)) for m in (trainer, cnn))
soft = kl_div(
    (logits / T).log_softmax(1), (teacher / T).log_softmax(1), log_target=True,
    reduction="batchmean",
)  # fmt: skip
expected = alpha * T**2 * soft + (1 - alpha) * cross_entropy(logits, torch.tensor(y_test))
print("by PyTorch", expected.item())
np.testing.assert_allclose(after["loss"], expected.item(), rtol=1e-4)
