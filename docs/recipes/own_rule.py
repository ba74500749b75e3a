"""
A gradient rule of your own
===========================

The activations of this network are rounded to eighths, by a local function of the model. Rounding
has no useful gradient, so that nothing in front of it would train. A rule for the function passes
gradients on where the activation is between -1 and 1.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20, "my": 1]>
    network (float[N,1] x) => (float[N,1] y) {
        a = MatMul(x, w1)  b = Add(a, b1)  h = Tanh(b)  r = my.Round8(h)  y = MatMul(r, w2)
    }
    <domain: "my", opset_import: ["": 20]>
    Round8 (x) => (y) {
        eight = Constant<value_float = 8.0>()  m = Mul(x, eight)  n = Round(m)  y = Div(n, eight)
    }
""")
rng = np.random.default_rng(0)
for name, shape in (("w1", (1, 16)), ("b1", (16,)), ("w2", (16, 1))):
    array = rng.normal(size=shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
x = np.linspace(-2, 2, 200, dtype=np.float32)[:, None]
y = np.sin(2 * x)


def fit():
    """Train all weights that have a gradient; return the trainer."""
    return og.Trainer(model, "mse", learning_rate=0.02).fit(x, y, epochs=200)


# %%
# Without a rule, the function is what its nodes are: the weights in front of it stay as they are,
# which a warning says. With the rule, they train as well.

without = fit()


@og.rule("Round8", domain="my")
def round8(op, node, g):
    """y = round(8 x) / 8:  dx = g where |x| <= 1."""
    return (op.Where(op.LessOrEqual(op.Abs(node.inputs[0]), 1.0), g, 0.0),)


with_rule = fit()
print("loss without the rule", without.history[-1]["loss"], "with", with_rule.history[-1]["loss"])
assert with_rule.history[-1]["loss"] < 0.5 * without.history[-1]["loss"]
plt.plot(x, y, label="data")
for trainer, label in ((without, "without the rule"), (with_rule, "with the rule")):
    plt.plot(x, trainer.predict(x), label=label)
plt.legend()
plt.show()
