"""A differential equation as a loss
=================================

A network learns the solution u(t) of the differential equation u'' = -u with u(0) = 0 and u'(0) =
1, which is the sine. There are no labels: the loss is the square of u'' + u, and contains the
second derivative of the network (`Raissi et al. 2019
<https://doi.org/10.1016/j.jcp.2018.10.045>`_).
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession

import onnxgrad as og

# %%
# The model computes u(t) = t + t² n(t), where n is a network with one hidden layer. So u(0) = 0 and
# u'(0) = 1 hold for any weights.

network = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    network (float[N,1] t) => (float[N,1] u) {
        a = MatMul(t, w1)  b = Add(a, b1)  h = Tanh(b)  n = MatMul(h, w2)
        square = Mul(t, t)  product = Mul(square, n)  u = Add(t, product)
    }
""")
rng = np.random.default_rng(0)
for name, shape in (("w1", (1, 32)), ("b1", (32,)), ("w2", (32, 1))):
    array = rng.normal(scale=1 if name != "w2" else 0.1, size=shape).astype(np.float32)
    network.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

# %%
# ``hvp`` returns a model with two more inputs, ``u_grad`` and ``t_vector``. If ``u_grad`` and
# ``t_vector`` are 1, the model also computes u' as the output ``t_grad`` and u'' as the output
# ``t_hvp``. A second model, ``residual``, computes the loss from the outputs ``u`` and ``t_hvp``.

second = og.hvp(network, inputs=["t"])
residual = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> f (float[N,1] u, float[N,1] t_hvp) => (float[N,1] loss)
    { residual = Add(t_hvp, u)  loss = Mul(residual, residual) }
""")
trainer = og.Trainer(
    second, og.losses.LossModel(residual), optimizer="adam", learning_rate=og.schedules.cosine(0.01)
)
t = np.linspace(0, 2 * np.pi, 100, dtype=np.float32)[:, None]
ones = np.ones_like(t)
trainer.fit({"t": t, "u_grad": ones, "t_vector": ones}, epochs=4000, batch_size=100)

# %%
# The trained weights have the names of the weights of the network, and
# ``replace_initializers_into_onnx`` writes the trained weights into the network.

solution = og.graph.replace_initializers_into_onnx(network, trainer.state.weights)
[u] = InferenceSession(solution.SerializeToString()).run(None, {"t": t})
print("loss", trainer.history[-1]["loss"], "largest error", np.abs(u - np.sin(t)).max())
np.testing.assert_allclose(u, np.sin(t), atol=0.02)
plt.plot(t, np.sin(t), label="sine")
plt.plot(t, u, "--", label="network")
plt.legend()
plt.show()
