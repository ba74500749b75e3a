"""The activations of RNN, GRU and LSTM, most of which fused operators of onnxruntime have too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit

Function = Callable[[Emit, ir.Value], ir.Value]

# the function, and the defaults of those of alpha and beta that it takes, None for no default
ACTIVATIONS: dict[str, tuple[Callable[..., Any], *tuple[float | None, ...]]] = {
    "relu": (lambda op, x: op.Relu(x),),
    "tanh": (lambda op, x: op.Tanh(x),),
    "sigmoid": (lambda op, x: op.Sigmoid(x),),
    "affine": (lambda op, x, a, b: a * x + b, None, 0.0),
    "leakyrelu": (lambda op, x, a: op.LeakyRelu(x, alpha=a), 0.01),
    "thresholdedrelu": (lambda op, x, a: op.ThresholdedRelu(x, alpha=a), 0.0),
    "scaledtanh": (lambda op, x, a, b: a * op.Tanh(b * x), None, None),
    "hardsigmoid": (lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b), 0.2, 0.5),
    "elu": (lambda op, x, a: op.Elu(x, alpha=a), 1.0),
    "softsign": (lambda op, x: op.Softsign(x),),
    "softplus": (lambda op, x: op.Softplus(x),),
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
    stated = [iter(node.attributes.get_floats(f"activation_{k}", ())) for k in ("alpha", "beta")]
    for name in (name.lower() for name in names):
        if name not in ACTIVATIONS:
            raise _error(node, f"no activation {name!r}; valid are {', '.join(ACTIVATIONS)}")
        function, *defaults = ACTIVATIONS[name]
        numbers = [next(given, n) for given, n in zip(stated, defaults, strict=False)]
        if None in numbers:
            raise _error(node, f"{name} without activation_alpha or activation_beta: write them")
        yield partial(_apply, function, numbers)


def _apply(function: Callable[..., Any], numbers: list, op: Emit, x: ir.Value) -> ir.Value:
    return op.set_type_like(function(op, x, *numbers), x)


def _error(node: ir.Node, reason: str) -> NoGradientRule:
    where = f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r})"
    return NoGradientRule(f"{where}: {reason}")
