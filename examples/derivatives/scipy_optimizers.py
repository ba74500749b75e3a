"""SciPy's solvers with exact derivatives
======================================

`trust-ncg` minimizes Rosenbrock's function, whose minimum is at (1, 1), by Hessian-vector products;
`least_squares` fits a decaying wave by the Jacobian of its residuals.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from scipy.optimize import check_grad, least_squares, minimize

from onnxgrad import hvp, jacobian

HEAD = '<ir_version: 9, opset_import: ["": 20]>'


def function(model):
    """Return a function of named arrays that returns the outputs of the model by name."""
    session = InferenceSession(model.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    return lambda **inputs: dict(zip(names, session.run(None, inputs)))


# %%
# `hvp` is one model for the value, the gradient and a Hessian-vector product.

rosenbrock = onnx.parser.parse_model(f"""{HEAD} rosenbrock (double[2] x) => (double[1] y)
    <int64[2] halves = {{1, 1}}, double[1] one = {{1.0}}, double[1] hundred = {{100.0}}> {{
    a, b = Split(x, halves)  s = Mul(a, a)  c = Sub(b, s)  d = Sub(one, a)
    e = Mul(c, c)  f = Mul(hundred, e)  g = Mul(d, d)  y = Add(f, g) }}""")
second = function(hvp(rosenbrock))  # value, gradient and product, in one run
zero = np.zeros(2)
path = [np.array([-1.2, 1.0])]
found = minimize(
    lambda x: second(x=x, x_vector=zero)["y"].item(),
    path[0],
    method="trust-ncg",
    jac=lambda x: second(x=x, x_vector=zero)["x_grad"],
    hessp=lambda x, v: second(x=x, x_vector=v)["x_hvp"],
    callback=lambda x: path.append(x.copy()),
    options={"gtol": 1e-10},
)
np.testing.assert_allclose(found.x, [1, 1], rtol=1e-8)
print(f"trust-ncg: {found.x} after {found.nit} steps and {found.nhev} products")

# %%
# The residuals of a decaying wave have a Jacobian with respect to its two parameters.

wave = onnx.parser.parse_model(f"""{HEAD}
    wave (double[2] p, double[N] t, double[N] y) => (double[N] r)
    <int64[2] halves = {{1, 1}}> {{ rate, speed = Split(p, halves)  a = Mul(rate, t)  b = Neg(a)
    c = Exp(b)  d = Mul(speed, t)  e = Cos(d)  f = Mul(c, e)  r = Sub(f, y) }}""")
t, true = np.linspace(0, 4, 50), np.array([0.5, 3.0])
data = {"t": t, "y": np.exp(-true[0] * t) * np.cos(true[1] * t)}
residuals, slopes = function(wave), function(jacobian(wave, inputs=["p"]))
r = lambda p: residuals(p=p, **data)["r"]  # noqa: E731
J = lambda p: slopes(p=p, **data)["r_p_jacobian"]  # noqa: E731
assert check_grad(lambda p: r(p) @ r(p), lambda p: 2 * J(p).T @ r(p), true + 0.1) < 1e-5
fitted = least_squares(r, true + 0.3, jac=J, xtol=1e-12, gtol=1e-12)
np.testing.assert_allclose(fitted.x, true, rtol=1e-8)
print(f"least_squares: {fitted.x} after {fitted.nfev} evaluations")

# %%
# The steps of Newton's method through the valley.

plt.plot(*np.array(path).T, "o-")
plt.show()
