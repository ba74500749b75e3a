"""Gradients at kinks
==================

Relu, Abs, Max and Clip have kinks, points without a derivative. There, a gradient is a convention;
here it is that of PyTorch. ``check_gradient`` compares the gradient of a model with central
differences, and leaves out what lies at a kink.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

import onnxgrad as og

FUNCTIONS = {
    "Relu(x)": torch.relu,
    "Abs(x)": torch.abs,
    "LeakyRelu(x)": lambda x: torch.nn.functional.leaky_relu(x, 0.01),
    "Clip(x, zero)": lambda x: torch.clamp(x, min=0),
    "Max(x, zero)": lambda x: torch.maximum(x, torch.zeros(1)),
    "Sqrt(x)": torch.sqrt,
}


def slopes(call, x):
    """Return f(x) and its gradient."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y)
        <float[1] zero = {{0.0}}> {{ y = {call} }}
    """)
    options = og.DerivativeOptions.FillGrad | og.DerivativeOptions.KeepOutputs
    gradient = og.onnx_derivative(model, weights=[], options=options)
    session = onnxruntime.InferenceSession(gradient.SerializeToString())
    return session.run(["y", "x_grad"], {"x": x})


# %%
# The gradient at zero, here and in PyTorch.

table = Table("function", "gradient at 0", "PyTorch")
x = np.linspace(-2, 2, 81, dtype=np.float32)
figure, axes = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
for ax, (call, function) in zip(axes.flat, FUNCTIONS.items()):
    y, slope = slopes(call, x)
    theirs = torch.tensor(x, requires_grad=True)
    function(theirs).sum().backward()
    np.testing.assert_allclose(slope, theirs.grad, rtol=1e-5, atol=1e-6)
    table.add_row(call, f"{slope[40]:g}", f"{theirs.grad[40]:g}")
    ax.plot(x, y, label="f")
    ax.plot(x, slope, ".", markersize=3, label="gradient")
    ax.set_title(call)
    ax.set_ylim(-2.2, 3)
axes[0, 0].legend()
plt.show()
Console().print(table)

# %%
# Central differences at a kink are the mean of both sides, and no gradient. Beside it they agree:
# ``check_gradient`` moves a model along random directions and takes the best of many steps.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,3] x) => (float[N,1] y)
    <float[3,2] w = {1, -1, 0.5, 2, -0.5, 0.25}, float[2,1] v = {1, -2}>
    { a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, v) }
""")
feed = {"x": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}
report = og.check_gradient(model, feed)
print(report)
assert report.ok
