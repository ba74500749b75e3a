"""An ensemble that knows where it does not know
=============================================

Twenty networks with other initial weights learn the same points, in one graph. Where there are
points they agree; elsewhere they do not, and their spread is a band that holds the true curve.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

rng = np.random.default_rng(0)
X = np.concatenate([rng.uniform(-3, -1, 60), rng.uniform(0.5, 2.5, 60)])[:, None].astype("f4")
y = np.sin(2 * X) + rng.normal(0, 0.1, X.shape).astype("f4")
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,1] x) => (float[N,1] y)
    { a = Gemm(x, w1, b1)  b = Tanh(a)  c = Gemm(b, w2, b2)  d = Tanh(c)  y = Gemm(d, w3, b3) }
""")


def weights(seed):
    """Return random weights, wide enough for several bends of the curve.

    With narrower ones, all members go on alike where there are no points, and the band is too thin.
    """
    rng = np.random.default_rng(seed)
    shapes = {"w1": (1, 40), "b1": 40, "w2": (40, 40), "b2": 40, "w3": (40, 1), "b3": 1}
    scales = {"w1": 3.0, "b1": 3.0, "w2": 0.3, "b2": 0.3, "w3": 1.0, "b3": 1.0}
    return {n: rng.normal(0, scales[n], s).astype("f4") for n, s in shapes.items()}


for name, array in weights(0).items():
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

# %%
# ``TrainerStack`` gives each weight a leading axis of members. One run of onnxruntime trains all.

members = [weights(seed) for seed in range(20)]
options = {"learning_rate": og.schedules.cosine(0.01), "seed": 0}
stack = og.TrainerStack(model, "squared_error", weights=members, **options)
stack.fit(X, y, epochs=300, batch_size=40)

# %%
# A member is what a ``Trainer`` with its weights would be.

alone = og.Trainer(
    og.graph.replace_initializers_into_onnx(model, members[7]), "squared_error", **options
)
alone.fit(X, y, epochs=5, batch_size=40)
short = og.TrainerStack(model, "squared_error", weights=members, **options)
short.fit(X, y, epochs=5, batch_size=40)
x = np.linspace(-4, 4, 200, dtype="f4")[:, None]
np.testing.assert_allclose(short.predict(x)[7], alone.predict(x), atol=1e-3)

# %%
# The mean of the members, and two standard deviations around it.

predictions = stack.predict(x)[..., 0]
mean, std = predictions.mean(axis=0), predictions.std(axis=0)
plt.figure(figsize=(8, 4), layout="constrained")
plt.fill_between(x[:, 0], mean - 2 * std, mean + 2 * std, alpha=0.3, label="±2 standard deviations")
plt.plot(x, predictions.T, color="gray", linewidth=0.3)
plt.plot(x, mean, color="tab:blue", label="mean")
plt.plot(x, np.sin(2 * x), "k--", label="sin 2x")
plt.scatter(X, y, s=6, color="tab:red", label="points")
plt.ylim(-3, 3)
plt.legend()
plt.show()

seen, between, beyond = ((x[:, 0] > a) & (x[:, 0] < b) for a, b in ((-3, -1), (-1, 0.5), (2.5, 4)))
inside = np.abs(mean - np.sin(2 * x[:, 0])) < 2 * std
print(f"mean standard deviation: {std[seen].mean():.3f} at points, {std[beyond].mean():.3f} beyond")
shares = inside[between].mean(), inside[beyond].mean()
print(f"share of the curve in the band: {shares[0]:.0%} between points, {shares[1]:.0%} beyond")
assert std[beyond].mean() > 5 * std[seen].mean()
assert min(shares) > 0.9
np.testing.assert_allclose(mean[seen], np.sin(2 * x[seen, 0]), atol=0.2)
