"""The gradient of a simulation
============================

A model simulates an oscillator in 100 time steps, by ``Scan``, a loop of ONNX. The stiffness k and
the friction c of the oscillator are weights. The gradient goes back through all time steps, and
training finds k and c from noisy observations.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table

import onnxgrad as og

STEPS, H = 100, 0.1
K, C = 2.0, 0.3  # which the training has to find

# %%
# Each row of the data is an oscillator, with its position x and its velocity v at the start. A time
# step of length h is a step of the semi-implicit Euler method: first v += h (-k x - c v), then x +=
# h v.

model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 20]>
    oscillator (double[N,1] x, double[N,1] v) => (double[N,{STEPS}] path)
    <double[1] k = {{1.0}}, double[1] c = {{0.0}}, double[1] h = {{{H}}},
     int64[2] shape = {{0, {STEPS}}}>
    {{ end, last, all = Scan <num_scan_inputs = 1, body = step
         (double[N,1] x0, double[N,1] v0, double tick)
         => (double[N,1] x1, double[N,1] v1, double[N,1] y)
         {{ pull = Mul(k, x0)  rub = Mul(c, v0)  force = Add(pull, rub)  dv = Mul(h, force)
            v1 = Sub(v0, dv)  dx = Mul(h, v1)  x1 = Add(x0, dx)  y = Identity(x1) }}> (x, v, clock)
       turned = Transpose <perm = [1, 0, 2]> (all)  path = Reshape(turned, shape) }}
""")
model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(STEPS), "clock"))


def simulate(x, v, k, c):
    """Return the positions after each time step, computed by numpy."""
    path = []
    for _ in range(STEPS):
        v = v - H * (k * x + c * v)
        x = x + H * v
        path.append(x)
    return np.hstack(path)


# %%
# The gradient of the squared error w.r.t. k and c equals the central differences of the simulation
# in numpy.

rng = np.random.default_rng(0)
x, v = rng.normal(size=(2, 30, 1))
truth = simulate(x, v, K, C)
observed = truth + rng.normal(0, 0.1, truth.shape)
gradient = og.onnx_derivative(model, weights=["k", "c"], inputs=[])
session = onnxruntime.InferenceSession(gradient.SerializeToString())
at = {"k": np.array([1.5]), "c": np.array([0.2])}
path = simulate(x, v, **at)
fed = {"x": x, "v": v, **at, "path_grad": 2 * (path - observed)}
found = session.run(["k_grad", "c_grad"], {i.name: fed[i.name] for i in session.get_inputs()})
table = Table("weight", "gradient", "central differences")
for name, slope in zip("kc", found):
    ends = [np.sum((simulate(x, v, **at | {name: at[name] + e}) - observed) ** 2)
            for e in (1e-5, -1e-5)]  # fmt: skip
    table.add_row(name, f"{slope[0]:.6f}", f"{(ends[0] - ends[1]) / 2e-5:.6f}")
    np.testing.assert_allclose(slope[0], (ends[0] - ends[1]) / 2e-5, rtol=1e-5)
Console().print(table)

# %%
# Training finds the stiffness and the friction with which the observations were simulated.

trainer = og.Trainer(
    model, "squared_error", train=["k", "c"], learning_rate=og.schedules.cosine(0.05)
)
trainer.fit({"x": x, "v": v}, observed, epochs=500, batch_size=30)
k, c = (trainer.state.weights[name].item() for name in "kc")
print(f"k = {k:.3f}, c = {c:.3f}")
np.testing.assert_allclose([k, c], [K, C], atol=0.02)
plt.plot(observed[0], ".", color="gray", markersize=4, label="observed")
plt.plot(simulate(x, v, 1.0, 0.0)[0], "--", label="before the training")
plt.plot(trainer.predict({"x": x, "v": v})[0], label="after the training")
plt.xlabel("time step")
plt.ylabel("position")
plt.legend()
plt.show()
