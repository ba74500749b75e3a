"""
An ONNX model inside of a PyTorch network
=========================================

A file becomes a ``torch.nn.Module``: its weights are parameters, onnxruntime computes the forward
and the backward pass, and PyTorch's optimizer trains it together with layers of PyTorch.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch

from onnxgrad.torch import OnnxModule

encoder = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    encoder (float[N,2] x) => (float[N,16] h) { a = MatMul(x, w)  c = Add(a, b)  h = Tanh(c) }
""")
rng = np.random.default_rng(0)
for name, shape in (("w", (2, 16)), ("b", (16,))):
    array = rng.normal(size=shape).astype(np.float32)
    encoder.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

torch.manual_seed(0)
body = OnnxModule(encoder)
rest = torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
network = torch.nn.Sequential(body, *rest)
print([name for name, _ in network.named_parameters()])

# %%
x = torch.rand(256, 2) * 4 - 2
y = torch.sin(2 * x[:, :1]) * x[:, 1:]
optimizer, losses = torch.optim.Adam(network.parameters(), 0.01), []
for _ in range(400):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(network(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
# %%
# The gradients are those of the same layer in PyTorch.

weight, bias = body.w.detach().requires_grad_(), body.b.detach()
torch.nn.functional.mse_loss(network[1:](torch.tanh(x @ weight + bias)), y).backward()
network.zero_grad()
torch.nn.functional.mse_loss(network(x), y).backward()
torch.testing.assert_close(body.w.grad, weight.grad, rtol=1e-4, atol=1e-6)

# %%
# The trained encoder is an ONNX file again.

body.to_onnx("encoder.onnx")
[h] = onnxruntime.InferenceSession("encoder.onnx").run(None, {"x": x.numpy()})
np.testing.assert_allclose(h, body(x).detach().numpy(), atol=1e-5)
assert losses[-1] < 0.1 * losses[0]
plt.semilogy(losses)
plt.show()
