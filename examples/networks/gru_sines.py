"""A recurrent network continues a wave
====================================

A GRU reads 40 values of a noisy sine wave and predicts the next value. Each row has a wave of
another frequency. A training step is compared with PyTorch, and the predictions with the true
continuation of the wave.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch

import onnxgrad as og

HIDDEN = 24
rng = np.random.default_rng(0)


def draw_waves(count, length=41):
    """Return waves (length, count, 1): the operator GRU has time on the first axis."""
    frequency, phase = rng.uniform(0.2, 0.6, count), rng.uniform(0, 2 * np.pi, count)
    clean = np.sin(np.arange(length)[:, None] * frequency + phase)
    return clean[..., None].astype(np.float32)


# %%
# ``GRU`` is one operator of ONNX. A linear layer computes the prediction from the last hidden
# state.

model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 20]> gru (float[T,N,1] x) => (float[N,1] next)
    <int64[1] first = {{0}}>
    {{ all, last = GRU <hidden_size = {HIDDEN}, linear_before_reset = 1> (x, W, R, B)
       h = Squeeze(last, first)  next = Gemm(h, out, bias) }}
""")
shapes = {"W": (1, 3 * HIDDEN, 1), "R": (1, 3 * HIDDEN, HIDDEN), "B": (1, 6 * HIDDEN)}
arrays = {name: rng.normal(0, 0.2, shape).astype("f4") for name, shape in shapes.items()}
arrays |= {"out": rng.normal(0, 0.2, (HIDDEN, 1)).astype("f4"), "bias": np.zeros(1, "f4")}
model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())

# %%
# One step of gradient descent, here and in PyTorch, changes the weights equally. ``batch_axes``
# says that the rows of ``x`` are on its second axis. In PyTorch, the reset gate comes before the
# update gate; in ONNX, it comes after the update gate.

x = draw_waves(64)
step = og.Trainer(model, "squared_error", optimizer="sgd", learning_rate=0.1, batch_axes={"x": 1})
step.fit(x[:-1], x[-1], batch_size=64)


def in_torch_order(array):
    """Return a weight of the operator GRU with its gates in the order of PyTorch."""
    z, r, h = np.split(array[0], 3)
    return torch.tensor(np.concatenate([r, z, h]))


gru = torch.nn.GRU(1, HIDDEN)
parts = [arrays["W"], arrays["R"], *np.split(arrays["B"], 2, axis=1)]
gru.load_state_dict(dict(zip(gru.state_dict(), map(in_torch_order, parts))))
loss = torch.mean((gru(torch.tensor(x[:-1]))[1][0] @ torch.tensor(arrays["out"])
                   - torch.tensor(x[-1])) ** 2)  # fmt: skip
loss.backward()
np.testing.assert_allclose(step.history[0]["loss"], loss.item(), rtol=1e-5)
after = in_torch_order(step.state.weights["R"])
expected = gru.weight_hh_l0 - 0.1 * gru.weight_hh_l0.grad
np.testing.assert_allclose(after, expected.detach(), atol=1e-6)
print(f"loss before the first step: {loss.item():.4f}, in PyTorch and here")

# %%
# The GRU trains on 1000 waves with noise.

X = draw_waves(1000)
noisy = X[:-1] + rng.normal(0, 0.05, X[:-1].shape).astype("f4")
rate = og.schedules.cosine(0.02)
trainer = og.Trainer(model, "squared_error", learning_rate=rate, clip_norm=1.0, batch_axes={"x": 1})
trainer.fit(noisy, X[-1], epochs=20, batch_size=50)
plt.semilogy([entry["loss"] for entry in trainer.history])
plt.xlabel("epoch")
plt.ylabel("mean squared error")
plt.show()

# %%
# The GRU continues three new waves by 40 values: each prediction becomes the last input of the next
# prediction. The true waves are gray.

new = draw_waves(3, 80)
history = new[:40]
for _ in range(40):
    history = np.concatenate([history, trainer.predict(history[-40:])[None]])
plt.figure(figsize=(9, 3), layout="constrained")
plt.plot(new[..., 0], color="lightgray", linewidth=4)
plt.plot(range(40, 80), history[40:, :, 0])
plt.axvline(39.5, color="black", linestyle=":")
plt.show()
error = np.sqrt(np.mean((history[40:50] - new[40:50]) ** 2))
print(f"root mean square error of ten steps: {error:.3f}")
assert error < 0.2
# sphinx_gallery_thumbnail_number = 2
