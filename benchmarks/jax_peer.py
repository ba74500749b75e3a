"""A PyTorch module as a training step of JAX, for networks.py: its operators in jax.numpy.

The step is compiled as a whole and takes over the memory of its state, as JAX users write it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax, nn

OPERATORS: dict[str, Callable[..., Any]] = {  # of PyTorch's export, on arrays of JAX
    "adaptive_avg_pool1d": lambda x, size: x.mean(-1, keepdims=True),
    "adaptive_avg_pool2d": lambda x, size: x.mean((-2, -1), keepdims=True),
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a + b,
    "arange": lambda n, **_: jnp.arange(n),
    "cat": jnp.concatenate,
    "chunk": lambda x, parts, axis=0: jnp.split(x, parts, axis),
    "contiguous": lambda x: x,
    "dropout": lambda x, rate, training: x,
    "embedding": lambda table, ids, *_: table[ids],
    "expand": lambda x, sizes: jnp.broadcast_to(
        x, [n if wanted < 0 else wanted for n, wanted in zip(x.shape, sizes, strict=True)]
    ),
    "flatten": lambda x, first=0, last=-1: x.reshape(
        *x.shape[:first], -1, *x.shape[last % x.ndim + 1 :]
    ),
    "gelu": partial(nn.gelu, approximate=False),
    "hardtanh": lambda x, low=-1.0, high=1.0: jnp.clip(x, low, high),
    "linear": lambda x, w, b=None: x @ w.T if b is None else x @ w.T + b,
    "matmul": jnp.matmul,
    "mean": lambda x, axes: x.mean(tuple(axes)),
    "permute": jnp.transpose,
    "relu": nn.relu,
    "reshape": lambda x, shape: x.reshape(shape),
    "select": lambda x, axis, i: jnp.take(x, i, axis),
    "slice": lambda x, axis, first, last: lax.slice_in_dim(
        x, first, min(last, x.shape[axis]), axis=axis
    ),
    "squeeze": jnp.squeeze,
    "transpose": jnp.swapaxes,
    "unflatten": lambda x, axis, sizes: x.reshape(
        *x.shape[: axis % x.ndim], *sizes, *x.shape[axis % x.ndim + 1 :]
    ),
    "unsqueeze": jnp.expand_dims,
    "view": lambda x, shape: x.reshape(shape),
    "zeros": lambda shape, **_: jnp.zeros(shape),
}


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function under its name to the operators."""
    OPERATORS[function.__name__] = function
    return function


@operator
def index(x, places):
    return x[tuple(slice(None) if i is None else i for i in places)]


@operator
def layer_norm(x, sizes, scale, bias, epsilon=1e-5, *_):
    axes = tuple(range(-len(sizes), 0))
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + epsilon) * scale + bias


@operator
def scaled_dot_product_attention(q, k, v, mask=None, dropout=0.0, is_causal=False):
    scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return nn.softmax(scores) @ v


def convolve(x, w, b=None, stride=1, padding=0, dilation=1, groups=1):
    axes = x.ndim - 2
    strides, pads, dilations = (_each(n, axes) for n in (stride, padding, dilation))
    y = lax.conv_general_dilated(
        x, w, strides, [(n, n) for n in pads], None, dilations, feature_group_count=groups
    )
    return y if b is None else y + b.reshape(-1, *[1] * axes)


OPERATORS |= {"conv1d": convolve, "conv2d": convolve}


@operator
def conv_transpose2d(x, w, b=None, stride=1):
    spatial = lax.conv_dimension_numbers(x.shape, w.shape, ("NCHW", "IOHW", "NCHW"))
    y = lax.conv_general_dilated(
        x, w[:, :, ::-1, ::-1], (1, 1), [(n - 1, n - 1) for n in w.shape[2:]],
        lhs_dilation=_each(stride, 2), dimension_numbers=spatial,
    )  # fmt: skip
    return y if b is None else y + b.reshape(-1, 1, 1)


def max_pool(x, size, stride=None, padding=0):
    axes = x.ndim - 2
    sizes, pads = _each(size, axes), _each(padding, axes)
    strides = _each(stride, axes) if stride else sizes
    return lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, 1, *sizes),
        (1, 1, *strides),
        [(0, 0)] * 2 + [(n, n) for n in pads],
    )


OPERATORS |= {"max_pool1d": max_pool, "max_pool2d": max_pool}


def _each(n: Any, axes: int) -> tuple[int, ...]:
    """Return a number for each axis, of a number or a list of one or more."""
    given = (n,) if isinstance(n, int) else tuple(n)
    return given * axes if len(given) == 1 else given


@operator
def lstm(x, states, weights, *_):
    w, r, b, c = weights
    inputs = jnp.swapaxes(x, 0, 1) @ w.T + (b + c)

    def cell(state, before):
        h, c = state
        i, f, g, o = jnp.split(before + h @ r.T, 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), outputs = lax.scan(cell, tuple(s[0] for s in states), inputs)
    return jnp.swapaxes(outputs, 0, 1), h[None], c[None]


