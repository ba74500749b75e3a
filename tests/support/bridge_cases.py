"""Models of many forms, and their mathematics in the functions of numpy or JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.models import parse_model

special = pytest.importorskip("scipy.special")

_RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class BridgeCase:
    """A model and its mathematics.

    Attributes:
        text: the model, without its weights.
        weights: the weights that have gradients, by name.
        inputs: arrays for one call, floats in `dtype`.
        mathematics: the outputs, as a function of a module of arrays (numpy or `jax.numpy`), of the
            weights and of the inputs.
        constants: other initializers of the model.
        opset: the opset of the model.
        dtype: "float64", or "float32" if onnxruntime has no kernel of an operator in float64.
    """

    text: str
    weights: Mapping[str, np.ndarray]
    inputs: Sequence[np.ndarray]
    mathematics: Callable[..., list[Any]]
    constants: Mapping[str, np.ndarray] | None = None
    opset: int = 18
    dtype: str = "float64"

    def model(self) -> onnx.ModelProto:
        """Return the model, in float32."""
        return parse_model(
            self.text,
            opset=self.opset,
            ir_version=10,
            **{name: w.astype(np.float32) for name, w in self.weights.items()},
            **(self.constants or {}),
        )

    def float_inputs(self) -> list[int]:
        """Return the indices of the inputs that have gradients."""
        return [i for i, x in enumerate(self.inputs) if x.dtype == self.dtype]


def _normal(*shape: int) -> np.ndarray:
    """Return numbers that float32 holds, so that float32 and float64 compute with the same ones."""
    return _RNG.normal(size=shape).astype(np.float32).astype(np.float64)


def _leaky(xp: Any, x: Any, slope: float) -> Any:
    return xp.where(x > 0, x, slope * x)


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def _standard(xp: Any, x: Any, epsilon: float) -> Any:
    """Return rows of mean zero and of variance one."""
    centered = x - x.mean(-1, keepdims=True)
    return centered / xp.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)


def _gelu(xp: Any, x: Any) -> Any:
    return x * (1 + _erf(xp, x / 2**0.5)) / 2


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:
        return special.erf(x)
    import jax

    return jax.scipy.special.erf(x)


def _local_functions(xp: Any, w: Any, x: Any) -> list[Any]:
    h = _leaky(xp, x @ w["w1"] + w["b"], 0.125)
    return [_leaky(xp, h @ w["w2"] + w["b"], 0.25)]


def _contrib(xp: Any, w: Any, x: Any) -> list[Any]:
    h = 0.5 * x @ w["w"].T
    total = h + x + w["bias"]
    return [_gelu(xp, _standard(xp, total, 2.0**-10) * w["gain"] + w["shift"]), total]


def _fixed_batch(xp: Any, w: Any, x: Any) -> list[Any]:
    powers = xp.exp(x @ w["w"])
    return [powers / powers.sum(0)]


def _several_types(xp: Any, w: Any, ids: Any, keep: Any, x: Any, pixels: Any) -> list[Any]:
    chosen = xp.where(keep[:, None], w["table"][ids], x)
    y = chosen * (pixels / 64.0)
    return [y, (2 * y).astype("int64"), y > x, x, w["table"]]


def _omitted_operands(xp: Any, w: Any, x: Any) -> list[Any]:
    return [_standard(xp, xp.minimum(x, 0.5) + x, 1e-12) * w["gain"]]


def _newest_opset(xp: Any, w: Any, x: Any) -> list[Any]:
    h = x @ w["a"]
    gated = h * _sigmoid(xp, h) * (x @ w["b"])
    return [xp.log(xp.exp(gated).sum(1)), gated]


CASES = {
    "local functions": BridgeCase(
        """f (float[N,3] x) => (float[N,3] y) {
            h = local.dense<slope=0.125>(x, w1, b)
            y = local.dense<slope=0.25>(h, w2, b)
        }
        <domain: "local", opset_import: ["": 18, "local": 1]> dense<slope>(x, w, b) => (y) {
            h = MatMul(x, w)
            s = Add(h, b)
            y = local.act<slope: float = @slope>(s)
        }
        <domain: "local", opset_import: ["": 18]> act<slope>(x) => (y) {
            y = LeakyRelu<alpha: float = @slope>(x)
        }""",
        {"w1": _normal(3, 3), "w2": _normal(3, 3), "b": _normal(3)},
        [_normal(4, 3)],
        _local_functions,
    ),
    "operators of onnxruntime": BridgeCase(
        """f (float[N,3] x) => (float[N,3] y, float[N,3] total) {
            h = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, w)
            n, mean, deviation, total =
                com.microsoft.SkipLayerNormalization<epsilon=0.0009765625>(h, x, gain, shift, bias)
            y = com.microsoft.Gelu(n)
        }""",
        {
            "w": _normal(3, 3),
            "gain": _normal(3),
            "shift": _normal(3),
            "bias": _normal(3),
        },
        [np.float32(_normal(4, 3))],
        _contrib,
        dtype="float32",  # Erf
    ),
    "a fixed batch": BridgeCase(
        "f (float[4,3] x) => (float[4,2] y) { h = MatMul(x, w)  y = Softmax<axis=0>(h) }",
        {"w": _normal(3, 2)},
        [_normal(4, 3)],
        _fixed_batch,
    ),
    "several types": BridgeCase(
        """f (int32[N] ids, bool[N] keep, float[N,2] x, uint8[N,2] pixels)
            => (float[N,2] y, int64[N,2] whole, bool[N,2] above, float[N,2] same, float[5,2] rows) {
            e = Gather(table, ids)
            k = Unsqueeze(keep, one)
            v = Where(k, e, x)
            p = Cast<to=1>(pixels)
            q = Div(p, scale)
            y = Mul(v, q)
            d = Add(y, y)
            whole = Cast<to=7>(d)
            above = Greater(y, x)
            same = Identity(x)
            rows = Identity(table)
        }""",
        {"table": _normal(5, 2)},
        [
            np.int32([0, 4, 2]),
            np.array([True, False, True]),
            _normal(3, 2),
            np.uint8([[1, 2], [3, 4], [255, 6]]),
        ],
        _several_types,
        {"one": np.int64([1]), "scale": np.float32(64)},
    ),
    "operands left out": BridgeCase(
        """f (float[N,3] x) => (float[N,3] y) {
            c = Clip(x, , most)
            y = com.microsoft.SkipLayerNormalization(c, x, gain)
        }""",
        {"gain": _normal(3)},
        [_normal(4, 3)],
        _omitted_operands,
        {"most": np.float32(0.5)},
    ),
    "an input with a default": BridgeCase(
        "f (float[N,3] x, float[3,2] w) => (float[N,2] y) { h = MatMul(x, w)  y = Softmax<axis=0>(h) }",
        {"w": _normal(3, 2)},
        [_normal(4, 3)],
        _fixed_batch,
    ),
    "opset 28": BridgeCase(
        """f (float[N,3] x) => (float[N] y, float[N,2] gated) {
            h = Einsum<equation="ij,jk->ik">(x, a)
            k = MatMul(x, b)
            gated = SwiGLU(h, k)
            y = ReduceLogSumExp<keepdims=0>(gated, one)
        }""",
        {"a": _normal(3, 2), "b": _normal(3, 2)},
        [_normal(4, 3)],
        _newest_opset,
        {"one": np.int64([1])},
        opset=28,
    ),
}
