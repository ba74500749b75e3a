"""An optimizer of your own
========================

An optimizer is a chain of transforms of a step. This one is Signum, which moves every weight by the
sign of its averaged gradient (`Bernstein et al. 2018 <https://arxiv.org/abs/1802.04434>`_). Two
steps of it are compared with numpy.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

# %%
# Its ``slots`` are what the optimizer keeps for each weight from step to step. ``update`` writes
# nodes, and returns the new step and the new slots. ``elementwise`` says that every element is
# computed on its own, so that small weights can be updated together. ``og.optimizers.sgd()``
# multiplies by the learning rate.


@dataclass(frozen=True)
class SignOfMean(og.optimizers.Optimizer):
    """m <- d m + (1 - d) u;  u -> sign(m)."""

    decay: float = 0.9
    slots = ("m",)
    elementwise = True

    def update(self, op, u, slots, inputs):
        """Write the nodes of one step."""
        m = self.decay * slots["m"] + (1 - self.decay) * u
        return op.Sign(m), {"m": m}


signum = og.optimizers.Chain((SignOfMean(), og.optimizers.sgd()))
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
""")
x, noise = np.split(np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32), [2], axis=1)
y = x @ np.float32([[2], [-1]]) + 0.1 * noise
trainer = og.Trainer(model, "mse", optimizer=signum, learning_rate=0.05)
trainer.fit(x, y, epochs=2, batch_size=64)

# %%
# The same two steps in numpy.

w = m = np.zeros((2, 1))
for _ in range(2):
    m = 0.9 * m + 0.1 * (2 * x.T @ (x @ w - y) / 64)
    w = w - 0.05 * np.sign(m)
np.testing.assert_allclose(trainer.state.weights["w"], w, rtol=1e-5)
np.testing.assert_allclose(trainer.state.slots["w"]["m"], m, rtol=1e-4)

trainer.fit(x, y, epochs=80, batch_size=64)
print(trainer.state.weights["w"].ravel())
plt.semilogy([entry["loss"] for entry in trainer.history])
plt.show()
