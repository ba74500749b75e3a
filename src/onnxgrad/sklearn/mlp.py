"""A multi-layer perceptron with the layers and initial weights of scikit-learn's perceptrons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_count
from onnxgrad.errors import unknown
from onnxgrad.finetune.layers import add_initializer
from onnxgrad.model.draft import Draft

ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid", "identity": "Identity"}


def build_mlp(
    features: int,
    hidden: int | Iterable[int],
    outputs: int,
    activation: str,
    rng: np.random.RandomState,
    dtype: Any,
    classes: Sequence[Any] | None = None,
) -> ModelProto:
    """Return the ONNX model of a perceptron, with the initial weights that scikit-learn draws.

    The weights and biases of a layer are uniform in +-sqrt(6 / (inputs + outputs)), or
    +-sqrt(2 / (inputs + outputs)) before a logistic function (Glorot and Bengio 2010).

    Args:
        features: columns of the input "X".
        hidden: numbers of units of the hidden layers.
        outputs: units of the last layer.
        activation: key of `ACTIVATIONS`, of the hidden layers.
        rng: draws the weights.
        dtype: float32 or float64, of the input and the weights.
        classes: labels, as integers or strings. Two of them for one unit, or as many as units; then
            the outputs are "label" and "probabilities". Empty: every unit is a separate label, 0 or
            1. None: a regression, whose output is "prediction".

    Raises:
        ValueError: an unknown activation, or a layer without units.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    sizes = list(hidden) if isinstance(hidden, Iterable) else [hidden]
    for size in sizes:
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"hidden_layer_sizes must be > 0, got {hidden}.")
        check_count("a number of hidden units", size)
    draft = Draft("mlp", dtype=dtype)
    op, factor = draft.op, 2.0 if activation == "logistic" else 6.0
    x = draft.input("X", ["N", features])
    layers = list(pairwise([features, *map(int, sizes), outputs]))
    for i, (fan_in, fan_out) in enumerate(layers):
        bound = sqrt(factor / (fan_in + fan_out))
        arrays = [rng.uniform(-bound, bound, shape) for shape in ((fan_in, fan_out), fan_out)]
        names = [f"layers.{i}.{part}" for part in ("weight", "bias")]
        operands = [
            add_initializer(op, a, draft.dtype, n) for n, a in zip(names, arrays, strict=True)
        ]
        x = op.Gemm(x, *operands)
        if i + 1 < len(layers) and activation != "identity":
            x = op.emit(ACTIVATIONS[activation], [x], {})
    if classes is None:
        return draft.model({"prediction": x})
    return draft.model(_write_classifier_outputs(op, x, classes))


def _write_classifier_outputs(op: Any, x: ir.Value, classes: Sequence[Any]) -> dict[str, ir.Value]:
    """Write the outputs `label` and `probabilities`, named as in models that skl2onnx exports."""
    with op:
        if not len(classes):
            p = op.Sigmoid(x)
            return {"label": op.Cast(op.Greater(p, 0.5), to=ir.DataType.INT64), "probabilities": p}
        if len(classes) == 2:
            p = op.Sigmoid(x)
            p = op.Concat(1.0 - p, p, axis=1)
        else:
            p = op.Softmax(x, axis=1)
        index = op.ArgMax(p, axis=1, keepdims=0)
        table = np.array(classes, object if isinstance(classes[0], str) else np.int64)
        return {"label": op.Gather(table, index, axis=0), "probabilities": p}
