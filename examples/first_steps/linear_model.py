"""A first training: a straight line
=================================

A model of two weights learns a straight line from points. ``Trainer`` takes the model, the loss and
the optimizer; ``fit`` takes the data. The trained slope and intercept are compared with the
solution of least squares.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

import onnxgrad as og

rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (200, 1)).astype(np.float32)
y = 1.5 * X - 0.5 + rng.normal(0, 0.4, X.shape).astype(np.float32)

# %%
# A model is an ONNX file. Here, the model is written as text: y = x w + b. Both weights begin at
# zero.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> line (float[N,1] x) => (float[N,1] y)
    <float[1,1] w = {0.0}, float[1] b = {0.0}> { a = MatMul(x, w)  y = Add(a, b) }
""")
og.plot.plot_onnxs(model, title="the model")
plt.show()

# %%
# The optimizer is stochastic gradient descent: after every batch of 20 rows, the weights move
# against the gradient of the mean squared error. The learning rate falls to zero along a cosine.

trainer = og.Trainer(
    model, "squared_error", optimizer="sgd", learning_rate=og.schedules.cosine(0.1)
)
trainer.fit(X, y, epochs=30, batch_size=20)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.semilogy([entry["loss"] for entry in trainer.history])
left.set(xlabel="epoch", ylabel="mean squared error")
right.scatter(X, y, s=6, color="gray")
ends = np.float32([[-2], [2]])
right.plot(ends, trainer.predict(ends), color="tab:red", linewidth=2)
right.set(xlabel="x", ylabel="y")
plt.show()

# %%
# ``trainer.model`` is the model with the trained weights, and ``trainer.save`` writes this model to
# a file. Its slope and intercept are close to the numbers that least squares finds.

(slope, intercept), *_ = np.linalg.lstsq(np.hstack([X, np.ones_like(X)]), y[:, 0])
weights = og.graph.get_train_initializer(trainer.model)
table = Table("", "slope", "intercept")
table.add_row("least squares", f"{slope:.4f}", f"{intercept:.4f}")
table.add_row("learned", *(f"{weights[name][0].item():.4f}" for name in ("w", "b")))
Console().print(table)
np.testing.assert_allclose([weights["w"][0].item(), weights["b"][0].item()], [slope, intercept],
                           atol=1e-2)  # fmt: skip
# sphinx_gallery_thumbnail_number = 2
