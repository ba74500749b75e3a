"""Fifty steps along fixed gradients, with learning rates that change: as optax."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from onnxgrad import optimizers as of
from tests.support.optimizer_runs import (
    RATES,
    TOLERANCE,
    assert_equal_weights,
    first_weights,
    fixed_gradients,
    weights_after_fifty_steps,
)
from tests.support.running import in_sweep

optax = pytest.importorskip("optax")
jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def jax_in_float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def rate(count):
    return jax.numpy.asarray(RATES)[count]


def steps_of_optax(optimizer, parameters, dtype):
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, gradient):
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for gradient in fixed_gradients(dtype):
        if isinstance(parameters, optax.LookaheadParams):
            gradient = jax.tree.map(jax.numpy.asarray, gradient)
        parameters, state = step(parameters, state, gradient)
    return parameters, state


def first_jax_weights(dtype):
    return {name: jax.numpy.asarray(a) for name, a in first_weights(dtype).items()}


def is_decayed(parameters):
    return {name: name not in ("bias", "norm.weight") for name in parameters}


DTYPES = pytest.mark.parametrize("dtype", [np.float64, in_sweep(np.float32)])
WITNESSES = {
    "lion with all": (
        of.lion(0.8, 0.9, 0.1, exclude=("bias", "norm*")),
        lambda: optax.lion(rate, 0.8, 0.9, weight_decay=0.1, mask=is_decayed),
    ),
    "lamb with all": (
        of.lamb(0.8, 0.9, 1e-3, 0.1, exclude=("bias", "norm*")),
        lambda: optax.lamb(rate, 0.8, 0.9, 1e-3, weight_decay=0.1, mask=is_decayed),
    ),
    "lion": (of.lion(), lambda: optax.lion(rate)),
    "lamb": (of.lamb(), lambda: optax.lamb(rate)),
    "adamw": (of.adamw(weight_decay=0.1), lambda: optax.adamw(rate, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_defaults_are_those_of_optax(name):
    ours, theirs = (inspect.signature(getattr(package, name)).parameters for package in (of, optax))
    shared = [option for option in ours if option in theirs]
    assert {"b1", "b2", "weight_decay"} <= {*shared}
    assert {n: ours[n].default for n in shared} == {n: theirs[n].default for n in shared}


@DTYPES
@pytest.mark.parametrize("name", [*WITNESSES][:2] + [in_sweep(name) for name in [*WITNESSES][2:]])
def test_fifty_steps(name, dtype):
    ours, theirs = WITNESSES[name]
    expected, _ = steps_of_optax(theirs(), first_jax_weights(dtype), dtype)
    assert_equal_weights(weights_after_fifty_steps(ours, dtype)[0], expected, TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(
    ("base", "power"), [("adamw", 2.0), ("sgd", 0.5), in_sweep("adamw", 0.5), in_sweep("sgd", 2.0)]
)
def test_schedule_free(base, power, dtype):
    ours = of.schedule_free(None if base == "adamw" else of.sgd(weight_decay=0.1), 0.8, power)
    if base == "adamw":
        theirs = optax.adamw(rate, b1=0.0, weight_decay=0.0)
    else:
        theirs = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))
    # its own count begins with one
    free = optax.contrib.schedule_free(theirs, lambda count: rate(count - 1), 0.8, power)
    parameters, state = steps_of_optax(free, first_jax_weights(dtype), dtype)
    reached, mean = weights_after_fifty_steps(ours, dtype)
    assert_equal_weights(reached, parameters, TOLERANCE[dtype])
    evaluation = optax.contrib.schedule_free_eval_params(state, parameters)
    assert_equal_weights(mean, evaluation, TOLERANCE[dtype])


@DTYPES
def test_lookahead(dtype):
    theirs = optax.lookahead(optax.adam(rate), sync_period=6, slow_step_size=0.3)
    expected, _ = steps_of_optax(
        theirs, optax.LookaheadParams.init_synced(first_jax_weights(dtype)), dtype
    )
    reached, slow = weights_after_fifty_steps(of.lookahead(of.adam(), every=6, alpha=0.3), dtype)
    assert_equal_weights(reached, expected.fast, TOLERANCE[dtype])
    assert_equal_weights(slow, expected.slow, TOLERANCE[dtype])
