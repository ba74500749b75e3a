"""Optimizers in a curved valley
=============================

Rosenbrock's function, (1 - x)² + 100 (y - x²)², has its minimum at (1, 1), at the end of a narrow,
curved valley. Six optimizers start at the same point. Each optimizer takes the same path as the
optimizer of this name in PyTorch.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table

import onnxgrad as og

# %%
# The function is a model: its weights are the coordinates x and y of a point, and its output is the
# loss. A trainer needs rows of data, so the model also has an input, which is 1 in every row.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> rosenbrock (float[N] ones) => (float loss)
    <float[1] x = {-1.5}, float[1] y = {2.0}, float one = {1.0}, float hundred = {100.0}>
    { a = Sub(one, x)  b = Mul(a, a)  c = Mul(x, x)  d = Sub(y, c)  e = Mul(d, d)
      f = Mul(hundred, e)  g = Add(b, f)  h = Mul(ones, g)  loss = ReduceMean <keepdims = 0> (h) }
""")
STEPS = 1500
rates = {"sgd": 4e-4, "momentum": 2e-4, "rmsprop": 5e-3, "adagrad": 0.5, "adam": 0.03}
rates["rprop"] = 0.01
torch_optimizers = {
    "sgd": torch.optim.SGD,
    "momentum": lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "rprop": torch.optim.Rprop,
}


class Path(og.callbacks.Callback):
    """Records the weights after every step."""

    every_steps = 1

    def __init__(self):
        self.points = [(-1.5, 2.0)]

    def on_step_end(self, trainer, state, control):
        self.points.append((state.weights["x"].item(), state.weights["y"].item()))


def path_in_torch(name):
    """Return the points that the optimizer of PyTorch visits."""
    w = torch.tensor([-1.5, 2.0], requires_grad=True)
    optimizer, points = torch_optimizers[name]([w], rates[name]), [(-1.5, 2.0)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2).backward()
        optimizer.step()
        points.append(tuple(w.tolist()))
    return points


# %%
# A path that bounces between the walls of the valley makes rounding errors larger from step to
# step. Therefore only the first 100 steps of each path are compared with PyTorch.

paths = {}
for name, rate in rates.items():
    path = Path()
    trainer = og.Trainer(
        model, train=["x", "y"], optimizer=name, learning_rate=rate, callbacks=[path]
    )
    trainer.fit(np.ones(STEPS, np.float32), batch_size=1)
    paths[name] = np.array(path.points)
    np.testing.assert_allclose(paths[name][:100], path_in_torch(name)[:100], atol=1e-2)

table = Table("optimizer", "learning rate", "last point", "loss at the last point")
for name, path in paths.items():
    x, y = path[-1]
    loss = (1 - x) ** 2 + 100 * (y - x**2) ** 2
    table.add_row(name, str(rates[name]), f"({x:.3f}, {y:.3f})", f"{loss:.1e}")
Console().print(table)

# %%
# Adam and Rprop follow the valley to the minimum, the star. Plain gradient descent, ``sgd``, is
# still far from it after 1500 steps.

x, y = np.meshgrid(np.linspace(-2, 2, 200), np.linspace(-1, 3, 200))
levels = np.log1p((1 - x) ** 2 + 100 * (y - x**2) ** 2)
figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharex=True, sharey=True, layout="constrained")
for ax, (name, path) in zip(axes.flat, paths.items()):
    ax.contourf(x, y, levels, 30, cmap="Blues_r")
    ax.plot(*path.T, color="tab:red", linewidth=1)
    ax.plot(1, 1, "k*")
    ax.set(title=name, xlim=(-2, 2), ylim=(-1, 3))
plt.show()
assert np.abs(paths["adam"][-1] - 1).max() < 0.1
