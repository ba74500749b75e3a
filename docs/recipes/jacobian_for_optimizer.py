"""
Exact Jacobians for scipy
=========================

``scipy.optimize.least_squares`` fits a curve to data. Without a Jacobian, it estimates one by
finite differences, with one more evaluation for each parameter. The model of the residuals as ONNX
gives the exact one, in float64.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnxruntime import InferenceSession
from scipy.optimize import least_squares

import onnxgrad as og

# %%
# Residuals of a damped oscillation y = a exp(-b t) cos(c t) + d, with the parameters (a, b, c, d).

residuals = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    residuals (double[4] p, double[M] t, double[M] y) => (double[M] r)
    <int64[4] sizes = {1, 1, 1, 1}> {
        a, b, c, d = Split <axis = 0> (p, sizes)
        bt = Mul(b, t)  minus = Neg(bt)  decay = Exp(minus)
        ct = Mul(c, t)  wave = Cos(ct)
        aw = Mul(a, wave)  curve = Mul(aw, decay)
        f = Add(curve, d)  r = Sub(f, y)
    }
""")
session = InferenceSession(og.jacobian(residuals, inputs=["p"]).SerializeToString())
rng = np.random.default_rng(0)
t, truth = np.linspace(0, 10, 80), np.array([2.0, 0.3, 2.0, 0.5])
y = truth[0] * np.exp(-truth[1] * t) * np.cos(truth[2] * t) + truth[3]
y += 0.05 * rng.normal(size=t.shape)


def run(p, name):
    """Return an output of the Jacobian's model."""
    return session.run([name], {"p": p, "t": t, "y": y})[0]


start = np.array([1.0, 0.1, 1.9, 0.0])
exact = least_squares(lambda p: run(p, "r"), start, jac=lambda p: run(p, "r_p_jacobian"))
estimated = least_squares(lambda p: run(p, "r"), start)
print("with the exact Jacobian:", exact.x, exact.nfev, "residuals,", exact.njev, "Jacobians")
np.testing.assert_allclose(exact.x, estimated.x, rtol=1e-4)
np.testing.assert_allclose(exact.x, truth, atol=0.05)

# %%
# The third column of the Jacobian is known in closed form: -a t exp(-b t) sin(c t).

a, b, c, _ = exact.x
column = -a * t * np.exp(-b * t) * np.sin(c * t)
np.testing.assert_allclose(run(exact.x, "r_p_jacobian")[:, 2], column, atol=1e-12)
plt.plot(t, y, ".")
plt.plot(t, run(exact.x, "r") + y)
plt.show()
