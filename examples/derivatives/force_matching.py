"""Force matching by L-BFGS
========================

A network computes the energy of atoms from their positions, and learns it from forces. The loss
compares a gradient, so that the gradient of the loss is of second order. L-BFGS of SciPy, which
reads all forces at once, reaches in as many steps a loss that is a thousandth of the loss of Adam.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
from scipy.optimize import minimize

import onnxgrad as og

# %%
# The energy of a cluster of six atoms is a sum over pairs of atoms. For each pair, the network
# reads the distance r, as Gaussians around 12 distances.

rng = np.random.default_rng(0)
first, second = np.triu_indices(6, 1)
constants = {
    "first": first, "second": second, "centers": np.linspace(0.9, 2.5, 12),
    "sharpness": np.array(-40.0), "last": np.array([-1]), "pairs": np.array([1, 2]),
    "w1": rng.normal(0, 0.5, (12, 16)), "b1": np.zeros(16), "w2": rng.normal(0, 0.5, (16, 1)),
}  # fmt: skip
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    clusters (double[N,6,3] positions) => (double[N] energy) {
        a = Gather <axis = 1> (positions, first)
        b = Gather <axis = 1> (positions, second)
        apart = Sub(a, b)  r = ReduceL2(apart, last)  away = Sub(r, centers)
        squares = Mul(away, away)  exponents = Mul(squares, sharpness)  basis = Exp(exponents)
        product = MatMul(basis, w1)  shifted = Add(product, b1)  hidden = Tanh(shifted)
        energies = MatMul(hidden, w2)  energy = ReduceSum <keepdims = 0> (energies, pairs) }
""")
for name, array in constants.items():
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

# %%
# The data are clusters with the forces of the potential of Lennard-Jones. PyTorch computes these,
# and, as a witness, the gradient of the loss of the network.


def slopes(positions, pair_energy):
    """Return the gradient w.r.t. positions of the energies of all pairs, by PyTorch."""
    atoms = torch.tensor(positions, requires_grad=True)
    r = (atoms[:, first] - atoms[:, second]).norm(dim=-1, keepdim=True)
    return torch.autograd.grad(pair_energy(r).sum(), atoms, create_graph=True)[0]


def network_energy(r):
    basis = torch.exp(-40 * (r - torch.tensor(constants["centers"])) ** 2)
    return torch.tanh(basis @ w["w1"] + w["b1"]) @ w["w2"]


octahedron = 0.8 * np.concatenate([np.eye(3), -np.eye(3)])
rows = rng.uniform(1.0, 1.5, (400, 1, 1)) * octahedron + rng.normal(0, 0.05, (400, 6, 3))
targets = slopes(rows, lambda r: 4 * (r**-12 - r**-6)).detach().numpy()
X, y, others = rows[:200], targets[:200], (rows[200:], targets[200:])
w = {name: torch.tensor(constants[name], requires_grad=True) for name in ("w1", "b1", "w2")}
torch.nn.functional.mse_loss(slopes(X, network_energy), torch.tensor(y)).backward()

# %%
# The forces are minus the gradient of the energy. The model of the gradient is a model like any
# other: its weights are the weights of the network, and a ``Trainer`` compares its output
# ``positions_grad``. ``value_and_grad`` returns the loss of all rows and the gradient of each
# weight, which are the ones of PyTorch.

options = og.DerivativeOptions.FillGrad | og.DerivativeOptions.KeepOutputs
forces = og.onnx_derivative(model, inputs=["positions"], weights=[], options=options)
trainer = og.Trainer(forces, {"positions_grad": "squared_error"})
for name, gradient in trainer.value_and_grad(X, y)[1].items():
    np.testing.assert_allclose(gradient, w[name].grad, rtol=1e-5, atol=1e-9)

# %%
# ``minimize`` of SciPy needs a function of one vector. Assigning to ``state.weights`` sets the
# weights.

start, losses = trainer.state.weights, {"L-BFGS": []}


def loss_of(vector):
    parts = np.split(vector, np.cumsum([w.size for w in start.values()])[:-1])
    trainer.state.weights = {n: p.reshape(w.shape) for (n, w), p in zip(start.items(), parts)}
    loss, gradients = trainer.value_and_grad(X, y)
    losses["L-BFGS"].append(loss)
    return loss, np.concatenate([gradients[name].ravel() for name in start])


limits = {"maxfun": 300, "maxiter": 300}
vector = np.concatenate([w.ravel() for w in start.values()])
found = minimize(loss_of, vector, jac=True, method="L-BFGS-B", options=limits)
loss_of(found.x)
print("loss of other rows:", trainer.evaluate(*others)["loss"])

# %%
# Adam takes as many passes over the rows, with 200 rows or 20 rows in a step. The picture shows the
# loss of each pass: with 20 rows, Adam takes ten steps in a pass, and comes close to L-BFGS.

for size in (200, 20):
    options = {"optimizer": "adam", "learning_rate": og.schedules.cosine(0.03)}
    adam = og.Trainer(forces, {"positions_grad": "squared_error"}, **options)
    losses[f"Adam, {size} rows"] = adam.fit(X, y, epochs=300, batch_size=size).state.losses
assert found.fun < 0.01 * losses["Adam, 200 rows"][-1]
for name, values in losses.items():
    plt.semilogy(values, label=name)
plt.legend()
plt.show()
