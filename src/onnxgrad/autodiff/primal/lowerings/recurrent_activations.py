"""The activations of RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit

Function = Callable[[Emit, ir.Value], ir.Value]

_ALPHA = {"leakyrelu": 0.01, "thresholdedrelu": 0.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"affine": 0.0, "hardsigmoid": 0.5}
_TAKES_ALPHA = {*_ALPHA, "affine", "scaledtanh"}
_TAKES_BETA = {*_BETA, "scaledtanh"}
_ACTIVATIONS: dict[str, Callable[[Emit, Any, Any, Any], Any]] = {
    "relu": lambda op, x, a, b: op.Relu(x),
    "tanh": lambda op, x, a, b: op.Tanh(x),
    "sigmoid": lambda op, x, a, b: op.Sigmoid(x),
    "affine": lambda op, x, a, b: a * x + b,
    "leakyrelu": lambda op, x, a, b: op.LeakyRelu(x, alpha=a),
    "thresholdedrelu": lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
    "scaledtanh": lambda op, x, a, b: a * op.Tanh(b * x),
    "hardsigmoid": lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
    "elu": lambda op, x, a, b: op.Elu(x, alpha=a),
    "softsign": lambda op, x, a, b: op.Softsign(x),
    "softplus": lambda op, x, a, b: op.Softplus(x),
}


def activation_functions(node: ir.Node, default: Sequence[str], n: int) -> Iterator[Function]:
    """Yield the activations of `n` directions, with their `activation_alpha` and `activation_beta`.

    A number that is not stated has the default of onnxruntime.
    """
    names = list(node.attributes.get_strings("activations", ())) or list(default) * n
    if len(names) != len(default) * n:
        raise _error(
            node, f"it has {len(default) * n} activations, not {len(names)}; correct the list"
        )
    alphas, betas = (
        iter(node.attributes.get_floats(f"activation_{k}", ())) for k in ("alpha", "beta")
    )
    for name in (name.lower() for name in names):
        if name not in _ACTIVATIONS:
            raise _error(node, f"no activation {name!r}; valid are {', '.join(_ACTIVATIONS)}")
        a = next(alphas, _ALPHA.get(name)) if name in _TAKES_ALPHA else 0.0
        b = next(betas, _BETA.get(name)) if name in _TAKES_BETA else 0.0
        if a is None or b is None:
            raise _error(node, f"{name} without activation_alpha or activation_beta: write them")
        yield _function(name, a, b)


def _function(name: str, a: float, b: float) -> Function:
    return lambda op, x: op.set_type_like(_ACTIVATIONS[name](op, x, a, b), x)


def _error(node: ir.Node, reason: str) -> NoGradientRule:
    where = f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r})"
    return NoGradientRule(f"{where}: {reason}")
