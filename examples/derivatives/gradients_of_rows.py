"""Gradients of single rows
========================

A gradient model returns the sum of the gradients over the batch. For the gradient of each row, such
as to find rows that pull hardest at the weights, take the Jacobian of the losses of the rows.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession

import onnxgrad as og

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 3)).astype(np.float32)
y = (x @ np.float32([[1], [-2], [3]]) + 0.1 * rng.normal(size=(64, 1))).astype(np.float32)
y[17] += 8  # an outlier
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,3] x) => (float[N,1] y) <float[3,1] w = {0.5, -1.0, 2.0}, float[1] b = {0.0}>
    { a = MatMul(x, w)  y = Add(a, b) }
""")

# %%
# ``unreduced_onnx_loss`` returns the loss of every row. Its Jacobian with respect to the weights
# has one block for each row: ``(64, 1, 3, 1)`` for w. With ``batched=True``, the rows are proven
# not to mix, and the model has a loop over them, which computes each alone.

rows = og.losses.unreduced_onnx_loss(og.add_loss_output(model, "squared_error"), "loss")
per_row = og.jacobian(rows, weights=["w", "b"], inputs=[], batched=True)
session = InferenceSession(per_row.SerializeToString())
print([(output.name, output.shape) for output in session.get_outputs()])

feed = {name: array for name, (array, _) in og.graph.get_train_initializer(model).items()}
losses, by_w, by_b = session.run(None, feed | {"x": x, "label": y})
by_w, by_b = by_w.reshape(64, 3), by_b.reshape(64, 1)

# %%
# The gradient of (f - y)^2 is 2 (f - y) x.

error = x @ feed["w"] + feed["b"] - y
np.testing.assert_allclose(by_w, 2 * error * x, rtol=1e-4, atol=1e-4)
np.testing.assert_allclose(by_b, 2 * error, rtol=1e-4, atol=1e-4)

norms = np.linalg.norm(np.hstack([by_w, by_b]), axis=1)
print("row", norms.argmax(), "pulls hardest")
assert norms.argmax() == 17

# %%
plt.bar(range(64), norms)
plt.xlabel("row")
plt.ylabel("norm of its gradient")
plt.show()
