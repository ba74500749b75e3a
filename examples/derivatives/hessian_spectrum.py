"""The spectrum of a Hessian
=========================

The eigenvalues of the Hessian of a loss say how curved it is, and so how large a learning rate may
be: gradient descent diverges above 2 / λ, with the largest eigenvalue λ. Hessian-vector products
find λ without the matrix.
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
# The mean loss of all rows as the output of the model, and two derivatives with respect to the
# weights: the product H v, and the whole matrix in blocks.

loss = og.add_loss_output(trainer.model, "cross_entropy", reduction="mean")
loss = og.graph.select_model_inputs_outputs(loss, ["loss"])
names, weights = list(shapes), trainer.state.weights
options = {"weights": names, "inputs": []}


def run(model, outputs, **more):
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
# Power iteration: the product with a vector, again and again.

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
# Few directions are curved; along most of the others the loss is nearly flat.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
limit = np.abs(H).max()
left.imshow(H, cmap="RdBu", vmin=-limit, vmax=limit)
left.set_title("Hessian")
right.semilogy(np.abs(eigenvalues[::-1]), "o")
right.set(title="absolute values of the eigenvalues", xlabel="number")
plt.show()
assert np.sum(eigenvalues > 0.1 * eigenvalues[-1]) < len(H) / 3
