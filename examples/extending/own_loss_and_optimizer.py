"""A loss and an optimizer of your own
===================================

A loss is a function that writes ONNX nodes, and so is the update of an optimizer. The loss of this
page counts predictions that are too low nine times as much as predictions that are too high. The
optimizer is Signum, which moves every weight by the sign of its averaged gradient (`Bernstein et
al. 2018 <https://arxiv.org/abs/1802.04434>`_). The loss and the optimizer are compared with numpy.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

rng = np.random.default_rng(0)
x = rng.uniform(0, 3, (400, 1)).astype(np.float32)
y = (1 + 2 * x + (0.2 + x) * rng.normal(size=x.shape)).astype(np.float32)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    line (float[N,1] x) => (float[N,1] y) <float[1,1] slope = {0.0}, float[1] intercept = {0.0}>
    { a = MatMul(x, slope)  y = Add(a, intercept) }
""")

# %%
# The loss
# --------
#
# The function that writes a loss gets ``op``, the prediction and the label. A method of ``op``,
# such as ``op.Abs`` or ``op.Where``, writes the node of this operator and returns its output, with
# which Python's arithmetic works too. The gradient of the loss is derived from its nodes.


def too_low_is_worse(op, prediction, label):
    """Write w (f - y)², with w = 0.9 where f < y, else 0.1."""
    weight = op.Where(op.Less(prediction, label), 0.9, 0.1)
    return weight * (prediction - label) * (prediction - label)


def fit_line(loss, **options):
    """Train on all rows in each step; return the trainer, and its slope and intercept."""
    trainer = og.Trainer(model, loss, **options)
    weights = trainer.fit(x, y, epochs=2000, batch_size=400).state.weights
    return trainer, np.array([weights["slope"].item(), weights["intercept"].item()])


# %%
# The line of the lowest loss is the result of an expectile regression, which numpy computes by
# repeated least squares, each time with new weights of the rows.

A, expected = np.hstack([x, np.ones_like(x)]).astype(float), np.zeros(2)
for _ in range(100):
    root = np.sqrt(np.where(A @ expected < y[:, 0], 0.9, 0.1))
    expected = np.linalg.lstsq(A * root[:, None], y[:, 0] * root, rcond=None)[0]
_, by_loss = fit_line(too_low_is_worse, optimizer="sgd", learning_rate=0.1)
_, usual = fit_line("squared_error", optimizer="sgd", learning_rate=0.1)
print("slope and intercept:", by_loss, "numpy:", expected, "squared error:", usual)
np.testing.assert_allclose(by_loss, expected, rtol=1e-3)
plt.plot(x[:, 0], y[:, 0], ".", alpha=0.3)
for name, line in (("own loss", by_loss), ("squared error", usual)):
    plt.plot([0, 3], [line[1], 3 * line[0] + line[1]], label=name)
plt.legend()
plt.show()

# %%
# The optimizer
# -------------
#
# ``slots`` names the arrays that an optimizer keeps for each weight from step to step: here, the
# averaged gradient m. ``update`` gets the gradient u, writes the nodes of one step, and returns the
# step and the new slots. ``elementwise`` says that each element of a weight is updated without the
# other elements, so that small weights can be joined and updated at once. ``og.optimizers.Chain``
# puts the two steps of Signum one after the other: ``SignOfMean`` computes the direction, and
# ``og.optimizers.sgd()`` multiplies the direction by the learning rate.


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
two_steps = og.Trainer(model, "squared_error", optimizer=signum, learning_rate=0.05)
two_steps.fit(x, y, epochs=2, batch_size=400)

# %%
# The first two training steps by Signum, computed in numpy, for the slope and the intercept
# together.

w = m = np.zeros(2)
for _ in range(2):
    m = 0.9 * m + 0.1 * (2 * A.T @ (A @ w - y[:, 0]) / 400)
    w = w - 0.05 * np.sign(m)
np.testing.assert_allclose(two_steps.state.weights["slope"].item(), w[0], rtol=1e-5)
np.testing.assert_allclose(two_steps.state.slots["slope"]["m"].item(), m[0], rtol=1e-4)

# %%
# Signum ends at the line of gradient descent, if the learning rate falls to zero.

rate = og.schedules.cosine(0.02)
trainer, by_signum = fit_line(too_low_is_worse, optimizer=signum, learning_rate=rate)
print("slope and intercept by Signum:", by_signum)
np.testing.assert_allclose(by_signum, expected, rtol=0.01)
plt.semilogy([entry["loss"] for entry in trainer.history])
plt.xlabel("step")
plt.ylabel("own loss")
plt.show()
