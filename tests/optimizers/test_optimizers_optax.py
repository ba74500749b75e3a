"""Fifty steps along fixed gradients, with learning rates that change: as optax."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad import optimizers as of
from tests.support.optimizer_runs import RATES, TOLERANCE, assert_same, gradients, start, trained

optax = pytest.importorskip("optax")
jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def _float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def rate(count):
    return jax.numpy.asarray(RATES)[count]


def stepped(optimizer, parameters, dtype):
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, gradient):
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for gradient in gradients(dtype):
        if isinstance(parameters, optax.LookaheadParams):
            gradient = jax.tree.map(jax.numpy.asarray, gradient)
        parameters, state = step(parameters, state, gradient)
    return parameters, state


def weights(dtype):
    return {name: jax.numpy.asarray(a) for name, a in start(dtype).items()}


def mask(parameters):
    return {name: name not in ("bias", "norm.weight") for name in parameters}


WITNESSES = {
    "lion": (of.lion(), lambda: optax.lion(rate)),
    "lion with all": (
        of.lion(0.8, 0.9, 0.1, exclude=("bias", "norm*")),
        lambda: optax.lion(rate, 0.8, 0.9, weight_decay=0.1, mask=mask),
    ),
    "lamb": (of.lamb(), lambda: optax.lamb(rate)),
    "lamb with all": (
        of.lamb(0.8, 0.9, 1e-3, 0.1, exclude=("bias", "norm*")),
        lambda: optax.lamb(rate, 0.8, 0.9, 1e-3, weight_decay=0.1, mask=mask),
    ),
    "adamw": (of.adamw(weight_decay=0.1), lambda: optax.adamw(rate, weight_decay=0.1)),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", WITNESSES)
def test_fifty_steps(name, dtype):
    ours, theirs = WITNESSES[name]
    expected, _ = stepped(theirs(), weights(dtype), dtype)
    assert_same(trained(ours, dtype)[0], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("power", [2.0, 0.5])
@pytest.mark.parametrize("base", ["adamw", "sgd"])
def test_schedule_free(base, power, dtype):
    ours = of.schedule_free(None if base == "adamw" else of.sgd(weight_decay=0.1), 0.8, power)
    if base == "adamw":
        theirs = optax.adamw(rate, b1=0.0, weight_decay=0.0)
    else:
        theirs = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))
    # its own count begins with one
    free = optax.contrib.schedule_free(theirs, lambda count: rate(count - 1), 0.8, power)
    parameters, state = stepped(free, weights(dtype), dtype)
    reached, mean = trained(ours, dtype)
    assert_same(reached, parameters, TOLERANCE[dtype])
    evaluation = optax.contrib.schedule_free_eval_params(state, parameters)
    assert_same(mean, evaluation, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_lookahead(dtype):
    theirs = optax.lookahead(optax.adam(rate), sync_period=6, slow_step_size=0.3)
    expected, _ = stepped(theirs, optax.LookaheadParams.init_synced(weights(dtype)), dtype)
    reached, slow = trained(of.lookahead(of.adam(), every=6, alpha=0.3), dtype)
    assert_same(reached, expected.fast, TOLERANCE[dtype])
    assert_same(slow, expected.slow, TOLERANCE[dtype])
