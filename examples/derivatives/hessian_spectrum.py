"""The spectrum of a Hessian
=========================

The eigenvalues of the Hessian of a loss say how curved the loss is. The largest eigenvalue λ limits
the learning rate: gradient descent diverges above 2 / λ. Products of the Hessian with vectors find
λ without the whole matrix.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from sklearn.datasets import load_iris
from sklearn.preprocessing import StandardScaler

import onnxgrad as og

X, y = load_iris(return_X_y=True)
X = StandardScaler().fit_transform(X)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (double[N,4] x) => (double[N,3] logits)
    { a = Gemm(x, w1, b1)  b = Tanh(a)  logits = Gemm(b, w2, b2) }
""")
rng = np.random.default_rng(0)
shapes = {"w1": (4, 6), "b1": (6,), "w2": (6, 3), "b2": (3,)}
for name, shape in shapes.items():
    tensor = onnx.numpy_helper.from_array(rng.normal(0, 0.5, shape), name)
    model.graph.initializer.append(tensor)
trainer = og.Trainer(model, "cross_entropy", learning_rate=0.01)
trainer.fit(X, y, epochs=30, batch_size=30)

# %%
# The model whose only output is the mean loss of all rows has two derivatives w.r.t. its weights:
# the product H v of the Hessian with a vector, by ``hvp``, and the whole Hessian H, by ``hessian``.
# The Hessian has a block for each pair of weights; numpy joins the blocks to one matrix.

loss = og.add_loss_output(trainer.model, "cross_entropy", reduction="mean")
loss = og.graph.select_model_inputs_outputs(loss, ["loss"])
names, weights = list(shapes), trainer.state.weights
options = {"weights": names, "inputs": []}


def run(model, outputs, **more):
    """Return the outputs of a model for all rows and the trained weights."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    known = {"x": X, "label": y, **weights, **more}
    return session.run(outputs, {i.name: known[i.name] for i in session.get_inputs()})


keys = [(a, b) for a in names for b in names]
blocks = run(og.hessian(loss, **options), [f"{a}_hessian" if a == b else f"{a}_{b}_hessian"
             for a, b in keys])  # fmt: skip
sizes = {name: weights[name].size for name in names}
flat = {(a, b): h.reshape(sizes[a], sizes[b]) for (a, b), h in zip(keys, blocks)}
H = np.block([[flat[a, b] for b in names] for a in names])
np.testing.assert_allclose(H, H.T, atol=1e-10)
eigenvalues = np.linalg.eigvalsh(H)

# %%
# Power iteration multiplies a vector by the Hessian again and again. The vector turns toward the
# eigenvector of the largest eigenvalue.

product = onnxruntime.InferenceSession(og.hvp(loss, **options).SerializeToString())
v, estimates = rng.normal(size=len(H)), []
for _ in range(60):
    v /= np.linalg.norm(v)
    parts = np.split(v, np.cumsum(list(sizes.values()))[:-1])
    fed = {f"{n}_vector": part.reshape(shapes[n]) for n, part in zip(names, parts)}
    outputs = product.run([f"{n}_hvp" for n in names], {"x": X, "label": y, **weights, **fed})
    Hv = np.concatenate([array.ravel() for array in outputs])
    estimates.append(v @ Hv)
    v = Hv
print(f"largest eigenvalue: {estimates[-1]:.6f}, by numpy {eigenvalues[-1]:.6f}")
np.testing.assert_allclose(estimates[-1], eigenvalues[-1], rtol=1e-3)

# %%
# Most eigenvalues are small: along most directions, the loss is nearly flat.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
limit = np.abs(H).max()
left.imshow(H, cmap="RdBu", vmin=-limit, vmax=limit)
left.set_title("Hessian")
right.semilogy(np.abs(eigenvalues[::-1]), "o")
right.set(title="absolute values of the eigenvalues", xlabel="index of the eigenvalue")
plt.show()
assert np.sum(eigenvalues > 0.1 * eigenvalues[-1]) < len(H) / 3
