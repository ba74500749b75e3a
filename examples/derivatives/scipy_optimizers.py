"""SciPy's solvers with exact derivatives
======================================

The solvers of SciPy take functions that return derivatives; a session of onnxruntime can compute
these derivatives. `minimize` by the method `trust-ncg` uses products of the Hessian with vectors,
and finds the minimum of Rosenbrock's function, which is at (1, 1). `least_squares` uses the
Jacobian of residuals, and fits a decaying wave.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from scipy.optimize import check_grad, least_squares, minimize

from onnxgrad import hvp, jacobian

HEAD = '<ir_version: 9, opset_import: ["": 20]>'


def make_function(model):
    """Return the function {name of input: array} -> {name of output: array} of a model."""
    session = InferenceSession(model.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    return lambda **inputs: dict(zip(names, session.run(None, inputs)))


# %%
# `hvp` returns one model that computes three outputs: the value of the function, its gradient, and
# the product of its Hessian with a vector.

rosenbrock = onnx.parser.parse_model(f"""{HEAD} rosenbrock (double[2] x) => (double[1] y)
    <int64[2] halves = {{1, 1}}, double[1] one = {{1.0}}, double[1] hundred = {{100.0}}> {{
    a, b = Split(x, halves)  s = Mul(a, a)  c = Sub(b, s)  d = Sub(one, a)
    e = Mul(c, c)  f = Mul(hundred, e)  g = Mul(d, d)  y = Add(f, g) }}""")
second = make_function(hvp(rosenbrock))
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
# The residuals of a decaying wave are the differences between the wave and the data. `jacobian`
# returns a model of the Jacobian of the residuals w.r.t. the two parameters of the wave, its rate
# of decay and its speed.

wave = onnx.parser.parse_model(f"""{HEAD}
    wave (double[2] p, double[N] t, double[N] y) => (double[N] r)
    <int64[2] halves = {{1, 1}}> {{ rate, speed = Split(p, halves)  a = Mul(rate, t)  b = Neg(a)
    c = Exp(b)  d = Mul(speed, t)  e = Cos(d)  f = Mul(c, e)  r = Sub(f, y) }}""")
t, true = np.linspace(0, 4, 50), np.array([0.5, 3.0])
data = {"t": t, "y": np.exp(-true[0] * t) * np.cos(true[1] * t)}
residuals, slopes = make_function(wave), make_function(jacobian(wave, inputs=["p"]))
r = lambda p: residuals(p=p, **data)["r"]  # noqa: E731
J = lambda p: slopes(p=p, **data)["r_p_jacobian"]  # noqa: E731
assert check_grad(lambda p: r(p) @ r(p), lambda p: 2 * J(p).T @ r(p), true + 0.1) < 1e-5
fitted = least_squares(r, true + 0.3, jac=J, xtol=1e-12, gtol=1e-12)
np.testing.assert_allclose(fitted.x, true, rtol=1e-8)
print(f"least_squares: {fitted.x} after {fitted.nfev} evaluations")

# %%
# The points that `trust-ncg` visits on its way to the minimum of Rosenbrock's function.

plt.plot(*np.array(path).T, "o-")
plt.plot(1, 1, "k*")
plt.xlabel("x[0]")
plt.ylabel("x[1]")
plt.show()
