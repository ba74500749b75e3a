"""Learning rates that change
==========================

A schedule is the learning rate as a function of the step. This draws some that come with the
package, compares them with PyTorch, and shows what a schedule does for a training with noise.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch

import onnxgrad as og

STEPS = 200
schedules = {
    "constant": og.schedules.constant(0.1),
    "linear": og.schedules.linear(0.1),
    "cosine, warm-up": og.schedules.cosine(0.1, warmup=0.1),
    "exponential": og.schedules.exponential(0.1, 0.98),
    "step_decay": og.schedules.step_decay(0.1, every=40, factor=0.5),
    "one_cycle": og.schedules.one_cycle(0.1),
}
rates = {name: [s.over(STEPS)(i) for i in range(STEPS)] for name, s in schedules.items()}
figure, axes = plt.subplots(2, 3, figsize=(9, 4.5), sharex=True, sharey=True, layout="constrained")
for ax, (name, values) in zip(axes.flat, rates.items()):
    ax.plot(values)
    ax.set_title(name)
figure.supxlabel("step")
plt.show()

# %%
# PyTorch computes the same numbers.

optim = torch.optim.lr_scheduler
for name, scheduler in {
    "exponential": lambda o: optim.ExponentialLR(o, 0.98),
    "step_decay": lambda o: optim.StepLR(o, 40, 0.5),
    "one_cycle": lambda o: optim.OneCycleLR(o, 0.1, STEPS),
}.items():
    sgd, theirs = torch.optim.SGD([torch.zeros(1)], 0.1), []
    schedule = scheduler(sgd)
    for _ in range(STEPS):
        theirs.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    np.testing.assert_allclose(rates[name], theirs, rtol=1e-5, atol=1e-8)
    print(f"{name}: the same {STEPS} rates as in PyTorch")

# %%
# A regression from single rows: with a constant rate, the weights keep trembling around the
# solution. A rate that falls ends there.

rng = np.random.default_rng(0)
X = rng.normal(size=(500, 3)).astype(np.float32)
y = X @ np.float32([[1], [2], [3]]) + rng.normal(size=(500, 1)).astype(np.float32)
exact = np.linalg.lstsq(X, y)[0]
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.0, 0.0, 0.0}> { y = MatMul(x, w) }
""")


class Distance(og.callbacks.Callback):
    """Keeps the distance to least squares after every step."""

    every_steps = 1

    def __init__(self):
        self.path = []

    def on_step_end(self, trainer, state, control):
        self.path.append(np.linalg.norm(state.weights["w"] - exact))


plt.figure(layout="constrained")
ends = {}
for name in ("constant", "step_decay", "cosine, warm-up"):
    distance, rate = Distance(), schedules[name]
    each = {"learning_rate": rate, "callbacks": [distance]}
    trainer = og.Trainer(model, "mse", optimizer="sgd", **each)
    trainer.fit(X, y, epochs=2, batch_size=4)
    plt.semilogy(distance.path, label=name)
    ends[name] = distance.path[-1]
plt.xlabel("step")
plt.ylabel("distance to least squares")
plt.legend()
plt.show()
assert ends["cosine, warm-up"] < ends["constant"] / 3
