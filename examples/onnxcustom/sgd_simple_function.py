"""The gradient of a function as a model
=====================================

The gradient of f(x) = a·x + b·x² + c, and of its loss, are ONNX models of standard operators. Their
results are compared with the derivatives computed by hand.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from rich.console import Console
from rich.table import Table

from onnxgrad.compat import (
    DerivativeOptions,
    add_loss_output,
    onnx_derivative,
    onnx_rename_names,
    onnx_simple_text_plot,
    onnx_text_plot_io,
    plot_onnxs,
    select_model_inputs_outputs,
)


def run(model, **inputs):
    session = InferenceSession(model.SerializeToString())
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, inputs)))


f = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 14]>
    f (float[N, 2] x) => (float[N, 1] y)
        <float[1, 2] b = {0.5, -0.33333}, float[1, 2] a = {-2.0, 3.0}, float[1] c = {-1.0},
         int64[1] last = {1}>
    { square = Mul(x, x)  bx = Mul(square, b)  ax = Mul(x, a)  both = Add(ax, bx)
      total = ReduceSum(both, last)  y = Add(total, c) }""")
x = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [2, 2]], np.float32)
y = run(f, x=x)["y"]

# %%
# The inputs of the gradient are ``x``, the weights, and ``y_grad``: the gradient of what comes
# behind ``y``. Its outputs are the gradients with respect to ``x`` and the weights.

gradient = onnx_derivative(f)
print(onnx_text_plot_io(gradient))
print("operators:", sorted({node.op_type for node in gradient.graph.node}))
plot_onnxs(f, onnx_rename_names(gradient), title=["f", "its gradient"])
plt.show()

# %%
# A square loss behind ``y`` gives ``y_grad``. Of the two outputs, loss and ``y``, only the loss is
# kept. ``FillGrad`` starts with a gradient of 1, and ``KeepOutputs`` returns the loss, too.

loss = select_model_inputs_outputs(add_loss_output(f), outputs=["loss"])
options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
loss_gradient = onnx_rename_names(onnx_derivative(loss, options=options))
print(onnx_simple_text_plot(loss_gradient))

# %%
# The gradient at other weights than those that made ``y``, and the derivatives by hand.

a, b, c = (np.array(v, np.float32) for v in ([[0.5, 0.33333]], [[2, 3]], [1]))
result = run(loss_gradient, x=x, label=y, a=a, b=b, c=c)
difference = x @ a.T + x**2 @ b.T + c - y
expected = {
    "loss": np.sum(difference**2, keepdims=True),
    "x_grad": 2 * difference * (a + 2 * b * x),
    "label_grad": -2 * difference,
    "a_grad": np.sum(2 * difference * x, axis=0, keepdims=True),
    "b_grad": np.sum(2 * difference * x**2, axis=0, keepdims=True),
    "c_grad": np.sum(2 * difference, axis=0),
}
table = Table("output", "by the model", "by hand", show_lines=True)
for name, array in expected.items():
    table.add_row(name, str(result[name].round(2)), str(array.round(2)))
    np.testing.assert_allclose(result[name], array, rtol=1e-5, atol=1e-4)
Console().print(table)
