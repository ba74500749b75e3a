"""`onnxgrad.jax.function` of models of many forms, beside their mathematics in JAX."""

import logging
import re

import numpy as np
import onnx
import pytest

from tests.support.bridge_cases import CASES
from tests.support.errors import naming

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import onnxgrad.jax  # noqa: E402
from onnxgrad.reporting import warn_once  # noqa: E402


@pytest.fixture(autouse=True)
def wide_floats():
    with jax.enable_x64(True):
        yield


def function_of_case(case, model=None):
    """Return the function of a case and its weights, in its dtype, and the mathematics in JAX."""
    apply, params = onnxgrad.jax.function(model or case.model(), trainable=list(case.weights))
    wide = {name: jnp.asarray(w, case.dtype) for name, w in params.items()}

    def by_onnx(params, *inputs):
        outputs = apply(params, *inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    return by_onnx, wide, lambda params, *inputs: case.mathematics(jnp, params, *inputs)


def gradient_function(case, outputs):
    """Return the gradients of a loss of all float outputs, w.r.t. the weights and float inputs."""

    def loss(params, *inputs):
        real = [y for y in outputs(params, *inputs) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum((i * y**2 + y).sum() for i, y in enumerate(real, 1))

    return jax.grad(loss, argnums=(0, *(1 + i for i in case.float_inputs())))


def assert_close_trees(found, expected, dtype="float64"):
    rtol, atol = (1e-6, 1e-9) if dtype == "float64" else (1e-4, 1e-5)
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def doubled(inputs):
    """Return each input twice along a new axis, floats also with another value."""
    return [np.stack([x, 0.5 * x if x.dtype.kind == "f" else x[::-1]]) for x in inputs]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = CASES[name]
    apply, params, witness = function_of_case(case)
    assert_close_trees(
        jax.jit(apply)(params, *case.inputs), witness(params, *case.inputs), case.dtype
    )
    found, expected = (gradient_function(case, f) for f in (apply, witness))
    assert_close_trees(
        jax.jit(found)(params, *case.inputs), expected(params, *case.inputs), case.dtype
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients(name):
    case = CASES[name]
    apply, params, witness = function_of_case(case)

    def penalty_gradient(outputs):
        gradients = gradient_function(case, outputs)
        return jax.grad(lambda *args: sum((g**2).sum() for g in jax.tree.leaves(gradients(*args))))

    found, expected = map(penalty_gradient, (apply, witness))
    assert_close_trees(
        jax.jit(found)(params, *case.inputs), expected(params, *case.inputs), case.dtype
    )


@pytest.mark.parametrize("name", CASES)
def test_vmap_of_gradients(name):
    case = CASES[name]
    apply, params, witness = function_of_case(case)
    found, expected = (
        jax.vmap(gradient_function(case, f), (None, *[0] * len(case.inputs)))
        for f in (apply, witness)
    )
    inputs = doubled(case.inputs)
    assert_close_trees(jax.jit(found)(params, *inputs), expected(params, *inputs), case.dtype)


def test_vmap_of_a_fixed_batch_says_that_it_is_a_loop(caplog):
    case = CASES["a fixed batch"]
    apply, params, witness = function_of_case(case)
    [blocks] = doubled(case.inputs)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        found = jax.vmap(lambda x: apply(params, x))(blocks)
    assert re.search(naming("vmap", "'x'", "(4, 3)"), caplog.text)
    assert_close_trees(found, jax.vmap(lambda x: witness(params, x))(blocks))


def test_a_fixed_batch_takes_no_other_rows():
    case = CASES["a fixed batch"]
    apply, params, _ = function_of_case(case)
    with pytest.raises(ValueError, match=naming("'x'", "(4, 3)", "(3, 3)")):
        apply(params, case.inputs[0][:3])


def test_tangents_and_gradients_skip_integers():
    """JAX has the dtype `float0` for tangents of integers and booleans."""
    case = CASES["several types"]
    apply, params, witness = function_of_case(case)
    directions = [
        np.flip(x) if x.dtype == np.float64 else np.zeros(x.shape, jax.dtypes.float0)
        for x in case.inputs
    ]
    found, expected = (
        jax.jvp(lambda *inputs, f=f: f(params, *inputs), tuple(case.inputs), tuple(directions))
        for f in (apply, witness)
    )
    assert_close_trees(found[0], expected[0])
    for a, b in zip(found[1], expected[1], strict=True):
        assert a.dtype == b.dtype
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b)
    gradients = [
        jax.grad(lambda *inputs, f=f: f(params, *inputs)[0].sum(), (0, 1, 2, 3), allow_int=True)(
            *case.inputs
        )
        for f in (apply, witness)
    ]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype
    np.testing.assert_allclose(gradients[0][2], gradients[1][2])


def test_weights_in_a_folder(tmp_path):
    """A model whose weights are files beside it is trained, and written as one file of its own."""
    case = CASES["local functions"]
    path = tmp_path / "given" / "model.onnx"
    path.parent.mkdir()
    onnx.save(case.model(), path, save_as_external_data=True, all_tensors_to_one_file=False,
              size_threshold=0)  # fmt: skip
    assert len(list(path.parent.iterdir())) == 1 + len(case.weights)
    apply, params = onnxgrad.jax.function(path)
    inputs = [np.float32(x) for x in case.inputs]
    np.testing.assert_allclose(
        apply(params, *inputs), case.mathematics(np, case.weights, *case.inputs)[0], rtol=1e-5
    )
    doubled_params = jax.tree.map(lambda w: 2 * w, params)
    apply.to_onnx(doubled_params, tmp_path / "trained.onnx")
    for file in path.parent.iterdir():
        file.unlink()
    again, read = onnxgrad.jax.function(tmp_path / "trained.onnx")
    assert_close_trees(read, doubled_params)
    assert_close_trees(again(read, *inputs), apply(doubled_params, *inputs))
