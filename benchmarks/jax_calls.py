"""Time of a call of `onnxgrad.jax.function`, beside onnxruntime's session and the same MLP in JAX.

    python benchmarks/jax_calls.py

prints milliseconds a call, medians of calls by turns: the session alone, `apply` with and without
`jit`, and `value_and_grad` under `jit` beside the network written in JAX.
"""

from __future__ import annotations

from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime as ort
from common import SIZES, data, model, turns

import onnxgrad.jax

ROWS = 32


def by_jax(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the output of `model`, written in JAX."""
    for i in range(0, 2 * (len(SIZES) - 1), 2):
        x = x @ params[f"w{i}"] + params[f"w{i + 1}"]
        x = jax.nn.relu(x) if i < 2 * (len(SIZES) - 2) else x
    return x


def main() -> None:
    proto = model("N", 20)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options)
    apply, params = onnxgrad.jax.function(proto)
    x = data()[0][:ROWS]
    array, jitted, in_jax = jnp.asarray(x), jax.jit(apply), jax.jit(by_jax)

    def squares(function):
        return jax.jit(jax.value_and_grad(lambda p, x: (function(p, x) ** 2).mean()))

    gradients = {"file": squares(apply), "JAX": squares(by_jax)}
    np.testing.assert_allclose(jitted(params, array), by_jax(params, array), rtol=1e-4, atol=1e-5)
    calls = {
        "session.run": lambda: session.run(None, {"X": x}),
        "apply, jit": lambda: jax.block_until_ready(jitted(params, array)),
        "apply": lambda: jax.block_until_ready(apply(params, array)),
        "JAX, jit": lambda: jax.block_until_ready(in_jax(params, array)),
        "value_and_grad of the file": lambda: jax.block_until_ready(
            gradients["file"](params, array)
        ),
        "value_and_grad in JAX": lambda: jax.block_until_ready(gradients["JAX"](params, array)),
    }
    for name, seconds in turns(calls, 15).items():
        print(f"{name:28} {1e3 * median(seconds):.3f} ms")


if __name__ == "__main__":
    main()
