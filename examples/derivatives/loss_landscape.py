"""A picture of the loss along two directions
==========================================

The weights of a network are a point in a space of many dimensions. The picture shows the loss on a
plane through the trained weights. Two random directions span the plane; for each weight, a
direction has the norm of this weight (`Li et al. 2018 <https://arxiv.org/abs/1712.09913>`_). The
slope of the surface is compared with the gradient that ``onnx_derivative`` computes.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from sklearn.datasets import make_moons

import onnxgrad as og

X, y = make_moons(200, noise=0.2, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32)[:, None]
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,2] x) => (float[N,1] y)
    { a = Gemm(x, w1, b1)  b = Tanh(a)  c = Gemm(b, w2, b2)  y = Sigmoid(c) }
""")
rng = np.random.default_rng(1)
for name, shape in {"w1": (2, 12), "b1": 12, "w2": (12, 1), "b2": 1}.items():
    array = rng.normal(0, 1, shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
trainer = og.Trainer(model, "binary_cross_entropy", learning_rate=og.schedules.cosine(0.05))
trainer.fit(X, y, epochs=60, batch_size=50)
end = dict(trainer.state.weights)

# %%
# ``onnx_derivative`` returns a model that takes the rows and the weights as inputs, and computes
# the loss and its gradient w.r.t. each weight.

with_loss = og.graph.select_model_inputs_outputs(
    og.add_loss_output(trainer.model, "binary_cross_entropy", reduction="mean"), ["loss"]
)
options = og.DerivativeOptions.FillGrad | og.DerivativeOptions.KeepOutputs
gradient = og.onnx_derivative(with_loss, weights=list(end), inputs=[], options=options)
session = onnxruntime.InferenceSession(gradient.SerializeToString())


def loss_and_gradient(weights):
    """Return the mean loss, and its gradient w.r.t. each weight."""
    names = ["loss", *(f"{name}_grad" for name in weights)]
    loss, *gradients = session.run(names, {"x": X, "label": y, **weights})
    return loss.item(), dict(zip(weights, gradients))


def weights_at(a, b):
    """Return the trained weights, moved by a times u and b times v."""
    return {n: np.float32(w + a * u[n] + b * v[n]) for n, w in end.items()}


def random_direction():
    """Return a random array for each weight, with the norm of the weight."""
    drawn = {n: rng.normal(size=w.shape) for n, w in end.items()}
    return {n: d / np.linalg.norm(d) * np.linalg.norm(end[n]) for n, d in drawn.items()}


u, v = random_direction(), random_direction()
grid = np.linspace(-1, 1, 41)
losses = np.array([[loss_and_gradient(weights_at(a, b))[0] for a in grid] for b in grid])

# %%
# The slope of the surface along the first direction u is the inner product of u and the gradient.
# The slope equals the central difference of two losses.

point = (0.3, -0.2)
found = sum(np.sum(g * u[n]) for n, g in loss_and_gradient(weights_at(*point))[1].items())
ends = [loss_and_gradient(weights_at(point[0] + h, point[1]))[0] for h in (1e-2, -1e-2)]
print(f"slope {found:.4f} by the gradient, {(ends[0] - ends[1]) / 2e-2:.4f} by differences")
np.testing.assert_allclose(found, (ends[0] - ends[1]) / 2e-2, rtol=0.02)

# %%
# The star marks the trained weights, which lie in a basin of the loss.

figure = plt.figure(figsize=(9, 4), layout="constrained")
left = figure.add_subplot(121, projection="3d")
left.plot_surface(*np.meshgrid(grid, grid), losses, cmap="viridis")
right = figure.add_subplot(122)
image = right.contourf(grid, grid, losses, 30, cmap="viridis")
right.plot(0, 0, "r*", markersize=12)
figure.colorbar(image, label="binary cross entropy")
plt.show()
assert losses.min() > 0.8 * losses[20, 20]
