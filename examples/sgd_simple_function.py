"""The gradient of f(x) = a·x + b·x² + c, and of its loss, as ONNX models of standard operators."""

from pprint import pprint

import numpy as np
import onnx
from onnxruntime import InferenceSession

from onnxgrad import (
    DerivativeOptions,
    add_loss_output,
    onnx_derivative,
    onnx_rename_names,
    onnx_simple_text_plot,
    onnx_text_plot_io,
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
print(onnx_simple_text_plot(f), "\n\ny =", y.ravel())

# The gradient: its inputs are x, the weights, and y_grad, the gradient of what comes behind y.
gradient = onnx_derivative(f)
print("\nThe gradient\n" + onnx_text_plot_io(gradient))
print("\nIts nodes, with short names\n" + onnx_simple_text_plot(onnx_rename_names(gradient)))
print("\nIts operators:", {node.op_type for node in gradient.graph.node})

# A square loss behind y gives y_grad. Of the two outputs, loss and y, only the loss is kept.
loss = select_model_inputs_outputs(add_loss_output(f), outputs=["loss"])
print("\nThe loss\n" + onnx_simple_text_plot(loss))
options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
loss_gradient = onnx_rename_names(onnx_derivative(loss, options=options))
print("\nIts gradient\n" + onnx_simple_text_plot(loss_gradient))

# The same, with other weights than those that made y.
a, b, c = (np.array(v, np.float32) for v in ([[0.5, 0.33333]], [[2, 3]], [1]))
result = run(loss_gradient, x=x, label=y, a=a, b=b, c=c)
pprint(result)
difference = x @ a.T + x**2 @ b.T + c - y
np.testing.assert_allclose(result["x_grad"], 2 * difference * (a + 2 * b * x), rtol=1e-5)
np.testing.assert_allclose(result["label_grad"], -2 * difference, rtol=1e-5)
np.testing.assert_allclose(result["loss"], [[532.5546]], rtol=1e-5)
np.testing.assert_allclose(result["a_grad"], [[109.333244, 102.666565]], rtol=1e-5)
np.testing.assert_allclose(result["b_grad"], [[193.33316, 186.66649]], rtol=1e-5)
np.testing.assert_allclose(result["c_grad"], [76.6666], rtol=1e-5)
