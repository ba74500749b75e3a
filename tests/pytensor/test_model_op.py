"""`onnxgrad.pytensor.OnnxOp` beside the same mathematics in PyTensor."""

import pickle

import numpy as np
import pytest

from tests.support.errors import naming
from tests.support.models import parse_model

pytensor = pytest.importorskip("pytensor")

import pytensor.tensor as pt  # noqa: E402

from onnxgrad.pytensor import OnnxOp  # noqa: E402

RNG = np.random.default_rng(0)
WEIGHTS = {
    "a": RNG.normal(size=(3, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
    "c": RNG.normal(size=(2, 4)).astype(np.float32),
}
X = RNG.normal(size=(5, 3))


def tanh_layers():
    return parse_model(
        """f (float[N,3] x) => (float[N,2] y) {
            h = MatMul(x, a)  s = Add(h, b)  t = Tanh(s)  y = Gemm<transB=1>(t, c)
        }""",
        **WEIGHTS,
    )


def by_pytensor(params, x):
    """The model `tanh_layers`, written in PyTensor."""
    return pt.tanh(x @ params["a"] + params["b"]) @ params["c"].T


@pytest.fixture(scope="module")
def variables():
    """The function, its input and its weights as variables, and their values in float64."""
    op = OnnxOp(tanh_layers(), dtype="float64")
    x = pt.matrix("x", dtype="float64")
    weights = {
        name: pt.tensor(name, dtype="float64", shape=(None,) * w.ndim)
        for name, w in op.params.items()
    }
    values = {x: X} | {weights[name]: w for name, w in op.params.items()}
    return (lambda params, x: op(x, params=params)), weights, x, values


def total_square(f):
    return lambda params, x: (f(params, x) ** 2).sum()


DERIVED = {  # of a function of weights and one input
    "call": lambda f, p, x: f(p, x),
    "shape": lambda f, p, x: f(p, x).shape,
    "gradient of the input": lambda f, p, x: pytensor.grad(total_square(f)(p, x), x),
    "gradient of a weight": lambda f, p, x: pytensor.grad(total_square(f)(p, x), p["a"]),
    "gradient penalty": lambda f, p, x: pytensor.grad(
        (pytensor.grad(total_square(f)(p, x), x) ** 2).sum(), p["c"]
    ),
    "third order": lambda f, p, x: pytensor.grad(
        pytensor.grad(pytensor.grad(total_square(f)(p, x), x).sum(), x).sum(), p["b"]
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives(name, variables):
    apply, weights, x, values = variables
    found, expected = (
        DERIVED[name](f, weights, x).eval(values, on_unused_input="ignore")
        for f in (apply, by_pytensor)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_tangents(variables):
    apply, weights, x, values = variables
    push = getattr(pytensor.gradient, "pushforward", pytensor.gradient.Rop)  # before PyTensor 3
    direction = pt.as_tensor_variable(RNG.normal(size=X.shape))
    found, expected = (
        push(f(weights, x), x, direction).eval(values, on_unused_input="ignore")
        for f in (apply, by_pytensor)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_weights_as_arrays():
    op = OnnxOp(tanh_layers())
    x = pt.matrix("x", dtype="float32")
    found = op(x).eval({x: np.float32(X)})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_pytensor(WEIGHTS, X).eval(), rtol=1e-5)
    assert op.input_names == ["x"]
    assert op.output_names == ["y"]
    assert list(op.params) == ["a", "b", "c"]
    changed = op(x, params={"c": 2 * WEIGHTS["c"]}).eval({x: np.float32(X)})
    np.testing.assert_allclose(changed, 2 * found, rtol=1e-6)


def test_integers_and_several_outputs():
    model = parse_model(
        """f (int64[N] ids, float[N,2] x) => (float[N,2] y, int64[N,1] best) {
            e = Gather(table, ids)
            y = Mul(e, x)
            best = ArgMax<axis=1>(y)
        }""",
        table=RNG.normal(size=(4, 2)).astype(np.float32),
    )
    op = OnnxOp(model, dtype="float64")
    table, ids, x = op.params["table"], np.int32([3, 0, 3]), RNG.normal(size=(3, 2))
    weight = pt.matrix("table", dtype="float64")
    y, best = op(ids, x, params={"table": weight})
    assert best.eval({weight: table})[:, 0].tolist() == (table[ids] * x).argmax(1).tolist()
    gradient = pytensor.grad(y.sum(), weight).eval({weight: table})
    expected = np.zeros_like(table)
    np.add.at(expected, ids, x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_an_input_without_a_path_has_a_zero_gradient():
    model = parse_model("f (float[N] x, float[N] z) => (float[N] y) { s = Sign(z) y = Mul(x, s) }")
    op = OnnxOp(model)
    x, z = pt.vector("x", dtype="float32"), pt.vector("z", dtype="float32")
    values = {x: np.float32([1, 2]), z: np.float32([3, -4])}
    slopes = pytensor.grad(op(x, z).sum(), [x, z])
    assert [g.eval(values, on_unused_input="ignore").tolist() for g in slopes] == [[1, -1], [0, 0]]


def test_compiled_functions_are_pickled(variables):
    apply, weights, x, values = variables
    compiled = pytensor.function([x, *weights.values()], apply(weights, x))
    copy = pickle.loads(pickle.dumps(compiled))
    np.testing.assert_array_equal(copy(*values.values()), compiled(*values.values()))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda op: op(np.float32(X), params={"d": X}), ValueError, ("'d'",)),
        (lambda op: op(), ValueError, ("1 inputs", "not 0")),
        (lambda op: op(X), TypeError, ("'x'", "float32", "float64", "dtype=")),
        (lambda op: op(np.float32(X[0])), ValueError, ("'x'", "1 axes", "2")),
    ],
)
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=naming(*words)):
        call(OnnxOp(tanh_layers()))


def test_bad_dtype():
    with pytest.raises(ValueError, match=naming("dtype", "float64")):
        OnnxOp(tanh_layers(), dtype="double")


def test_nuts_samples_the_posterior_of_a_file():
    """The mean of a normal with known deviation has a posterior in closed form."""
    pm = pytest.importorskip("pymc")
    model = parse_model(
        """f (float[N] y, float[1] mean) => (float[N] log_density) {
            z = Sub(y, mean)  s = Mul(z, z)  log_density = Mul(s, half)
        }""",
        half=np.float32([-0.5]),
    )
    op = OnnxOp(model, dtype="float64")
    y = RNG.normal(1.5, 1, size=50)
    with pm.Model():
        mean = pm.Normal("mean", 0, 10, shape=1)
        pm.Potential("file", op(y, mean).sum())
        trace = pm.sample(
            400, tune=400, chains=2, cores=1, random_seed=0, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
    draws = trace.posterior["mean"].to_numpy().ravel()
    precision = 50 + 1 / 100
    assert abs(draws.mean() - y.sum() / precision) < 0.03
    assert abs(draws.std() - precision**-0.5) < 0.02
