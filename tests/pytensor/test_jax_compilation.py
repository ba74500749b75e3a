"""`onnxgrad.pytensor.OnnxOp` in functions that PyTensor compiles to JAX."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.bridge_cases import CASES
from tests.support.errors import naming
from tests.support.models import parse_model

jax = pytest.importorskip("jax")
pytensor = pytest.importorskip("pytensor")

import pytensor.tensor as pt  # noqa: E402

from onnxgrad.pytensor import OnnxOp  # noqa: E402
from tests.support.pytensor_cases import operation_of_case, weighted_sum  # noqa: E402

X = np.array([1.0, 2.0, -3.0])


@pytest.fixture(autouse=True)
def precision_of_pytensor():
    """Set the precision that PyTensor sets when it first compiles to JAX, in these tests only."""
    before = jax.config.jax_enable_x64
    import pytensor.link.jax.dispatch  # noqa: F401

    with jax.enable_x64(True):
        yield
    jax.config.update("jax_enable_x64", before)


def scaled_rows():
    return OnnxOp(
        parse_model("f (float[N] x, float factor) => (float[N] y) { y = Mul(x, factor) }"),
        dtype="float64",
    )


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = CASES[name]
    outputs, variables, values = operation_of_case(case)
    slopes = pytensor.grad(weighted_sum(outputs), variables)
    penalty = sum((g**2).sum() for g in slopes)
    results = [*outputs, *[y.shape for y in outputs], *slopes, *pytensor.grad(penalty, variables)]
    found, expected = (
        pytensor.function([*values], results, mode=mode)(*values.values()) for mode in ("JAX", None)
    )
    for a, b in zip(found, expected, strict=True):
        assert np.asarray(a).dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 if case.dtype == "float32" else 1e-12)


def test_constants_and_a_scan():
    """A constant number is no array in PyTensor's functions of JAX; a loop has its own graph."""
    op, x = scaled_rows(), pt.dvector("x")
    states = pytensor.scan(lambda h: op(h, 0.5), outputs_info=x, n_steps=3, return_updates=False)
    slope = pytensor.grad(states[-1].sum(), x)
    compiled = pytensor.function([x], [op(x, 2.5), states, slope], mode="JAX")
    y, states, slope = compiled(X)
    np.testing.assert_allclose(y, 2.5 * X)
    np.testing.assert_allclose(states, [X / 2, X / 4, X / 8])
    np.testing.assert_allclose(slope, [0.125] * 3)


def test_gradients_by_jax():
    """Samplers that compile to JAX differentiate by JAX, and may run all chains at once."""
    pm = pytest.importorskip("pymc")
    from pymc.sampling.jax import get_jaxified_logp

    op = scaled_rows()
    with pm.Model() as model:
        factor = pm.Normal("factor", 1, 2)
        pm.Potential("file", -((op(X, factor) - 1) ** 2).sum())
    log_density = get_jaxified_logp(model)
    factors = np.array([0.3, -1.2])
    slopes = jax.vmap(jax.grad(lambda factor: log_density([factor])))(factors)
    expected = (1 - factors) / 4 - 2 * (X * (factors[:, None] * X - 1)).sum(1)
    np.testing.assert_allclose(slopes, expected, rtol=1e-10)


def test_numpyro_samples_the_posterior_of_a_file():
    """The mean of a normal with known deviation has a posterior in closed form."""
    pm = pytest.importorskip("pymc")
    pytest.importorskip("numpyro")
    measured = np.random.default_rng(0).normal(1.5, 1, size=50)
    op = scaled_rows()
    with pm.Model():
        mean = pm.Normal("mean", 0, 10)
        pm.Potential("file", -0.5 * ((measured - op(np.ones(50), mean)) ** 2).sum())
        trace = pm.sample(
            400, tune=400, chains=2, random_seed=0, progressbar=False, nuts_sampler="numpyro",
            nuts_sampler_kwargs={"chain_method": "vectorized"}, compute_convergence_checks=False,
        )  # fmt: skip
    draws = trace.posterior["mean"].to_numpy().ravel()
    precision = 50 + 1 / 100
    assert abs(draws.mean() - measured.sum() / precision) < 0.03
    assert abs(draws.std() - precision**-0.5) < 0.02


def test_a_graph_in_float64_needs_64_bits_of_jax():
    op, x = scaled_rows(), pt.dvector("x")
    with jax.enable_x64(False), pytest.raises(ValueError, match=naming("'x'", "jax_enable_x64")):
        pytensor.function([x], op(x, 2.0), mode="JAX")(X)


def test_jax_is_imported_when_it_compiles():
    """The import of PyTensor's conversions to JAX would set the precision of JAX for all."""
    code = """if True:
        import sys
        import onnx, pytensor, pytensor.tensor as pt
        from onnxgrad.pytensor import OnnxOp
        model = 'f (float[N] x) => (float[N] y) { y = Exp(x) }'
        op = OnnxOp(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {model}'))
        x = pt.fvector("x")
        print(*op(x).eval({x: [0.0]}), "jax" in sys.modules)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1.0", "False"]