@operator
def gru(x, state, weights, *_):
    w, r, b, c = weights
    inputs = jnp.swapaxes(x, 0, 1) @ w.T + b

    def cell(h, before):
        (p, q, s), (t, u, v) = jnp.split(before, 3, -1), jnp.split(h @ r.T + c, 3, -1)
        reset, update = nn.sigmoid(p + t), nn.sigmoid(q + u)
        h = (1 - update) * jnp.tanh(s + reset * v) + update * h
        return h, h

    h, outputs = lax.scan(cell, state[0], inputs)
    return jnp.swapaxes(outputs, 0, 1), h[None]


def batch_norm(x, scale, bias, mean, variance, training, momentum, epsilon, *_):
    """Return the normalized values, and the statistics after the batch."""
    each = (-1, *[1] * (x.ndim - 2))
    if training:
        axes = (0, *range(2, x.ndim))
        of_batch, spread = x.mean(axes), x.var(axes)
        count = x.size / x.shape[1]
        mean = (1 - momentum) * mean + momentum * of_batch
        variance = (1 - momentum) * variance + momentum * spread * count / (count - 1)
    else:
        of_batch, spread = mean, variance
    factor = scale * lax.rsqrt(spread + epsilon)
    y = x * factor.reshape(each) + (bias - of_batch * factor).reshape(each)
    return y, (mean, variance)


def traced(module: torch.nn.Module, example: torch.Tensor) -> tuple[Callable[..., Any], Any, Any]:
    """Return `apply(weights, buffers, x) -> (y, buffers)`, and the weights and buffers by name."""
    exported = torch.export.export(module, (example,))
    signature, nodes = exported.graph_signature, list(exported.graph.nodes)
    held = {**module.state_dict(), **exported.constants}
    weights = {k: held[name] for k, name in signature.inputs_to_parameters.items()}
    names = signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    buffers = {k: held[name] for k, name in names.items()}

    def apply(weights, buffers, x):
        values, after = {**weights, **buffers}, dict(buffers)
        for node in nodes:
            if node.op == "placeholder":
                values.setdefault(node.name, x)
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, dict(node.kwargs)), lambda n: values[n.name]
                )
                name = str(node.target).split(".")[1] if "." in str(node.target) else "getitem"
                if name == "getitem":
                    values[node.name] = args[0][args[1]]
                elif name == "batch_norm":
                    values[node.name], moments = batch_norm(*args)
                    after |= zip((n.name for n in node.args[3:5]), moments, strict=True)
                else:
                    values[node.name] = OPERATORS[name](*args, **kwargs)
        [output] = [
            values[n.name]
            for n in nodes[-1].args[0]
            if n.op != "placeholder" and not n.name.startswith("add_")
        ]
        return output, after

    arrays = [
        {k: jnp.array(t.detach().numpy()) for k, t in part.items()} for part in (weights, buffers)
    ]
    return apply, *arrays


def mean_loss(network: Any, prediction: Any, label: Any) -> Any:
    """Return the mean loss; classes are on the last axis of the prediction."""
    if not network.labels:
        return ((prediction - label) ** 2).mean()
    scores = nn.log_softmax(prediction)
    return -jnp.take_along_axis(scores, label[..., None], -1).mean()


def updated(network: Any, weight: Any, gradient: Any, slots: Any, step: Any) -> tuple[Any, Any]:
    """Return a weight and its slots after a step of AdamW, or of SGD with momentum."""
    if not network.adam:
        velocity = 0.9 * slots[0] + gradient
        return weight - network.rate * velocity, (velocity,)
    mean = 0.9 * slots[0] + 0.1 * gradient
    square = 0.999 * slots[1] + 0.001 * gradient * gradient
    size = jnp.sqrt(square / (1 - 0.999**step)) + 1e-8
    change = mean / (1 - 0.9**step) / size
    return weight * (1 - network.rate * 0.01) - network.rate * change, (mean, square)


def jax_stepper(network: Any, module: Any, rows: int) -> Callable[[int], list[float]]:
    """Return JAX's training: `run(n)` does n steps and returns their losses."""
    X, y = network.data(rows)
    apply, weights, buffers = traced(module, torch.from_numpy(X[: network.batch]))
    slots = {
        k: tuple(jnp.zeros_like(w) for _ in range(1 + network.adam)) for k, w in weights.items()
    }

    @partial(jax.jit, donate_argnums=0)
    def step(state, x, label):
        weights, buffers, slots, count = state

        def objective(weights):
            prediction, after = apply(weights, buffers, x)
            return mean_loss(network, prediction, label), after

        (loss, after), gradients = jax.value_and_grad(objective, has_aux=True)(weights)
        pairs = {
            k: updated(network, w, gradients[k], slots[k], count + 1) for k, w in weights.items()
        }
        state = (
            {k: p[0] for k, p in pairs.items()},
            after,
            {k: p[1] for k, p in pairs.items()},
            count + 1,
        )
        return state, loss

    held = [(weights, buffers, slots, jnp.zeros(()))]

    def run(steps: int) -> list[float]:
        losses = []
        for i in range(steps):
            part = slice(i * network.batch % rows, i * network.batch % rows + network.batch)
            held[0], loss = step(held[0], X[part], y[part])
            losses.append(loss)
        return [float(loss) for loss in losses]

    return run
